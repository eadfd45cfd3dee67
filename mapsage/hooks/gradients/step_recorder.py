"""Records one training step of each virtual rank: its batch, its losses, its gradients' norms."""
from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Callable, Dict, List

import numpy as np
import torch
from mmengine.dist import get_rank
from mmengine.model import is_model_wrapper
from mmengine.structures import BaseDataElement

from mapsage.accelerator import current_accelerator
from mapsage.hooks.base import MapSageHook


class StepDone(Exception):  # noqa: N818  (nothing is wrong)
    """The recorded step has been carried out."""


@dataclass
class RankStep:
    """What one virtual rank did in the recorded step.

    Attributes:
        virtual_rank: Its number.
        batch: What the loader gave it, as :func:`plain` containers, in host memory.
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
        steps: What was recorded, one entry for each virtual rank of this process. It is filled
            while the step runs, so that a step that fails leaves its batches.
        learning_rate: Learning rates of the step's parameter groups, by name.
    """

    # Ahead of users' hooks: nothing is lost if one of them raises an error behind the step.
    priority = 'VERY_HIGH'

    def __init__(self, iteration: int) -> None:
        self.iteration = iteration
        self.steps: List[RankStep] = []
        self.learning_rate: Dict[str, List[float]] = {}
        self._norms: List[Dict[str, torch.Tensor]] = []
        self._undo: List[Callable[[], Any]] = []
        self._loss_scale = 1.0

    def before_train(self, runner: Any) -> None:
        """Let the samples carry their keys, where they have metainfo."""
        samples = getattr(runner.train_dataloader, 'samples', None)
        if samples is not None:
            samples.show_keys = True

    def begin(self, runner: Any, data_batch: Any) -> None:
        """Record what is computed from now on; ``data_batch`` is what the loader handed out."""
        self._end()  # that of an earlier training
        self.steps, self._norms = [], []
        self.learning_rate = runner.optim_wrapper.get_lr()
        self._loss_scale = _loss_scale(runner.optim_wrapper)
        model = runner.model.module if is_model_wrapper(runner.model) else runner.model
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                self._undo.append(parameter.register_hook(self._reader(name)).remove)
        if hasattr(runner.model, 'on_virtual_rank_start'):  # VirtualDataParallel
            begin = partial(self._begin_unless_counting, runner.model)
            runner.model.on_virtual_rank_start.append(begin)
            self._undo.append(partial(runner.model.on_virtual_rank_start.remove, begin))
        else:
            self._begin(get_rank(), data_batch)

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None,
                         outputs: Any = None) -> None:
        """Keep losses and norms of the recorded iteration."""
        if runner.iter + 1 != self.iteration:
            return
        every = getattr(runner.model, 'block_outputs', None) or [outputs]
        for step, logged, norms in zip(self.steps, every, self._norms):
            step.losses = {
                name: float(value.detach() if isinstance(value, torch.Tensor) else value)
                for name, value in (logged or {}).items() if _is_number(value)}
            step.gradient_norms = {name: float(norm) / self._loss_scale
                                   for name, norm in norms.items()}
        self._end()

    def _end(self) -> None:
        for undo in self._undo:
            undo()
        self._undo = []

    def _begin_unless_counting(self, model: Any, virtual_rank: int, batch: Any) -> None:
        if not model.counting:
            self._begin(virtual_rank, batch)

    def _begin(self, virtual_rank: int, batch: Any) -> None:
        self.steps.append(RankStep(virtual_rank, plain(batch)))
        self._norms.append({})

    def _reader(self, name: str) -> Callable[[torch.Tensor], None]:
        def read(gradient: torch.Tensor) -> None:
            gradient = gradient.detach()
            values = gradient.coalesce().values() if gradient.is_sparse else gradient
            wide = torch.float64 if current_accelerator().supports.float64 else torch.float32
            self._norms[-1][name] = values.to(wide).norm()

        return read


class StepEnds(MapSageHook):
    """Hook that lets a recorder begin behind all other hooks, and ends the training behind them.

    Args:
        recorder: Recorder of the step.
    """

    priority = 'LOWEST'

    def __init__(self, recorder: StepRecorder) -> None:
        self.recorder = recorder

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        """Begin to record, if this is the iteration."""
        if runner.iter + 1 == self.recorder.iteration:
            self.recorder.begin(runner, data_batch)

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None,
                         outputs: Any = None) -> None:
        """End the training if this was the iteration.

        Raises:
            StepDone: Then.
        """
        if runner.iter + 1 == self.recorder.iteration:
            raise StepDone


def plain(value: Any) -> Any:
    """Return a copy of nested containers that ``torch.load`` reads with its defaults.

    Tensors and arrays become CPU tensors, data elements dicts with ``metainfo`` and their fields.
    What is no container, number or text becomes its ``repr``.
    """
    if isinstance(value, torch.Tensor):
        # A loader's batch may be of a subclass.
        return value.detach().to('cpu', copy=True).as_subclass(torch.Tensor)
    if isinstance(value, BaseDataElement):
        return dict(metainfo=plain(dict(value.metainfo_items())),
                    **{name: plain(each) for name, each in value.items()})
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [plain(each) for each in value]
        return tuple(parts) if isinstance(value, tuple) else parts
    if isinstance(value, (np.ndarray, np.generic)):
        try:
            return torch.as_tensor(np.array(value)) if value.ndim else plain(value.item())
        except TypeError:  # text, objects, and on older versions unsigned integers
            return plain(value.tolist())
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)  # without a subclass such as that of a sample's key
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return None if value is None else repr(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, torch.Tensor)
                                               and value.numel() == 1)


def _loss_scale(optim_wrapper: Any) -> float:
    # OptimWrapperDict: several optimizers, each with the same loss scaler or with none
    wrappers = list(optim_wrapper.values()) if hasattr(optim_wrapper, 'values') else [optim_wrapper]
    scaler = getattr(wrappers[0], 'loss_scaler', None)
    return float(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else 1.0
