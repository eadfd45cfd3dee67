"""Model wrappers, registered over MMEngine's names so that configs need no edit."""
from .ddp import MMDistributedDataParallel, PlacementError, place_module
from .device_map import DeviceMapError
from .head_replicas import HeadReplicas, whole_model
from .model_parallel import CrossDeviceError, MMModelParallel

__all__ = [
    'CrossDeviceError', 'DeviceMapError', 'HeadReplicas', 'MMDistributedDataParallel',
    'MMModelParallel', 'PlacementError', 'place_module', 'whole_model'
]
