"""The ranks of this machine: how many there are, how they start, and why they failed."""
