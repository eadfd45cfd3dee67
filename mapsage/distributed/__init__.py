"""Process groups and launchers, without a call to any vendor."""
from .agreement import RankError, all_ranks_or_none, error_text, raise_together
from .channel import Channel, RankLostError, SerialChannel
from .consensus import Consensus, DisagreementError, Facts
from .group_channel import open_channel
from .launcher import (
                       LauncherError,
                       apply_launcher_environment,
                       die_with_parent,
                       launcher_environment,
                       local_rank,
)
from .process_group import (
                       DEFAULT_TIMEOUT_SECONDS,
                       BackendError,
                       init_process_group,
                       resolve_backend,
                       usable_backends,
)
from .replicas import Replicas, make_replicas
from .staged import StagedProcessGroup
from .strategy import Strategy, StrategyError, resolve_strategy
from .weights import WeightsDifferError, check_equal_weights

__all__ = [
    'BackendError', 'Channel', 'Consensus', 'DEFAULT_TIMEOUT_SECONDS', 'DisagreementError',
    'Facts', 'LauncherError', 'RankError', 'RankLostError', 'Replicas', 'SerialChannel',
    'StagedProcessGroup', 'Strategy', 'StrategyError', 'WeightsDifferError', 'all_ranks_or_none',
    'apply_launcher_environment', 'check_equal_weights', 'die_with_parent', 'error_text',
    'init_process_group', 'launcher_environment', 'local_rank', 'make_replicas', 'open_channel',
    'raise_together', 'resolve_backend', 'resolve_strategy', 'usable_backends'
]
