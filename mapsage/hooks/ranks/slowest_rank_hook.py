"""Which rank the others wait for."""
from __future__ import annotations

import socket
import time
from typing import Any, List

import torch
from mmengine.hooks import Hook
from mmengine.model import is_model_wrapper
from mmengine.registry import HOOKS

from mapsage.accelerator import current_accelerator
from mapsage.distributed import open_channel


@HOOKS.register_module()
class SlowestRankHook(Hook):
    """Hook that logs which rank took most time of its own, now and then.

    All ranks take as long for a step as the slowest one, since they wait for each other's
    gradients. What is a rank's own is the time that it waits for its data, averaged over the
    interval, and that of its forward pass, measured once in it with the device synchronized. The
    ranks tell each other these two numbers in one collective an interval; the backward pass, in
    which they wait for each other, is left out, and so is the forward pass on lazy devices, which
    compute it later together with the rest of the step.

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
        self._ended = self._waited = self._forward = self._began = 0.0
        self._counted = 0
        self._measures = False
        self._handles: List[Any] = []

    def before_train(self, runner: Any) -> None:
        """Begin to measure."""
        if not runner.distributed:
            return
        model = runner.model.module if is_model_wrapper(runner.model) else runner.model
        self._handles = [model.register_forward_pre_hook(self._before_forward),
                         model.register_forward_hook(self._after_forward)]
        self._ended = time.perf_counter()

    def before_train_epoch(self, runner: Any) -> None:
        """Do not count what happened between two epochs as waiting for data."""
        self._ended = time.perf_counter()

    def after_val(self, runner: Any) -> None:
        """Do not count the validation as waiting for data."""
        self._ended = time.perf_counter()

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        """Count the time since the end of the last iteration as waiting for data."""
        if self._handles:
            self._waited += time.perf_counter() - self._ended
            self._counted += 1
            self._measures = self.every_n_train_iters(runner, self.interval)

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None,
                         outputs: Any = None) -> None:
        """Gather the times of all ranks at the end of an interval; rank 0 logs the slowest."""
        if self._measures:
            channel = open_channel()
            own = torch.tensor([self._waited / self._counted, self._forward], dtype=torch.float64)
            times = torch.stack(channel.gather(own))
            slowest = int(times.sum(1).argmax())
            hosts = channel.gather_texts(
                socket.gethostname() if channel.ranks[slowest] == channel.rank else '')
            waited, forward = times[slowest].tolist()
            runner.logger.info(
                f'slowest of {len(times)} ranks: rank {channel.ranks[slowest]} on host '
                f'{hosts[slowest]}, {waited:.3f} s a step waiting for data'
                f'{self._in_forward(forward)}; the median of all is {times.sum(1).median():.3f} s')
            self._measures = False
            self._waited, self._forward, self._counted = 0.0, 0.0, 0
        if self._handles:
            self._ended = time.perf_counter()

    def after_train(self, runner: Any) -> None:
        """Take the measuring out of the model."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @staticmethod
    def _in_forward(seconds: float) -> str:
        return '' if current_accelerator().lazy else f' and {seconds:.3f} s in the forward pass'

    def _before_forward(self, *_: Any) -> None:
        if self._measures and not current_accelerator().lazy:
            current_accelerator().synchronize()
            self._began = time.perf_counter()

    def _after_forward(self, *_: Any) -> None:
        if self._measures and not current_accelerator().lazy:
            current_accelerator().synchronize()
            self._forward += time.perf_counter() - self._began
