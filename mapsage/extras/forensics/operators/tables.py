"""The operators that an Enflame S60 computes, from a file, for machines without the card.

The file's header has its source and date. `placement.py` asks the table, and the dispatch table of
PyTorch where a card is at hand.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Dict, Mapping

CARD, LISTED, LISTED_PARTLY, NO_KERNEL = 'card', 'listed', 'listed-partly', 'no-kernel'
_GROUPS = (CARD, LISTED, LISTED_PARTLY, NO_KERNEL)
_S60_FILE = Path(__file__).with_name('s60_torch_gcu_2.10.txt')
S60_SOURCE = 'S60, torch_gcu 2.10'


@functools.lru_cache(maxsize=None)
def s60_groups() -> Mapping[str, str]:
    """Return the group of each operator that torch_gcu 2.10 treats on an S60.

    Returns:
        Name of an operator, such as ``'add.Tensor'`` -> :data:`CARD`, :data:`LISTED`,
        :data:`LISTED_PARTLY` or :data:`NO_KERNEL`.
    """
    return parse_groups(_S60_FILE.read_text(encoding='utf-8'))


def parse_groups(text: str) -> Dict[str, str]:
    """Return the group of each operator in the text of a table.

    Raises:
        ValueError: If a line names an unknown group, or an operator is in two groups.
    """
    groups: Dict[str, str] = {}
    group = None
    for line in text.splitlines():
        if line.startswith('#'):
            continue
        if line.startswith('['):
            group = line.strip('[]')
            if group not in _GROUPS:
                raise ValueError(f'{line!r}: expected one of the groups {_GROUPS}')
            continue
        for name in line.split():
            if group is None or name in groups:
                raise ValueError(
                    f'operator {name!r} must be in one group, got '
                    f'{groups.get(name)!r} and {group!r}'
                )
            groups[name] = group
    return groups
