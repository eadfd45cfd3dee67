"""The numbers of a step that must be finite, by the names that an error shows.

These are the losses of the virtual ranks of this process, the tensors that a checkpoint would hold,
and the gradients of an open accumulation cycle. Nothing here enters a collective.
"""

from __future__ import annotations

import os
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple

import torch
from mmengine.dist import get_rank, is_main_process
from mmengine.hooks import SyncBuffersHook

from mapsage.distributed.device_checks import is_statistic
from mapsage.distributed.wrappers import VirtualDataParallel
from mapsage.distributed.wrappers.rank_batches import Batch, unpack_rank_batches
from mapsage.host.runner import HostRunner, hooks_of_type, plain_model

# Number of images of a batch that an error names.
_MAX_PATHS = 16


class RankLosses(NamedTuple):
    """Losses of a virtual rank in one iteration.

    Attributes:
        rank_name: Name of the virtual rank, for messages.
        losses: Loss terms by name, the total as ``'loss'``.
        batch: Batch of the virtual rank.
    """

    rank_name: str
    losses: Dict[str, float]
    batch: Any


def checkpoint_tensors(runner: HostRunner) -> List[Tuple[str, torch.Tensor]]:
    """Return what training changes and a checkpoint would hold, by name.

    These are the parameters on every rank. Running statistics of BatchNorm differ between ranks,
    and only the main process writes its own, unless a SyncBuffersHook averages them.
    """
    named: List[Tuple[str, torch.Tensor]] = []
    writes_statistics = is_main_process() or bool(hooks_of_type(runner, SyncBuffersHook))
    # EMAHook's average, or the average of a user's hook that has the same attribute.
    averages = [
        hook.ema_model
        for hook in runner.hooks
        if isinstance(getattr(hook, 'ema_model', None), torch.nn.Module)
    ]
    for prefix, model in [('', plain_model(runner)), *(('ema.', model) for model in averages)]:
        tensors: Dict[str, torch.Tensor] = dict(model.named_parameters())
        if writes_statistics:
            tensors.update(
                (name, value) for name, value in model.state_dict().items() if is_statistic(name)
            )
        named.extend((prefix + name, tensor) for name, tensor in tensors.items())
    return named


def accumulated_gradients(runner: HostRunner) -> List[Tuple[str, torch.Tensor]]:
    """Return the gradients of an accumulation cycle, which a checkpoint inside it holds."""
    return [
        (f'the gradient of {name}', parameter.grad)
        for name, parameter in plain_model(runner).named_parameters()
        if parameter.grad is not None and parameter.grad.layout == torch.strided
    ]


def _losses(runner: HostRunner, outputs: Optional[Dict[str, Any]]) -> Dict[str, float]:
    """Return this iteration's loss terms by name, the total as 'loss'."""
    scalars = runner.message_hub.log_scalars
    # The hub also holds terms of earlier iterations; the outputs name the terms of this one.
    names: Iterable[str] = outputs if isinstance(outputs, dict) else ()
    return {
        name: float(scalars[f'train/{name}'].current())
        for name in names
        if 'loss' in name and f'train/{name}' in scalars
    }


def losses_of_ranks(
    runner: HostRunner, outputs: Optional[Dict[str, Any]], data_batch: Optional[Batch]
) -> List[RankLosses]:
    """Return the losses of each virtual rank of this process.

    Args:
        runner: Runner of the training.
        outputs: What the model logged for the first virtual rank.
        data_batch: What the loader handed out.
    """
    model = runner.model
    first = _losses(runner, outputs)
    if not isinstance(model, VirtualDataParallel) or 'loss' not in first:
        return [RankLosses(rank_name(runner), first, data_batch)]
    later = [
        {name: float(value.detach()) for name, value in logged.items() if 'loss' in name}
        for logged in model.block_outputs[1:]
    ]
    return [
        RankLosses(rank_name(runner, virtual_rank), losses, batch)
        for virtual_rank, losses, batch in zip(
            model.block, [first, *later], unpack_rank_batches(data_batch, model.block)
        )
    ]


def rank_name(runner: HostRunner, virtual_rank: Optional[int] = None) -> str:
    """Return the name of this process, or of a virtual rank of it, for messages."""
    name = f'rank {get_rank()}'
    if (
        virtual_rank is None
        or not isinstance(runner.model, VirtualDataParallel)
        or runner.model.virtual_ranks.one_each
    ):
        return name
    return f'virtual rank {virtual_rank} ({name})'


def add_images(text: str, paths: Sequence[str]) -> str:
    """Return a text for an error with the paths of a batch's images below it."""
    return '\n'.join(
        [
            text,
            '  images of the batch:',
            *(
                f'    {path}'
                for path in paths
                or ['unknown: the batch carries no img_path (meta_keys of PackSegInputs)']
            ),
        ]
    )


def image_paths(data_batch: Optional[Batch]) -> List[str]:
    """Return the paths of a batch's images; empty if its samples do not carry them."""
    samples = data_batch.get('data_samples') if isinstance(data_batch, dict) else None
    if not isinstance(samples, (list, tuple)):
        return []
    paths = [
        str(path)
        for path in (getattr(sample, 'img_path', None) for sample in samples)
        if isinstance(path, (str, os.PathLike))
    ]
    if len(paths) > _MAX_PATHS:
        return paths[:_MAX_PATHS] + [f'... and {len(paths) - _MAX_PATHS} more']
    return paths
