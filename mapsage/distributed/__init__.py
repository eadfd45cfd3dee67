"""How the ranks of a job start, meet, agree and add their gradients; no vendor's library is called.

``groups/`` starts torch.distributed, ``channels/`` has small collectives that name missing ranks,
and ``ordered_sum.py`` adds gradients with the same bits on any number of processes. The processes
that start and watch the ranks are in ``mapsage_launcher/``.

A name below is imported from its module when it is first used. So the sampling library, which needs
the interface of a channel and no more, does not load the rest.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .broken_collective import lost_ranks_named
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
    from .groups.staged import StagedProcessGroup
    from .launcher import (
        LauncherError,
        apply_launcher_environment,
        die_with_launcher,
        die_with_parent,
        launcher_environment,
        local_rank,
    )
    from .ordered_sum import Fold, OrderedSum, resolve_reduction
    from .strategy import Strategy, StrategyError, resolve_strategy
    from .weights import WeightsDifferError, broadcast_tensors, check_equal_weights

__all__ = [
    'BackendError',
    'Channel',
    'Consensus',
    'DEFAULT_TIMEOUT_SECONDS',
    'DescriptorLimitError',
    'DisagreementError',
    'Facts',
    'Fold',
    'LauncherError',
    'OrderedSum',
    'RankError',
    'RankLostError',
    'SerialChannel',
    'StagedProcessGroup',
    'Strategy',
    'StrategyError',
    'WeightsDifferError',
    'all_ranks_or_none',
    'apply_launcher_environment',
    'broadcast_tensors',
    'check_descriptors',
    'check_equal_weights',
    'die_with_launcher',
    'die_with_parent',
    'error_text',
    'init_process_group',
    'launcher_environment',
    'local_rank',
    'lost_ranks_named',
    'open_channel',
    'raise_together',
    'resolve_backend',
    'resolve_reduction',
    'resolve_strategy',
    'tell_why',
    'usable_backends',
]

# Names by the module that defines them.
_NAMES = {
    'broken_collective': 'lost_ranks_named',
    'channels.agreement': 'RankError all_ranks_or_none error_text raise_together',
    'channels.channel': 'Channel RankLostError SerialChannel',
    'channels.consensus': 'Consensus DisagreementError Facts',
    'channels.open_channels': 'open_channel tell_why',
    'descriptors': 'DescriptorLimitError check_descriptors',
    'groups.process_group': 'DEFAULT_TIMEOUT_SECONDS BackendError init_process_group '
    'resolve_backend usable_backends',
    'groups.staged': 'StagedProcessGroup',
    'launcher': 'LauncherError apply_launcher_environment die_with_launcher die_with_parent '
    'launcher_environment local_rank',
    'ordered_sum': 'Fold OrderedSum resolve_reduction',
    'strategy': 'Strategy StrategyError resolve_strategy',
    'weights': 'WeightsDifferError broadcast_tensors check_equal_weights',
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    value = getattr(importlib.import_module(f'.{_MODULES[name]}', __name__), name)
    # The next access does not come here.
    globals()[name] = value
    return value
