"""Computes the gradient of one virtual rank again, as a training step has computed it.

:class:`StepCapture` records what a step of one virtual rank starts from (batch, random state,
buffers, sums over the global batch, weights) and prints of the gradients that it computes.
:meth:`StepCapture.recompute` does the same from such a record, of this rank or of another one. It
leaves the training alone: stand-ins take the place of the parameters, so that no gradient of the
training, no hook of DDP and no hook of a parameter takes part.
"""

from __future__ import annotations

import copy
from contextlib import ExitStack, contextmanager
from typing import Any, Callable, Dict, Iterator, List, Mapping, NamedTuple, Optional, Tuple

import torch
from mmengine.model import BaseModel
from mmengine.optim import OptimWrapper
from torch import nn

from mapsage.accelerator import generator_states, restore_generators
from mapsage.distributed.nested_tensors import move
from mapsage.distributed.weights import tensor_digest
from mapsage.distributed.wrappers.batch_counts import counters_of
from mapsage.distributed.wrappers.rank_batches import Batch, RankDict, RankList
from mapsage.distributed.wrappers.rank_buffers import Buffers, RankBuffers
from mapsage.host.runner import enabled_scaler

from .gradient_prints import GradientPrint, PrintReader


class StepInputs(NamedTuple):
    """What the gradient of a virtual rank follows from, other than the weights; it can be pickled.

    Attributes:
        batch: Batch as the model's preprocessor is given it.
        random_states: States of all generators before the step.
        buffers: Buffers of the virtual rank before the step.
        training: ``training`` of each module, in the order of the model.
        inner_count: Number of iterations that the optimizer wrapper has counted before the step,
            from which the factor of an accumulation cycle follows.
        loss_scale: Factor of the gradient scaler; None without one.
        sums: What ``sum_over_ranks`` of the losses returned in the step, in the order of the calls.
    """

    batch: Batch
    random_states: Tuple[Any, ...]
    buffers: Buffers
    training: List[bool]
    inner_count: int
    loss_scale: Optional[float]
    sums: List[torch.Tensor]


class StepCapture:
    """Records one virtual rank of a training step, and computes such a record again.

    Args:
        model: Model without its wrapper.
        optim_wrapper: Wrapper of the optimizer.
        exact: Whether prints are digests; else sums, see ``gradient_prints.py``.

    Attributes:
        active: Whether the step now computes the virtual rank that is recorded.
        inputs: Inputs of the recorded virtual rank; None until the step has begun it.
        weight_digests: Digest of each parameter before the step, by name.
    """

    def __init__(self, model: BaseModel, optim_wrapper: OptimWrapper, exact: bool) -> None:
        self._model, self._optim_wrapper, self._exact = model, optim_wrapper, exact
        self._buffers = RankBuffers(model, range(1))
        self._reader = PrintReader(exact)
        self._handles: List[Any] = []
        self._restore_counters: List[Callable[[], None]] = []
        # Values of the trained parameters before the step, in host memory.
        self._weights: Dict[str, torch.Tensor] = {}
        self.active = True
        self.inputs: Optional[StepInputs] = None
        self.weight_digests: Dict[str, int] = {}

    @property
    def print(self) -> GradientPrint:
        """Print of the gradients that the step has computed."""
        return self._reader.print

    def begin(self) -> None:
        """Store the weights, and record the step from now on."""
        named = dict(self._model.named_parameters())
        host = {name: parameter.detach().to('cpu', copy=True) for name, parameter in named.items()}
        self.weight_digests = {name: tensor_digest(value) for name, value in host.items()}
        self._weights = {name: value for name, value in host.items() if named[name].requires_grad}
        self._reader.enabled = False
        self._reader.attach(named)
        self._handles = [self._model.data_preprocessor.register_forward_pre_hook(self._on_batch)]

    def end(self) -> None:
        """Stop recording."""
        self._reader.detach()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._release_counters()

    def release_weights(self) -> None:
        """Free the copy of the weights, which the recorded step's check has used."""
        self._weights = {}

    def _on_batch(self, module: nn.Module, arguments: Tuple[Any, ...]) -> None:
        """Record the inputs, as the forward pass begins with the preprocessor's call."""
        self._reader.enabled = self.active
        self._release_counters()
        if not self.active:
            return
        # A hook may have called the preprocessor before the step did: the last call counts.
        self._reader.print = {}
        scaler = enabled_scaler(self._optim_wrapper)
        # A copy, because the preprocessor changes a batch in place.
        self.inputs = StepInputs(
            copy.deepcopy(_first_batch(arguments[0])),
            generator_states(),
            self._buffers.read(),
            [child.training for child in self._model.modules()],
            self._optim_wrapper._inner_count,
            None if scaler is None else float(scaler.get_scale()),
            [],
        )
        for counter in counters_of(self._model):
            self._restore_counters.append(
                _replace_sum(counter, _recording(counter.sum_over_ranks, self.inputs.sums))
            )

    def _release_counters(self) -> None:
        for restore in self._restore_counters:
            restore()
        self._restore_counters = []

    def recompute(self, inputs: StepInputs, before_step: bool = True) -> GradientPrint:
        """Return the print of a gradient that is computed again.

        Weights, gradients, buffers and random states of the training are as before afterwards.

        Args:
            inputs: Inputs of a virtual rank, whose tensors may be in host memory.
            before_step: Whether to compute with the weights before the recorded step, instead of
                the current weights.
        """
        model = self._model
        reader = PrintReader(self._exact)
        device = next(model.parameters()).device
        with ExitStack() as stack:
            stack.enter_context(_unchanged_generators())
            stack.enter_context(self._buffers.unchanged())
            stack.enter_context(_in_modes(model, inputs.training))
            stack.enter_context(_replayed_sums(model, inputs.sums))
            stand_ins = stack.enter_context(_stand_ins(model, self._weights if before_step else {}))
            stack.enter_context(torch.enable_grad())
            self._buffers.write(move(inputs.buffers, device))
            restore_generators(inputs.random_states)
            reader.attach(stand_ins)
            with self._optim_wrapper.optim_context(model):
                batch = model.data_preprocessor(copy.deepcopy(inputs.batch), training=True)
                losses = (
                    model(**batch, mode='loss')
                    if isinstance(batch, dict)
                    else model(*batch, mode='loss')
                )
            loss, _ = model.parse_losses(losses)
            self._scale(loss, inputs).backward()
        return reader.print

    def _scale(self, loss: torch.Tensor, inputs: StepInputs) -> torch.Tensor:
        """Return the loss with the factors of accumulation and gradient scaler in the step."""
        wrapper = self._optim_wrapper
        count, wrapper._inner_count = wrapper._inner_count, inputs.inner_count
        try:
            scaled = wrapper.scale_loss(loss)
        finally:
            wrapper._inner_count = count
        if inputs.loss_scale is None:
            return scaled
        return scaled * torch.full((), inputs.loss_scale, dtype=torch.float32, device=loss.device)


