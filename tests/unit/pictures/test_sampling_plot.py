"""The picture of dynamic sampling: its tiles pixel by pixel, its charts, its refusals."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Dict, Sequence

import cv2
import numpy as np
import pytest
from sampling_files import (
    PALETTE,
    SIDE,
    record,
    row,
    tile_arrays,
    write_tiles,
)
from warm_python import warm_python

from mapsage.pictures import tiles
from mapsage.pictures.sampling_plot import (
    _BLOCK_GAP,
    _BLOCK_WIDTH,
    CHARTS_BOTTOM,
    MARGIN,
    TILES_TOP,
    WIDTH,
    SamplingPlotError,
    _in_order,
    _significant,
    plot_sampling,
    read_steps,
    read_tiles,
    render_sampling,
    tile_places,
)


def test_missing_records_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(SamplingPlotError, match='none does not exist, .*DynamicSamplingHook'):
        plot_sampling(tmp_path / 'none')
    with pytest.raises(SamplingPlotError, match='steps.jsonl does not exist, .*train with Dyn'):
        plot_sampling(tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_tiles_are_in_the_picture_pixel_for_pixel(tmp_path: Path) -> None:
    samples = read_tiles(write_tiles(tmp_path))
    assert samples is not None
    picture = render_sampling([row(50), row(100)], samples)
    shown = 0
    for block, left in (
        (samples.kept, MARGIN),
        (samples.dropped, MARGIN + _BLOCK_WIDTH + _BLOCK_GAP),
    ):
        ordered = _in_order(block)
        for index, (x, y) in enumerate(tile_places(ordered, left)[0]):
            labels = tiles.color_labels(ordered.labels[index], PALETTE)
            assert (picture[y : y + SIDE, x : x + SIDE] == ordered.images[index]).all()
            assert (picture[y : y + SIDE, x + SIDE + 2 : x + 2 * SIDE + 2] == labels).all()
            shown += 1
    assert shown == 11
    assert tile_places(samples.kept, MARGIN)[0][0] == (MARGIN, TILES_TOP)


def test_the_picture_has_the_documented_size(tmp_path: Path) -> None:
    charts = render_sampling([row(50)])
    assert charts.dtype == np.uint8 and charts.shape[1:] == (WIDTH, 3)
    assert CHARTS_BOTTOM < charts.shape[0] < TILES_TOP + SIDE
    heights = []
    for count in (0, 4, 5, 24):
        path = write_tiles(tmp_path, **tile_arrays(count, 1))
        picture = render_sampling([row(50)], read_tiles(path))
        assert picture.shape[1] == WIDTH
        heights.append(picture.shape[0])
    # Four tiles per line, with 30 pixels of caption below.
    assert [height - heights[1] for height in heights] == [0, 0, SIDE + 30, 5 * (SIDE + 30)]


@pytest.mark.parametrize('side', [1, 64, 415])
def test_tiles_of_other_sizes_stay_inside_their_block(tmp_path: Path, side: int) -> None:
    samples = read_tiles(write_tiles(tmp_path, **tile_arrays(24, 3, side)))
    assert samples is not None
    positions, _ = tile_places(samples.kept, 0)
    assert len(set(positions)) == 24
    assert max(x for x, _ in positions) + 2 * side + 2 <= _BLOCK_WIDTH
    render_sampling([row(50)], samples)


@pytest.mark.parametrize('kept, dropped', [(0, 0), (0, 3), (3, 0)])
def test_a_kind_may_have_no_tiles(tmp_path: Path, kept: int, dropped: int) -> None:
    samples = read_tiles(write_tiles(tmp_path, **tile_arrays(kept, dropped)))
    assert render_sampling([row(50)], samples).shape[1] == WIDTH


def test_tiles_are_ordered_by_reason_and_score(tmp_path: Path) -> None:
    samples = read_tiles(
        write_tiles(tmp_path, dropped_scores=np.array([1.5, np.nan, 3, 0.2, 2, 0.1]))
    )
    assert samples is not None
    ordered = _in_order(samples.dropped)
    assert ordered.reasons == ('too_low',) * 3 + ('too_high',) * 3
    assert ordered.iters.tolist() == [3, 5, 1, 2, 4, 0]
    assert (ordered.images[0] == samples.dropped.images[3]).all()
    assert _in_order(samples.kept).scores.tolist() == sorted(samples.kept.scores, reverse=True)


@pytest.mark.parametrize(
    'score, shown',
    [
        (0.5, '0.500'),
        (12.345, '12.3'),
        (100.2, '100'),
        (0.000012345, '1.23e-05'),
        (0, '0.00'),
        (float('nan'), 'nan'),
        (-float('inf'), '-inf'),
    ],
)
def test_scores_have_three_significant_digits(score: float, shown: str) -> None:
    assert _significant(score) == shown


@pytest.mark.parametrize('iters, width', [((50, 100), 1 / 2), ((50, 200), 1 / 4)])
def test_the_charts_show_dropped_samples_and_no_missing_interval(
    iters: Sequence[int], width: float
) -> None:
    def blue(*dropped: Dict[str, int]) -> int:
        pixels = render_sampling(
            [row(iteration, dropped=counts) for iteration, counts in zip(iters, dropped)]
        )
        return int((pixels == np.array([0x00, 0x72, 0xB2], np.uint8)).all(axis=2).sum())

    one = {'too_low': 300, 'expired': 100}
    # The chart has 348 x 156 pixels, and the tallest stack takes 1/1.1 of its height. `width` is
    # the share of the chart's width that an interval takes.
    height = 156 / 1.1 * 300 / 400
    assert abs((blue(one, {}) - blue({}, {})) / (348 * width * height) - 1) < 0.05
    assert abs((blue(one, one) - blue({}, {})) / (348 * 2 * width * height) - 1) < 0.05


def test_the_picture_is_written_atomically(tmp_path: Path) -> None:
    record(tmp_path, [row(50)], torn='{"iter')
    write_tiles(tmp_path)
    path = plot_sampling(tmp_path)
    assert path == tmp_path / 'dynamic_sampling.png'
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        'dynamic_sampling',
        'dynamic_sampling.png',
    ]
    expected = render_sampling(
        read_steps(tmp_path / 'dynamic_sampling' / 'steps.jsonl'),
        read_tiles(tmp_path / 'dynamic_sampling' / 'tiles.npz'),
        f'Dynamic sampling: {tmp_path.name}',
    )
    assert (cv2.imread(str(path))[:, :, ::-1] == expected).all()
    out = tmp_path / 'new' / 'a.png'
    assert plot_sampling(tmp_path, out) == out
    assert out.read_bytes() == path.read_bytes()


def test_a_picture_that_cannot_be_written_leaves_no_file(tmp_path: Path) -> None:
    record(tmp_path, [row(50)])
    out = tmp_path / 'pictures'
    out.mkdir()
    with pytest.raises(OSError):
        plot_sampling(tmp_path, out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ['dynamic_sampling', 'pictures']


def test_the_tool_prints_the_path_or_what_is_wrong(tmp_path: Path) -> None:
    tool = Path(__file__).resolve().parents[3] / 'tools' / 'plot_sampling.py'

    def plot(*arguments: object) -> 'subprocess.CompletedProcess[str]':
        return subprocess.run(
            [warm_python(), str(tool), *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            universal_newlines=True,
        )

    failed = plot(tmp_path)
    assert failed.returncode == 1
    assert failed.stderr.strip().splitlines()[-1].startswith('SamplingPlotError: ')
    assert 'Traceback' not in failed.stderr
    record(tmp_path, [row(50)])
    done = plot(tmp_path, '--out', tmp_path / 'b.png')
    assert (done.returncode, done.stdout.strip()) == (0, str(tmp_path / 'b.png')), done.stderr
    assert cv2.imread(str(tmp_path / 'b.png')).shape[1] == WIDTH
