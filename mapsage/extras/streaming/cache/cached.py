"""The feature source that reads a cache from disk.

A cache has one or more random views of every sample, and a run must load its samples as one of
these views. `keys.py` decides whether a cache fits a run, `index.py` lists its files, `shards.py`
reads them.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from pathlib import Path
from typing import ClassVar, Dict, Optional, Sequence, Tuple

import torch

from mapsage.base.process import BackgroundWorker
from mapsage.extras.streaming.source import Features, FeatureSource, Item

from .index import INDEX, CacheIndex, check_views, find_shards, read_index
from .keys import CacheKeys, ViewSeeds
from .shards import CacheError, DamagedShardError, Shard, ShardEntry, read_items


class Cached(FeatureSource):
    """Reads the features that ``tools/cache_features.py`` computed.

    If items are requested ahead, a thread reads them while the head trains.

    The loader must load every sample as one of the cache's views: set ``KeyedDataset.reseed`` to
    :attr:`seed_of`. The checksum of each item is verified when the item is first read.

    Args:
        folder: Folder of the cache.
        views: Number of views per sample, as given to the tool.
        device: Device on which the head wants the features.
        keys: Keys of everything on which this run's features depend.
        slots: Slot in the cache of each sample of the run; looked up by ``keys.samples`` when None.
        check_files: Whether to look at the size of each shard now; one rank of a run is enough.

    Attributes:
        seed_of: Function that takes the number of a sample and the seed that the run drew for it,
            and returns the seed of the view to load instead. The seed of a view is returned as is.

    Raises:
        ValueError: If ``views`` is less than 1.
        CacheError: If the cache is missing, incomplete, damaged or made with other settings.
    """

    needs_images: ClassVar[bool] = False
    may_wait: ClassVar[bool] = True
    ahead = 2

    def __init__(
        self,
        folder: str,
        views: int,
        device: torch.device,
        keys: CacheKeys,
        slots: Optional[Sequence[int]] = None,
        check_files: bool = True,
    ) -> None:
        check_views(views, 'feature_source.views')
        self._folder, self._device = Path(folder), device
        index = read_index(self._folder)
        if index is None:
            raise CacheError(
                f'{self._folder} holds no cache of features ({INDEX} is missing). Make it: python '
                f'tools/cache_features.py CONFIG --views {views} --folder {self._folder}'
            )
        index.check(self._folder, keys, views)
        self._entries = index.shards
        self._shard_of = {
            item: number for number, entry in enumerate(self._entries) for item in entry.items
        }
        self._views = views
        self.seed_of = ViewSeeds(
            index.seed, views, tuple(index.slots(keys.samples) if slots is None else slots)
        )
        self._check_complete(index, check_files)
        self._shards: Dict[int, Shard] = {}
        self._checked = bytearray(index.items)
        self._report = dict(waited=0.0, bytes=0.0)
        self._worker = BackgroundWorker('feature-cache')
        self._reading: Dict[int, Future] = {}

    def request(self, item: Item) -> None:
        """Begin to read an item in the thread."""
        self._reading[item.number] = self._worker.submit(self._read, item)

    def features(self, item: Item) -> Features:
        """Return the stored features of an item's samples, copied to the device.

        Raises:
            CacheError: If a shard is damaged or missing, or the features differ in shape.
            ValueError: If a sample was not loaded as a view of this cache.
        """
        begin = time.monotonic()
        if item.number not in self._reading:
            self.request(item)
        host = self._reading.pop(item.number).result()
        features = tuple(level.to(self._device) for level in host)
        self._report['waited'] += time.monotonic() - begin
        self._report['bytes'] += sum(level.numel() * level.element_size() for level in host)
        return features

    def _read(self, item: Item) -> Features:
        rows = [self._find(index, seed) for index, seed in item.keys]
        try:
            return read_items(rows)
        except ValueError as error:
            raise CacheError(
                f'the samples {[index for index, _ in item.keys]} of one batch have features of '
                f'different shapes: {error}. Set batch_size=1, or crop or resize in the pipeline '
                f'so that all images have one size, and make the cache again.'
            ) from error

    def report(self) -> Dict[str, float]:
        """Return ``waited`` (seconds for which the head stood still) and ``bytes`` that were read."""
        report, self._report = self._report, dict(waited=0.0, bytes=0.0)
        return report

    def close(self) -> None:
        """End the thread and unmap the shards."""
        self._worker.close()
        self._reading.clear()
        self._shards.clear()

    def _find(self, index: int, seed: Tuple[int, ...]) -> Tuple[Shard, int]:
        number = self.seed_of.item(index, seed)
        at = self._shard_of[number]
        if at not in self._shards:
            self._shards[at] = self._open(self._entries[at])
        shard = self._shards[at]
        if not self._checked[number]:
            shard.check(number)
            self._checked[number] = 1
        return shard, number

    def _open(self, entry: ShardEntry) -> Shard:
        shard = Shard(self._folder / entry.file)
        if shard.entry != entry:
            raise DamagedShardError(
                f'{self._folder / entry.file} is not the shard that {INDEX} lists. If no other '
                f'program writes there, delete it; tools/cache_features.py with the same arguments '
                f'as before computes what is missing.'
            )
        return shard

    def _check_complete(self, index: CacheIndex, check_files: bool) -> None:
        again = (
            'Run tools/cache_features.py with the same arguments as before: it continues '
            'where it stopped.'
        )
        for entry in self._entries if check_files else []:
            path = self._folder / entry.file
            size = path.stat().st_size if path.exists() else None
            if size is None:
                raise CacheError(f'{path}, which {INDEX} lists, is missing. {again}')
            if size != entry.bytes:
                raise DamagedShardError(
                    f'{path} has {size:,} bytes, {entry.bytes:,} were written. Delete it. {again}'
                )
        views = range(index.views)
        missing = [
            at
            for at, slot in enumerate(self.seed_of.slots or ())
            if slot < 0 or any(slot * index.views + view not in self._shard_of for view in views)
        ]
        if missing:
            # An index is completed at the end of a run; a run that was killed left only shards.
            done = set(find_shards(self._folder, index)[0].finished())
            slots = self.seed_of.slots or ()
            lacking = [
                (at, view)
                for at in missing
                for view in views
                if slots[at] < 0 or slots[at] * index.views + view not in done
            ]
            first = f', from sample {lacking[0][0]} on' if lacking else ''
            raise CacheError(
                f'the cache in {self._folder} is not complete: {len(lacking)} of '
                f'{len(slots) * index.views} items are missing{first}, or the run that computes '
                f'them has not ended. {again}'
            )
