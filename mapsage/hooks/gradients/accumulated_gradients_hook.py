"""Keeps the gradients of an unfinished accumulation cycle in the checkpoint."""
from __future__ import annotations

from typing import Any, Dict, Iterator, List, Optional, Tuple

import torch
from mmengine.dist import all_reduce, get_rank, get_world_size, is_main_process
from mmengine.model import is_model_wrapper
from mmengine.optim import OptimWrapper, OptimWrapperDict
from mmengine.registry import HOOKS

from mapsage.accelerator import current_accelerator
from mapsage.distributed.ordered_sum import Fold, OrderedSum
from mapsage.distributed.virtual_ranks import VirtualRanks
from mapsage.hooks.base import MapSageHook
from mapsage.wrappers import VirtualDataParallel

_KEY = 'gradients'
_COUNTS = 'accumulative_counts'  # of the run that saved them


@HOOKS.register_module()
class AccumulatedGradientsHook(MapSageHook):
    """Hook that makes a resume exact where gradients are being accumulated.

    With ``optim_wrapper.accumulative_counts`` of 2 or more, a checkpoint may be saved between two
    optimizer steps. It then holds the gradients so far, and a resumed run goes on with them;
    MMEngine loses them.

    Each virtual rank has gradients of its own until the step. Before they are saved every one gets
    their mean, from which the run itself goes on too: the mean over the virtual ranks at the step
    is the same, the checkpoint holds one set, and it can be resumed on any number of processes.
    They are added along the same tree as at the step.

    ``MapSageRunner`` registers it.
    """

    def __init__(self) -> None:
        self._gradients: Dict[str, torch.Tensor] = {}
        self._warned = False

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        """Forget what was gathered in the iteration before."""
        self._gradients = {}

    def gather_state(self, runner: Any) -> None:
        """Average the gradients over the ranks, if a cycle is unfinished. Collective then."""
        self._gradients = {}
        if not inside_cycle(runner.optim_wrapper):
            return
        if hasattr(runner.model, 'replicas'):
            if not self._warned:
                runner.logger.warning(
                    f'iteration {runner.iter + 1} is inside an accumulation cycle, and the '
                    f'gradients of a head that is split over ranks are not saved: a run that is '
                    f'resumed there loses them. Set the interval of CheckpointHook to a multiple '
                    f'of accumulative_counts.')
            self._warned = True
            return
        gradients = dict(_mean_gradients(runner))
        current_accelerator().flush()  # else a lazy device compiles the next step anew
        self._gradients = gradients if is_main_process() else {}

    def check_own_state(self, runner: Any) -> None:
        """Say what is missing from a checkpoint that one rank saves inside a cycle."""
        self._gradients = {}
        if inside_cycle(runner.optim_wrapper):
            runner.logger.warning(
                f'iteration {runner.iter + 1} is inside an accumulation cycle, and the checkpoint '
                f'is saved by one rank: the gradients so far are missing from it. To save them, '
                f'enter runner.saving_together() on all ranks.')

    def before_save_checkpoint(self, runner: Any, checkpoint: Dict[str, Any]) -> None:
        """Put the gathered gradients into the checkpoint."""
        if self._gradients:
            checkpoint[_KEY] = dict(self._gradients)
            checkpoint[_COUNTS] = _counts(runner.optim_wrapper)

    def after_load_checkpoint(self, runner: Any, checkpoint: Dict[str, Any]) -> None:
        """Give a resumed model the gradients of its checkpoint."""
        gradients = checkpoint.get(_KEY, {}) if runner._resume else {}
        counts = checkpoint.get(_COUNTS)
        if gradients and counts != _counts(runner.optim_wrapper):
            runner.logger.warning(
                f'the checkpoint is inside an accumulation cycle of {counts} iterations, and '
                f'accumulative_counts is {_counts(runner.optim_wrapper)} now: its gradients are '
                f'left out, as under MMEngine.')
            return
        for name, parameter in _trained(runner).items():
            if name in gradients:
                parameter.grad = gradients[name].to(parameter.device, parameter.dtype, copy=True)
        if isinstance(runner.model, VirtualDataParallel):
            runner.model.share_gradients()


def inside_cycle(optim_wrapper: Any) -> bool:
    """Return whether the iteration that has ended did not update all weights."""
    return any(not each.should_update() for each in _built(optim_wrapper))


def _counts(optim_wrapper: Any) -> List[int]:
    return [each._accumulative_counts for each in _built(optim_wrapper)]


def _built(optim_wrapper: Any) -> List[OptimWrapper]:
    wrappers = optim_wrapper.values() if isinstance(optim_wrapper, OptimWrapperDict) \
        else [optim_wrapper]
    # A checkpoint may be saved before a training, when the wrapper is still a config.
    return [each for each in wrappers if isinstance(each, OptimWrapper)]


def _trained(runner: Any) -> Dict[str, torch.nn.Parameter]:
    model = runner.model.module if is_model_wrapper(runner.model) else runner.model
    return {name: each for name, each in model.named_parameters() if each.requires_grad}


def _mean_gradients(runner: Any) -> Iterator[Tuple[str, torch.Tensor]]:
    """Yield the gradients in host memory; give each virtual rank their mean. Collective."""
    trained = _trained(runner)
    ranks, rank = VirtualRanks(get_world_size(), get_world_size()), get_rank()
    sets = [[each.grad for each in trained.values()]]
    wrapper = runner.model if isinstance(runner.model, VirtualDataParallel) else None
    if wrapper is not None:
        ranks, sets = wrapper.virtual_ranks, wrapper.gradients_of_ranks()
    # A virtual rank may have none where another has one. All processes enter the same collectives.
    present = torch.tensor([any(each is not None for each in column) for column in zip(*sets)],
                           dtype=torch.int64)
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
            for own in sets:
                fold.add([_on_host(own[index], parameter)])
            mean = ordered.sum([each for each, in fold.partials()]).div_(ranks.count)
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            # In place: a lazy device knows this tensor already.
            parameter.grad.copy_(mean.view(parameter.shape))
            # Not read back: a lazy device would compile a graph for each shape.
            yield name, mean.view(parameter.shape)
    if wrapper is not None:
        wrapper.share_gradients()


def _on_host(gradient: Optional[torch.Tensor], parameter: torch.Tensor) -> torch.Tensor:
    """Return a flat copy of a gradient in host memory, zeros where there is none."""
    if gradient is None:
        return torch.zeros(parameter.numel(), dtype=parameter.dtype)
    return gradient.detach().to('cpu', copy=True).reshape(-1)
