"""Checkpoints at intervals of minutes (``CheckpointHook(interval_minutes=...)``).

All ranks must save at the same iteration although their clocks differ. So rank 0's clock decides,
and its answer also says after how many iterations the ranks ask again. That keeps the broadcasts
rare: some 20 between two checkpoints instead of one per step.
"""

from __future__ import annotations

import time
from typing import Optional

import torch
from mmengine.hooks import CheckpointHook

from mapsage.distributed import Channel, SerialChannel, open_channel


def parse_minutes(hook: CheckpointHook) -> Optional[float]:
    """Remove ``interval_minutes`` from a hook's extra arguments and return it.

    Raises:
        ValueError: If the value is not a positive number, or the hook counts epochs.
    """
    minutes = hook.args.pop('interval_minutes', None)
    if minutes is None:
        return None
    if isinstance(minutes, bool) or not isinstance(minutes, (int, float)) or not minutes > 0:
        raise ValueError(
            f'CheckpointHook(interval_minutes={minutes!r}): expected a number of '
            f'minutes above 0, or None.'
        )
    if hook.by_epoch:
        raise ValueError(
            f'CheckpointHook(interval_minutes={minutes!r}, by_epoch=True): such a checkpoint is '
            f'saved inside an epoch, and its file is named by the iteration. Set by_epoch=False; '
            f'an epoch-based run resumes inside the epoch. For files of epochs as well, add a '
            f'second CheckpointHook to custom_hooks.'
        )
    return float(minutes)


def steps_to_wait(left: float, elapsed: float, steps: int) -> int:
    """Return after how many more iterations to read the clock again; 0 if the time is up. Pure.

    The result is half of the iterations that seem to be left, because later iterations may be
    slower, and at most twice the iterations that were timed so far.

    Args:
        left: Seconds until the next checkpoint.
        elapsed: Seconds since the last checkpoint.
        steps: Iterations since the last checkpoint, at least 1.
    """
    if left <= 0:
        return 0
    return max(1, min(int(left * steps / max(elapsed, 1e-9) / 2), 2 * steps))


class SaveClock:
    """Tells when rank 0's clock says that the interval since the last save is over.

    Args:
        minutes: Time between two saves.

    Attributes:
        minutes: The argument of that name.
        steps: Iterations since the last save; the caller counts them.
    """

    def __init__(self, minutes: float) -> None:
        self.minutes = minutes
        self._channel: Channel = SerialChannel()
        self.restart()

    def open(self) -> None:
        """Begin a training. Collective."""
        self._channel = open_channel(purpose='save clock')
        self.restart()

    def restart(self) -> None:
        """Note that a checkpoint was saved now."""
        self._since, self.steps, self._ask_at = time.monotonic(), 0, 1

    def is_due(self) -> bool:
        """Return whether to save. Collective in some steps: all ranks count the same iterations."""
        if self.steps < self._ask_at:
            return False
        elapsed = time.monotonic() - self._since
        answer = torch.tensor([steps_to_wait(self.minutes * 60 - elapsed, elapsed, self.steps)])
        self._channel.broadcast(answer, self._channel.ranks[0])
        self._ask_at = self.steps + int(answer)
        return not answer.item()
