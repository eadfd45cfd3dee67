"""Predict strips of a scene: read windows, compute scores, blend them; finished strips on disk.

`predict_strips` is the inner loop of a prediction. One thread or several run the model, one or
several read windows ahead of it (`reading.py`), another blends scores behind it. A strip's pixels
are the same bits whichever other strips are predicted in the same call, so ranks may share a scene
and a stopped prediction may continue: a batch never spans two rows of windows, and scores are added
in a fixed order.

`StripStore` has the finished strips, from which a stopped prediction continues. They lie under a
folder name that depends on everything the map depends on (`key_of`), so strips of other settings
cannot be mixed into a map. `assembly.py` reads the strips when all of them are finished.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
import uuid
import zlib
from collections import deque
from concurrent.futures import Future, wait
from contextlib import closing, suppress
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from types import TracebackType
from typing import (
    Any,
    Callable,
    Deque,
    Generator,
    Iterable,
    Iterator,
    List,
    Mapping,
    Optional,
    Tuple,
    Type,
    TypeVar,
)

import numpy as np

from mapsage.base.files import atomic_write, parse_json
from mapsage.base.process import BackgroundWorker

from .blending import RowBlender
from .errors import PredictError
from .inputs import Scene
from .map_model import Predictor, Scores
from .reading import Window, WindowReader
from .windows import Grid

_T = TypeVar('_T')
_R = TypeVar('_R')
_END: Any = object()


def read_ahead(items: Iterable[_T], depth: int) -> Generator[_T, None, None]:
    """Yield ``items``, which a thread draws up to ``depth`` items ahead.

    An error while drawing an item is raised here when that item is due. The thread ends when the
    generator is closed.
    """
    iterator, worker = iter(items), BackgroundWorker('read-ahead')
    drawn: Deque[Future] = deque(worker.submit(next, iterator, _END) for _ in range(depth))
    try:
        while True:
            item = drawn.popleft().result()
            if item is _END:
                return
            drawn.append(worker.submit(next, iterator, _END))
            yield item
    finally:
        worker.close()


def map_in_order(
    function: Callable[[_T], _R], items: Iterable[_T], threads: int
) -> Generator[Tuple[_T, _R], None, None]:
    """Yield each item with the function's result, in the order of the items.

    One more item than there are threads is drawn, so that a thread that has finished finds the
    next item. An error is raised here when its item is due. The threads end when the generator is
    closed.

    Args:
        function: Function that several threads may call at the same time.
        items: Items, drawn in the calling thread.
        threads: Number of threads; with 1 the calling thread calls the function.
    """
    if threads == 1:
        for item in items:
            yield item, function(item)
        return
    workers = [BackgroundWorker(f'compute-{number}') for number in range(threads)]
    waiting: Deque[Tuple[_T, Future]] = deque()
    try:
        for item, worker in zip(items, cycle(workers)):
            waiting.append((item, worker.submit(function, item)))
            # The result leaves this list before it is used, so that it can be freed after that.
            if len(waiting) > threads:
                first, result = waiting.popleft()
                yield first, result.result()
                del first, result
        while waiting:
            first, result = waiting.popleft()
            yield first, result.result()
            del first, result
    finally:
        for worker in workers:
            worker.close()


class WriteBehind:
    """Calls a function in a thread, in the order of :meth:`put`.

    The ``with`` block ends after all calls were made. If the block raises, waiting calls are
    dropped.

    Args:
        function: Function to call.
        depth: Number of calls that may wait.
    """

    def __init__(self, function: Callable[..., None], depth: int) -> None:
        self._function, self._depth = function, depth
        self._worker = BackgroundWorker('write-behind')
        self._calls: Deque[Future] = deque()
        self._error: Optional[BaseException] = None

    def put(self, *arguments: object) -> None:
        """Let the thread call the function with ``arguments``; wait while too many calls wait.

        Raises:
            BaseException: The error of an earlier call; no call is made after it.
        """
        # One call is running, the rest of the queue waits.
        if len(self._calls) > self._depth:
            wait([self._calls.popleft()])
        if self._error is not None:
            raise self._error
        self._calls.append(self._worker.submit(self._call, *arguments))

    def __enter__(self) -> WriteBehind:
        return self

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        if kind is None:
            wait(self._calls)
        self._worker.close()
        if kind is None and self._error is not None:
            raise self._error

    def _call(self, *arguments: object) -> None:
        if self._error is not None:
            return
        try:
            self._function(*arguments)
        # Handed to the thread that puts, which raises it.
        except BaseException as error:
            self._error = error


_BATCHES_AHEAD = 2


@dataclass
class Strip:
    """Finished rows of a map.

    Attributes:
        number: Number of the strip in the grid.
        classes: ``(rows, width)`` uint8, 255 where there is no data.
        confidence: ``(rows, width)`` uint8 in percent, 255 where there is no data, or None.
        damage: Line for each window of the strip that could not be read completely.
        probabilities: ``(classes, rows, width)`` uint8 in steps of 0.004, 255 where there is no
            data, or None.
    """

    number: int
    classes: np.ndarray
    confidence: Optional[np.ndarray] = None
    damage: List[str] = field(default_factory=list)
    probabilities: Optional[np.ndarray] = None


@dataclass
class Waits:
    """Seconds that the model waited for windows to be read, and for rows to be written."""

    reading: float = 0.0
    writing: float = 0.0

    def describe(self, seconds: float) -> str:
        """Return each one's share of the prediction's seconds, and what makes the slowest faster."""
        shares = dict(
            reading=self.reading,
            model=max(0.0, seconds - self.reading - self.writing),
            writing=self.writing,
        )
        hint = dict(
            reading='tiled, uncompressed or local scenes are read faster',
            model='more devices share the windows, and a smaller --overlap leaves fewer',
            writing='--confidence and --probabilities take longest',
        )
        slowest = max(shares, key=lambda name: shares[name])
        text = ', '.join(f'{name} {100 * part / seconds:.0f} %' for name, part in shares.items())
        return f'{text} of the time: {hint[slowest]}'


@dataclass
class _Batch:
    """Windows of one row of windows. The last batch of a row may be empty.

    Attributes:
        row: Number of the row of windows.
        windows, columns, valid: Pixels, first columns and data masks of the windows with data.
        stacked: All windows as the predictor takes them; None without windows.
        damage: Lines about blocks that could not be read.
        passed: Number of windows read for this batch, including windows without data.
        ends_row: Whether this is the last batch of its row.
    """

    row: int
    windows: List[np.ndarray] = field(default_factory=list)
    columns: List[int] = field(default_factory=list)
    valid: List[np.ndarray] = field(default_factory=list)
    damage: List[str] = field(default_factory=list)
    passed: int = 0
    ends_row: bool = False
    stacked: Optional[Scores] = None


def predict_strips(
    scene: Scene,
    grid: Grid,
    strips: Iterable[int],
    predictor: Predictor,
    batch_size: int,
    confidence: bool,
    store: Callable[[Strip], None],
    advance: Callable[[int], None],
    probabilities: bool = False,
    most_readers: int = 1,
) -> Waits:
    """Predict some strips of a scene.

    For each run of consecutive strips, the rows of windows that reach into its first strip from
    above are computed too, but their own strips are not stored.

    Args:
        scene: The scene.
        grid: Windows of the scene.
        strips: Numbers of the strips to predict.
        predictor: The model, for windows of the grid's size.
        batch_size: Largest number of windows in a batch.
        confidence: Whether strips have a confidence plane.
        store: Function that receives each finished strip, in another thread.
        advance: Function that receives the number of windows that were done since the last call,
            including windows without data.
        probabilities: Whether strips have the probabilities of all classes.
        most_readers: Largest number of threads that may read the scene at the same time.

    Returns:
        How long the model waited for the other threads.
    """
    waits = Waits()
    reader = WindowReader(scene, most_readers)
    window = min(grid.window[0], grid.height), min(grid.window[1], grid.width)
    for first, last in grid.runs(strips):
        begin, end = grid.reach(first)
        blender = predictor.blender(
            window,
            end - begin,
            grid.shared_rows,
            confidence=confidence,
            probabilities=probabilities,
        )
        _predict_run(
            reader, grid, first, last, predictor, batch_size, blender, store, advance, waits
        )
    return waits


def count_windows(grid: Grid, strips: Iterable[int]) -> int:
    """Return the number of windows that :func:`predict_strips` reads for these strips."""
    return sum(
        len(grid.columns_of(row))
        for first, last in grid.runs(strips)
        for row in range(grid.first_row(first), last + 1)
    )


def _predict_run(
    reader: WindowReader,
    grid: Grid,
    first: int,
    last: int,
    predictor: Predictor,
    batch_size: int,
    blender: RowBlender,
    store: Callable[[Strip], None],
    advance: Callable[[int], None],
    waits: Waits,
) -> None:
    """Predict the consecutive strips ``first`` to ``last``."""
    damage: List[str] = []
    left = grid.reach(first)[0]
    span = slice(*(column - left for column in grid.span(first)))
    blender.begin(_rows_of(grid, grid.first_row(first)))

    def blend(batch: _Batch, scores: Any) -> None:
        for index, column in enumerate(batch.columns):
            blender.add(column - left, scores[index], predictor.weights, batch.valid[index])
        damage.extend(batch.damage)
        if batch.ends_row:
            rows = blender.take()
            if batch.row >= first:
                store(
                    Strip(
                        batch.row,
                        rows.classes[:, span],
                        None if rows.confidence is None else rows.confidence[:, span],
                        list(damage),
                        None if rows.probabilities is None else rows.probabilities[..., span],
                    )
                )
            damage.clear()
            if batch.row < last:
                blender.begin(_rows_of(grid, batch.row + 1))

    def compute(batch: _Batch) -> Optional[Scores]:
        return None if batch.stacked is None else predictor(batch.stacked)

    def stack(batches: Iterable[_Batch]) -> Generator[_Batch, None, None]:
        for batch in batches:
            if batch.windows:
                batch.stacked = predictor.stack(batch.windows)
                batch.windows.clear()
            yield batch

    batches = stack(_read_batches(reader, grid, grid.first_row(first), last, batch_size))
    # Closed from the last to the first, so no thread reads the scene after this block.
    with closing(batches), WriteBehind(blend, _BATCHES_AHEAD) as behind, closing(
        read_ahead(batches, _BATCHES_AHEAD)
    ) as ready, closing(
        map_in_order(compute, _watch(ready, reader, waits), predictor.parallel)
    ) as computed:
        for batch, scores in computed:
            asked = time.monotonic()
            behind.put(batch, scores)
            waits.writing += time.monotonic() - asked
            advance(batch.passed)


def _rows_of(grid: Grid, strip: int) -> int:
    """Return the number of pixel rows of a strip."""
    start, stop = grid.strip(strip)
    return stop - start


def _watch(batches: Iterator[_Batch], reader: WindowReader, waits: Waits) -> Iterator[_Batch]:
    """Yield batches, and tell the reader how long each kept the caller waiting."""
    end = time.monotonic()
    while True:
        asked = time.monotonic()
        batch = next(batches, None)
        if batch is None:
            return
        start, end = end, time.monotonic()
        waits.reading += end - asked
        reader.note_batch(end - asked, end - start)
        yield batch


def _read_batches(
    reader: WindowReader, grid: Grid, first: int, last: int, size: int
) -> Iterator[_Batch]:
    """Yield the windows of the rows of windows ``first`` to ``last`` in batches of one row each."""
    corners = (
        (column, grid.strip(row)[0])
        for row in range(first, last + 1)
        for column in grid.columns_of(row)
    )
    with closing(reader.read(corners, grid.window)) as windows:
        yield from _batches_of(windows, grid, first, last, size)


def _batches_of(
    windows: Iterator[Window], grid: Grid, first: int, last: int, size: int
) -> Iterator[_Batch]:
    for row in range(first, last + 1):
        batch = _Batch(row)
        for column in grid.columns_of(row):
            if len(batch.windows) == size:
                yield batch
                batch = _Batch(row)
            values, valid, damage = next(windows)
            batch.passed += 1
            batch.damage += damage
            if valid.any():
                batch.windows.append(values)
                batch.columns.append(column)
                batch.valid.append(valid)
        batch.ends_row = True
        yield batch


# Largest size in bytes of a strip's lines about unreadable blocks.
_MOST_DAMAGE = 1 << 26
# Fastest level of zlib; class maps compress well at any level.
_LEVEL = 1


def key_of(settings: Mapping[str, object]) -> str:
    """Return a short key of all settings of a map; different settings have different keys."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def remove_folder(folder: Path) -> None:
    """Remove a folder at once: what another job makes under its name meanwhile is a new folder."""
    removed = folder.with_name(f'{folder.name}.{uuid.uuid4().hex[:8]}')
    with suppress(FileNotFoundError):
        folder.rename(removed)
        shutil.rmtree(removed, ignore_errors=True)


