"""Data parallelism over head replicas, each of which is several ranks that hold one head."""
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
from mapsage.distributed.replicas import Replicas, average_gradients

from .ddp import place_module


class Shares(Protocol):
    """What a head that is split over the ranks of a replica does for :class:`HeadReplicas`."""

    head: nn.Module

    def parameters_of(self, optimizer: torch.optim.Optimizer
                      ) -> Tuple[List[nn.Parameter], List[nn.Parameter]]:
        """Return what is trained: this rank's shares, and what all ranks hold whole."""

    def take_gradients(self) -> None:
        """Move the gradients of the last backward passes to the trained parameters."""

    def assemble(self) -> nn.Module:
        """Return the head in one piece. Collective."""

    def put_away(self) -> None:
        """Release what :meth:`assemble` returned."""


@MODEL_WRAPPERS.register_module()
class HeadReplicas(nn.Module):
    """Trains one model on several replicas, whose ``decode_head`` may be split over their ranks.

    The ranks of a replica train on the same samples. Gradients are averaged over the replicas, by
    the ranks with the same place, once a step: just before the optimizer's.

    Until :meth:`use_shares` all ranks hold the whole model, for initializing and loading it.

    Args:
        module: The model, on any device.
        replicas: Which ranks form the replicas.

    Raises:
        PlacementError: If a parameter or buffer did not reach the device.
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

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        return self.module(*args, **kwargs)

    def use_shares(self, shares: Shares) -> None:
        """Train ``model.decode_head`` split over the ranks of this replica from now on."""
        self._shares = shares
        for module in self.module.modules():
            if isinstance(module, nn.SyncBatchNorm):
                # samples of a replica are on all of its ranks, and count once
                module.process_group = self.replicas.peers

    def train_step(self, data: Any, optim_wrapper: Any) -> Dict[str, torch.Tensor]:
        """Train as ``MMDistributedDataParallel`` does, with gradients averaged over replicas.

        Args:
            data: A batch of the loader.
            optim_wrapper: MMEngine's wrapper of one optimizer.

        Returns:
            Losses of this rank's replica, for the log.
        """
        module: Any = self.module
        with optim_wrapper.optim_context(self):
            data = module.data_preprocessor(data, training=True)
            losses = self._run_forward(data, mode='loss')
        loss, log_vars = module.parse_losses(losses)
        # update_params() in its parts, since gradients must be complete before the step
        optim_wrapper.backward(optim_wrapper.scale_loss(loss))
        if optim_wrapper.should_update():
            self._complete_gradients(optim_wrapper)
            optim_wrapper.step()
            optim_wrapper.zero_grad()
        return log_vars

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Put the head together on every rank while the context is open. Collective at its begin.

        The model in it computes alone what all ranks of a replica compute otherwise, and its state
        dict is that of a model on one rank. May be nested.
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
        # Apart, so that what is whole lies at the same offsets on all ranks: an all-reduce adds in
        # an order that may depend on the offset.
        for parameters in (shares, whole):
            average_gradients(parameters, self.replicas.peers)
        scaler = getattr(optim_wrapper, 'loss_scaler', None)
        if shares and scaler is not None and scaler.is_enabled():
            self._agree_on_overflow(shares)

    def _agree_on_overflow(self, shares: List[nn.Parameter]) -> None:
        """Let a gradient that is not finite on one rank be so on all, which then skip the step."""
        finite = torch.stack([each.grad.isfinite().all() for each in shares
                              if each.grad is not None]).all()
        overflow = (~finite).to(torch.float32).reshape(1)
        dist.all_reduce(overflow, op=dist.ReduceOp.MAX, group=self.replicas.group)
        if overflow.item():
            assert shares[0].grad is not None
            shares[0].grad.fill_(float('inf'))


def whole_model(model: nn.Module) -> Any:
    """Return a context in which ``model`` has no head that is split over ranks. Collective.

    Args:
        model: The model or its wrapper, of any type.
    """
    return model.whole() if isinstance(model, HeadReplicas) else nullcontext()
