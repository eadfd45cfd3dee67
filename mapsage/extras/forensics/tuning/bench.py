"""Training steps of a config with other options: the step that a run would carry out.

A visit of a variant begins with the initial weights, a new optimizer and the same seed, so every
visit computes the same numbers and no variant inherits another one's state. Hooks of the config
take no part.
"""

from __future__ import annotations

import copy
import logging
import math
import statistics
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import torch
from mmengine.config import Config
from mmengine.optim import build_optim_wrapper
from mmengine.registry import DefaultScope

from mapsage.accelerator import Accelerator
from mapsage.distributed.wrappers.memory_layout import put_channels_last
from mapsage.engine.runner import build_optimizers

from .memory import PeakMemory
from .options import Variant

# A variant that takes this many times as long as the config as it is ends its visit early.
FAR_SLOWER = 3.0
# Seconds for which a visit times steps, and the most steps for which it does.
_VISIT_SECONDS, _MOST_STEPS = 0.6, 5
_SILENT = logging.getLogger('mapsage.tuning')
_SILENT.addHandler(logging.NullHandler())
_SILENT.propagate = False

Step = Callable[[Any], float]


@dataclass(frozen=True)
class Visit:
    """Result of some steps of a variant.

    Attributes:
        seconds: Time of a step, median of the visit: on the CPU processor time of the main thread,
            which takes part in all computations, so that other processes count less.
        elapsed: Elapsed time of a step in seconds, median of the visit.
        loss: Loss of a step.
        updates: Number of updates of the weights before that step.
        bytes: Peak memory of a step with weights and optimizer state; None if unknown.
    """

    seconds: float
    elapsed: float = 0.0
    loss: float = 0.0
    updates: int = 0
    bytes: Optional[int] = None


class StepBench:
    """Carries out steps of a model under the options of a variant.

    Attributes:
        model: Model, with the state of the last step.
        batch: Batch of all visits.
        steps: Number of timed steps of a visit.
        seconds: Elapsed time of a step of the config as it is.

    Args:
        cfg: Complete config, with one optimizer.
        model: Model of the config on the accelerator's first device, changed by the visits.
        batch: Batch of the training loader.
        accelerator: Accelerator in force.
    """

    def __init__(self, cfg: Config, model: Any, batch: Any, accelerator: Accelerator) -> None:
        self._cfg, self._accelerator = cfg, accelerator
        self.model, self.batch = model, batch
        self._memory = PeakMemory(accelerator)
        self._bytes: Dict[Variant, Optional[int]] = {}
        # On the host, because a card may be too small for a second copy.
        self._initial = {
            name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
            for name, tensor in self._tensors()
        }
        self._weight_bytes = sum(
            tensor.numel() * tensor.element_size() for tensor in self._initial.values()
        )
        self.steps = 1
        self._first_seconds = self.seconds = math.inf

    def calibrate(self, base: Variant) -> Visit:
        """Time the config as it is, set the number of steps of a visit by that, return a visit."""
        self.steps = 1
        for _ in range(2):
            visit = self.visit(base)
            self.seconds = min(self.seconds, visit.elapsed)
            self.steps = max(1, min(_MOST_STEPS, int(_VISIT_SECONDS / self.seconds)))
        return visit

    def visit(self, variant: Variant) -> Visit:
        """Carry out one step to warm up, then :attr:`steps` timed ones.

        The first visit of a variant has one more step, whose memory is measured.

        Raises:
            FloatingPointError: If a loss is NaN or infinite.
            Exception: Whatever the model, the optimizer or torch raises.
        """
        measures_memory = variant not in self._bytes
        with self.session(variant) as step:
            before = self._memory.current() if measures_memory else None
            first = self._time(step)
            timed: List[Visit] = []
            losses = [first.loss]
            if math.isinf(self._first_seconds):
                self._first_seconds = first.elapsed
            # The first step also compiles or chooses kernels, so the bound is generous.
            if first.elapsed > max(2.0, 2 * FAR_SLOWER * self._first_seconds):
                return first
            if measures_memory:
                self._memory.restart()
                losses.append(self._time(step).loss)
                peak = self._memory.peak()
                self._bytes[variant] = (
                    None
                    if before is None or peak is None
                    else max(0, peak - before) + self._weight_bytes
                )
            while len(timed) < self.steps and not (
                timed and timed[-1].elapsed > FAR_SLOWER * self.seconds
            ):
                timed.append(self._time(step))
                losses.append(timed[-1].loss)
        updates = min(self.steps, len(losses) - 1)
        return Visit(
            statistics.median(visit.seconds for visit in timed),
            statistics.median(visit.elapsed for visit in timed),
            losses[updates],
            updates,
            self._bytes[variant],
        )

    @contextmanager
    def session(self, variant: Variant) -> Iterator[Step]:
        """Set a variant's options; yield a function that trains on a batch and returns the loss.

        The batch is not changed, and the step is complete when the function returns.
        """
        cfg = copy.deepcopy(self._cfg)
        cfg.merge_from_dict(variant.changes)
        self._restore(bool((cfg.get('env_cfg') or {}).get('channels_last')))
        self._accelerator.seed(0)
        threads = torch.get_num_threads()
        torch.set_num_threads(variant.threads)
        optim_wrapper = self._build_optimizer(cfg)

        def step(batch: Any) -> float:
            outputs = self.model.train_step(batch, optim_wrapper)
            self._accelerator.flush()
            self._accelerator.synchronize()
            return float(outputs['loss'])

        try:
            yield step
        finally:
            torch.set_num_threads(threads)
            for parameter in self.model.parameters():
                parameter.grad = None

    def _time(self, step: Step) -> Visit:
        """Return time and loss of a single step.

        Raises:
            FloatingPointError: If the loss is NaN or infinite.
        """
        # The preprocessor pads the samples in place.
        batch = copy.deepcopy(self.batch)
        self._accelerator.synchronize()
        start, processor_start = time.perf_counter(), time.thread_time()
        loss = step(batch)
        elapsed = time.perf_counter() - start
        seconds = (
            time.thread_time() - processor_start
            if self._accelerator.device_type == 'cpu'
            else elapsed
        )
        if not math.isfinite(loss):
            raise FloatingPointError(f'the loss is {loss}')
        return Visit(seconds, elapsed, loss)

    def _build_optimizer(self, cfg: Config) -> Any:
        config = copy.deepcopy(cfg.optim_wrapper)
        # Every step updates the weights, so that all steps take the same time.
        config.pop('accumulative_counts', None)
        with DefaultScope.overwrite_default_scope(cfg.get('default_scope', 'mmengine')):
            return build_optimizers(
                config,
                lambda wrapper: build_optim_wrapper(self.model, wrapper),
                self._accelerator,
                _SILENT,
            )

    def _restore(self, channels_last: bool) -> None:
        for name, tensor in self._tensors():
            # A new tensor, because the memory format of the old one may be another.
            tensor.data = self._initial[name].to(tensor.device, copy=True)
        if channels_last:
            put_channels_last(self.model)
        self.model.train()

    def _tensors(self) -> Iterator[Tuple[str, torch.Tensor]]:
        yield from self.model.named_parameters()
        yield from self.model.named_buffers()
