"""The record of a run's training data in its checkpoints, and its comparison at a resume.

The record is a plain dict of numbers, texts and lists. It has digests of blocks of files instead of
their names, so its size does not grow with the data and a difference still leads to few files. Only
the paths below the files' common folder count, so that data may be copied or mounted elsewhere.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Sized, Tuple

from torch.utils.data import Subset

from mapsage.datasets import GeoTiffDataset
from mapsage.host.dataset_parts import (
    innermost,
    listed_samples,
    lists_samples,
    metainfo_of,
    parts,
)

from .build import datasets_of_scenes
from .passports import passport_of

META_KEY = 'data'

# Most blocks of a list. A digest of a block has 8 hexadecimal digits.
_BLOCKS = 256
# Keys of a sample's files in the order of their names: of MMSegmentation, of pairs, of scenes.
_FILE_KEYS = (
    'img_path',
    'img_path_from',
    'img_path_to',
    'scene',
    'seg_map_path',
    'seg_map_path_from',
    'seg_map_path_to',
)
# Files whose sizes are asked for in one go, and the seconds for one from which on several threads
# ask.
_TRIED = 256
_SLOW_SECONDS = 1e-4
_THREADS = 16
_MAX_NAMED = 3


class DataFacts(NamedTuple):
    """What a dataset reads.

    Attributes:
        record: Record for checkpoints: ``samples`` (number; None for a stream), ``classes``
            (names), ``order`` (digests of the samples' names, in their order), ``files`` (number),
            ``sizes`` (digests of the files' sizes), ``passport`` (`mapsage/geo/passport.py`) and,
            for scenes, ``times`` (digests of the times of their last change).
        names: Names behind ``order``.
        files: Paths of the files behind ``sizes`` and ``times``.
    """

    record: Dict[str, Any]
    names: List[str]
    files: List[str]


class DataDifference(NamedTuple):
    """Differences between the data of a checkpoint and of a run.

    Attributes:
        meaning: Differences that change which samples a step gets, or what their labels mean.
        content: Differences of files that change neither.
    """

    meaning: List[str]
    content: List[str]


def facts_of_data(dataset: object) -> DataFacts:
    """Return the facts of a training dataset, also inside of wrappers.

    Datasets that do not list their samples have only a number of samples and classes.
    """
    names: List[str] = []
    paths: Dict[str, None] = {}
    for part in parts(dataset):
        part_names, part_paths = _list_part(part)
        names += part_names
        paths.update(dict.fromkeys(part_paths))
    stats = _stat(list(paths))
    record: Dict[str, Any] = dict(
        samples=len(dataset) if isinstance(dataset, Sized) else None,
        classes=[str(name) for name in metainfo_of(dataset).get('classes') or ()],
        order=_digests(names),
        files=len(paths),
        sizes=_digests([str(size) for size, _ in stats]),
    )
    if datasets_of_scenes(dataset):
        record['times'] = _digests([str(seconds) for _, seconds in stats])
    record['passport'] = passport_of(dataset)
    return DataFacts(record, names, list(paths))


def compare_records(before: Mapping[str, Any], now: DataFacts) -> DataDifference:
    """Return how the data of a run differ from the record of its checkpoint. Pure."""
    meaning: List[str] = []
    record = now.record
    if before.get('samples') != record['samples']:
        meaning.append(f'{_number(before.get("samples"))}, now {_number(record["samples"])}')
    else:
        changed = _changed_blocks(before.get('order'), record['order'], now.names)
        if changed is None:
            meaning.append('the names of the samples')
        elif changed:
            meaning.append(f'the names of the samples, now {changed}')
    # Sizes are compared by position.
    content = [] if meaning else _changed_files(before, now)
    classes = before.get('classes')
    if isinstance(classes, list) and classes != record['classes']:
        meaning.append(
            f'classes {_some(classes) or "none"}, now {_some(record["classes"]) or "none"}'
        )
    return DataDifference(meaning, content)


def _number(samples: object) -> str:
    return 'a stream of samples' if samples is None else f'{samples} samples'


def _changed_files(before: Mapping[str, Any], now: DataFacts) -> List[str]:
    record = now.record
    if before.get('files') != record['files']:
        return [f'{before.get("files")} files, now {record["files"]}']
    sizes = _changed_blocks(before.get('sizes'), record['sizes'], now.files)
    if sizes:
        return [f'the size of {sizes}']
    times = _changed_blocks(before.get('times'), record.get('times'), now.files)
    return [f'the time of the last change of {times}'] if times else []


def _list_part(part: Any) -> Tuple[List[str], List[str]]:
    """Return the samples' names of a dataset without wrappers, and the paths of its files."""
    if isinstance(part, GeoTiffDataset):
        return _shorten(part.scene_paths()), [*part.read_rasters(), *part.vector_labels]
    infos = _infos(part)
    first = next(infos, {})
    keys = [key for key in _FILE_KEYS if isinstance(first.get(key), str)]
    columns: List[List[str]] = [[] for _ in keys]
    windows: List[str] = []
    for info in itertools.chain([first], infos):
        for key, column in zip(keys, columns):
            column.append(str(info.get(key, '')))
        if 'window' in first:
            windows.append(str(info.get('window')))
    paths = [path for column in columns for path in column]
    annotations = getattr(part, 'ann_file', None)
    if isinstance(annotations, str) and os.path.isfile(annotations):
        paths.append(annotations)
    rows = zip(*map(_shorten, columns), *([windows] if windows else []))
    return [' '.join(dict.fromkeys(row)) for row in rows], paths


def _infos(part: Any) -> Iterator[Mapping[str, Any]]:
    """Yield what a dataset knows of each sample; nothing if it does not list its samples."""
    if not isinstance(part, Subset):
        yield from listed_samples(part)
        return
    for number in range(len(part)):
        inner, index = innermost(part, number)
        if lists_samples(inner):
            yield inner.get_data_info(index)


def _shorten(paths: Sequence[str]) -> List[str]:
    """Return paths below their common folder."""
    pairs = [path.rpartition('/')[::2] for path in paths]
    folders = {folder for folder, _ in pairs}
    if len(folders) < 2:
        return [name for _, name in pairs]
    absolute = {folder: os.path.abspath(folder) for folder in folders}
    common = os.path.commonpath(list(absolute.values()))
    below = {folder: os.path.relpath(absolute[folder], common) for folder in folders}
    return [name if below[folder] == '.' else f'{below[folder]}/{name}' for folder, name in pairs]


def _stat(paths: Sequence[str]) -> List[Tuple[Optional[int], Optional[int]]]:
    """Return size and time of each file in bytes and seconds; None for what is no local file."""
    begin = time.perf_counter()
    stats = list(map(_stat_file, paths[:_TRIED]))
    # A network disk answers late, but many requests at once. On a local one, threads only disturb.
    is_slow = time.perf_counter() - begin > _TRIED * _SLOW_SECONDS
    with ThreadPoolExecutor(_THREADS if is_slow else 1) as threads:
        chunks = [paths[start : start + _TRIED] for start in range(_TRIED, len(paths), _TRIED)]
        return stats + [
            stat
            for chunk in threads.map(lambda chunk: list(map(_stat_file, chunk)), chunks)
            for stat in chunk
        ]


def _stat_file(path: str) -> Tuple[Optional[int], Optional[int]]:
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None, None
    return status.st_size, int(status.st_mtime)


def _block_length(count: int) -> int:
    return max(1, -(-count // _BLOCKS))


def _digests(texts: Sequence[str]) -> List[str]:
    length = _block_length(len(texts))
    return [
        hashlib.blake2b(
            '\0'.join(texts[start : start + length]).encode('utf-8', 'replace'), digest_size=4
        ).hexdigest()
        for start in range(0, len(texts), length)
    ]


def _changed_blocks(
    before: Any, now: Optional[Sequence[str]], names: Sequence[str]
) -> Optional[str]:
    """Return the names in the blocks whose digests differ; '' if none differs.

    None if the lists have different lengths. Lists of which one is missing do not differ.
    """
    if not isinstance(before, list) or now is None:
        return ''
    if len(before) != len(now):
        return None
    length = _block_length(len(names))
    blocks = [
        names[number * length : (number + 1) * length]
        for number, (old, new) in enumerate(zip(before, now))
        if old != new
    ]
    return _some(
        [
            block[0] if len(block) == 1 else f'one or more of {block[0]} to {block[-1]}'
            for block in blocks
        ]
    )


def _some(names: Sequence[object]) -> str:
    # Names of a checkpoint or a disk may hold control characters.
    texts = [text if text.isprintable() else repr(text) for text in map(str, names[:_MAX_NAMED])]
    more = f' and {len(names) - _MAX_NAMED} more' if len(names) > _MAX_NAMED else ''
    return ', '.join(texts) + more
