"""The picture of dynamic sampling: its numbers by hand, its tiles pixel by pixel, its refusals."""
from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any, Dict, List, Sequence

import cv2
import numpy as np
import pytest
from warm_python import warm_python

from mapsage.drawing import tiles
from mapsage.drawing.sampling_plot import (
    _BLOCK_GAP,
    _BLOCK_WIDTH,
    CHARTS_BOTTOM,
    MARGIN,
    MAX_POINTS,
    TILES_TOP,
    WIDTH,
    SamplingPlotError,
    _in_order,
    _significant,
    headline,
    merged,
    plot_sampling,
    read_steps,
    read_tiles,
    render_sampling,
    series,
    tile_places,
)

CLASSES = ('land', 'water')
PALETTE = np.array([[0, 90, 0], [0, 0, 255]], dtype=np.uint8)
SIDE = 96


def row(iteration: int, **changes: Any) -> Dict[str, Any]:
    figures: Dict[str, Any] = dict(
        iter=iteration, steps=50, attempts=10, rounds=14, judged=800, passed=400, not_finite=0,
        missing=3, moved_samples=100, sent_bytes=25 * 2**20, fetched=800, used=400, replicated=0,
        unfiltered=0, surplus=4, seconds=2.0, interval_seconds=40.0, shortfalls={'fallback': 1},
        dropped={'too_low': 300, 'expired': 100}, world_size=8, global_target=16)
    figures.update(changes)
    return figures


def record(folder: Path, rows: Sequence[Dict[str, Any]], torn: str = '') -> Path:
    """Write a run's steps.jsonl and return its path."""
    path = folder / 'dynamic_sampling' / 'steps.jsonl'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(''.join(json.dumps(each) + '\n' for each in rows) + torn)
    return path


def tile_arrays(kept: int = 5, dropped: int = 6, side: int = SIDE) -> Dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    arrays: Dict[str, np.ndarray] = dict(palette=PALETTE, classes=np.array(CLASSES))
    for kind, count in (('kept', kept), ('dropped', dropped)):
        arrays.update({
            f'{kind}_images': rng.integers(0, 256, (count, side, side, 3), dtype=np.uint8),
            f'{kind}_labels': rng.choice(np.array([0, 1, 255], np.uint8), (count, side, side)),
            f'{kind}_scores': np.linspace(0.1, 0.9, count),
            f'{kind}_iters': np.arange(count, dtype=np.int64)})
    arrays['dropped_reasons'] = np.array(['too_high', 'too_low'] * 12)[:dropped]
    return arrays


def write_tiles(folder: Path, **changes: np.ndarray) -> Path:
    path = folder / 'dynamic_sampling' / 'tiles.npz'
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(str(path), **dict(tile_arrays(), **changes))
    return path


def iterations(rows: Sequence[Dict[str, Any]]) -> List[int]:
    return [each['iter'] for each in rows]


def test_the_series_are_these_numbers() -> None:
    arrays = series([
        row(50),
        row(75, steps=25, attempts=50, judged=400, passed=100, moved_samples=75, surplus=9,
            sent_bytes=2**20 * 50, seconds=5.0, interval_seconds=20.0,
            shortfalls={'pad': 5, 'fallback': 10}, dropped={'not_finite': 50, 'too_low': 250})])
    expected = {
        'begin': [0, 50], 'iter': [50, 75], 'pass_rate': [0.5, 0.25], 'resamples': [0.2, 2],
        'moved_samples': [2, 3], 'moved_mib': [0.5, 2], 'surplus': [4, 9],
        'time_share': [0.05, 0.25], 'shortfalls/fallback': [0.02, 0.4], 'shortfalls/pad': [0, 0.2],
        'dropped/too_low': [6, 10], 'dropped/not_finite': [0, 2], 'dropped/expired': [2, 0]}
    assert set(arrays) == set(expected)
    for name, values in expected.items():
        np.testing.assert_allclose(arrays[name], values, err_msg=name)
    assert [name for name in arrays if '/' in name] == [
        'shortfalls/fallback', 'shortfalls/pad', 'dropped/too_low', 'dropped/not_finite',
        'dropped/expired']


def test_unknown_reasons_come_last_and_zeros_not_at_all() -> None:
    arrays = series([row(50, shortfalls={'pad': 0}, dropped={'new': 50, 'surplus': 50})])
    assert [name for name in arrays if '/' in name] == ['dropped/surplus', 'dropped/new']


