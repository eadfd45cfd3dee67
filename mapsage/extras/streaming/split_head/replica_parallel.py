"""Data parallelism over head replicas: groups of ranks that share one head.

The ranks of a replica train on the same samples, and each may hold a share of ``decode_head``.
Ranks that hold the same share, one in each replica, are peers: they average their gradients. How a
head is split is in the modules next to this one; this module sees it as :class:`Shares`.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Dict, Iterator, List, Optional, Protocol, Tuple

import torch
import torch.distributed as dist
from mmengine.model import BaseModel
from mmengine.model import MMDistributedDataParallel as _MMDistributedDataParallel
from mmengine.optim import AmpOptimWrapper, OptimWrapper
from mmengine.registry import MODEL_WRAPPERS
from torch import nn

from mapsage.accelerator import current_accelerator
from mapsage.distributed import local_rank
from mapsage.distributed.virtual_ranks import VirtualRanks
from mapsage.distributed.wrappers.batch_counts import BatchCounts
from mapsage.distributed.wrappers.placement import place_module
from mapsage.distributed.wrappers.rank_batches import Batch
from mapsage.distributed.wrappers.split_model import SplitModel
from mapsage.extras.streaming.split_head.replicas import Replicas, average_gradients


class Shares(Protocol):
    """The operations of a split head that :class:`HeadReplicas` uses."""

    head: nn.Module

    def parameters_of(
        self, optimizer: torch.optim.Optimizer
    ) -> Tuple[List[nn.Parameter], List[nn.Parameter]]:
        """Return the parameters of ``optimizer``: this rank's shares, and unsplit parameters."""

    def take_gradients(self) -> None:
        """Move the gradients of the last backward passes to the trained parameters."""

    def assemble(self) -> nn.Module:
        """Return a copy of the head in one piece. Collective."""

    def put_away(self) -> None:
        """Free the device memory of the copy that :meth:`assemble` returned."""


@MODEL_WRAPPERS.register_module()
class HeadReplicas(SplitModel):
    """Trains one model on several replicas, each of which may have split ``decode_head``.

    The ranks of a replica train on the same samples. Ranks with the same position in their replica
    average their gradients, once per optimizer step and just before it.

    Until :meth:`use_shares` is called, all ranks hold the whole model, so that it can be
    initialized and loaded.

    Args:
        module: Model to train, on any device.
        replicas: Head replicas of the job.

    Raises:
        PlacementError: If a parameter or buffer was not moved to the device.
    """

    val_step = _MMDistributedDataParallel.val_step
    test_step = _MMDistributedDataParallel.test_step
    _run_forward = _MMDistributedDataParallel._run_forward

    def __init__(self, module: nn.Module, replicas: Replicas) -> None:
        super().__init__()
        self.module = place_module(module, current_accelerator(), local_rank())
        self.replicas = replicas
        self._shares: Optional[Shares] = None
        self._assembled = False
        # The ranks of a replica have the same samples, which count once.
        self.counts = BatchCounts(
            self.module, VirtualRanks(replicas.count, replicas.count), replicas.peers
        )

    @property
    def samples_rank(self) -> int:
        """Number of this rank's replica."""
        return self.replicas.index

    def forward(self, *args: object, **kwargs: object) -> object:
        """Call the model."""
        return self.module(*args, **kwargs)

    def use_shares(self, shares: Shares) -> None:
        """Train with ``model.decode_head`` split over the ranks of this replica from now on."""
        self._shares = shares
        for module in self.module.modules():
            if isinstance(module, nn.SyncBatchNorm):
                # All ranks of a replica have the same samples, which must count once.
                module.process_group = self.replicas.peers

    def train_step(self, data: Batch, optim_wrapper: OptimWrapper) -> Dict[str, torch.Tensor]:
        """Train like ``MMDistributedDataParallel``, with gradients averaged over replicas.

        Args:
            data: Batch of the loader.
            optim_wrapper: MMEngine's wrapper of one optimizer.

        Returns:
            Losses of this rank's replica, for the log.
        """
        module: BaseModel = self.module
        with self.counts.step([data]), optim_wrapper.optim_context(self):
            inputs = module.data_preprocessor(data, training=True)
            losses = self._run_forward(inputs, mode='loss')
        loss, log_vars = module.parse_losses(losses)
        # The steps of update_params(), with the gradients averaged before the optimizer's.
        optim_wrapper.backward(optim_wrapper.scale_loss(loss))
        if optim_wrapper.should_update():
            self._complete_gradients(optim_wrapper)
            optim_wrapper.step()
            optim_wrapper.zero_grad()
        return log_vars

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Assemble the whole head on every rank while the context is open. Collective on entry.

        Within the context each rank runs the whole model by itself, and the model has the state
        dict of an unsplit model. Contexts may be nested.
        """
        if self._shares is None or self._assembled:
            yield
            return
        self.module.decode_head, self._assembled = self._shares.assemble(), True
        try:
            yield
        finally:
            self.module.decode_head, self._assembled = self._shares.head, False
            self._shares.put_away()

    def _complete_gradients(self, optim_wrapper: OptimWrapper) -> None:
        """Average gradients over the replicas. Collective."""
        assert self._shares is not None
        self._shares.take_gradients()
        shares, unsplit = self._shares.parameters_of(optim_wrapper.optimizer)
        average_gradients(shares, self.replicas.peers)
        # Over all ranks: kernels with atomics give the ranks of one replica gradients that differ
        # in the last bits, and the weights would drift apart.
        average_gradients(unsplit, None)
        if (
            shares
            and isinstance(optim_wrapper, AmpOptimWrapper)
            and optim_wrapper.loss_scaler.is_enabled()
        ):
            self._agree_on_overflow(shares)

    def _agree_on_overflow(self, shares: List[nn.Parameter]) -> None:
        """Make the gradients of all ranks infinite if one rank's are, so that all skip the step."""
        finite = torch.stack(
            [share.grad.isfinite().all() for share in shares if share.grad is not None]
        ).all()
        overflow = (~finite).to(torch.float32).reshape(1)
        dist.all_reduce(overflow, op=dist.ReduceOp.MAX, group=self.replicas.group)
        if overflow.item():
            assert shares[0].grad is not None
            shares[0].grad.fill_(float('inf'))
