"""The Runner that ties accelerator, process group and wrapper together."""
from .data_checks import DataError
from .data_order import ResumableSampler
from .env_cfg import ConfigError
from .resume import ResumeError
from .runner import MapSageRunner

__all__ = [
    'ConfigError', 'DataError', 'MapSageRunner', 'ResumableSampler', 'ResumeError'
]
