"""Conversion of a provider's archives to the folders that MMSeg's dataset classes read.

The output folder gets ``img_dir/{train,val,test}``, ``ann_dir/{train,val}`` and
``prepared.jsonl``, which records the options and, in one line for each image, the files written
for it. With this record a stopped run continues where it was; every file appears complete or not
at all.
"""
from __future__ import annotations

import json
import shutil
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple

import cv2
import numpy as np

from mapsage.atomic_write import atomic_write
from mapsage.json_text import parse_json

from .layouts import LAYOUTS, ArchiveLayout, SourceImage
from .source_files import EXTRACTED, PrepareError, SourceFile, list_files
from .tiling import ColorClasses, encode_png, image_size, read_strips, starts

LEDGER = 'prepared.jsonl'

_Written = Tuple[Dict[str, Any], int]  # ledger line of an image, number of new files

_LOVEDA_VALUES = 8  # number of mask values: no data and seven classes


@dataclass(frozen=True)
class PrepareOptions:
    """Options for cutting images into tiles.

    Attributes:
        clip_size: Side of a tile in pixels; None for the usual one of the dataset.
        stride: Distance between tiles in pixels; None for ``clip_size`` where that is set, and
            otherwise for the usual one of the dataset.
        ignore_other_colors: Whether a pixel whose label color is not a class is ignored instead of
            being an error.
    """

    clip_size: Optional[int] = None
    stride: Optional[int] = None
    ignore_other_colors: bool = False


class Prepared(NamedTuple):
    """Result of a run: images by split, files newly written, pixels of other colors."""

    images: Dict[str, int]
    new_files: int
    other_colors: int


def prepare_dataset(name: str, source: Path, out: Path, options: PrepareOptions = PrepareOptions(),
                    workers: int = 1,
                    report: Callable[[int, int], None] = lambda done, of: None) -> Prepared:
    """Write a dataset.

    Args:
        name: Name of the dataset: ``loveda``, ``potsdam``, ``vaihingen`` or ``isaid``.
        source: Folder of the provider's archives, or of their unpacked content.
        out: Folder to write, either empty or written by an earlier run with the same options.
        options: Options for cutting images into tiles.
        workers: Number of worker processes.
        report: Function that is called with the number of finished images and of all images.

    Returns:
        Counts of images, new files and ignored pixels.

    Raises:
        PrepareError: If the delivery is incomplete, damaged or not as expected, or ``out`` holds
            something else. Files that are finished are kept.
    """
    layout, clip_size, stride = _resolve(name, options)
    items = layout.find(source, list_files(source))
    asked = dict(dataset=name, clip_size=clip_size, stride=stride,
                 ignore_other_colors=options.ignore_other_colors,
                 labels=sorted({_label_kind(i) for i in items if i.label}))
    done = _open_ledger(out, asked)
    todo = [item for item in items if f'{item.split}/{item.stem}' not in done]
    for item in items:
        for kind in ('img_dir', 'ann_dir')[:2 if item.label else 1]:
            (out / kind / item.split).mkdir(parents=True, exist_ok=True)
    count = new_files = 0
    with (out / LEDGER).open('a') as ledger:
        jobs = [(layout, item, out, clip_size, stride, options.ignore_other_colors)
                for item in todo]
        for entry, written in _run(jobs, workers):
            ledger.write(json.dumps(entry) + '\n')
            ledger.flush()
            done[entry['image']] = entry
            new_files += written
            count += 1
            report(len(items) - len(todo) + count, len(items))
    for leftover in out.glob(EXTRACTED + '*'):  # left by a killed run
        shutil.rmtree(str(leftover), ignore_errors=True)
    splits = [item.split for item in items]
    return Prepared({s: splits.count(s) for s in sorted(set(splits))}, new_files,
                    sum(entry['other_colors'] for entry in done.values()))


def _resolve(name: str, options: PrepareOptions
             ) -> Tuple[ArchiveLayout, Optional[int], Optional[int]]:
    if name not in LAYOUTS:
        raise PrepareError(f'dataset {name!r} is not known; choose one of {sorted(LAYOUTS)}')
    layout = LAYOUTS[name]
    if layout.clip_size is None:
        if options != PrepareOptions():
            raise PrepareError(f'{name} is not cut, its masks are kept as they are; leave out '
                               '--clip-size, --stride and --ignore-other-colors')
        return layout, None, None
    clip_size = options.clip_size or layout.clip_size
    stride = options.stride or (clip_size if options.clip_size else layout.stride)
    if clip_size < 32 or not stride or not 1 <= stride <= clip_size:
        raise PrepareError(f'clip_size={clip_size} with stride={stride} does not cover an image; '
                           'choose 32 pixels or more, and a stride of 1 to the clip size')
    return layout, clip_size, stride


def _label_kind(item: SourceImage) -> str:
    """Return the kind of a label, recorded so that one folder never mixes both kinds."""
    return 'noBoundary' if item.label and 'noBoundary' in item.label.place else 'full'


