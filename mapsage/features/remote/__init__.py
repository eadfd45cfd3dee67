"""Features that other ranks compute: the encoder that sends them, and the head that receives."""
