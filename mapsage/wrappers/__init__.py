"""Model wrappers, registered under MMEngine's names so that configs need no change."""
from .ddp import MMDistributedDataParallel, PlacementError, place_module
from .device_map import DeviceMapError
from .model_parallel import CrossDeviceError, MMModelParallel

__all__ = [
    'CrossDeviceError', 'DeviceMapError', 'MMDistributedDataParallel', 'MMModelParallel',
    'PlacementError', 'place_module'
]
