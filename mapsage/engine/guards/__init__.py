"""Hooks that guard a run: devices, gradients, equal ranks, requests to stop, reproducibility.

Most of them raise an error on every rank before a wrong number is saved. Importing the package
registers them; `engine/runner.py` has those that every run gets.
"""

from .accelerator_hook import AcceleratorHook
from .accumulated_gradients_hook import AccumulatedGradientsHook
from .data_record_hook import DataRecordHook
from .device_check_hook import DeviceCheckError, DeviceCheckHook
from .equal_buffers_hook import EqualBuffersHook
from .non_finite_loss_hook import NonFiniteLossError, NonFiniteLossHook
from .reproducibility import ReproducibilityHook
from .slowest_rank_hook import SlowestRankHook
from .stop_hook import StopHook
from .trained_weights_hook import TrainedWeightsHook
from .validation_record_hook import ValidationRecordHook
from .validation_trial import ValidationTrialHook, metric_obstacle

__all__ = [
    'AcceleratorHook',
    'AccumulatedGradientsHook',
    'DataRecordHook',
    'DeviceCheckError',
    'DeviceCheckHook',
    'EqualBuffersHook',
    'NonFiniteLossError',
    'NonFiniteLossHook',
    'ReproducibilityHook',
    'SlowestRankHook',
    'StopHook',
    'TrainedWeightsHook',
    'ValidationRecordHook',
    'ValidationTrialHook',
    'metric_obstacle',
]