def _open_ledger(out: Path, asked: Dict[str, Any]) -> Dict[str, Dict[str, Any]]:
    """Return what earlier runs finished, by image; begin the ledger of an empty folder."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / LEDGER
    if not path.is_file():
        if any(out.iterdir()):
            raise PrepareError(f'{out} is in use and has no {LEDGER}; choose another folder or '
                               'empty this one')
        atomic_write(path, (json.dumps(asked) + '\n').encode())
        return {}
    lines = path.read_text(encoding='utf-8', errors='replace').split('\n')
    if lines[-1]:  # an incomplete line, left by a killed run
        atomic_write(path, '\n'.join([*lines[:-1], '']).encode())
    try:
        found, *entries = map(parse_json, lines[:-1])
    except ValueError as error:
        raise PrepareError(f'{path} is damaged: {error}; choose another folder or empty this one'
                           ) from error
    if found != asked:
        raise PrepareError(f'{out} was written with {found}, asked for now is {asked}; choose '
                           'another folder or empty this one')
    present = {str(p.relative_to(out)) for kind in ('img_dir', 'ann_dir')
               for p in (out / kind).rglob('*.png')}
    return {entry['image']: entry for entry in entries
            if _is_entry(entry) and present.issuperset(entry['files'])}


def _is_entry(entry: Any) -> bool:
    """Return whether a line of the ledger is one of this module."""
    return (isinstance(entry, dict) and isinstance(entry.get('image'), str)
            and isinstance(entry.get('files'), list)
            and all(isinstance(name, str) for name in entry['files']))


def _run(jobs: List[Tuple[Any, ...]], workers: int) -> Iterator[_Written]:
    """Yield the result of each job as it finishes; the first failure cancels the others."""
    if workers <= 1:
        for job in jobs:
            yield _write_item(*job)
        return
    with ProcessPoolExecutor(workers) as pool:
        futures: List['Future[_Written]'] = [pool.submit(_write_item, *job) for job in jobs]
        try:
            for future in as_completed(futures):
                yield future.result()
        except BrokenProcessPool as error:
            raise PrepareError('a worker process was killed, most likely for want of memory; '
                               'run again with fewer --workers, finished files are kept'
                               ) from error
        except BaseException:
            for future in futures:
                future.cancel()
            raise


def _write_item(layout: ArchiveLayout, item: SourceImage, out: Path, clip_size: Optional[int],
                stride: Optional[int], ignore_other_colors: bool) -> _Written:
    """Write the files of one image."""
    images, masks = out / 'img_dir' / item.split, out / 'ann_dir' / item.split
    other_colors = 0
    if clip_size is None or stride is None or item.label is None:
        files = [images / f'{item.stem}.png']
        _copy(item.image, files[0])
        if item.label is not None:
            files.append(masks / f'{item.stem}{layout.label_suffix}')
            _copy_mask(item.label, files[1])
        written = len(files)
    else:
        classes = ColorClasses(dict(layout.colors), layout.ignored if ignore_other_colors else -1)
        files, written, other_colors = _cut(layout, item, out, clip_size, stride, classes)
    return dict(image=f'{item.split}/{item.stem}', other_colors=other_colors,
                files=[str(file.relative_to(out)) for file in files]), written


def _copy(source: SourceFile, target: Path) -> None:
    data = source.read()
    if not data.startswith(b'\x89PNG') or data[-8:-4] != b'IEND':
        raise PrepareError(f'{source} ({len(data)} bytes) is no complete PNG; the file is damaged, '
                           'download it again')
    atomic_write(target, data)


def _copy_mask(source: SourceFile, target: Path) -> None:
    """Copy a mask of LoveDA, which holds class values already."""
    data = source.read()
    mask = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED)
    if mask is None or mask.ndim != 2 or mask.dtype != np.uint8 or mask.max() >= _LOVEDA_VALUES:
        found = 'cannot be decoded' if mask is None else (
            f'has the shape {mask.shape}, type {mask.dtype} and values up to {mask.max()}')
        raise PrepareError(f'{source} {found}; expected one band of uint8 with 0 (no data) and 1 '
                           f'to {_LOVEDA_VALUES - 1}. Take the masks of the delivery')
    atomic_write(target, data)


def _cut(layout: ArchiveLayout, item: SourceImage, out: Path, clip_size: int, stride: int,
         classes: ColorClasses) -> Tuple[List[Path], int, int]:
    """Write the tiles of one image and of its label, except those that exist already.

    Returns:
        All files of the image, the number of files written, and the number of pixels of other
        colors.
    """
    images, masks = out / 'img_dir' / item.split, out / 'ann_dir' / item.split
    files: List[Path] = []
    written = other_colors = counted = 0
    assert item.label is not None
    with ExitStack() as stack:
        sources = [item.image, item.label]
        places = [stack.enter_context(source.on_disk(out)) for source in sources]
        sizes = [image_size(place, str(source)) for place, source in zip(places, sources)]
        if sizes[0] != sizes[1]:
            raise PrepareError(f'{item.image} has {sizes[0].width} x {sizes[0].height} pixels, its '
                               f'label {item.label} has {sizes[1].width} x {sizes[1].height}; they '
                               'are not of one delivery')
        strips = zip(starts(sizes[0].height, clip_size, stride),
                     *(read_strips(place, str(source), clip_size, stride)
                       for place, source in zip(places, sources)))
        for top, pixels, colors in strips:
            mask, others = classes.read(colors, str(item.label), top)
            other_colors += int(others[max(counted - top, 0):].sum())  # strips may overlap
            counted = top + len(mask)
            for left in starts(sizes[0].width, clip_size, stride):
                stem = layout.tile_name.format(stem=item.stem, x0=left, y0=top,
                                               x1=left + clip_size, y1=top + clip_size)
                columns = slice(left, left + clip_size)
                for path, plane, padding in (
                        (images / f'{stem}.png', pixels, 0),
                        (masks / f'{stem}{layout.label_suffix}', mask, layout.ignored)):
                    if not path.exists():
                        atomic_write(path, encode_png(plane[:, columns], clip_size, padding))
                        written += 1
                    files.append(path)
    return files, written, other_colors
