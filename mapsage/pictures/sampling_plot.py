"""Picture of dynamic sampling in a run: eight charts over iterations, and kept and dropped samples.

It is drawn from the files that :mod:`sampling_records` reads. Tiles are placed without resampling,
at positions that :func:`tile_places` computes.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, Iterable, List, Optional, Sequence, Tuple, Union

import numpy as np

from . import tiles
from .canvas import FAINT, INK, Canvas, Legend, save_png
from .preview import legend_of
from .sampling_records import (
    COUNTS,
    SampleTiles,
    SamplingPlotError,
    TileBlock,
    headline,
    in_order,
    merged,
    read_steps,
    read_tiles,
    series,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# In pixels. Two blocks of four tiles of 96 pixels, with their labels, fill this width.
WIDTH, MARGIN, HEADER = 1760, 28, 82
# A panel is 350 pixels wide; with more points the line would look like a band.
MAX_POINTS = 160
_PANEL_WIDTH, _PANEL_HEIGHT, _PANEL_GAP, _PANELS_A_LINE = 408, 248, 24, 4
_AXES_LEFT, _AXES_RIGHT, _AXES_TOP, _AXES_BOTTOM = 56, 4, 44, 48
CHARTS_BOTTOM = HEADER + 2 * _PANEL_HEIGHT
_BLOCK_WIDTH, _BLOCK_GAP, _BLOCK_TITLE = 832, 40, 58
TILES_TOP = CHARTS_BOTTOM + _BLOCK_TITLE
_SPLIT, _CELL_GAP, _CAPTION, _LEGEND_GAP = 2, 14, 30, 14
# The smallest width with room for a caption.
_MIN_CELL = 194

# The palette of Okabe and Ito, which is distinguishable with every common color blindness
# (https://jfly.uni-koeln.de/color/), in the order of the stacks.
_LINE = '#0072b2'
_COLORS = {
    'shortfalls': dict(zip(COUNTS['shortfalls'], ('#e69f00', '#56b4e9', '#009e73', '#d55e00'))),
    'dropped': dict(
        zip(COUNTS['dropped'], ('#0072b2', '#e69f00', '#009e73', '#d55e00', '#b4b9c0', '#56b4e9'))
    ),
}
_SPARE = ('#cc79a7', '#f0e442', '#5b636d')


def plot_sampling(work_dir: Union[str, Path], out: Union[str, Path, None] = None) -> Path:
    """Draw the picture of a run and write it atomically.

    Args:
        work_dir: Work dir of the run.
        out: Path of the PNG file; its folder is created. None for
            ``WORK_DIR/dynamic_sampling.png``.

    Returns:
        Path of the picture.

    Raises:
        SamplingPlotError: If the run recorded nothing or a file is damaged.
        OSError: If the picture cannot be written.
    """
    folder = Path(work_dir)
    if not folder.is_dir():
        raise SamplingPlotError(
            f'the folder {folder} does not exist, expected the work_dir of a '
            'training with DynamicSamplingHook; give that folder'
        )
    records = folder / 'dynamic_sampling'
    rows = read_steps(records / 'steps.jsonl')
    pixels = render_sampling(
        rows, read_tiles(records / 'tiles.npz'), f'Dynamic sampling: {folder.resolve().name}'
    )
    path = folder / 'dynamic_sampling.png' if out is None else Path(out)
    save_png(str(path), pixels)
    return path


def _colors(key: str, names: Iterable[str]) -> Dict[str, str]:
    """Return colors for the known names of ``key`` and for further ``names``."""
    known = _COLORS[key]
    unknown = in_order(key, names)[len(known) :]
    return {**known, **{name: _SPARE[index % len(_SPARE)] for index, name in enumerate(unknown)}}


def render_sampling(
    rows: Sequence[Dict[str, Any]],
    samples: Optional[SampleTiles] = None,
    title: str = 'Dynamic sampling',
) -> np.ndarray:
    """Draw the picture.

    It is :data:`WIDTH` pixels wide. The tiles start at row :data:`TILES_TOP` and are not resampled.

    Args:
        rows: Result of :func:`read_steps`.
        samples: Result of :func:`read_tiles`; None for charts only.
        title: First line.

    Returns:
        Picture, RGB uint8 ``(H, W, 3)``.
    """
    blocks = [] if samples is None else [_in_order(samples.kept), _in_order(samples.dropped)]
    legend = Legend([] if samples is None else _legend(samples), WIDTH - 2 * MARGIN)
    bottom = max(
        [CHARTS_BOTTOM + _CAPTION] + [tile_places(block, 0)[1] + _LEGEND_GAP for block in blocks]
    )
    canvas = Canvas(WIDTH, bottom + legend.height + MARGIN)
    canvas.text(MARGIN, 32, title, size=15, weight='bold')
    points = merged(rows, MAX_POINTS)
    note = (
        ''
        if len(points) == len(rows)
        else f'  ·  charts: a point for {-(-len(rows) // MAX_POINTS)} log intervals'
    )
    canvas.text(MARGIN, 57, headline(rows) + note, size=11, color=FAINT)
    _draw_charts(canvas, points)
    if samples is None:
        canvas.text(
            MARGIN,
            CHARTS_BOTTOM + 26,
            'No tiles.npz: this run recorded no samples.',
            10,
            color=FAINT,
        )
    for index, block in enumerate(blocks):
        _draw_block(
            canvas,
            block,
            ('Kept', 'Dropped')[index],
            MARGIN + index * (_BLOCK_WIDTH + _BLOCK_GAP),
            samples.palette,  # type: ignore[union-attr]
        )
    legend.draw(canvas, MARGIN, bottom)
    return canvas.pixels()


# Title, label of the y axis, key in series() (or the prefix of several keys), factor, upper end.
_PANELS: Tuple[Tuple[str, str, str, float, Optional[float]], ...] = (
    ('Pass rate', '% of samples judged', 'pass_rate', 100, 100),
    ('Dropped, by reason', 'samples / step', 'dropped', 1, None),
    ('Resamples', 'resamples / step', 'resamples', 1, None),
    ('Shortfalls, by policy', '% of steps', 'shortfalls', 100, None),
    ('Samples moved between ranks', 'samples / step', 'moved_samples', 1, None),
    ('Data moved between ranks', 'MiB / step', 'moved_mib', 1, None),
    ('Surplus in the pool', 'samples', 'surplus', 1, None),
    ('Time spent sampling', '% of wall-clock time', 'time_share', 100, None),
)


def _draw_charts(canvas: Canvas, rows: Sequence[Dict[str, Any]]) -> None:
    arrays = series(rows)
    for index, (title, unit, key, factor, upper) in enumerate(_PANELS):
        left = MARGIN + index % _PANELS_A_LINE * (_PANEL_WIDTH + _PANEL_GAP)
        top = HEADER + index // _PANELS_A_LINE * _PANEL_HEIGHT
        canvas.text(left, top + 15, title, size=11, weight='bold')
        axes = canvas.axes(
            left + _AXES_LEFT,
            top + _AXES_TOP,
            _PANEL_WIDTH - _AXES_LEFT - _AXES_RIGHT,
            _PANEL_HEIGHT - _AXES_TOP - _AXES_BOTTOM,
        )
        if key in COUNTS:
            highest = factor * _stack(axes, arrays, key, factor)
        else:
            axes.plot(
                arrays['iter'],
                factor * arrays[key],
                color=_LINE,
                linewidth=1.2,
                marker='o',
                markersize=4 if len(rows) <= 40 else 1.5,
                clip_on=False,
            )
            highest = factor * float(np.nanmax([0, *arrays[key]]))
        _style(axes, unit, arrays, upper or 1.1 * highest or 1)


def _stack(axes: Axes, arrays: Dict[str, np.ndarray], key: str, factor: float) -> float:
    """Draw the counts of every interval as a stack and return the highest sum."""
    layers = {
        name.split('/', 1)[1]: np.nan_to_num(values)
        for name, values in arrays.items()
        if name.startswith(f'{key}/')
    }
    colors = _colors(key, layers)
    begin, end = arrays['begin'], arrays['iter']
    base = np.zeros(len(end))
    for name, values in layers.items():
        top = base + values
        # Every interval starts and ends at the base, so nothing is drawn where one is missing.
        axes.fill_between(
            np.stack([begin, begin, end, end], 1).ravel(),
            factor * np.repeat(base, 4),
            factor * np.stack([base, top, top, base], 1).ravel(),
            color=colors[name],
            linewidth=0,
            label=name,
        )
        base = top
    if layers:
        # Between title and axes, the legend hides no data.
        axes.legend(
            loc='lower left',
            bbox_to_anchor=(0, 1),
            ncol=len(layers),
            fontsize=7.5,
            frameon=False,
            borderaxespad=0,
            borderpad=0.2,
            handlelength=0.8,
            handletextpad=0.4,
            columnspacing=0.9,
        )
    else:
        axes.text(0.5, 0.5, 'none', transform=axes.transAxes, color=FAINT, ha='center')
    return float(base.max())


def _style(axes: Axes, unit: str, arrays: Dict[str, np.ndarray], upper: float) -> None:
    axes.set_xlim(arrays['begin'].min(), max(arrays['iter'][-1], arrays['begin'].min() + 1))
    axes.set_ylim(0, upper)
    axes.set_xlabel('iteration', fontsize=8.5, color=FAINT, labelpad=2)
    axes.set_ylabel(unit, fontsize=8.5, color=FAINT)
    axes.locator_params(axis='y', nbins=5)
    axes.locator_params(axis='x', nbins=6, integer=True)
    axes.ticklabel_format(style='plain', useOffset=False)
    axes.tick_params(labelsize=8.5, colors=FAINT, labelcolor=INK, length=3)
    axes.grid(axis='y', color='#e3e6ea', linewidth=0.8)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ('left', 'bottom'))
        spine.set_color('#a8aeb6')


def _in_order(block: TileBlock) -> TileBlock:
    """Return the samples sorted by reason, then by decreasing score, with NaN last."""
    if not block.reasons:
        return block
    ranks = {name: rank for rank, name in enumerate(_colors('dropped', block.reasons))}
    by_reason = np.array([ranks.get(reason, -1) for reason in block.reasons])
    order = np.lexsort((-block.scores, by_reason))
    return TileBlock(
        block.images[order],
        block.labels[order],
        block.scores[order],
        block.iters[order],
        tuple(block.reasons[index] for index in order),
    )


def tile_places(block: TileBlock, left: int) -> Tuple[List[Tuple[int, int]], int]:
    """Return the (left, top) pixels of the images, and the first row below all of them.

    Args:
        block: Samples, with sides of T pixels. The labels are T + 2 pixels to the right of their
            image.
        left: Left edge of the block in pixels.
    """
    if not block.reasons:
        return [], TILES_TOP + _CAPTION
    side = block.images.shape[1]
    cell = max(2 * side + _SPLIT, _MIN_CELL)
    columns = (_BLOCK_WIDTH + _CELL_GAP) // (cell + _CELL_GAP)
    lines = -(-len(block.reasons) // columns)
    return (
        [
            (
                left + index % columns * (cell + _CELL_GAP),
                TILES_TOP + index // columns * (side + _CAPTION),
            )
            for index in range(len(block.reasons))
        ],
        TILES_TOP + lines * (side + _CAPTION),
    )


def _draw_block(
    canvas: Canvas, block: TileBlock, name: str, left: int, palette: np.ndarray
) -> None:
    canvas.text(left, CHARTS_BOTTOM + 26, name, size=12, weight='bold')
    dropped = any(block.reasons)
    note = (
        f'{len(block.reasons)} samples, {"by reason and " if dropped else ""}highest score '
        f'first: image, labels; score, {"reason, " if dropped else ""}iteration'
        if block.reasons
        else 'No sample was recorded.'
    )
    canvas.text(left, CHARTS_BOTTOM + 46, note, size=9, color=FAINT)
    for index, (x, y) in enumerate(tile_places(block, left)[0]):
        side, baseline = block.images.shape[1], y + block.images.shape[1] + 16
        canvas.picture(x, y, block.images[index])
        canvas.picture(x + side + _SPLIT, y, tiles.color_labels(block.labels[index], palette))
        canvas.text(x, baseline, _significant(float(block.scores[index])), 8.5, 'bold')
        canvas.text(x + 77, baseline, block.reasons[index], 8.5)
        canvas.text(
            x + (151 if dropped else 77), baseline, str(block.iters[index]), 8.5, color=FAINT
        )


def _significant(score: float) -> str:
    """Return a number with three significant digits."""
    return f'{score:#.3g}'.rstrip('.') if math.isfinite(score) else str(score)


def _legend(samples: SampleTiles) -> List[Tuple[str, np.ndarray]]:
    """Return (name, 18x18 swatch) pairs, of a long class list only for classes in the picture."""
    labels = np.unique(np.append(samples.kept.labels, samples.dropped.labels))
    is_class = tiles.is_class(labels, len(samples.classes))
    entries, _ = legend_of([labels[is_class]], samples.classes, samples.palette)
    if not is_class.all():
        entries.append(('no class', tiles.hatch(18, 18)))
    return entries
