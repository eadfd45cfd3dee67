"""Data parallelism over virtual ranks when a process carries out several of them.

The virtual ranks of a process run one after the other within a training step. Each has its own
buffers (`rank_buffers.py`), random state (``AcceleratorHook``, a function in
:attr:`VirtualDataParallel.on_virtual_rank_start`) and gradients, which are exchanged between the
forward passes. The bits of a training therefore depend on the number of virtual ranks, and not on
the number of processes. The batches of one step travel in one object (`rank_batches.py`).
"""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Callable, Dict, Iterator, List, Optional

import torch
import torch.distributed as dist
from mmengine.model import BaseModel
from mmengine.model import MMDistributedDataParallel as _MMDistributedDataParallel
from mmengine.model.utils import detect_anomalous_params
from mmengine.optim import OptimWrapper
from mmengine.registry import MODEL_WRAPPERS
from torch import nn

from mapsage.accelerator import current_accelerator
from mapsage.distributed import broadcast_tensors, check_equal_weights, local_rank
from mapsage.distributed.virtual_ranks import VirtualRanks, VirtualRanksError

from .batch_counts import BatchCounts
from .gradient_mean import GradientMean
from .placement import place_module
from .rank_batches import Batch, unpack_rank_batches
from .rank_buffers import RankBuffers

# Arguments of torch's DDP that change nothing here: there are no buckets during a backward pass.
_WITHOUT_EFFECT = (
    'device_ids',
    'output_device',
    'bucket_cap_mb',
    'gradient_as_bucket_view',
    'check_reduction',
    'dim',
)
# Gradients of one virtual rank in the order of the trained parameters.
_Gradients = List[Optional[torch.Tensor]]


