"""Wrappers of models and optimizers, under MMEngine's names so that configs need no change."""
from .ddp import MMDistributedDataParallel, PlacementError, place_module
from .device_map import DeviceMapError
from .model_parallel import CrossDeviceError, MMModelParallel
from .optim_wrapper import AmpOptimWrapper, OptimWrapper
from .replica_parallel import HeadReplicas, whole_model
from .virtual_parallel import VirtualDataParallel

__all__ = [
    'AmpOptimWrapper', 'CrossDeviceError', 'DeviceMapError', 'HeadReplicas',
    'MMDistributedDataParallel', 'MMModelParallel', 'OptimWrapper', 'PlacementError',
    'VirtualDataParallel', 'place_module', 'whole_model'
]
