"""The version of MapSage."""

__version__ = '0.5.0'
