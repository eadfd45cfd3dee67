"""The index of a cache: its shards, and the settings that it was made with.

The shards name their samples too, so that a lost index can be rebuilt from them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

from mapsage.base.files import atomic_write, parse_json

from .keys import CacheKeys, hash_of
from .shards import PATTERN, CacheError, DamagedShardError, Shard, ShardEntry

VERSION = 2
INDEX = 'index.json'
# Limit for the views of a sample, so that a damaged index is recognized.
_MOST_VIEWS = 10000


@dataclass(frozen=True)
class CacheIndex:
    """The content of a cache. Items are numbered ``slot * views + view``.

    A sample never changes its slot. New samples get the next slots, and the slots of samples that a
    dataset no longer lists stay unused.

    Attributes:
        keys: Keys of everything on which the features depend.
        views: Number of views per sample.
        seed: Seed from which the views are drawn, 0 or more.
        made_with: Versions, device and batch size, for people who read the file.
        shards: Files of the cache.
    """

    keys: CacheKeys
    views: int
    seed: int
    made_with: Dict[str, Any]
    shards: List[ShardEntry] = field(default_factory=list)

    @property
    def items(self) -> int:
        """Number of items of the complete cache, including items that are no longer used."""
        return len(self.keys.samples) * self.views

    @property
    def cache(self) -> str:
        """Hash that every shard carries; different settings give a different hash."""
        return hash_of([VERSION, self.keys.weights, self.keys.transforms, self.views, self.seed])

    def slots(self, samples: Sequence[str]) -> List[int]:
        """Return the slot of each sample, by its hash; -1 for a sample without one."""
        known = {sample: slot for slot, sample in enumerate(self.keys.samples)}
        return [known.get(sample, -1) for sample in samples]

    def extended(self, samples: Sequence[str]) -> CacheIndex:
        """Return the index with slots for all of these samples."""
        new = dict.fromkeys(samples)
        for sample in self.keys.samples:
            new.pop(sample, None)
        return replace(self, keys=replace(self.keys, samples=(*self.keys.samples, *new)))

    def finished(self) -> List[int]:
        """Return the numbers of the items in the shards, ascending."""
        return sorted({item for entry in self.shards for item in entry.items})

    def check(self, folder: Path, keys: CacheKeys, views: int) -> None:
        """Raise CacheError, naming the differences, if the cache was made with other settings."""
        differences = self.keys.differences(keys)
        if self.views != views:
            differences.append(f'views {self.views} there, {views} here')
        if differences:
            raise CacheError(
                f'the cache in {folder} is of other features: {"; ".join(differences)}. Restore '
                f'what it was made with, or make another cache: python tools/cache_features.py '
                f'CONFIG --views {views} --folder ANOTHER'
            )


def read_index(folder: Path) -> Optional[CacheIndex]:
    """Return the index of the cache in a folder; None if the file is missing.

    Raises:
        CacheError: If the index cannot be read or has another version.
    """
    path = folder / INDEX
    try:
        content = parse_json(path.read_text())
        version = content['version']
        if version == VERSION:
            keys = dict(content['keys'], samples=tuple(content['keys']['samples']))
            views, items = content['views'], len(keys['samples']) * content['views']
            check_views(views, 'views')
            if views > _MOST_VIEWS or not all(
                isinstance(text, str)
                for text in [keys['weights'], keys['transforms'], *keys['samples']]
            ):
                raise ValueError(f'views {views}, or keys that are no texts')
            return CacheIndex(
                CacheKeys(**keys),
                views,
                content['seed'],
                content['made_with'],
                [ShardEntry.of_json(entry, items) for entry in content['shards']],
            )
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CacheError(f'{path} cannot be read: {error}.') from error
    except (ValueError, KeyError, TypeError) as error:
        raise CacheError(
            f'{path} is damaged: {error!r}. Delete it and run tools/cache_features.py with the '
            f'same arguments as before: it is made again from the shards.'
        ) from error
    raise CacheError(
        f'{path} is of version {version!r}, this MapSage reads version {VERSION}. '
        f'Make the cache again in another folder with tools/cache_features.py.'
    )


def write_index(folder: Path, index: CacheIndex) -> None:
    """Write the index of a cache. The old one is replaced once the new one is complete.

    Raises:
        CacheError: If the index cannot be written.
    """
    content = dict(
        version=VERSION,
        keys=vars(index.keys),
        views=index.views,
        seed=index.seed,
        made_with=index.made_with,
        shards=[entry.to_json() for entry in index.shards],
    )
    path = folder / INDEX
    try:
        atomic_write(path, json.dumps(content, indent=1).encode(), durable=True)
    except OSError as error:
        raise CacheError(
            f'cannot write {path}: {error}. Free space there, or write elsewhere with '
            f'--folder. The shards stay: the same command continues.'
        ) from error


def find_shards(folder: Path, index: CacheIndex) -> Tuple[CacheIndex, List[Path]]:
    """Return an index with the shards that are in its folder, and the files that are damaged.

    The shards name their samples too, so that an index that was deleted is made again from them.
    Only the headers of the files are read.

    Raises:
        CacheError: If a shard belongs to another cache, or cannot be read.
    """
    entries, damaged = [], []
    samples = dict(enumerate(index.keys.samples))
    for path in sorted(folder.glob(PATTERN)):
        try:
            shard = Shard(path)
        except DamagedShardError:
            damaged.append(path)
            continue
        if shard.cache != index.cache:
            raise CacheError(
                f'{path} is of another cache than this one. Choose another --folder, '
                f'or delete the other cache.'
            )
        entries.append(shard.entry)
        for item, sample in shard.samples.items():
            if samples.setdefault(item // index.views, sample) != sample:
                raise CacheError(
                    f'{path} has features of another sample than {INDEX} says. If no '
                    f'other program writes there, delete it.'
                )
    slots = 1 + max(samples, default=-1)
    keys = replace(index.keys, samples=tuple(samples.get(slot, '') for slot in range(slots)))
    return replace(index, keys=keys, shards=entries), damaged


def check_views(views: int, name: str) -> None:
    """Raise ValueError unless ``views`` is a number of views."""
    if not isinstance(views, int) or isinstance(views, bool) or views < 1:
        raise ValueError(f'{name}={views!r}, expected a number of views, 1 or more.')