def test_a_ratio_of_nothing_is_nan() -> None:
    rows = [row(50, judged=0, passed=0, steps=0, interval_seconds=0, dropped={'too_low': 1})]
    arrays = series(rows)
    for name in ('pass_rate', 'resamples', 'time_share', 'dropped/too_low'):
        assert np.isnan(arrays[name]).all(), name
    assert 'no sample judged' in headline(rows)
    assert render_sampling(rows).shape[1] == WIDTH


def test_the_headline_holds_the_totals() -> None:
    rows = [row(50), row(100, judged=1200, passed=300, shortfalls={'raise': 2, 'fallback': 1})]
    assert headline(rows).split('  ·  ') == [
        '100 steps, up to iteration 100', 'pass rate 35.0 % of 2,000 samples judged',
        '800 samples dropped', '4 shortfalls (fallback 2, raise 2)']
    assert headline([row(50, shortfalls={}, dropped={})]).endswith(
        '0 samples dropped  ·  0 shortfalls')


def test_a_long_run_is_merged_to_few_points_with_the_same_totals() -> None:
    rows = [row(50 * (index + 1), surplus=index, judged=800 + index) for index in range(7)]
    few = merged(rows, 3)
    assert iterations(few) == [150, 300, 350]
    assert [each['surplus'] for each in few] == [2, 5, 6]
    assert [each['judged'] for each in few] == [2403, 2412, 806]
    assert few[0]['dropped'] == {'too_low': 900, 'expired': 300}
    assert headline(few) == headline(rows)
    assert series(few)['begin'].tolist() == [0, 150, 300]
    for name, values in series(merged(rows, 7)).items():
        np.testing.assert_array_equal(values, series(rows)[name])
    many = [row(50 * (index + 1)) for index in range(MAX_POINTS + 1)]
    assert len(merged(many, MAX_POINTS)) <= MAX_POINTS


def test_a_resumed_run_has_one_history(tmp_path: Path) -> None:
    path = record(tmp_path, [row(50), row(100, judged=1), row(150), row(100, judged=2), row(125)])
    rows = read_steps(path)
    assert iterations(rows) == [50, 100, 125]
    assert rows[1]['judged'] == 2
    assert iterations(read_steps(record(tmp_path, [row(50), row(100), row(100)]))) == [50, 100]


@pytest.mark.parametrize('cut', [1, 5, 60, 200, -1])
def test_a_torn_last_line_is_ignored(tmp_path: Path, cut: int) -> None:
    path = record(tmp_path, [row(50)], torn=json.dumps(row(100))[:cut])
    assert iterations(read_steps(path)) == [50]


def test_a_line_that_a_resumed_run_glued_to_a_torn_one_counts(tmp_path: Path) -> None:
    torn = json.dumps(row(100))
    for cut in (1, 60, torn.index('fallback') + 3, len(torn) - 1):
        path = record(tmp_path, [row(50)], torn[:cut] + json.dumps(row(75)) + '\n\n'
                      + json.dumps(row(125)) + '\n')
        assert iterations(read_steps(path)) == [50, 75, 125], cut


def test_further_keys_are_ignored(tmp_path: Path) -> None:
    assert iterations(read_steps(record(tmp_path, [row(50, new={'a': [1]}, other=None)]))) == [50]


@pytest.mark.parametrize('text, message', [
    ('', 'no whole line yet; train'),
    ('{"iter": 50', 'no whole line yet; train'),
    ('nonsense\n{"iter": 50}\n', 'line 1 of .*steps.jsonl is .nonsense., expected'),
    ('{"iter": 50}\n', 'steps in line 1 of .*steps.jsonl is None, expected a number; plot with'),
    (json.dumps(row(50, judged='8')), "judged in line 1 of .* is '8', expected a number"),
    (json.dumps(row(50, judged=True)), 'judged in line 1'),
    (json.dumps(row(50, judged={'a': 1})), 'judged in line 1'),
    (json.dumps(row(50, dropped=3)) + '\n', 'dropped in line 1 of .* is 3, expected an object'),
    (json.dumps(row(50, dropped={'too_low': None})) + '\n', 'dropped in line 1'),
])
def test_wrong_lines_are_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / 'steps.jsonl'
    path.write_text(text)
    with pytest.raises(SamplingPlotError, match=message):
        read_steps(path)


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
    for block, left in ((samples.kept, MARGIN),
                        (samples.dropped, MARGIN + _BLOCK_WIDTH + _BLOCK_GAP)):
        ordered = _in_order(block)
        for index, (x, y) in enumerate(tile_places(ordered, left)[0]):
            labels = tiles.color_labels(ordered.labels[index], PALETTE)
            assert (picture[y:y + SIDE, x:x + SIDE] == ordered.images[index]).all()
            assert (picture[y:y + SIDE, x + SIDE + 2:x + 2 * SIDE + 2] == labels).all()
            shown += 1
    assert shown == 11
    assert tile_places(samples.kept, MARGIN)[0][0] == (MARGIN, TILES_TOP)


