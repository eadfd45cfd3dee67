"""The programs of this extra."""
