"""Dynamic sampling as hooks."""