def test_the_picture_has_the_documented_size(tmp_path: Path) -> None:
    alone = render_sampling([row(50)])
    assert alone.dtype == np.uint8 and alone.shape[1:] == (WIDTH, 3)
    assert CHARTS_BOTTOM < alone.shape[0] < TILES_TOP + SIDE
    heights = []
    for count in (0, 4, 5, 24):
        path = write_tiles(tmp_path, **tile_arrays(count, 1))
        picture = render_sampling([row(50)], read_tiles(path))
        assert picture.shape[1] == WIDTH
        heights.append(picture.shape[0])
    # Four tiles a line, 30 pixels of caption below each.
    assert [height - heights[1] for height in heights] == [0, 0, SIDE + 30, 5 * (SIDE + 30)]


@pytest.mark.parametrize('side', [1, 64, 415])
def test_tiles_of_other_sizes_stay_inside_their_block(tmp_path: Path, side: int) -> None:
    samples = read_tiles(write_tiles(tmp_path, **tile_arrays(24, 3, side)))
    assert samples is not None
    places, _ = tile_places(samples.kept, 0)
    assert len(set(places)) == 24
    assert max(x for x, _ in places) + 2 * side + 2 <= _BLOCK_WIDTH
    render_sampling([row(50)], samples)


@pytest.mark.parametrize('kept, dropped', [(0, 0), (0, 3), (3, 0)])
def test_a_kind_may_have_no_tiles(tmp_path: Path, kept: int, dropped: int) -> None:
    samples = read_tiles(write_tiles(tmp_path, **tile_arrays(kept, dropped)))
    assert render_sampling([row(50)], samples).shape[1] == WIDTH


def test_tiles_are_ordered_by_reason_and_score(tmp_path: Path) -> None:
    samples = read_tiles(write_tiles(
        tmp_path, dropped_scores=np.array([1.5, np.nan, 3, 0.2, 2, 0.1])))
    assert samples is not None
    ordered = _in_order(samples.dropped)
    assert ordered.reasons == ('too_low',) * 3 + ('too_high',) * 3
    assert ordered.iters.tolist() == [3, 5, 1, 2, 4, 0]
    assert (ordered.images[0] == samples.dropped.images[3]).all()
    assert _in_order(samples.kept).scores.tolist() == sorted(samples.kept.scores, reverse=True)


@pytest.mark.parametrize('score, shown', [
    (0.5, '0.500'), (12.345, '12.3'), (100.2, '100'), (0.000012345, '1.23e-05'), (0, '0.00'),
    (float('nan'), 'nan'), (-float('inf'), '-inf')])
def test_scores_have_three_significant_digits(score: float, shown: str) -> None:
    assert _significant(score) == shown


