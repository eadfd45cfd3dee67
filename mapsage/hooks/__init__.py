"""MMEngine hooks; importing this package registers them."""
from .accelerator_hook import AcceleratorHook
from .non_finite_loss_hook import NonFiniteLossError, NonFiniteLossHook
from .preview_hook import PreviewHook
from .progress_hook import ProgressBarHook

__all__ = [
    'AcceleratorHook', 'NonFiniteLossError', 'NonFiniteLossHook', 'PreviewHook', 'ProgressBarHook'
]
