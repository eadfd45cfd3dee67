"""One training loader for all virtual ranks of a process.

A process that carries out virtual ranks 4 to 7 builds four samplers, each as if the process were
that rank (:func:`as_rank`). One loader then reads a batch of every sampler in round robin and packs
the four batches into one, so the training loop sees an ordinary loader. The model wrapper unpacks
them: `mapsage/distributed/wrappers/rank_batches.py`.
"""

from __future__ import annotations

import copy
import functools
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, List, Sequence

import mmengine.dist.dist
import mmengine.dist.utils
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from mapsage.base.stand_ins import Delegate, replaced
from mapsage.distributed import all_ranks_or_none, open_channel
from mapsage.distributed.virtual_ranks import VirtualRanks, VirtualRanksError
from mapsage.distributed.wrappers.rank_batches import pack_rank_batches

from .data_order import ResumableSampler
from .keyed_loader import KeyedLoader

_MISSING = object()
_COLLECTIVES = (
    'all_gather',
    'all_gather_object',
    'all_reduce',
    'all_to_all',
    'all_to_all_single',
    'barrier',
    'broadcast',
    'broadcast_object_list',
    'gather',
    'gather_object',
    'new_group',
    'reduce',
    'reduce_scatter',
    'scatter',
    'scatter_object_list',
)


class BlockLoader(KeyedLoader):
    """The training loader of a process that carries out several virtual ranks.

    It looks like the loader of its first virtual rank: ``batch_size``, ``sampler`` and length are
    that loader's. So is each batch, which also carries the batches of the other virtual ranks, see
    :func:`~mapsage.distributed.wrappers.rank_batches.unpack_rank_batches`. The same workers read all of them.

    Args:
        loaders: One :class:`KeyedLoader` per virtual rank, all of the same dataset.
    """

    def __init__(self, loaders: Sequence[DataLoader]) -> None:
        # The settings and the samples of the first loader.
        vars(self).update(vars(loaders[0]))
        self._loaders: List[DataLoader] = [self, *loaders[1:]]
        samplers = [_find_sampler(loader) for loader in loaders]
        samplers[0].lead(samplers[1:])

    def _get_iterator(self) -> Any:
        # torch's iterators take the sampler from the loader, so they are built from a changed copy.
        loader = copy.copy(self)
        if self.batch_sampler is None:
            vars(loader)['sampler'] = _RoundRobin([other.sampler for other in self._loaders])
        else:
            vars(loader)['batch_sampler'] = _RoundRobin(
                [other.batch_sampler for other in self._loaders]
            )
        if self.num_workers:
            # As many batches as the loaders of separate processes would read ahead.
            vars(loader)['prefetch_factor'] = (self.prefetch_factor or 2) * len(self._loaders)
        return _BlockIterator(super(BlockLoader, loader)._get_iterator(), len(self._loaders))


class _RoundRobin:
    """A sampler that takes one item from each of several samplers in round robin."""

    def __init__(self, samplers: Sequence[Any]) -> None:
        self._samplers = list(samplers)

    def __len__(self) -> int:
        return sum(len(sampler) for sampler in self._samplers)

    def __iter__(self) -> Iterator[object]:
        streams = [iter(sampler) for sampler in self._samplers]
        while True:
            items = [next(stream, _MISSING) for stream in streams]
            ended = [item is _MISSING for item in items]
            if all(ended):
                return
            if any(ended):
                raise VirtualRanksError(
                    f'the sampler of {sum(ended)} of the {len(ended)} virtual ranks of this '
                    f'process ended before the others: expected as many batches of each.'
                )
            yield from items


class _BlockIterator(Delegate):
    """A loader's iterator that packs several batches into one."""

    def __init__(self, batches: Any, size: int) -> None:
        super().__init__(batches)
        self._size = size

    def __iter__(self) -> _BlockIterator:
        return self

    def __len__(self) -> int:
        return len(self.original) // self._size

    def __next__(self) -> Any:
        return pack_rank_batches([next(self.original) for _ in range(self._size)])

    # MMEngine's loop calls it to skip batches.
    def _next_index(self) -> List[object]:
        return [self.original._next_index() for _ in range(self._size)]


