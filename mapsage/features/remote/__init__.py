"""Features that other ranks compute: the encoder that sends, and the head that receives."""
