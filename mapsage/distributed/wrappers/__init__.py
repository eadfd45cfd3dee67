"""Wrappers of models and optimizers, under MMEngine's names so that configs need no change.

A model wrapper decides which device holds which weights, which batch a forward pass gets and when
gradients are averaged. ``mapsage/engine/wrapping.py`` chooses the wrapper of a run: `ddp.py` with
one virtual rank per process, `virtual_parallel.py` with several, `model_parallel.py` for a model
split over the devices of one process. `split_model.py` is the base of an extra's wrapper whose ranks
hold one model together.
"""

from .ddp import MMDistributedDataParallel
from .device_map import DeviceMapError
from .model_parallel import CrossDeviceError, MMModelParallel
from .optim_wrapper import AmpOptimWrapper, OptimWrapper
from .placement import PlacementError, place_module
from .split_model import SplitModel, whole_model
from .virtual_parallel import VirtualDataParallel

__all__ = [
    'AmpOptimWrapper',
    'CrossDeviceError',
    'DeviceMapError',
    'MMDistributedDataParallel',
    'MMModelParallel',
    'OptimWrapper',
    'PlacementError',
    'SplitModel',
    'VirtualDataParallel',
    'place_module',
    'whole_model',
]
