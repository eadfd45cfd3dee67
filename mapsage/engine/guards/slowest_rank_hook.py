"""Which rank the others wait for.

The time of a step is equal on all ranks, because they wait for each other's gradients; it does not
show which rank is slow. So the hook measures only what a rank does without waiting for another:
loading its data, and its forward pass.
"""

from __future__ import annotations

import socket
import time
from typing import Any, Dict, List, Optional

import torch
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from torch.utils.hooks import RemovableHandle

from mapsage.accelerator import current_accelerator
from mapsage.distributed import open_channel
from mapsage.distributed.wrappers.rank_batches import Batch
from mapsage.host.runner import HostRunner, plain_model


@HOOKS.register_module()
class SlowestRankHook(Hook):
    """Hook that logs at an interval which rank delays the others.

    All ranks take as long for a step as the slowest one, since they wait for each other's
    gradients. Two times belong to a rank itself: its wait for data, averaged over the interval,
    and its forward pass, measured once per interval with the device synchronized. The ranks
    exchange these two numbers in one collective per interval. The backward pass, in which they
    wait for each other, is left out, and so is the forward pass on lazy devices, which compute it
    later together with the rest of the step.

    ``MapSageRunner`` registers it. It does nothing with one process.

    Args:
        interval: Number of iterations from one line of the log to the next.

    Raises:
        ValueError: If ``interval`` is not positive.
    """

    priority = 'LOWEST'

    def __init__(self, interval: int = 200) -> None:
        if interval < 1:
            raise ValueError(f'interval={interval}, expected at least 1 iteration')
        self.interval = interval
        # Time at which the last iteration ended.
        self._ended = 0.0
        # Time at which the measured forward pass began, and its seconds.
        self._began = self._forward = 0.0
        # Seconds of waiting for data in the interval, and the number of iterations.
        self._waited = 0.0
        self._counted = 0
        self._measures = False
        self._handles: List[RemovableHandle] = []

    def before_train(self, runner: HostRunner) -> None:
        """Begin to measure."""
        if not runner.distributed:
            return
        model = plain_model(runner)
        self._handles = [
            model.register_forward_pre_hook(self._before_forward),
            model.register_forward_hook(self._after_forward),
        ]
        self._ended = time.perf_counter()

    def before_train_epoch(self, runner: HostRunner) -> None:
        """Do not count what happened between two epochs as waiting for data."""
        self._ended = time.perf_counter()

    def after_val(self, runner: HostRunner) -> None:
        """Do not count the validation as waiting for data."""
        self._ended = time.perf_counter()

    def before_train_iter(
        self, runner: HostRunner, batch_idx: int, data_batch: Optional[Batch] = None
    ) -> None:
        """Count the time since the end of the last iteration as waiting for data."""
        if self._handles:
            self._waited += time.perf_counter() - self._ended
            self._counted += 1
            self._measures = self.every_n_train_iters(runner, self.interval)

    def after_train_iter(
        self,
        runner: HostRunner,
        batch_idx: int,
        data_batch: Optional[Batch] = None,
        outputs: Optional[Dict[str, Any]] = None,
    ) -> None:
        """Gather the times of all ranks at the end of an interval; rank 0 logs the slowest."""
        if self._measures:
            channel = open_channel()
            local_times = torch.tensor(
                [self._waited / self._counted, self._forward], dtype=torch.float64
            )
            times = torch.stack(channel.gather(local_times))
            slowest = int(times.sum(1).argmax())
            hosts = channel.gather_texts(
                socket.gethostname() if channel.ranks[slowest] == channel.rank else ''
            )
            waited, forward = times[slowest].tolist()
            runner.logger.info(
                f'slowest of {len(times)} ranks: rank {channel.ranks[slowest]} on host '
                f'{hosts[slowest]}, {waited:.3f} s a step waiting for data'
                f'{self._format_forward(forward)}; the median of all is '
                f'{times.sum(1).median():.3f} s'
            )
            self._measures = False
            self._waited, self._forward, self._counted = 0.0, 0.0, 0
        if self._handles:
            self._ended = time.perf_counter()

    def after_train(self, runner: HostRunner) -> None:
        """Remove the measurement from the model."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @staticmethod
    def _format_forward(seconds: float) -> str:
        return '' if current_accelerator().lazy else f' and {seconds:.3f} s in the forward pass'

    def _before_forward(self, *_: Any) -> None:
        if self._measures and not current_accelerator().lazy:
            current_accelerator().synchronize()
            self._began = time.perf_counter()

    def _after_forward(self, *_: Any) -> None:
        if self._measures and not current_accelerator().lazy:
            current_accelerator().synchronize()
            self._forward += time.perf_counter() - self._began
