"""Computes a frozen encoder's features of all training samples once.

The unit of work is an *item*: one view of one sample, number ``slot * views + view``, where a slot
is the sample's position in the cache's index. Rank 0 finds out which items are missing; every rank
computes an equal share of them, and rank 0 completes the index. Loader, precision and weights are
built exactly as a training builds them, because a training must get the same bits from the cache as
from its own encoder. The format of the cache is in `mapsage/extras/streaming/cache/`.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple, TypedDict, cast

import torch
from mmengine.config import Config
from torch.utils.data import DataLoader

from mapsage.base.folder_claims import claimed
from mapsage.commands import cli
from mapsage.commands.cli import read_config
from mapsage.distributed import all_ranks_or_none, open_channel
from mapsage.engine.env_cfg import ConfigError
from mapsage.engine.loading.data_order import SampleKey
from mapsage.engine.loading.keyed_loader import KeyedLoader
from mapsage.extras.streaming.cache.index import CacheIndex, find_shards, read_index, write_index
from mapsage.extras.streaming.cache.keys import ViewSeeds, keys_of_run, sample_hashes
from mapsage.extras.streaming.cache.shards import (
    PATTERN,
    SHARD_BYTES,
    CacheError,
    Levels,
    free_bytes,
    ranges_of,
    write_shard,
)
from mapsage.extras.streaming.source import check_finite
from mapsage.host.runner import cast_dtype, plain_model
from mapsage.version import __version__

from .cache_checks import check_features, check_model, check_repeatable

# Ranks wait for each other after their items are computed, which may take unequally long.
_TIMEOUT_SECONDS = 7 * 24 * 3600
# Least time between two lines of progress.
_PROGRESS_SECONDS = 5.0


class _CachePlan(TypedDict):
    """Work that rank 0 found, in types of JSON.

    Attributes:
        cache: Name of the cache, which its shards carry.
        seed: Seed of the views.
        todo: Missing items as ranges [start, stop).
        slots: Position in the index of each sample of the dataset.
        samples: Hash of the sample at each slot.
    """

    cache: str
    seed: int
    todo: List[List[int]]
    slots: List[int]
    samples: Sequence[str]


class FeatureCaching:
    """This rank's share of the work on a feature cache.

    Args:
        args: Options of tools/cache_features.py.
        say: Function that prints a line; called on rank 0 only.
        shard_bytes: Bytes of features after which a shard is written.
    """

    def __init__(
        self, args: argparse.Namespace, say: Callable[[str], None], shard_bytes: int = SHARD_BYTES
    ) -> None:
        cfg = read_config(args)
        self._folder, self._chosen_views = choose_cache(cfg, args)
        self._views = self._chosen_views or 1
        self._batch_size, self._shard_bytes = args.batch_size, shard_bytes
        self._workers = _build_without_workers(cfg)
        self._runner = cli.build_runner(cfg)
        self._channel = open_channel(timeout=_TIMEOUT_SECONDS)
        self._rank = self._channel.rank
        self._world_size = len(self._channel.ranks)
        self._say = say if self._rank == 0 else lambda line: None
        self._prepare()
        with self._fail_together('preparing the cache'), contextlib.ExitStack() as stack:
            plan = self._plan(stack) if self._rank == 0 else None
            self._lock = stack.pop_all()
        self._broadcast(plan)

    def run(self) -> int:
        """Compute the missing items, complete the index, and return the exit status."""
        with self._lock:
            items = [item for start, stop in self._todo for item in range(start, stop)]
            begin, end = (
                len(items) * rank // self._world_size for rank in (self._rank, self._rank + 1)
            )
            start_time = time.monotonic()
            with self._fail_together('computing features'):
                self._compute(items[begin:end])
            with self._fail_together('completing the index'):
                if self._rank == 0:
                    self._complete(len(items), time.monotonic() - start_time)
        return 0

    def _fail_together(self, task: str) -> contextlib.AbstractContextManager:
        """Return a context that raises an error of one rank on all ranks."""
        return all_ranks_or_none(task, timeout=_TIMEOUT_SECONDS)

    def _prepare(self) -> None:
        """Build precision, weights and loader in the order in which a training builds them."""
        runner = self._runner
        if runner.train_loop is None:
            raise ConfigError(
                'the config has no train_dataloader, train_cfg and optim_wrapper: '
                'the features of the training samples are cached.'
            )
        runner.optim_wrapper = runner.build_optim_wrapper(runner.optim_wrapper)
        runner._init_model_weights()
        runner.load_or_resume()
        self._loader = runner.train_loop.dataloader
        if not isinstance(self._loader, KeyedLoader):
            raise ConfigError(
                f'the samples of the training dataset ({type(self._loader.dataset).__name__}) '
                f"cannot be asked for by number. Use runner_type='MapSageRunner' and a map-style "
                f'dataset.'
            )
        self._samples = self._loader.samples
        # A segmentor of MMSegmentation, whose classes carry no types.
        self._model: Any = plain_model(runner)
        self._dtype: Optional[torch.dtype] = cast_dtype(runner.optim_wrapper)
        check_model(self._model)

    def _plan(self, stack: contextlib.ExitStack) -> _CachePlan:
        """Claim the folder, find the missing items and write a first index; on rank 0 only."""
        try:
            hashes = sample_hashes(self._loader.dataset)
            keys = keys_of_run(self._runner.cfg, (), self._model.backbone, self._dtype)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        index = CacheIndex(
            keys,
            self._views,
            (self._runner.cfg.get('randomness') or {}).get('seed') or 0,
            dict(
                mapsage=__version__,
                torch=torch.__version__,
                batch_size=self._batch_size,
                device=self._runner.accelerator.describe(),
            ),
        )
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            warning = stack.enter_context(
                claimed(
                    self._folder, ['the feature cache'], 'Wait for it, or choose another --folder.'
                )
            )
            if warning:
                self._say(f'note: {warning}')
        except OSError as error:
            raise CacheError(f'--folder {self._folder} cannot be written: {error}.') from error
        existing = read_index(self._folder)
        if existing is not None:
            existing.check(self._folder, keys, self._views)
            # Its seed draws the remaining views like the existing ones.
            index = existing
        index, damaged = find_shards(self._folder, index)
        index = index.extended(hashes)
        slots = index.slots(hashes)
        finished = set(index.finished())
        needed = {slot * index.views + view for slot in slots for view in range(index.views)}
        todo = sorted(needed - finished)
        self._seeds = ViewSeeds(index.seed, index.views, tuple(slots))
        self._hashes: Sequence[str] = index.keys.samples
        if todo:
            check_repeatable(self._samples, self._seeds, self._chosen_views)
            self._check_free_space(todo)
        for path in [
            *damaged,
            *self._folder.glob('.partial-*'),
            *self._folder.glob(f'{PATTERN}.partial-*'),
        ]:
            if path in damaged:
                self._say(f'{path} is damaged: its items are computed again')
            path.unlink()
        if existing is None or existing.keys.samples != index.keys.samples:
            write_index(self._folder, index)
        self._say(
            f'{len(hashes)} samples x {index.views} view(s) into {self._folder}: '
            f'{len(needed & finished)} of {len(needed)} items are there'
        )
        if finished - needed:
            self._say(
                f'{len(finished - needed)} more items are of samples that the dataset does '
                f'not list any more, or that were changed: they are kept, and not used'
            )
        self._index, self._needed = index, needed
        return _CachePlan(
            cache=index.cache,
            seed=index.seed,
            todo=ranges_of(todo),
            slots=slots,
            samples=index.keys.samples,
        )

    def _broadcast(self, plan: Optional[_CachePlan]) -> None:
        """Take rank 0's plan on all ranks."""
        plan = cast(_CachePlan, json.loads(self._channel.gather_texts(json.dumps(plan))[0]))
        self._cache, self._todo = plan['cache'], plan['todo']
        self._seeds = ViewSeeds(plan['seed'], self._views, tuple(plan['slots']))
        self._hashes = plan['samples']

    def _check_free_space(self, todo: List[int]) -> None:
        """Compute one item, and raise an error if all items do not fit the disk."""
        levels = next(self._encoded(todo[:1], workers=0))[1]
        needed, free = _bytes(levels) * len(todo), free_bytes(self._folder)
        shapes = ', '.join('x'.join(map(str, level.shape)) for level in levels)
        self._say(
            f'a sample has {_bytes(levels):,} bytes of features ({shapes}, '
            f'{levels[0].dtype}); {needed:,} are to be written, {free:,} are free'
        )
        if needed > free:
            raise CacheError(
                f'{self._folder} has {free:,} bytes free, and the features need about '
                f'{needed:,}. Free space, or choose another --folder.'
            )

    def _compute(self, items: List[int]) -> None:
        """Compute items and write them in shards."""
        waiting: Dict[int, Levels] = {}
        size = 0
        start_time = last = time.monotonic()
        for done, (item, levels) in enumerate(self._encoded(items, self._workers), start=1):
            waiting[item] = levels
            size += _bytes(levels)
            if size >= self._shard_bytes or done == len(items):
                write_shard(
                    self._folder,
                    self._cache,
                    waiting,
                    {number: self._hashes[number // self._views] for number in waiting},
                )
                waiting, size = {}, 0
            now = time.monotonic()
            if now - last >= _PROGRESS_SECONDS:
                last, rate = now, done / (now - start_time)
                self._say(
                    f'rank {self._rank} of {self._world_size}: {done}/{len(items)} items, '
                    f'{rate:.1f} items/s, {(len(items) - done) / rate:.0f} s to go'
                )

    def _encoded(self, items: List[int], workers: int) -> Iterator[Tuple[int, Levels]]:
        """Yield items with their features in host memory.

        Images of equal shape are encoded in batches.
        """
        index_of = {slot: index for index, slot in enumerate(self._seeds.slots or ())}
        keys = [
            SampleKey(
                index_of[item // self._views],
                self._seeds.of(index_of[item // self._views], item % self._views),
            )
            for item in items
        ]
        loader: DataLoader = DataLoader(
            self._samples,
            batch_size=self._batch_size,
            sampler=keys,  # type: ignore[arg-type]
            num_workers=workers,
            collate_fn=_as_list,
        )
        numbers = iter(items)
        for samples in loader:
            for _, group in itertools.groupby(samples, lambda sample: sample['inputs'].shape):
                for levels in self._encode(self._loader.collate_fn(list(group))):
                    yield next(numbers), levels

    def _encode(self, batch: Any) -> List[Levels]:
        """Return the features of each image of a batch, in host memory."""
        accelerator = self._runner.accelerator
        precision = (
            contextlib.nullcontext() if self._dtype is None else accelerator.autocast(self._dtype)
        )
        with torch.no_grad():
            images = self._model.data_preprocessor(batch, True)['inputs']
            with precision:
                features = self._model.backbone(images)
        check_features(features, len(images))
        check_finite(features, images)
        host_levels = [level.cpu() for level in features]
        return [[level[number].clone() for level in host_levels] for number in range(len(images))]

    def _complete(self, computed: int, seconds: float) -> None:
        """Write the complete index, and tell the user how to use the cache."""
        index, damaged = find_shards(self._folder, self._index)
        missing = len(self._needed - set(index.finished()))
        if missing or damaged:
            raise CacheError(
                f'{missing} of {len(self._needed)} items are not in {self._folder} at the end. '
                f'With several machines, --folder must be on a storage that they share; else '
                f'something removed or damaged shards, and the same command computes them again.'
            )
        write_index(self._folder, index)
        size = sum(entry.bytes for entry in index.shards)
        if computed:
            self._say(
                f'{computed} items in {seconds:.1f} s on {self._world_size} rank(s): '
                f'{computed / seconds:.1f} items/s'
            )
        self._say(
            f'complete: {len(self._needed)} items, {size:,} bytes in {len(index.shards)} '
            f"shard(s). In the config:\nfeature_source = dict(type='Cached', "
            f'folder={str(self._folder)!r}, views={self._views})'
        )


def choose_cache(cfg: Config, args: argparse.Namespace) -> Tuple[Path, Optional[int]]:
    """Return the folder and the number of views, and change ``cfg`` so that it encodes locally.

    The command line takes precedence over a ``feature_source`` of type ``'Cached'``. The number is
    None if neither sets one.
    """
    source = cfg.pop('feature_source', None) or {}
    cached = source if source.get('type') == 'Cached' else {}
    folder = args.folder or cached.get('folder') or os.path.join(cfg.work_dir, 'features')
    views = args.views or cached.get('views')
    cfg.resume = False
    # Nothing is trained, so schedulers are not needed.
    cfg.param_scheduler = None
    return Path(folder), views


def _build_without_workers(cfg: Config) -> int:
    """Keep the training loader from starting workers; return its configured number of workers."""
    loader = cfg.get('train_dataloader') or {}
    workers = int(loader.get('num_workers', 0))
    if loader:
        loader.update(num_workers=0, persistent_workers=False)
        loader.pop('prefetch_factor', None)
    return workers


def _as_list(samples: List[Any]) -> List[Any]:
    return samples


def _bytes(levels: Levels) -> int:
    return sum(level.numel() * level.element_size() for level in levels)
