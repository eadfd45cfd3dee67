"""Checkpoints every so many minutes, at an iteration on which all ranks agree."""
from __future__ import annotations

import time
from typing import Any, Optional

import torch
from mmengine.hooks import CheckpointHook

from mapsage.distributed import Channel, SerialChannel, open_channel


def parse_minutes(hook: Any) -> Optional[float]:
    """Take ``interval_minutes`` out of the arguments that a CheckpointHook passes on.

    Raises:
        ValueError: If it is no positive number, or the hook counts epochs.
    """
    minutes = hook.args.pop('interval_minutes', None)
    if minutes is None:
        return None
    if isinstance(minutes, bool) or not isinstance(minutes, (int, float)) or not minutes > 0:
        raise ValueError(f'CheckpointHook(interval_minutes={minutes!r}): expected a number of '
                         f'minutes above 0, or None.')
    if hook.by_epoch:
        raise ValueError(
            f'CheckpointHook(interval_minutes={minutes!r}, by_epoch=True): such a checkpoint is '
            f'saved inside an epoch, and its file is named by the iteration. Set by_epoch=False; '
            f'an epoch-based run resumes inside the epoch. For files of epochs as well, add a '
            f'second CheckpointHook to custom_hooks.')
    return float(minutes)


def steps_to_wait(left: float, elapsed: float, steps: int) -> int:
    """Return after how many more iterations to look at the clock again; 0 if the time is up. Pure.

    Half of the iterations that seem to be left, since they may become slower, and at most twice
    those that were timed. So the ranks ask some 20 times between two checkpoints, not every step.

    Args:
        left: Seconds until the next checkpoint.
        elapsed: Seconds since the last one.
        steps: Iterations since the last one, at least 1.
    """
    if left <= 0:
        return 0
    return max(1, min(int(left * steps / max(elapsed, 1e-9) / 2), 2 * steps))


class SaveClock:
    """Lets a CheckpointHook save when rank 0's clock says so.

    Rank 0 says when to ask it again, so that all ranks know the next iteration at which they meet.
    A save of the hook for another reason starts the time anew.

    Args:
        hook: Hook that counts iterations.
        seconds: Time between two saves.
    """

    def __init__(self, hook: CheckpointHook, seconds: float) -> None:
        self._hook, self._seconds = hook, seconds
        self._channel: Channel = SerialChannel()
        self._restart()

    def attach(self) -> None:
        """Take part in what the hook does."""
        hook: Any = self._hook
        before_train, after_iter = hook.before_train, hook.after_train_iter
        save = hook._save_checkpoint_with_step

        def begin(runner: Any) -> None:
            before_train(runner)
            self._channel = open_channel(purpose='save clock')
            self._restart()

        def look(runner: Any, *args: Any, **kwargs: Any) -> None:
            self._steps += 1
            after_iter(runner, *args, **kwargs)
            if self._steps >= self._ask_at and runner.iter + 1 >= hook.save_begin and self._due():
                runner.logger.info(f'Saving checkpoint at {runner.iter + 1} iterations, '
                                   f'{self._seconds / 60:g} minutes after the last one')
                hook._save_checkpoint(runner)

        def note(*args: Any, **kwargs: Any) -> None:
            save(*args, **kwargs)
            self._restart()

        hook.before_train, hook.after_train_iter = begin, look
        hook._save_checkpoint_with_step = note

    def _restart(self) -> None:
        self._since, self._steps, self._ask_at = time.monotonic(), 0, 1

    def _due(self) -> bool:
        """Ask rank 0. Collective: all ranks have counted the same iterations."""
        elapsed = time.monotonic() - self._since
        answer = torch.tensor([steps_to_wait(self._seconds - elapsed, elapsed, self._steps)])
        self._channel.broadcast(answer, self._channel.ranks[0])
        self._ask_at = self._steps + int(answer)
        return not answer.item()
