"""The version of MapSage."""
__version__ = '0.1.0'