def test_damaged_tiles_are_named(tmp_path: Path) -> None:
    path = write_tiles(tmp_path)
    whole = path.read_bytes()
    for damaged in (b'', whole[:len(whole) // 2], b'PK' + whole[:40], b'nonsense',
                    whole[:300] + bytes(200) + whole[500:]):
        path.write_bytes(damaged)
        with pytest.raises(SamplingPlotError, match='tiles.npz cannot be read .*remove the file'):
            read_tiles(path)


@pytest.mark.parametrize('changes, message', [
    (dict(kept_images=np.zeros((5, SIDE, SIDE), np.uint8)), 'kept tiles of uint8'),
    (dict(kept_images=np.zeros((5, SIDE, SIDE, 3))), 'kept tiles of float64'),
    (dict(dropped_labels=np.zeros((6, SIDE, 9), np.uint8)), 'dropped tiles'),
    (dict(dropped_labels=np.zeros((6, SIDE, SIDE))), 'dropped tiles of uint8 and float64'),
    (dict(dropped_scores=np.zeros(5)), 'dropped tiles'),
    (dict(dropped_reasons=np.array(['too_low'])), 'dropped tiles'),
    (tile_arrays(side=416), 'T up to 415'),
    (dict(palette=np.zeros((2, 4))), 'palette'),
    (dict(classes=np.array([None, {}])), 'allow_pickle'),
])
def test_other_arrays_are_refused(tmp_path: Path, changes: Dict[str, Any], message: str) -> None:
    with pytest.raises(SamplingPlotError, match=message):
        read_tiles(write_tiles(tmp_path, **changes))


def test_a_missing_array_is_named(tmp_path: Path) -> None:
    path = tmp_path / 'tiles.npz'
    arrays = tile_arrays()
    del arrays['kept_iters']
    np.savez_compressed(str(path), **arrays)
    with pytest.raises(SamplingPlotError, match=r"tiles.npz cannot be read \(no 'kept_iters'\)"):
        read_tiles(path)


@pytest.mark.parametrize('iters, part', [((50, 100), 1 / 2), ((50, 200), 1 / 4)])
def test_the_charts_show_what_was_dropped_and_no_missing_interval(iters: Sequence[int],
                                                                  part: float) -> None:
    def blue(*dropped: Dict[str, int]) -> int:
        pixels = render_sampling([row(each, dropped=counts)
                                  for each, counts in zip(iters, dropped)])
        return int((pixels == np.array([0x00, 0x72, 0xb2], np.uint8)).all(axis=2).sum())

    one = {'too_low': 300, 'expired': 100}
    # Of a chart 348 x 156 pixels the tallest stack takes 1/1.1 of the height.
    height = 156 / 1.1 * 300 / 400
    assert abs((blue(one, {}) - blue({}, {})) / (348 * part * height) - 1) < 0.05
    assert abs((blue(one, one) - blue({}, {})) / (348 * 2 * part * height) - 1) < 0.05


def test_the_picture_is_put_in_place_whole(tmp_path: Path) -> None:
    record(tmp_path, [row(50)], torn='{"iter')
    write_tiles(tmp_path)
    path = plot_sampling(tmp_path)
    assert path == tmp_path / 'dynamic_sampling.png'
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        'dynamic_sampling', 'dynamic_sampling.png']
    expected = render_sampling(read_steps(tmp_path / 'dynamic_sampling' / 'steps.jsonl'),
                               read_tiles(tmp_path / 'dynamic_sampling' / 'tiles.npz'),
                               f'Dynamic sampling: {tmp_path.name}')
    assert (cv2.imread(str(path))[:, :, ::-1] == expected).all()
    out = tmp_path / 'new' / 'a.png'
    assert plot_sampling(tmp_path, out) == out
    assert out.read_bytes() == path.read_bytes()


def test_a_picture_that_cannot_be_put_in_place_leaves_nothing(tmp_path: Path) -> None:
    record(tmp_path, [row(50)])
    out = tmp_path / 'pictures'
    out.mkdir()
    with pytest.raises(OSError):
        plot_sampling(tmp_path, out)
    assert sorted(each.name for each in tmp_path.iterdir()) == ['dynamic_sampling', 'pictures']


def test_the_tool_prints_the_path_or_what_is_wrong(tmp_path: Path) -> None:
    tool = Path(__file__).resolve().parents[3] / 'tools' / 'plot_sampling.py'

    def plot(*arguments: object) -> 'subprocess.CompletedProcess[str]':
        return subprocess.run([warm_python(), str(tool), *map(str, arguments)],
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                              universal_newlines=True)

    failed = plot(tmp_path)
    assert failed.returncode == 1
    assert failed.stderr.strip().splitlines()[-1].startswith('SamplingPlotError: ')
    assert 'Traceback' not in failed.stderr
    record(tmp_path, [row(50)])
    done = plot(tmp_path, '--out', tmp_path / 'b.png')
    assert (done.returncode, done.stdout.strip()) == (0, str(tmp_path / 'b.png')), done.stderr
    assert cv2.imread(str(tmp_path / 'b.png')).shape[1] == WIDTH
