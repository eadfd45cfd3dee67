"""MMEngine hooks; importing this package registers them."""
from .accelerator_hook import AcceleratorHook
from .device_check_hook import DeviceCheckError, DeviceCheckHook
from .non_finite_loss_hook import NonFiniteLossError, NonFiniteLossHook
from .preview_hook import PreviewHook
from .progress_hook import ProgressBarHook

__all__ = [
    'AcceleratorHook', 'DeviceCheckError', 'DeviceCheckHook', 'NonFiniteLossError',
    'NonFiniteLossHook', 'PreviewHook', 'ProgressBarHook'
]
