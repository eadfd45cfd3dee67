"""The Runner that ties accelerator, process group and wrapper together."""
from .data_checks import DataError
from .data_order import ResumableSampler
from .env_cfg import ConfigError
from .optim_wrapper import AmpOptimWrapper, OptimWrapper
from .resume import ResumeError
from .runner import MapSageRunner

__all__ = [
    'AmpOptimWrapper', 'ConfigError', 'DataError', 'MapSageRunner', 'OptimWrapper',
    'ResumableSampler', 'ResumeError'
]
