"""Stands where a user's ``import distributed`` must not arrive."""

VENDORS = True
