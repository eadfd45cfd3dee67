"""Tuning by rewards of drawn label maps."""