def build_block_loader(
    config: Dict[str, Any],
    build: Callable[[Dict[str, Any]], DataLoader],
    dataset: Dataset,
    ranks: VirtualRanks,
    rank: int,
) -> DataLoader:
    """Return the training loader of a process, with one sampler per virtual rank.

    Collective: an epoch must have as many batches on each virtual rank of all processes.

    Args:
        config: Config of the loader.
        build: Function that builds one loader from a config.
        dataset: Dataset that ``config`` describes; all virtual ranks read this object.
        ranks: Virtual ranks of the run.
        rank: Rank of this process.

    Raises:
        VirtualRanksError: If the loader cannot be divided among virtual ranks.
        RankError: If it cannot be divided on another process.
    """

    def existing_dataset() -> Dataset:
        return dataset

    loaders = []
    with all_ranks_or_none('dividing the training loader among virtual ranks'):
        for virtual_rank in ranks.block(rank):
            with as_rank(virtual_rank, ranks.count):
                loader = build(dict(config, dataset=dict(type=existing_dataset)))
            if not isinstance(loader, KeyedLoader):
                raise VirtualRanksError(
                    f'the training dataset {type(loader.dataset).__name__} is an IterableDataset, '
                    f'which divides itself among processes: expected a dataset with an index, or '
                    f'as many processes as there are virtual ranks ({ranks.count}).'
                )
            _check_rank(_find_sampler(loader), virtual_rank, ranks.count)
            loaders.append(loader)
    _check_lengths([len(loader) for loader in loaders])
    return BlockLoader(loaders)


def _check_lengths(lengths: Sequence[int]) -> None:
    """Check that an epoch has as many batches on each virtual rank of all processes. Collective.

    Args:
        lengths: Batches per epoch of this process's virtual ranks.
    """
    extremes = torch.tensor([max(lengths), -min(lengths)])
    open_channel().max(extremes)
    longest, shortest = int(extremes[0]), -int(extremes[1])
    if longest != shortest:
        raise VirtualRanksError(
            f'an epoch has {shortest} batches on one virtual rank and {longest} on another: '
            f'expected the same number on each, as under DistributedDataParallel. Let the sampler '
            f'round up (round_up=True), or set drop_last=True.'
        )


@contextmanager
def as_rank(rank: int, world_size: int) -> Iterator[None]:
    """Make MMEngine and torch say that this process is rank ``rank`` of ``world_size``.

    MMEngine's samplers, and users' that follow them, ask both when they are built and have no
    arguments for the two numbers. They have imported MMEngine's functions by name, so torch's, which
    these call, are replaced. A collective in the block is refused, because processes carry out
    different numbers of virtual ranks; torch has no one place where all collectives pass.

    Raises:
        VirtualRanksError: From a collective of torch.distributed.
    """
    refusals = {name: functools.partial(_refuse, name, rank, world_size) for name in _COLLECTIVES}
    with replaced(
        dist,
        get_rank=lambda group=None: rank,
        get_world_size=lambda group=None: world_size,
        is_initialized=lambda: True,
        get_backend=lambda group=None: 'gloo',
        **refusals,
    ), replaced(mmengine.dist.utils, get_default_group=lambda: None), replaced(
        mmengine.dist.dist, get_default_group=lambda: None
    ):
        yield


def _refuse(name: str, rank: int, world_size: int, *args: object, **kwargs: object) -> None:
    raise VirtualRanksError(
        f'torch.distributed.{name} is called while the sampler of virtual rank {rank} of '
        f'{world_size} is built, and processes build different numbers of samplers: expected a '
        f'sampler that uses the seed that it is given (seed=...), which all virtual ranks share, '
        f'and communicates with no other rank.'
    )


def _find_sampler(loader: DataLoader) -> ResumableSampler:
    for sampler in (loader.sampler, getattr(loader.batch_sampler, 'sampler', None)):
        # isinstance would be wrong: it sees the class of the wrapped sampler.
        if type(sampler) is ResumableSampler:
            return sampler
    raise VirtualRanksError(
        f'the training loader draws its samples with {type(loader.sampler).__name__} and '
        f'{type(loader.batch_sampler).__name__}, of which none was built from '
        f'train_dataloader.sampler: expected a sampler that is a dict in the config, and a batch '
        f'sampler that keeps it as its attribute sampler.'
    )


def _check_rank(sampler: ResumableSampler, rank: int, world_size: int) -> None:
    """Check that a sampler has the numbers of its virtual rank, if it stores them."""
    for names, expected in ((('rank',), rank), (('world_size', 'num_replicas'), world_size)):
        for name in names:
            value = getattr(sampler, name, expected)
            if isinstance(value, int) and value != expected:
                raise VirtualRanksError(
                    f'the sampler of virtual rank {rank} of {world_size} has {name}={value}: '
                    f'expected {expected}. A sampler must ask mmengine.dist.get_dist_info() or '
                    f'torch.distributed when it is built, or leave {name} out of the config.'
                )
