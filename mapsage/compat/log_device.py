"""Build a logger even if there are more ranks than visible cards.

Gap: mmengine's logger looks up the card of ``LOCAL_RANK`` among the visible CUDA devices, whichever
device the run uses, to put the card's index into the names of log files of ranks other than 0. If
there is no such card, it raises ``IndexError: list index out of range``: for CPU and simulated
ranks on a machine with fewer cards, for ranks that see one card each, and instead of MapSage's
error about more ranks than cards. It also starts CUDA's driver in runs on the CPU.
Remove when: mmengine builds its logger for ``LOCAL_RANK=1`` with one visible CUDA device.
"""

from __future__ import annotations

import os

from mmengine.logging import logger


def _local_rank() -> int:
    return int(os.environ.get('LOCAL_RANK', '0'))


def apply() -> None:
    """Name log files by the rank on the node, which needs no driver."""
    logger._get_device_id = _local_rank
