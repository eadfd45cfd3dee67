"""Hooks that look after ranks, devices and machines."""
