"""Checkpoints at intervals of minutes (``CheckpointHook(interval_minutes=...)``).

All ranks must save at the same iteration although their clocks differ. So rank 0's clock decides,
and its answer also says after how many iterations the ranks ask again. That keeps the broadcasts
rare: some 20 between two checkpoints instead of one per step.
"""

from __future__ import annotations

import time
from typing import Any, Optional

import torch
from mmengine.hooks import CheckpointHook

from mapsage.distributed import Channel, SerialChannel, open_channel
from mapsage.host.runner import HostRunner


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
    """Lets a CheckpointHook save when rank 0's clock says that the interval is over.

    A save that the hook makes for another reason restarts the interval.

    Args:
        hook: Hook that counts iterations.
        seconds: Time between two saves.
    """

    def __init__(self, hook: CheckpointHook, seconds: float) -> None:
        self._hook, self._seconds = hook, seconds
        self._channel: Channel = SerialChannel()
        self._restart()

    def attach(self) -> None:
        """Replace three methods of the hook by versions that also use the clock."""
        # The methods of the instance are replaced, which mypy forbids for a typed hook.
        hook: Any = self._hook
        before_train, after_iter = hook.before_train, hook.after_train_iter
        save = hook._save_checkpoint_with_step

        def open_clock(runner: HostRunner) -> None:
            before_train(runner)
            self._channel = open_channel(purpose='save clock')
            self._restart()

        def save_if_due(runner: HostRunner, *args: Any, **kwargs: Any) -> None:
            self._steps += 1
            after_iter(runner, *args, **kwargs)
            if self._steps >= self._ask_at and runner.iter + 1 >= hook.save_begin and self._due():
                runner.logger.info(
                    f'Saving checkpoint at {runner.iter + 1} iterations, '
                    f'{self._seconds / 60:g} minutes after the last one'
                )
                hook._save_checkpoint(runner)

        def save_and_restart(*args: Any, **kwargs: Any) -> None:
            save(*args, **kwargs)
            self._restart()

        hook.before_train, hook.after_train_iter = open_clock, save_if_due
        hook._save_checkpoint_with_step = save_and_restart

    def _restart(self) -> None:
        self._since, self._steps, self._ask_at = time.monotonic(), 0, 1

    def _due(self) -> bool:
        """Ask rank 0. Collective: all ranks have counted the same iterations."""
        elapsed = time.monotonic() - self._since
        answer = torch.tensor([steps_to_wait(self._seconds - elapsed, elapsed, self._steps)])
        self._channel.broadcast(answer, self._channel.ranks[0])
        self._ask_at = self._steps + int(answer)
        return not answer.item()
