"""Channels: how ranks agree, and how they learn who is missing."""
