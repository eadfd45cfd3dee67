"""Checkpoints: how they are written, when, and what a run does until they are on the disk."""
