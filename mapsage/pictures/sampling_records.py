"""Records of a run with dynamic sampling.

Rank 0 writes two files into ``WORK_DIR/dynamic_sampling/``: ``steps.jsonl`` has sums over all
ranks, one line per log interval; ``tiles.npz`` has a few kept and dropped samples. A killed run
may leave an incomplete last line, and a resumed run repeats iterations; `read_steps` handles both.

Shapes:
    images  (N, T, T, 3)  RGB uint8
    labels  (N, T, T)     integers; labels that are not a class mean no data
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterable, List, Optional, Sequence, Tuple, Union

import numpy as np

from mapsage.base.errors import UserError
from mapsage.base.files import parse_json

from . import tiles

_SUMS = (
    'steps',
    'attempts',
    'judged',
    'passed',
    'moved_samples',
    'sent_bytes',
    'surplus',
    'seconds',
    'interval_seconds',
)
# Counts by name, in the order of lists and stacks.
COUNTS = dict(
    shortfalls=('fallback', 'pad', 'shrink', 'raise'),
    dropped=('too_low', 'too_high', 'no_spread', 'not_finite', 'expired', 'surplus'),
)
# The longest side of a tile, in pixels, that fits the picture.
MAX_SIDE = 415


# How many braces of a line are tried as the begin of its object.
_MAX_BRACES = 64


class SamplingPlotError(UserError, ValueError):
    """The files of dynamic sampling are missing or unreadable."""


@dataclass(frozen=True)
class TileBlock:
    """N samples of one kind; N may be 0.

    Attributes:
        images: Images, RGB uint8 ``(N, T, T, 3)``.
        labels: Label maps, integers ``(N, T, T)``; labels that are not a class mean no data.
        scores: Scores, floats ``(N,)``.
        iters: Iterations in which the samples were judged, integers ``(N,)``.
        reasons: Reasons why the samples were dropped; ``''`` for kept samples.
    """

    images: np.ndarray
    labels: np.ndarray
    scores: np.ndarray
    iters: np.ndarray
    reasons: Tuple[str, ...]


@dataclass(frozen=True)
class SampleTiles:
    """The content of ``tiles.npz``.

    Attributes:
        kept: Samples that passed.
        dropped: Samples that did not pass.
        palette: Colors of the classes, RGB uint8 ``(C, 3)``.
        classes: Names of the C classes.
    """

    kept: TileBlock
    dropped: TileBlock
    palette: np.ndarray
    classes: Tuple[str, ...]


def read_steps(path: Union[str, Path]) -> List[Dict[str, Any]]:
    """Read ``steps.jsonl`` as the history of the current weights, with increasing iterations.

    If a resumed run repeats iterations, its records replace the earlier ones. The last line may be
    incomplete.

    Args:
        path: Path of the file.

    Returns:
        One dict per log interval, at least one.

    Raises:
        SamplingPlotError: If there is no file or no complete line, or a line has another format.
    """
    path = Path(path)
    if not path.is_file():
        raise SamplingPlotError(
            f'{path} does not exist, expected the records of dynamic sampling; '
            'train with DynamicSamplingHook first'
        )
    lines = path.read_text(encoding='utf-8', errors='replace').splitlines()
    rows: List[Dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        row = _parse(line)
        if row is None:
            if line.strip() and number < len(lines):
                raise SamplingPlotError(
                    f'line {number} of {path} is {line[:60]!r}, expected a '
                    'JSON object; remove this line'
                )
            continue
        _check_row(row, f'line {number} of {path}')
        while rows and rows[-1]['iter'] >= row['iter']:
            rows.pop()
        rows.append(row)
    if not rows:
        raise SamplingPlotError(
            f'{path} holds no whole line yet; train with DynamicSamplingHook '
            'for at least one log interval'
        )
    return rows


def _parse(line: str) -> Optional[Dict[str, Any]]:
    """Return the object of a line, also if it follows an incomplete object on the same line."""
    # A row has fewer braces; each of them begins a text that is parsed.
    for begin in [index for index, letter in enumerate(line) if letter == '{'][:_MAX_BRACES]:
        try:
            # Text that starts inside an object cannot be parsed: it has one closing brace too many.
            row: Dict[str, Any] = parse_json(line[begin:])
        except ValueError:
            continue
        return row
    return None


def _check_row(row: Dict[str, Any], where: str) -> None:
    """Raise an error unless all numbers that the picture needs are present."""
    for key in ('iter', *_SUMS):
        if not _is_number(row.get(key)):
            raise SamplingPlotError(
                f'{key} in {where} is {row.get(key)!r}, expected a number; '
                'plot with the version of MapSage that trained'
            )
    for key in COUNTS:
        counts = row.get(key)
        if not isinstance(counts, dict) or not all(map(_is_number, counts.values())):
            raise SamplingPlotError(
                f'{key} in {where} is {counts!r}, expected an object of '
                'numbers; plot with the version of MapSage that trained'
            )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def series(rows: Sequence[Dict[str, Any]]) -> Dict[str, np.ndarray]:
    """Return the values of the charts: key -> float64 array ``(len(rows),)``.

    The keys are ``begin`` and ``iter`` (the interval is ``(begin, iter]``); ``pass_rate``, the
    share of judged samples that passed; ``resamples``, ``moved_samples`` and ``moved_mib``, all per
    step; ``surplus``, a number of samples; ``time_share``, the share of wall-clock time spent on
    sampling; ``shortfalls/POLICY`` and ``dropped/REASON``, per step, in the order of the stacks. A
    ratio with denominator 0 is NaN.

    Args:
        rows: Result of :func:`read_steps`.
    """
    columns = {
        key: np.array([row[key] for row in rows], dtype=np.float64) for key in ('iter', *_SUMS)
    }
    steps = columns['steps']
    arrays = dict(
        begin=columns['iter'] - steps,
        iter=columns['iter'],
        surplus=columns['surplus'],
        pass_rate=_ratio(columns['passed'], columns['judged']),
        resamples=_ratio(columns['attempts'], steps),
        moved_samples=_ratio(columns['moved_samples'], steps),
        moved_mib=_ratio(columns['sent_bytes'] / 2**20, steps),
        time_share=_ratio(columns['seconds'], columns['interval_seconds']),
    )
    for key in COUNTS:
        for name in in_order(key, {name for row in rows for name in row[key]}):
            counts = np.array([row[key].get(name, 0) for row in rows], dtype=np.float64)
            if counts.any():
                arrays[f'{key}/{name}'] = _ratio(counts, steps)
    return arrays


def merged(rows: Sequence[Dict[str, Any]], at_most: int) -> List[Dict[str, Any]]:
    """Merge consecutive intervals, so that a long run has few points.

    A merged row has sums over its intervals, and the surplus and iteration of the last interval.

    Args:
        rows: Result of :func:`read_steps`.
        at_most: Largest number of rows to return.
    """
    size = -(-len(rows) // at_most)
    merged_rows = []
    for begin in range(0, len(rows), size):
        group = rows[begin : begin + size]
        merged_row: Dict[str, Any] = {key: sum(row[key] for row in group) for key in _SUMS}
        merged_row.update(
            {key: _sum_by_name([row[key] for row in group]) for key in COUNTS},
            iter=group[-1]['iter'],
            surplus=group[-1]['surplus'],
        )
        merged_rows.append(merged_row)
    return merged_rows


def in_order(key: str, names: Iterable[str]) -> List[str]:
    """Return the known names of ``key`` in :data:`COUNTS`, then the rest of ``names``, sorted."""
    return [*COUNTS[key], *sorted(set(names) - set(COUNTS[key]))]


def _sum_by_name(counts: Sequence[Dict[str, int]]) -> Dict[str, int]:
    names = sorted({name for count in counts for name in count})
    return {name: sum(count.get(name, 0) for count in counts) for name in names}


def _ratio(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    return np.divide(
        numerator, denominator, out=np.full(numerator.shape, np.nan), where=denominator > 0
    )


def headline(rows: Sequence[Dict[str, Any]]) -> str:
    """Return a line with the totals: steps, pass rate, dropped samples, shortfalls."""
    total = {key: sum(row[key] for row in rows) for key in _SUMS}
    judged = f'{total["judged"]:,} samples judged'
    policies = _sum_by_name([row['shortfalls'] for row in rows])
    listed = ', '.join(
        f'{name} {policies[name]:,}'
        for name in in_order('shortfalls', policies)
        if policies.get(name)
    )
    return '  ·  '.join(
        [
            f'{total["steps"]:,} steps, up to iteration {rows[-1]["iter"]:,}',
            f'pass rate {100 * total["passed"] / total["judged"]:.1f} % of {judged}'
            if total['judged']
            else 'no sample judged',
            f'{sum(sum(row["dropped"].values()) for row in rows):,} samples dropped',
            f'{sum(policies.values()):,} shortfalls{f" ({listed})" if listed else ""}',
        ]
    )


def read_tiles(path: Union[str, Path]) -> Optional[SampleTiles]:
    """Read ``tiles.npz``; return None if there is no such file.

    Raises:
        SamplingPlotError: If the file is damaged or has another content.
    """
    path = Path(path)
    if not path.is_file():
        return None
    try:
        with np.load(str(path), allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        classes = tuple(str(name) for name in arrays['classes'])
        return SampleTiles(
            _block(arrays, 'kept'),
            _block(arrays, 'dropped'),
            tiles.class_palette(len(classes), arrays['palette']),
            classes,
        )
    except Exception as error:
        # A damaged file raises classes of zipfile, zlib, ast or NumPy.
        reason = f'no {error}' if isinstance(error, KeyError) else error or type(error).__name__
        raise SamplingPlotError(
            f'{path} cannot be read ({reason}), expected the tiles that '
            'DynamicSamplingHook writes; remove the file to plot without '
            'them'
        ) from error


def _block(arrays: Dict[str, np.ndarray], kind: str) -> TileBlock:
    images, labels, scores, iters = (
        arrays[f'{kind}_{name}'] for name in ('images', 'labels', 'scores', 'iters')
    )
    reasons = arrays['dropped_reasons'] if kind == 'dropped' else np.full(len(images), '')
    count, side = len(images), images.shape[1] if images.ndim == 4 else 0
    shapes = [array.shape for array in (images, labels, scores, iters, reasons)]
    if count and (
        shapes != [(count, side, side, 3), (count, side, side)] + 3 * [(count,)]
        or not 1 <= side <= MAX_SIDE
        or images.dtype != np.uint8
        or labels.dtype.kind not in 'iu'
    ):
        raise ValueError(
            f'{kind} tiles of {images.dtype} and {labels.dtype} have shapes {shapes}, '
            f'expected uint8 images (N, T, T, 3), integer labels (N, T, T) and three '
            f'(N,), T up to {MAX_SIDE}'
        )
    return TileBlock(images, labels, scores, iters, tuple(str(reason) for reason in reasons))
