"""Compute the features of a frozen encoder for every training sample, once, with several ranks."""
from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import os
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import torch
from mmengine.config import Config
from mmengine.model import is_model_wrapper
from torch.utils.data import DataLoader

from mapsage.distributed import all_ranks_or_none, open_channel
from mapsage.engine.env_cfg import ConfigError
from mapsage.engine.loading.data_order import SampleKey
from mapsage.engine.loading.keyed_loader import KeyedLoader
from mapsage.features.cache.index import CacheIndex, find_shards, read_index, write_index
from mapsage.features.cache.keys import ViewSeeds, keys_of_run, sample_hashes
from mapsage.features.cache.shards import (
    SHARD_BYTES,
    CacheError,
    Levels,
    free_bytes,
    ranges_of,
    write_shard,
)
from mapsage.features.source import check_finite
from mapsage.folder_claims import claimed
from mapsage.version import __version__

from . import cli
from .cache_checks import check_features, check_model, check_repeatable
from .configs import read_config

# Ranks wait for each other after they have computed their parts, which may take unequally long.
_TIMEOUT_SECONDS = 7 * 24 * 3600
_PROGRESS_SECONDS = 5.0  # between two lines of progress


class FeatureCaching:
    """This rank's part in making the cache that the command line asks for.

    Args:
        args: Options of tools/cache_features.py.
        say: Function that prints a line; called on rank 0 only.
        shard_bytes: Bytes of features after which a shard is written.
    """

    def __init__(self, args: argparse.Namespace, say: Callable[[str], None],
                 shard_bytes: int = SHARD_BYTES) -> None:
        cfg = read_config(args)
        self._folder, self._asked = choose_place(cfg, args)
        self._views = self._asked or 1
        self._batch_size, self._shard_bytes = args.batch_size, shard_bytes
        self._workers = _build_without_workers(cfg)
        self._runner = cli.build_runner(cfg)
        self._channel = open_channel(timeout=_TIMEOUT_SECONDS)
        self._rank = self._channel.rank
        self._world_size = len(self._channel.ranks)
        self._say = say if self._rank == 0 else lambda line: None
        self._prepare()
        with self._together('preparing the cache'), contextlib.ExitStack() as stack:
            plan = self._plan(stack) if self._rank == 0 else {}
            self._lock = stack.pop_all()
        self._share(plan)

    def run(self) -> int:
        """Compute what is missing, complete the index, and return the exit status."""
        with self._lock:
            items = [item for start, stop in self._todo for item in range(start, stop)]
            begin, end = (len(items) * rank // self._world_size
                          for rank in (self._rank, self._rank + 1))
            start_time = time.monotonic()
            with self._together('computing features'):
                self._compute(items[begin:end])
            with self._together('completing the index'):
                if self._rank == 0:
                    self._complete(len(items), time.monotonic() - start_time)
        return 0

    def _together(self, what: str) -> Any:
        return all_ranks_or_none(what, timeout=_TIMEOUT_SECONDS)

    def _prepare(self) -> None:
        """Build loader, precision and weights as a training does, and in the same order."""
        runner = self._runner
        if runner.train_loop is None:
            raise ConfigError('the config has no train_dataloader, train_cfg and optim_wrapper: '
                              'the features of the training samples are cached.')
        runner.optim_wrapper = runner.build_optim_wrapper(runner.optim_wrapper)
        runner._init_model_weights()
        runner.load_or_resume()
        self._loader = runner.train_loop.dataloader
        if not isinstance(self._loader, KeyedLoader):
            raise ConfigError(
                f'the samples of the training dataset ({type(self._loader.dataset).__name__}) '
                f"cannot be asked for by number. Use runner_type='MapSageRunner' and a map-style "
                f'dataset.')
        self._samples = self._loader.samples
        self._model = runner.model.module if is_model_wrapper(runner.model) else runner.model
        self._dtype: Optional[torch.dtype] = getattr(runner.optim_wrapper, 'cast_dtype', None)
        check_model(self._model)

    def _plan(self, stack: contextlib.ExitStack) -> Dict[str, Any]:
        """Find out which items are missing, and begin the cache; on rank 0 only."""
        try:
            hashes = sample_hashes(self._loader.dataset)
            keys = keys_of_run(self._runner.cfg, (), self._model.backbone, self._dtype)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        index = CacheIndex(
            keys, self._views, (self._runner.cfg.get('randomness') or {}).get('seed') or 0,
            dict(mapsage=__version__, torch=torch.__version__, batch_size=self._batch_size,
                 device=self._runner.accelerator.describe()))
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            warning = stack.enter_context(claimed(
                self._folder, ['the feature cache'], 'Wait for it, or choose another --folder.'))
            if warning:
                self._say(f'note: {warning}')
        except OSError as error:
            raise CacheError(f'--folder {self._folder} cannot be written: {error}.') from error
        before = read_index(self._folder)
        if before is not None:
            before.check(self._folder, keys, self._views)
            index = before  # with its seed: the remaining views are drawn as the first were
        index, damaged = find_shards(self._folder, index)
        index = index.extended(hashes)
        slots = index.slots(hashes)
        finished = set(index.finished())
        wanted = {slot * index.views + view for slot in slots for view in range(index.views)}
        todo = sorted(wanted - finished)
        self._seeds = ViewSeeds(index.seed, index.views, tuple(slots))
        self._hashes = index.keys.samples
        if todo:
            check_repeatable(self._samples, self._seeds, self._asked)
            self._check_room(todo)
        for path in [*damaged, *self._folder.glob('*.partial-*')]:
            if path in damaged:
                self._say(f'{path} is damaged: its items are computed again')
            path.unlink()
        if before is None or before.keys.samples != index.keys.samples:
            write_index(self._folder, index)
        self._say(f'{len(hashes)} samples x {index.views} view(s) into {self._folder}: '
                  f'{len(wanted & finished)} of {len(wanted)} items are there')
        if finished - wanted:
            self._say(f'{len(finished - wanted)} more items are of samples that the dataset does '
                      f'not list any more, or that were changed: they are kept, and not used')
        self._index, self._wanted = index, wanted
        return dict(cache=index.cache, seed=index.seed, todo=ranges_of(todo), slots=slots,
                    samples=index.keys.samples)

    def _share(self, plan: Dict[str, Any]) -> None:
        """Tell all ranks what rank 0 found."""
        plan = json.loads(self._channel.gather_texts(json.dumps(plan))[0])
        self._cache: str = plan['cache']
        self._todo: List[List[int]] = plan['todo']
        self._seeds = ViewSeeds(plan['seed'], self._views, tuple(plan['slots']))
        self._hashes = plan['samples']

    def _check_room(self, todo: List[int]) -> None:
        levels = next(self._encoded(todo[:1], workers=0))[1]
        needed, free = _bytes(levels) * len(todo), free_bytes(self._folder)
        shapes = ', '.join('x'.join(map(str, level.shape)) for level in levels)
        self._say(f'a sample has {_bytes(levels):,} bytes of features ({shapes}, '
                  f'{levels[0].dtype}); {needed:,} are to be written, {free:,} are free')
        if needed > free:
            raise CacheError(f'{self._folder} has {free:,} bytes free, and the features need about '
                             f'{needed:,}. Free space, or choose another --folder.')

    def _compute(self, items: List[int]) -> None:
        waiting: Dict[int, Levels] = {}
        size = 0
        start_time = last = time.monotonic()
        for done, (item, levels) in enumerate(self._encoded(items, self._workers), start=1):
            waiting[item] = levels
            size += _bytes(levels)
            if size >= self._shard_bytes or done == len(items):
                write_shard(self._folder, self._cache, waiting,
                            {each: self._hashes[each // self._views] for each in waiting})
                waiting, size = {}, 0
            now = time.monotonic()
            if now - last >= _PROGRESS_SECONDS:
                last, rate = now, done / (now - start_time)
                self._say(f'rank {self._rank} of {self._world_size}: {done}/{len(items)} items, '
                          f'{rate:.1f} items/s, {(len(items) - done) / rate:.0f} s to go')

    def _encoded(self, items: List[int], workers: int) -> Iterator[Tuple[int, Levels]]:
        """Yield items with their features on the host, encoded in batches of equal images."""
        index_of = {slot: index for index, slot in enumerate(self._seeds.slots or ())}
        keys = [SampleKey(index_of[item // self._views],
                          self._seeds.of(index_of[item // self._views], item % self._views))
                for item in items]
        loader: DataLoader = DataLoader(
            self._samples, batch_size=self._batch_size, sampler=keys,  # type: ignore[arg-type]
            num_workers=workers, collate_fn=_as_list)
        numbers = iter(items)
        for samples in loader:
            for _, group in itertools.groupby(samples, lambda each: each['inputs'].shape):
                for levels in self._encode(self._loader.collate_fn(list(group))):
                    yield next(numbers), levels

    def _encode(self, batch: Any) -> List[Levels]:
        accelerator = self._runner.accelerator
        precision = (contextlib.nullcontext() if self._dtype is None else
                     accelerator.autocast(self._dtype))
        with torch.no_grad():
            images = self._model.data_preprocessor(batch, True)['inputs']
            with precision:
                features = self._model.backbone(images)
        check_features(features, len(images))
        check_finite(features, images)
        host = [level.cpu() for level in features]
        return [[level[at].clone() for level in host] for at in range(len(images))]

    def _complete(self, computed: int, seconds: float) -> None:
        index, damaged = find_shards(self._folder, self._index)
        missing = len(self._wanted - set(index.finished()))
        if missing or damaged:
            raise CacheError(
                f'{missing} of {len(self._wanted)} items are not in {self._folder} at the end. '
                f'With several machines, --folder must be on a storage that they share; else '
                f'something removed or damaged shards, and the same command computes them again.')
        write_index(self._folder, index)
        size = sum(entry.bytes for entry in index.shards)
        if computed:
            self._say(f'{computed} items in {seconds:.1f} s on {self._world_size} rank(s): '
                      f'{computed / seconds:.1f} items/s')
        self._say(f'complete: {len(self._wanted)} items, {size:,} bytes in {len(index.shards)} '
                  f"shard(s). In the config:\nfeature_source = dict(type='Cached', "
                  f'folder={str(self._folder)!r}, views={self._views})')


def cache_features(args: argparse.Namespace,
                   say: Callable[[str], None] = functools.partial(print, flush=True)) -> int:
    """Make or continue the cache that the command line asks for, and return the exit status.

    Args:
        args: Options of tools/cache_features.py.
        say: Function that prints a line; called on rank 0 only.
    """
    return FeatureCaching(args, say).run()


def choose_place(cfg: Config, args: argparse.Namespace) -> Tuple[Path, Optional[int]]:
    """Return the cache's folder and the requested views, and make ``cfg`` encode locally.

    The command line takes precedence over ``feature_source`` of the config, if that is a cache.
    """
    source = cfg.pop('feature_source', None) or {}
    cached = source if source.get('type') == 'Cached' else {}
    folder = args.folder or cached.get('folder') or os.path.join(cfg.work_dir, 'features')
    views = args.views or cached.get('views')
    cfg.resume = False
    cfg.param_scheduler = None  # nothing is trained, so that schedulers are never built
    return Path(folder), views


def _build_without_workers(cfg: Config) -> int:
    """Keep the training loader from starting workers; return how many it wants."""
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
