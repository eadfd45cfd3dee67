"""Features from elsewhere as hooks."""
