"""Model wrappers, registered over MMEngine's names so that configs need no edit."""
from .ddp import MMDistributedDataParallel, PlacementError, place_module

__all__ = ['MMDistributedDataParallel', 'PlacementError', 'place_module']
