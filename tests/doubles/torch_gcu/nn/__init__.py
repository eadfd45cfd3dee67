"""``torch_gcu.nn``."""

from . import parallel

__all__ = ['parallel']
