"""The version of MapSage, which the launcher prints without importing this package."""

from mapsage_launcher.version import __version__

__all__ = ['__version__']
