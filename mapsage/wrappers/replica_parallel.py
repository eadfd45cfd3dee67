"""Data parallelism over head replicas, each of which consists of several ranks with one head."""
from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import Any, Dict, Iterator, List, Optional, Protocol, Tuple

import torch
import torch.distributed as dist
from mmengine.model import MMDistributedDataParallel as _MMDistributedDataParallel
from mmengine.registry import MODEL_WRAPPERS
from torch import nn

from mapsage.accelerator import current_accelerator
from mapsage.distributed import local_rank
from mapsage.distributed.groups.replicas import Replicas, average_gradients
from mapsage.distributed.virtual_ranks import VirtualRanks

from .batch_counts import BatchCounts
from .ddp import place_module


class Shares(Protocol):
    """The operations of a split head that :class:`HeadReplicas` uses."""

    head: nn.Module

    def parameters_of(self, optimizer: torch.optim.Optimizer
                      ) -> Tuple[List[nn.Parameter], List[nn.Parameter]]:
        """Return what ``optimizer`` trains: this rank's shares, and the whole parameters."""

    def take_gradients(self) -> None:
        """Move the gradients of the last backward passes to the trained parameters."""

    def assemble(self) -> nn.Module:
        """Return a copy of the head in one piece. Collective."""

    def put_away(self) -> None:
        """Free the device memory of the copy that :meth:`assemble` has returned."""


@MODEL_WRAPPERS.register_module()
class HeadReplicas(nn.Module):
    """Trains one model on several replicas, each of which may have split ``decode_head``.

    The ranks of a replica train on the same samples. Ranks with the same place average their
    gradients over the replicas, once per optimizer step and just before it.

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
            self.module, VirtualRanks(replicas.count, replicas.count), replicas.peers)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        return self.module(*args, **kwargs)

    def use_shares(self, shares: Shares) -> None:
        """Train with ``model.decode_head`` split over the ranks of this replica from now on."""
        self._shares = shares
        for module in self.module.modules():
            if isinstance(module, nn.SyncBatchNorm):
                # All ranks of a replica have the same samples, which must count once.
                module.process_group = self.replicas.peers

    def train_step(self, data: Any, optim_wrapper: Any) -> Dict[str, torch.Tensor]:
        """Train like ``MMDistributedDataParallel``, with gradients averaged over replicas.

        Args:
            data: Batch of the loader.
            optim_wrapper: MMEngine's wrapper of one optimizer.

        Returns:
            Losses of this rank's replica, for the log.
        """
        module: Any = self.module
        with self.counts.step([data]), optim_wrapper.optim_context(self):
            data = module.data_preprocessor(data, training=True)
            losses = self._run_forward(data, mode='loss')
        loss, log_vars = module.parse_losses(losses)
        # These are the parts of update_params(). Gradients are averaged between two of them.
        optim_wrapper.backward(optim_wrapper.scale_loss(loss))
        if optim_wrapper.should_update():
            self._complete_gradients(optim_wrapper)
            optim_wrapper.step()
            optim_wrapper.zero_grad()
        return log_vars

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Assemble the whole head on every rank while the context is open. Collective on entry.

        Within the context each rank runs the whole model on its own, and the model's state dict is
        that of a model that is not split. Contexts may be nested.
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

    def _complete_gradients(self, optim_wrapper: Any) -> None:
        """Average gradients over the replicas. Collective."""
        assert self._shares is not None
        self._shares.take_gradients()
        shares, whole = self._shares.parameters_of(optim_wrapper.optimizer)
        average_gradients(shares, self.replicas.peers)
        # Over all ranks: kernels with atomics give the ranks of one replica gradients that differ
        # in the last bits, and with them weights that drift apart.
        average_gradients(whole, None)
        scaler = getattr(optim_wrapper, 'loss_scaler', None)
        if shares and scaler is not None and scaler.is_enabled():
            self._agree_on_overflow(shares)

    def _agree_on_overflow(self, shares: List[nn.Parameter]) -> None:
        """Make the gradients of all ranks infinite if one rank's are, so that all skip the step."""
        finite = torch.stack([each.grad.isfinite().all() for each in shares
                              if each.grad is not None]).all()
        overflow = (~finite).to(torch.float32).reshape(1)
        dist.all_reduce(overflow, op=dist.ReduceOp.MAX, group=self.replicas.group)
        if overflow.item():
            assert shares[0].grad is not None
            shares[0].grad.fill_(float('inf'))


def whole_model(model: nn.Module) -> Any:
    """Return a context in which the head of ``model`` is whole on every rank. Collective.

    Args:
        model: Model or wrapped model, of any type. Nothing is done unless it is a
            :class:`HeadReplicas`.
    """
    return model.whole() if isinstance(model, HeadReplicas) else nullcontext()
