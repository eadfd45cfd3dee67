"""Keeps the gradients of an unfinished accumulation cycle in the checkpoint.

A checkpoint holds one set of gradients, but each virtual rank has its own. So the ranks average
them before a save and continue with the mean themselves; otherwise a resumed run would differ from
the run that saved. The mean at the optimizer step stays the same.
"""

from __future__ import annotations

from typing import Any, Dict, Iterator, List, Optional, Tuple

import torch
from mmengine.dist import all_reduce, get_rank, get_world_size, is_main_process
from mmengine.registry import HOOKS
from torch import nn

from mapsage.accelerator import current_accelerator
from mapsage.distributed.ordered_sum import Fold, OrderedSum
from mapsage.distributed.virtual_ranks import VirtualRanks
from mapsage.distributed.wrappers import VirtualDataParallel
from mapsage.distributed.wrappers.rank_batches import Batch
from mapsage.distributed.wrappers.split_model import SplitModel
from mapsage.host.hook import MapSageHook
from mapsage.host.runner import (
    HostRunner,
    MapSageRun,
    OptimWrappers,
    built_wrappers,
    inside_cycle,
    plain_model,
)

# Keys in a checkpoint: the gradients by name, and accumulative_counts of the run that saved them.
_KEY = 'gradients'
_COUNTS = 'accumulative_counts'


@HOOKS.register_module()
class AccumulatedGradientsHook(MapSageHook):
    """Hook that makes a resume exact where gradients are being accumulated.

    With ``optim_wrapper.accumulative_counts`` of 2 or more, a checkpoint may be saved between two
    optimizer steps. It then holds the gradients so far, and a resumed run continues with them;
    MMEngine loses them.

    Each virtual rank has separate gradients until the step. Before they are saved every virtual
    rank gets their mean, from which the run itself continues too: the mean over the virtual ranks
    at the step is the same, the checkpoint holds one set, and it can be resumed on any number of
    processes. They are added along the same tree as at the step.

    ``MapSageRunner`` registers it.
    """

    def __init__(self) -> None:
        self._gradients: Dict[str, torch.Tensor] = {}
        self._warned = False

    def before_train_iter(
        self, runner: HostRunner, batch_idx: int, data_batch: Optional[Batch] = None
    ) -> None:
        """Drop what was gathered in the previous iteration."""
        self._gradients = {}

    def gather_state(self, runner: MapSageRun) -> None:
        """Average the gradients over the ranks, if a cycle is unfinished. Collective then."""
        self._gradients = {}
        if not inside_cycle(runner.optim_wrapper):
            return
        if isinstance(runner.model, SplitModel):
            if not self._warned:
                runner.logger.warning(
                    f'iteration {runner.iter + 1} is inside an accumulation cycle, and the '
                    f'gradients of a head that is split over ranks are not saved: a run that is '
                    f'resumed there loses them. Set the interval of CheckpointHook to a multiple '
                    f'of accumulative_counts.'
                )
            self._warned = True
            return
        gradients = dict(_average_gradients(runner))
        # Otherwise a lazy device compiles the next step again.
        current_accelerator().flush()
        self._gradients = gradients if is_main_process() else {}

    def check_own_state(self, runner: MapSageRun) -> None:
        """Warn of what is missing from a checkpoint that one rank saves inside a cycle."""
        self._gradients = {}
        if inside_cycle(runner.optim_wrapper):
            runner.logger.warning(
                f'iteration {runner.iter + 1} is inside an accumulation cycle, and the checkpoint '
                f'is saved by one rank: the gradients so far are missing from it. To save them, '
                f'enter runner.saving_together() on all ranks.'
            )

    def before_save_checkpoint(self, runner: HostRunner, checkpoint: Dict[str, Any]) -> None:
        """Put the gathered gradients into the checkpoint."""
        if self._gradients:
            checkpoint[_KEY] = dict(self._gradients)
            checkpoint[_COUNTS] = _accumulative_counts(runner.optim_wrapper)

    def after_load_checkpoint(self, runner: HostRunner, checkpoint: Dict[str, Any]) -> None:
        """Load the gradients of the checkpoint into a resumed model."""
        gradients = checkpoint.get(_KEY, {}) if runner._resume else {}
        counts = checkpoint.get(_COUNTS)
        if gradients and counts != _accumulative_counts(runner.optim_wrapper):
            runner.logger.warning(
                f'the checkpoint is inside an accumulation cycle of {counts} iterations, and '
                f'accumulative_counts is {_accumulative_counts(runner.optim_wrapper)} now: its '
                f'gradients are left out, as under MMEngine.'
            )
            return
        for name, parameter in _trained_parameters(runner).items():
            if name in gradients:
                parameter.grad = gradients[name].to(parameter.device, parameter.dtype, copy=True)
        if isinstance(runner.model, VirtualDataParallel):
            runner.model.share_gradients()


def _accumulative_counts(optim_wrapper: OptimWrappers) -> List[int]:
    return [wrapper._accumulative_counts for wrapper in built_wrappers(optim_wrapper)]


def _trained_parameters(runner: HostRunner) -> Dict[str, nn.Parameter]:
    return {
        name: parameter
        for name, parameter in plain_model(runner).named_parameters()
        if parameter.requires_grad
    }


def _average_gradients(runner: HostRunner) -> Iterator[Tuple[str, torch.Tensor]]:
    """Yield the gradients in host memory; give each virtual rank their mean. Collective."""
    trained = _trained_parameters(runner)
    ranks, rank = VirtualRanks(get_world_size(), get_world_size()), get_rank()
    # One list of gradients for each virtual rank of this process.
    gradient_sets: List[List[Optional[torch.Tensor]]] = [
        [parameter.grad for parameter in trained.values()]
    ]
    wrapper = runner.model if isinstance(runner.model, VirtualDataParallel) else None
    if wrapper is not None:
        ranks, gradient_sets = wrapper.virtual_ranks, wrapper.gradients_of_ranks()
    # A virtual rank may lack a gradient that another has. All processes must enter the same
    # collectives, so they first agree which gradients exist.
    present = torch.tensor(
        [any(gradient is not None for gradient in column) for column in zip(*gradient_sets)],
        dtype=torch.int64,
    )
    all_reduce(present, 'max')
    ordered = OrderedSum(ranks, rank)
    for index, (name, parameter) in enumerate(trained.items()):
        if not present[index]:
            continue
        if ranks.count == 1:
            assert parameter.grad is not None
            yield name, parameter.grad.detach().to('cpu', copy=True)
        else:
            fold = Fold(ranks, ranks.block(rank))
            for gradients in gradient_sets:
                fold.add([_on_host(gradients[index], parameter)])
            mean = ordered.sum([partial for (partial,) in fold.partials()]).div_(ranks.count)
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            # In place, because a lazy device has compiled the step with this tensor.
            parameter.grad.copy_(mean.view(parameter.shape))
            # Not read back: a lazy device would compile a graph for each shape.
            yield name, mean.view(parameter.shape)
    if wrapper is not None:
        wrapper.share_gradients()


def _on_host(gradient: Optional[torch.Tensor], parameter: torch.Tensor) -> torch.Tensor:
    """Return a flat copy of a gradient in host memory, or zeros for a missing gradient."""
    if gradient is None:
        return torch.zeros(parameter.numel(), dtype=parameter.dtype)
    return gradient.detach().to('cpu', copy=True).reshape(-1)
