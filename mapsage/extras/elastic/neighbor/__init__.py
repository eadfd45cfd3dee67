"""A second copy of the newest checkpoint, on another machine, for runs without a shared disk."""
