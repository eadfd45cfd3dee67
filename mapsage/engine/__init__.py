"""The Runner that ties accelerator, process group and wrapper together."""

from . import display, guards  # noqa: F401  (registers their hooks)
from .checkpoints.resume import ResumeError
from .env_cfg import ConfigError
from .loading.data_checks import DataError
from .loading.data_order import ResumableSampler
from .runner import MapSageRunner

__all__ = [
    'ConfigError',
    'DataError',
    'MapSageRunner',
    'ResumableSampler',
    'ResumeError',
]