class StripStore:
    """The finished strips of a map in a hidden folder beside the map.

    A strip is written atomically, and its checksum is verified when it is read.

    Args:
        folder: Folder of the strips; created with the first strip.
        grid: Windows of the scene.
        confidence: Whether strips have a confidence plane.
        probabilities: Number of probability planes of a strip; 0 for none.
    """

    def __init__(self, folder: Path, grid: Grid, confidence: bool, probabilities: int = 0) -> None:
        self.folder, self._grid = folder, grid
        self._confidence, self._probabilities = int(confidence), probabilities

    def remove_damaged(self) -> None:
        """Read all finished strips, and remove the damaged ones."""
        for number in filter(self.has, range(self._grid.strip_count)):
            try:
                self.read(number)
            except PredictError:
                self._path(number).unlink()

    def has(self, number: int) -> bool:
        """Return whether a strip is there, damaged or not."""
        return self._path(number).exists()

    def write(self, strip: Strip) -> None:
        """Write a strip.

        Raises:
            PredictError: If the disk is full or the folder cannot be written.
        """
        planes = [
            strip.classes,
            *([] if strip.confidence is None else [strip.confidence]),
            *([] if strip.probabilities is None else strip.probabilities),
        ]
        packer = zlib.compressobj(_LEVEL)
        packed = [packer.compress(json.dumps(strip.damage).encode() + b'\n')]
        # Plane by plane, so that only the packed pixels are in memory twice.
        for plane in planes:
            packed.append(packer.compress(plane.tobytes()))
        data = b''.join(packed) + packer.flush()
        path = self._path(strip.number)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            atomic_write(path, data)
        except OSError as error:
            raise PredictError(
                f'cannot write {path}: {error}. Free space there, or write elsewhere with --out. '
                f'What is finished stays: the same command continues.'
            ) from error

    def read(self, number: int) -> Strip:
        """Return a strip.

        Raises:
            PredictError: If it is missing or damaged.
        """
        start, stop = self._grid.strip(number)
        left, right = self._grid.span(number)
        path = self._path(number)
        try:
            first = 1 + self._confidence
            shape = (first + self._probabilities, stop - start, right - left)
            unpacker = zlib.decompressobj()
            # Limited, because a damaged file of a few bytes may unpack into gigabytes.
            most = int(np.prod(shape)) + _MOST_DAMAGE
            content = unpacker.decompress(path.read_bytes(), most)
            if not unpacker.eof:
                raise ValueError('it is cut off, or longer than a strip')
            head, pixels = content.split(b'\n', 1)
            planes = np.frombuffer(pixels, np.uint8).reshape(shape)
            damage = parse_json(head)
            if not isinstance(damage, list) or not all(isinstance(line, str) for line in damage):
                raise ValueError('it does not say what could not be read')
            return Strip(
                number,
                planes[0],
                planes[1] if self._confidence else None,
                damage,
                planes[first:] if self._probabilities else None,
            )
        except FileNotFoundError as error:
            raise PredictError(
                f'{path} is missing. With several ranks, --out must be on a storage '
                f'that all of them share.'
            ) from error
        except (OSError, ValueError, zlib.error) as error:
            raise PredictError(
                f'{path} is damaged ({error}). Start the same command again: it '
                f'predicts these rows again.'
            ) from error

    def remove(self) -> None:
        """Remove the folder with all strips."""
        remove_folder(self.folder)

    def _path(self, number: int) -> Path:
        return self.folder / f'strip{number:06d}'
