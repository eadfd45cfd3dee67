"""Features of a frozen encoder, computed ahead of time and read from disk."""
