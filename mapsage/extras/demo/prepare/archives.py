"""Conversion of a provider's archives to the folders that MMSeg's dataset classes read.

The output folder gets ``img_dir/{train,val,test}``, ``ann_dir/{train,val}`` and a ledger,
``prepared.jsonl``. The first line of the ledger holds the options, and each further line an image
and the files written for it. A stopped run continues from the ledger; every file appears complete
or not at all. What is in which archive is in `layouts.py`.
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

from mapsage.base.files import atomic_write, parse_json
from mapsage.base.progress import ProgressLine

from .layouts import LAYOUTS, ArchiveLayout, SourceImage
from .source_files import EXTRACTED, PrepareError, SourceFile, list_files
from .tiling import ColorClasses, encode_png, image_size, read_strips, starts

LEDGER = 'prepared.jsonl'

_Written = Tuple[Dict[str, Any], int]
"""Ledger entry of an image, and the number of new files."""

# Number of mask values in LoveDA: no data and seven classes.
_LOVEDA_VALUES = 8


@dataclass(frozen=True)
class PrepareOptions:
    """Options for cutting images into tiles.

    Attributes:
        clip_size: Side of a tile in pixels; None for the dataset's usual tile size.
        stride: Distance between tiles in pixels. If None, it equals ``clip_size``, or the dataset's
            usual stride if ``clip_size`` is None too.
        ignore_other_colors: Whether a pixel is ignored if its label color is not a class. If False,
            such a pixel is an error.
    """

    clip_size: Optional[int] = None
    stride: Optional[int] = None
    ignore_other_colors: bool = False


class Prepared(NamedTuple):
    """Result of a run: images by split, files newly written, pixels of other colors."""

    images: Dict[str, int]
    new_files: int
    other_colors: int


def prepare_dataset(
    name: str,
    source: Path,
    out: Path,
    options: PrepareOptions = PrepareOptions(),
    workers: int = 1,
    say: Optional[Callable[[str], None]] = None,
) -> Prepared:
    """Write a dataset.

    Args:
        name: Name of the dataset: ``loveda``, ``potsdam``, ``vaihingen`` or ``isaid``.
        source: Folder of the provider's archives, or of their unpacked content.
        out: Folder to write, either empty or written by an earlier run with the same options.
        options: Options for cutting images into tiles.
        workers: Number of worker processes.
        say: Function that prints a line of progress; None to show nothing.

    Returns:
        Counts of images, new files and ignored pixels.

    Raises:
        PrepareError: If the delivery is incomplete, damaged or not as expected, or ``out`` has
            other content. Finished files stay.
    """
    layout, clip_size, stride = _resolve_options(name, options)
    items = layout.find(source, list_files(source))
    settings = dict(
        dataset=name,
        clip_size=clip_size,
        stride=stride,
        ignore_other_colors=options.ignore_other_colors,
        labels=sorted({_label_kind(item) for item in items if item.label}),
    )
    done = _open_ledger(out, settings)
    todo = [item for item in items if f'{item.split}/{item.stem}' not in done]
    for item in items:
        for kind in ('img_dir', 'ann_dir')[: 2 if item.label else 1]:
            (out / kind / item.split).mkdir(parents=True, exist_ok=True)
    new_files = 0
    with (out / LEDGER).open('a') as ledger, ProgressLine(
        len(todo), name, say or print, say is not None, 'images'
    ) as progress:
        jobs = [
            _Job(layout, item, out, clip_size, stride, options.ignore_other_colors) for item in todo
        ]
        for entry, written in _run(jobs, workers):
            ledger.write(json.dumps(entry) + '\n')
            ledger.flush()
            done[entry['image']] = entry
            new_files += written
            progress.advance(1)
    # A killed run leaves its unpacked files.
    for leftover in out.glob(EXTRACTED + '*'):
        shutil.rmtree(str(leftover), ignore_errors=True)
    splits = [item.split for item in items]
    return Prepared(
        {s: splits.count(s) for s in sorted(set(splits))},
        new_files,
        sum(entry['other_colors'] for entry in done.values()),
    )


def _resolve_options(
    name: str, options: PrepareOptions
) -> Tuple[ArchiveLayout, Optional[int], Optional[int]]:
    """Return the layout, clip size and stride; the numbers are None if images stay whole."""
    if name not in LAYOUTS:
        raise PrepareError(f'dataset {name!r} is not known; choose one of {sorted(LAYOUTS)}')
    layout = LAYOUTS[name]
    if layout.clip_size is None:
        if options != PrepareOptions():
            raise PrepareError(
                f'{name} is not cut, its masks are copied unchanged; leave out '
                '--clip-size, --stride and --ignore-other-colors'
            )
        return layout, None, None
    clip_size = options.clip_size or layout.clip_size
    stride = options.stride or (clip_size if options.clip_size else layout.stride)
    if clip_size < 32 or not stride or not 1 <= stride <= clip_size:
        raise PrepareError(
            f'clip_size={clip_size} with stride={stride} does not cover an image; '
            'choose 32 pixels or more, and a stride of 1 to the clip size'
        )
    return layout, clip_size, stride


def _label_kind(item: SourceImage) -> str:
    """Return the kind of a label. The ledger has it, so that a folder never mixes both kinds."""
    return 'noBoundary' if item.label and 'noBoundary' in item.label.location else 'full'


def _open_ledger(out: Path, settings: Dict[str, Any]) -> Dict[str, Dict[str, Any]]:
    """Return the ledger entries of finished images, by image; create the ledger if missing.

    Raises:
        PrepareError: If the folder has other content, or was written with other settings.
    """
    out.mkdir(parents=True, exist_ok=True)
    path = out / LEDGER
    if not path.is_file():
        if any(out.iterdir()):
            raise PrepareError(
                f'{out} is in use and has no {LEDGER}; choose another folder or empty this one'
            )
        atomic_write(path, (json.dumps(settings) + '\n').encode())
        return {}
    lines = path.read_text(encoding='utf-8', errors='replace').split('\n')
    # A killed run may leave an incomplete line at the end.
    if lines[-1]:
        atomic_write(path, '\n'.join([*lines[:-1], '']).encode())
    try:
        recorded, *entries = map(parse_json, lines[:-1])
    except ValueError as error:
        raise PrepareError(
            f'{path} is damaged: {error}; choose another folder or empty this one'
        ) from error
    if recorded != settings:
        raise PrepareError(
            f'{out} was written with {recorded}, but asked for now is {settings}; '
            'choose another folder or empty this one'
        )
    present = {
        str(p.relative_to(out))
        for kind in ('img_dir', 'ann_dir')
        for p in (out / kind).rglob('*.png')
    }
    return {
        entry['image']: entry
        for entry in entries
        if _is_entry(entry) and present.issuperset(entry['files'])
    }


def _is_entry(entry: object) -> bool:
    """Return whether a line of the ledger has the form that this module writes."""
    return (
        isinstance(entry, dict)
        and isinstance(entry.get('image'), str)
        and isinstance(entry.get('files'), list)
        and all(isinstance(name, str) for name in entry['files'])
    )


class _Job(NamedTuple):
    """The arguments of ``_write_item``, which a worker process gets."""

    layout: ArchiveLayout
    item: SourceImage
    out: Path
    clip_size: Optional[int]
    stride: Optional[int]
    ignore_other_colors: bool


def _run(jobs: List[_Job], workers: int) -> Iterator[_Written]:
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
            raise PrepareError(
                'a worker process was killed, most likely for want of memory; '
                'run again with fewer --workers, finished files stay'
            ) from error
        # Also for KeyboardInterrupt and a closed generator: the pool would write all remaining
        # files before it ends.
        except BaseException:
            for future in futures:
                future.cancel()
            raise


def _write_item(
    layout: ArchiveLayout,
    item: SourceImage,
    out: Path,
    clip_size: Optional[int],
    stride: Optional[int],
    ignore_other_colors: bool,
) -> _Written:
    """Write the files of one image; return its ledger entry and the number of new files."""
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
        files, written, other_colors = _cut_image(layout, item, out, clip_size, stride, classes)
    return dict(
        image=f'{item.split}/{item.stem}',
        other_colors=other_colors,
        files=[str(file.relative_to(out)) for file in files],
    ), written


def _copy(source: SourceFile, target: Path) -> None:
    data = source.read()
    if not data.startswith(b'\x89PNG') or data[-8:-4] != b'IEND':
        raise PrepareError(
            f'{source} ({len(data)} bytes) is not a complete PNG; the file is '
            'damaged, download it again'
        )
    atomic_write(target, data)


def _copy_mask(source: SourceFile, target: Path) -> None:
    """Copy a mask of LoveDA, whose pixels are class values already."""
    data = source.read()
    try:
        mask = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED)
    # An image with more pixels than OpenCV or the memory takes.
    except cv2.error:
        mask = None
    if mask is None or mask.ndim != 2 or mask.dtype != np.uint8 or mask.max() >= _LOVEDA_VALUES:
        problem = (
            'cannot be decoded'
            if mask is None
            else (f'has the shape {mask.shape}, type {mask.dtype} and values up to {mask.max()}')
        )
        raise PrepareError(
            f'{source} {problem}; expected one band of uint8 with 0 (no data) and 1 '
            f'to {_LOVEDA_VALUES - 1}. Take the masks of the delivery'
        )
    atomic_write(target, data)


def _cut_image(
    layout: ArchiveLayout,
    item: SourceImage,
    out: Path,
    clip_size: int,
    stride: int,
    classes: ColorClasses,
) -> Tuple[List[Path], int, int]:
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
        paths = [stack.enter_context(source.on_disk(out)) for source in sources]
        sizes = [image_size(path, str(source)) for path, source in zip(paths, sources)]
        if sizes[0] != sizes[1]:
            raise PrepareError(
                f'{item.image} has {sizes[0].width} x {sizes[0].height} pixels, its '
                f'label {item.label} has {sizes[1].width} x {sizes[1].height}; they '
                'are not of one delivery'
            )
        strips = zip(
            starts(sizes[0].height, clip_size, stride),
            *(
                read_strips(path, str(source), clip_size, stride)
                for path, source in zip(paths, sources)
            ),
        )
        for top, pixels, colors in strips:
            mask, is_other = classes.read(colors, str(item.label), top)
            # Strips may overlap: rows that an earlier strip counted are skipped.
            other_colors += int(is_other[max(counted - top, 0) :].sum())
            counted = top + len(mask)
            for left in starts(sizes[0].width, clip_size, stride):
                stem = layout.tile_name.format(
                    stem=item.stem, x0=left, y0=top, x1=left + clip_size, y1=top + clip_size
                )
                columns = slice(left, left + clip_size)
                for path, plane, padding in (
                    (images / f'{stem}.png', pixels, 0),
                    (masks / f'{stem}{layout.label_suffix}', mask, layout.ignored),
                ):
                    if not path.exists():
                        atomic_write(path, encode_png(plane[:, columns], clip_size, padding))
                        written += 1
                    files.append(path)
    return files, written, other_colors
