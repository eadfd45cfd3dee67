"""Process groups and launchers, without a call to any vendor."""
from .launcher import (
                       LauncherError,
                       apply_launcher_environment,
                       die_with_parent,
                       launcher_environment,
)
from .process_group import (
                       DEFAULT_TIMEOUT_SECONDS,
                       BackendError,
                       init_process_group,
                       resolve_backend,
                       usable_backends,
)
from .staged import StagedProcessGroup
from .weights import WeightsDifferError, check_equal_weights

__all__ = [
    'BackendError', 'DEFAULT_TIMEOUT_SECONDS', 'LauncherError', 'StagedProcessGroup',
    'WeightsDifferError', 'apply_launcher_environment', 'check_equal_weights', 'die_with_parent',
    'init_process_group', 'launcher_environment', 'resolve_backend', 'usable_backends'
]
