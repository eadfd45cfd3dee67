"""Hooks about ranks and their devices: random state, checks, stops, restarts, slow ranks."""
