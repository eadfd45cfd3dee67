"""Records one training step of each virtual rank: its batch, its losses, its gradients' norms.

``tools/train.py --replay`` uses it to show what a step trained on. The recorder fills its steps
while the step runs, so that a step that fails still leaves its batches. Two hooks are needed:
:class:`StepRecorder` reads results before users' hooks, and :class:`StepEnds` starts the recording
and ends the training after them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, List, Optional

import numpy as np
import torch
from mmengine.dist import get_rank
from mmengine.structures import BaseDataElement

from mapsage.accelerator import current_accelerator
from mapsage.distributed.wrappers import VirtualDataParallel
from mapsage.distributed.wrappers.rank_batches import Batch
from mapsage.host.hook import MapSageHook
from mapsage.host.runner import (
    HostRunner,
    OptimWrappers,
    built_wrappers,
    enabled_scaler,
    keyed_samples,
    plain_model,
)


class StepDone(Exception):  # noqa: N818
    """The recorded step has ended. Not an error, but the way out of the training."""


@dataclass
class RankStep:
    """What one virtual rank did in the recorded step.

    Attributes:
        virtual_rank: Number of the virtual rank.
        batch: Batch from the loader, as :func:`plain` containers, in host memory.
        losses: What the model logs, by name, the total as ``'loss'``; empty if the step failed.
        gradient_norms: Euclidean norm of each gradient of this virtual rank in this iteration, by
            name of the parameter, without the factor of a loss scaler. Parameters without a
            gradient are missing.
    """

    virtual_rank: int
    batch: Any
    losses: Dict[str, float] = field(default_factory=dict)
    gradient_norms: Dict[str, float] = field(default_factory=dict)


class StepRecorder(MapSageHook):
    """Hook that records an iteration; :class:`StepEnds` goes with it.

    Args:
        iteration: Number of the iteration, counted from 1 as in the log.

    Attributes:
        steps: What was recorded, one entry for each virtual rank of this process.
        learning_rate: Learning rates of the step's parameter groups, by name.
    """

    # Before users' hooks: nothing is lost if one of them raises an error after the step.
    priority = 'VERY_HIGH'

    def __init__(self, iteration: int) -> None:
        self.iteration = iteration
        self.steps: List[RankStep] = []
        self.learning_rate: Dict[str, List[float]] = {}
        self._norms: List[Dict[str, torch.Tensor]] = []
        self._remove_readers: List[Callable[[], None]] = []
        self._loss_scale = 1.0

    def before_train(self, runner: HostRunner) -> None:
        """Have the loader write the keys of samples into their metainfo, if they have it."""
        samples = keyed_samples(runner.train_dataloader)
        if samples is not None:
            samples.show_keys = True

    def begin(self, runner: HostRunner, data_batch: Any) -> None:
        """Record what is computed from now on.

        Args:
            runner: Runner of the training.
            data_batch: What the loader handed out for the step.
        """
        # An earlier training may have failed in its recorded step.
        self._end(runner)
        self.steps, self._norms = [], []
        self.learning_rate = runner.optim_wrapper.get_lr()
        self._loss_scale = _loss_scale(runner.optim_wrapper)
        for name, parameter in plain_model(runner).named_parameters():
            if parameter.requires_grad:
                handle = parameter.register_hook(self._make_reader(name))
                self._remove_readers.append(handle.remove)
        if isinstance(runner.model, VirtualDataParallel):
            self.follow_virtual_ranks(runner)
        else:
            self._begin_rank(get_rank(), data_batch)

    def on_virtual_rank_start(self, runner: HostRunner, virtual_rank: int, batch: Batch) -> None:
        """Begin to record a virtual rank."""
        # A first pass, which only counts predictions, is not the step.
        if not runner.model.counting:
            self._begin_rank(virtual_rank, batch)

    def after_train_iter(
        self,
        runner: HostRunner,
        batch_idx: int,
        data_batch: Optional[Batch] = None,
        outputs: Optional[Dict[str, Any]] = None,
    ) -> None:
        """Store losses and norms of the recorded iteration."""
        if runner.iter + 1 != self.iteration:
            return
        logged_by_rank = (
            runner.model.block_outputs
            if isinstance(runner.model, VirtualDataParallel)
            else [outputs]
        )
        for step, logged, norms in zip(self.steps, logged_by_rank, self._norms):
            step.losses = {
                name: float(value.detach() if isinstance(value, torch.Tensor) else value)
                for name, value in (logged or {}).items()
                if _is_number(value)
            }
            step.gradient_norms = {
                name: float(norm) / self._loss_scale for name, norm in norms.items()
            }
        self._end(runner)

    def _end(self, runner: HostRunner) -> None:
        self.unfollow_virtual_ranks(runner)
        for remove in self._remove_readers:
            remove()
        self._remove_readers = []

    def _begin_rank(self, virtual_rank: int, batch: Batch) -> None:
        self.steps.append(RankStep(virtual_rank, plain(batch)))
        self._norms.append({})

    def _make_reader(self, name: str) -> Callable[[torch.Tensor], None]:
        def read(gradient: torch.Tensor) -> None:
            gradient = gradient.detach()
            values = gradient.coalesce().values() if gradient.is_sparse else gradient
            wide = torch.float64 if current_accelerator().supports.float64 else torch.float32
            self._norms[-1][name] = values.to(wide).norm()

        return read


class StepEnds(MapSageHook):
    """Hook that starts a recorder after all other hooks, and ends the training after them.

    Args:
        recorder: Recorder of the step.
    """

    priority = 'LOWEST'

    def __init__(self, recorder: StepRecorder) -> None:
        self.recorder = recorder

    def before_train_iter(
        self, runner: HostRunner, batch_idx: int, data_batch: Optional[Batch] = None
    ) -> None:
        """Begin to record, if this is the iteration."""
        if runner.iter + 1 == self.recorder.iteration:
            self.recorder.begin(runner, data_batch)

    def after_train_iter(
        self,
        runner: HostRunner,
        batch_idx: int,
        data_batch: Optional[Batch] = None,
        outputs: Optional[Dict[str, Any]] = None,
    ) -> None:
        """End the training after the recorded iteration.

        Raises:
            StepDone: After the recorded iteration.
        """
        if runner.iter + 1 == self.recorder.iteration:
            raise StepDone


def plain(value: Any) -> Any:
    """Return a copy of nested containers that ``torch.load`` reads with its defaults.

    Tensors and arrays become CPU tensors, data elements dicts with ``metainfo`` and their fields.
    Anything but a container, a number or a text becomes its ``repr``.
    """
    if isinstance(value, torch.Tensor):
        # A loader's batch may be of a subclass.
        return value.detach().to('cpu', copy=True).as_subclass(torch.Tensor)
    if isinstance(value, BaseDataElement):
        return dict(
            metainfo=plain(dict(value.metainfo_items())),
            **{name: plain(element) for name, element in value.items()},
        )
    if isinstance(value, Mapping):
        return {str(key): plain(element) for key, element in value.items()}
    if isinstance(value, (list, tuple)):
        elements = [plain(element) for element in value]
        return tuple(elements) if isinstance(value, tuple) else elements
    if isinstance(value, (np.ndarray, np.generic)):
        try:
            return torch.as_tensor(np.array(value)) if value.ndim else plain(value.item())
        except TypeError:
            # Text, objects, and on older versions unsigned integers.
            return plain(value.tolist())
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            # Converted, because a value may be of a subclass, such as the sampler's keys.
            return kind(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return None if value is None else repr(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (
        isinstance(value, torch.Tensor) and value.numel() == 1
    )


def _loss_scale(optim_wrapper: OptimWrappers) -> float:
    """Return the factor of the loss scaler. Several optimizers have the same scaler or none."""
    wrappers = built_wrappers(optim_wrapper)
    scaler = enabled_scaler(wrappers[0]) if wrappers else None
    return 1.0 if scaler is None else float(scaler.get_scale())