@MODEL_WRAPPERS.register_module()
class VirtualDataParallel(nn.Module):
    """Trains as ``MMDistributedDataParallel`` does with one process for each virtual rank.

    The virtual ranks of this process run one after the other within a training step. Each has its
    own batch, random state, buffers and gradients; then the gradients are averaged over the virtual
    ranks of all processes, in one order, and the optimizer makes its step. Works in a single
    process without torch.distributed.

    Between two steps the module holds the buffers of the block's first virtual rank, and within an
    accumulation cycle also this virtual rank's gradients.

    Args:
        module: Model, on any device.
        virtual_ranks: Virtual ranks of the run and their processes.
        reduction: ``'ordered'``, or ``'native'`` for the backend's own sum over processes.
        detect_anomalous_params: Whether to report parameters that get no gradient, as in MMEngine.
        find_unused_parameters: Whether parameters may receive no gradient. If False, a parameter
            without a gradient is an error.
        static_graph: As in torch's DDP: the set of parameters that receive no gradient is the same
            in every step.
        broadcast_buffers: Whether all virtual ranks start a step with the first one's buffers.
        **kwargs: Further arguments of torch's DDP, which have no effect here.

    Attributes:
        block: Virtual ranks of this process.
        on_virtual_rank_start: Functions that are called with ``(virtual_rank, batch)`` before each
            virtual rank's forward pass. If a step has a first pass, they are called in both passes.
        counting: Whether the current forward pass belongs to the first pass of a step, which
            collects counts of predictions for losses and has no gradients; see ``batch_counts``.
        block_outputs: What the model logged for each virtual rank of the block in the last step.

    Raises:
        PlacementError: If a parameter or buffer did not reach the device.
        WeightsDifferError: If the weights of the processes differ after wrapping.
        VirtualRanksError: If DDP has an argument that cannot be obeyed here.
    """

    val_step = _MMDistributedDataParallel.val_step
    test_step = _MMDistributedDataParallel.test_step
    _run_forward = _MMDistributedDataParallel._run_forward

    def __init__(
        self,
        module: nn.Module,
        virtual_ranks: VirtualRanks,
        reduction: str = 'ordered',
        detect_anomalous_params: bool = False,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        broadcast_buffers: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        for name in kwargs:
            if name not in _WITHOUT_EFFECT:
                raise VirtualRanksError(
                    f'model_wrapper_cfg.{name}={kwargs[name]!r} cannot be obeyed with '
                    f'{virtual_ranks.count} virtual ranks in {virtual_ranks.processes} '
                    f'process(es): remove it, or start {virtual_ranks.count} processes.'
                )
        rank = dist.get_rank() if virtual_ranks.processes > 1 else 0
        self.module = place_module(module, current_accelerator(), local_rank())
        self.virtual_ranks, self.block = virtual_ranks, virtual_ranks.block(rank)
        self.reduction = reduction
        self.detect_anomalous_params = detect_anomalous_params
        self.on_virtual_rank_start: List[Callable[[int, Batch], None]] = []
        self.counting = False
        self.block_outputs: List[Dict[str, torch.Tensor]] = []
        self._broadcast_buffers = broadcast_buffers
        self._rank_buffers = RankBuffers(self.module, self.block)
        self.counts = BatchCounts(self.module, virtual_ranks)
        self._mean = GradientMean(
            virtual_ranks, rank, reduction, may_miss=find_unused_parameters or static_graph
        )
        # Within an accumulation cycle: gradients of the block's virtual ranks but the first, whose
        # gradients stay in the module.
        self._later_gradients: List[_Gradients] = []
        # Ids of the parameters that the current accumulation cycle trains.
        self._cycle: List[int] = []
        if virtual_ranks.processes > 1:
            check_equal_weights(self.module, 'after wrapping')

    def forward(self, *args: object, **kwargs: object) -> object:
        """Call the model."""
        return self.module(*args, **kwargs)

    def no_sync(self) -> AbstractContextManager:
        """Return a context without effect: backward passes average no gradients here."""
        return nullcontext()

    def train_step(self, data: Batch, optim_wrapper: OptimWrapper) -> Dict[str, torch.Tensor]:
        """Train the virtual ranks of this process on a batch each, and make one optimizer step.

        Args:
            data: Batch from the training loader: the first virtual rank's batch, which carries the
                batches of the others.
            optim_wrapper: MMEngine's wrapper of one optimizer.

        Returns:
            What the model logs for the block's first virtual rank.

        Raises:
            VirtualRanksError: If ``data`` does not carry one batch for each virtual rank, a
                gradient is missing, the wrapper overrides ``update_params``, or the set of trained
                parameters has changed since the beginning of the accumulation cycle.
        """
        if type(optim_wrapper).update_params is not OptimWrapper.update_params:
            raise VirtualRanksError(
                f'{type(optim_wrapper).__name__} has an update_params of its own, and the virtual '
                f'ranks of a process share one optimizer step that does not call it: expected a '
                f"wrapper with OptimWrapper's. Start {self.virtual_ranks.count} processes, one for "
                f"each virtual rank, with env_cfg.reduction='native', or override step() instead."
            )
        batches = unpack_rank_batches(data, self.block)
        with self.counts.step(batches):
            return self._train_step(batches, optim_wrapper)

    def _train_step(
        self, batches: List[Batch], optim_wrapper: OptimWrapper
    ) -> Dict[str, torch.Tensor]:
        if self._broadcast_buffers:
            self.share_buffers()
        self._rank_buffers.begin()
        if self.counts.wants_first_pass:
            self._count_predictions(batches, optim_wrapper)
        self.block_outputs = []
        # Asked before the first backward pass, which already counts this iteration.
        completes = optim_wrapper.should_sync()
        trained = self._trained_parameters()
        begins = optim_wrapper.should_update()
        self._check_cycle(trained, begins)
        # A cycle begins without gradients, even if the module has some: torch 1.10 leaves zeros.
        gradients = self._no_gradients(len(trained)) if begins else self.gradients_of_ranks()
        self._mean.begin(self.module)
        for virtual_rank, batch in zip(self.block, batches):
            rank_gradients = gradients[virtual_rank - self.block.start]
            for parameter, gradient in zip(trained, rank_gradients):
                parameter.grad = gradient
            self._rank_buffers.place(virtual_rank)
            for function in self.on_virtual_rank_start:
                function(virtual_rank, batch)
            self.block_outputs.append(self._backward(batch, optim_wrapper))
            self.counts.next_virtual_rank()
            if virtual_rank + 1 < self.block.stop:
                # The backward passes of all virtual ranks are one iteration to the wrapper.
                optim_wrapper._inner_count -= 1
                current_accelerator().flush()
            rank_gradients[:] = [parameter.grad for parameter in trained]
            if completes:
                self._mean.add(rank_gradients)
                rank_gradients[:] = []
        self._rank_buffers.place(self.block.start)
        if not completes:
            self._store_gradients(trained, gradients)
            return self.block_outputs[0]
        self._later_gradients = []
        for parameter, gradient in zip(trained, self._mean.finish()):
            parameter.grad = gradient
        optim_wrapper.step()
        optim_wrapper.zero_grad()
        return self.block_outputs[0]

    def _check_cycle(self, trained: List[nn.Parameter], begins: bool) -> None:
        """Raise VirtualRanksError if parameters were frozen or thawed within a cycle."""
        identities = [id(parameter) for parameter in trained]
        if not begins and self._cycle not in ([], identities):
            raise VirtualRanksError(
                'other parameters are trained than at the beginning of the accumulation cycle: '
                'expected the same requires_grad throughout a cycle. Freeze or thaw them at an '
                'iteration that is a multiple of accumulative_counts.'
            )
        self._cycle = identities

    def gradients_of_ranks(self) -> List[_Gradients]:
        """Return each virtual rank's gradients so far, in the order of the trained parameters."""
        first = [parameter.grad for parameter in self._trained_parameters()]
        return [first, *(self._later_gradients or self._no_gradients(len(first))[1:])]

    def _trained_parameters(self) -> List[nn.Parameter]:
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]

    def _no_gradients(self, parameters: int) -> List[_Gradients]:
        return [[None] * parameters for _ in self.block]

    def share_gradients(self) -> None:
        """Give every virtual rank of this process a copy of the gradients in the module."""
        gradients = [parameter.grad for parameter in self._trained_parameters()]
        self._later_gradients = [
            [None if gradient is None else gradient.detach().clone() for gradient in gradients]
            for _ in self.block[1:]
        ]

    def share_buffers(self) -> None:
        """Give every virtual rank the buffers of the first one. Collective."""
        if self.virtual_ranks.processes > 1:
            broadcast_tensors(self.module.buffers())
        self._rank_buffers.forget()

    @contextmanager
    def buffers_of(self, virtual_rank: int) -> Iterator[None]:
        """Put the buffers of a virtual rank of this process into the model, between two steps."""
        self._rank_buffers.begin()
        self._rank_buffers.place(virtual_rank)
        try:
            yield
        finally:
            self._rank_buffers.place(self.block.start)

    @torch.no_grad()
    def _count_predictions(self, batches: List[Batch], optim_wrapper: OptimWrapper) -> None:
        """Let the losses count the predictions of all virtual ranks. Collective.

        Each virtual rank has the random state and the buffers that it has in the second pass.
        """
        module: BaseModel = self.module
        self.counting = True
        try:
            for virtual_rank, batch in zip(self.block, batches):
                self._rank_buffers.place(virtual_rank)
                for function in self.on_virtual_rank_start:
                    function(virtual_rank, batch)
                with self._rank_buffers.unchanged(), self.counts.collecting(), optim_wrapper.optim_context(
                    self
                ):
                    # A copy, because the preprocessor pads in place.
                    inputs = module.data_preprocessor(_copy_first_batch(batch), training=True)
                    self._run_forward(inputs, mode='loss')
                current_accelerator().flush()
        finally:
            self.counting = False
        self.counts.sum_collected()

    def _backward(self, batch: Batch, optim_wrapper: OptimWrapper) -> Dict[str, torch.Tensor]:
        """Carry out the forward and backward pass of one virtual rank; return what it logs."""
        module: BaseModel = self.module
        with optim_wrapper.optim_context(self):
            inputs = module.data_preprocessor(batch, training=True)
            losses = self._run_forward(inputs, mode='loss')
        loss, log_vars = module.parse_losses(losses)
        optim_wrapper.backward(optim_wrapper.scale_loss(loss))
        if self.detect_anomalous_params:
            detect_anomalous_params(loss, model=self)
        # Detached, because the graph would otherwise live until the next step.
        return {
            name: value.detach() if isinstance(value, torch.Tensor) else value
            for name, value in log_vars.items()
        }

    def _store_gradients(self, trained: List[nn.Parameter], gradients: List[_Gradients]) -> None:
        """Keep the gradients of an unfinished accumulation cycle until the next step."""
        for parameter, gradient in zip(trained, gradients[0]):
            parameter.grad = gradient
        self._later_gradients = gradients[1:]


def _copy_first_batch(batch: Batch) -> Batch:
    """Return a deep copy of a batch, without the other virtual ranks' batches that it carries."""
    if isinstance(batch, dict):
        return {key: copy.deepcopy(value) for key, value in batch.items()}
    return copy.deepcopy(batch)
