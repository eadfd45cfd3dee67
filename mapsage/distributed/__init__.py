"""How the ranks of a job start, meet, agree and add their gradients; no vendor's library is called.

``groups/`` starts torch.distributed, ``channels/`` has small collectives that name missing ranks,
and ``ordered_sum.py`` adds gradients with the same bits on any number of processes. The processes
that start and watch the ranks are in ``mapsage_launcher/``.
"""
from .channels.agreement import RankError, all_ranks_or_none, error_text, raise_together
from .channels.channel import Channel, RankLostError, SerialChannel
from .channels.consensus import Consensus, DisagreementError, Facts
from .channels.open_channels import open_channel, tell_why
from .descriptors import DescriptorLimitError, check_descriptors
from .groups.process_group import (
                       DEFAULT_TIMEOUT_SECONDS,
                       BackendError,
                       init_process_group,
                       resolve_backend,
                       usable_backends,
)
from .groups.replicas import Replicas, make_replicas
from .groups.staged import StagedProcessGroup
from .launcher import (
                       LauncherError,
                       apply_launcher_environment,
                       die_with_launcher,
                       die_with_parent,
                       launcher_environment,
                       local_rank,
)
from .lost_ranks import lost_ranks_named
from .ordered_sum import Fold, OrderedSum, resolve_reduction
from .strategy import Strategy, StrategyError, resolve_strategy
from .weights import WeightsDifferError, broadcast_tensors, check_equal_weights

__all__ = [
    'BackendError', 'Channel', 'Consensus', 'DEFAULT_TIMEOUT_SECONDS', 'DescriptorLimitError',
    'DisagreementError', 'Facts', 'Fold', 'LauncherError', 'OrderedSum', 'RankError',
    'RankLostError', 'Replicas',
    'SerialChannel', 'StagedProcessGroup', 'Strategy', 'StrategyError', 'WeightsDifferError',
    'all_ranks_or_none', 'apply_launcher_environment', 'broadcast_tensors', 'check_descriptors',
    'check_equal_weights', 'die_with_launcher', 'die_with_parent', 'error_text',
    'init_process_group', 'launcher_environment', 'local_rank', 'lost_ranks_named',
    'make_replicas', 'open_channel', 'raise_together', 'resolve_backend', 'resolve_reduction',
    'resolve_strategy', 'tell_why', 'usable_backends'
]