def _first_batch(batch: Batch) -> Batch:
    """Return the batch of a block's first virtual rank without the others that it may carry."""
    if isinstance(batch, RankDict):
        return dict(batch)
    return list(batch) if isinstance(batch, RankList) else batch


@contextmanager
def _unchanged_generators() -> Iterator[None]:
    states = generator_states()
    try:
        yield
    finally:
        restore_generators(states)


@contextmanager
def _in_modes(model: nn.Module, modes: List[bool]) -> Iterator[None]:
    """Give each module the ``training`` that it had in the step."""
    children = list(model.modules())
    current = [child.training for child in children]
    try:
        for child, mode in zip(children, modes):
            child.training = mode
        yield
    finally:
        for child, mode in zip(children, current):
            child.training = mode


def _replace_sum(
    counter: Any, function: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[], None]:
    """Replace ``sum_over_ranks`` of a loss; return a function that restores it."""
    before = vars(counter).get('sum_over_ranks')
    counter.sum_over_ranks = function

    def restore() -> None:
        if before is None:
            vars(counter).pop('sum_over_ranks', None)
        else:
            counter.sum_over_ranks = before

    return restore


def _recording(
    sum_over_ranks: Callable[[torch.Tensor], torch.Tensor], sums: List[torch.Tensor]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a ``sum_over_ranks`` that also appends its results to ``sums``, in host memory."""

    def record(count: torch.Tensor) -> torch.Tensor:
        total = sum_over_ranks(count)
        sums.append(total.detach().to('cpu', copy=True))
        return total

    return record


@contextmanager
def _replayed_sums(model: nn.Module, sums: List[torch.Tensor]) -> Iterator[None]:
    """Have the losses' ``sum_over_ranks`` return what it returned in the step."""
    remaining = iter(sums)
    restore = [
        _replace_sum(counter, lambda count: next(remaining).to(count.device))
        for counter in counters_of(model)
    ]
    try:
        yield
    finally:
        for function in restore:
            function()


@contextmanager
def _stand_ins(
    model: nn.Module, values: Mapping[str, torch.Tensor]
) -> Iterator[Dict[str, nn.Parameter]]:
    """Put other parameters into the place of a model's; yield them by name.

    A stand-in is another leaf: gradients are added up there, and neither hooks of the parameter nor
    DDP's hooks run.

    Args:
        model: Model.
        values: Values of some parameters by name; the others share their memory.
    """
    stand_ins: Dict[int, nn.Parameter] = {}
    by_name: Dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        value = values.get(name, parameter.detach()).to(parameter.device)
        by_name[name] = nn.Parameter(value, requires_grad=parameter.requires_grad)
        stand_ins[id(parameter)] = by_name[name]
    replaced = [
        (child, key, parameter)
        for child in model.modules()
        for key, parameter in child._parameters.items()
        if parameter is not None
    ]
    try:
        for child, key, parameter in replaced:
            child._parameters[key] = stand_ins[id(parameter)]
        yield by_name
    finally:
        for child, key, parameter in replaced:
            child._parameters[key] = parameter
