"""The numbers that dynamic sampling recorded, by hand, and damaged files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict

import numpy as np
import pytest
from sampling_files import (
    SIDE,
    iterations,
    record,
    row,
    tile_arrays,
    write_tiles,
)

from mapsage.pictures.sampling_plot import (
    MAX_POINTS,
    WIDTH,
    SamplingPlotError,
    headline,
    merged,
    read_steps,
    read_tiles,
    render_sampling,
    series,
)


def test_the_series_are_these_numbers() -> None:
    arrays = series(
        [
            row(50),
            row(
                75,
                steps=25,
                attempts=50,
                judged=400,
                passed=100,
                moved_samples=75,
                surplus=9,
                sent_bytes=2**20 * 50,
                seconds=5.0,
                interval_seconds=20.0,
                shortfalls={'pad': 5, 'fallback': 10},
                dropped={'not_finite': 50, 'too_low': 250},
            ),
        ]
    )
    expected = {
        'begin': [0, 50],
        'iter': [50, 75],
        'pass_rate': [0.5, 0.25],
        'resamples': [0.2, 2],
        'moved_samples': [2, 3],
        'moved_mib': [0.5, 2],
        'surplus': [4, 9],
        'time_share': [0.05, 0.25],
        'shortfalls/fallback': [0.02, 0.4],
        'shortfalls/pad': [0, 0.2],
        'dropped/too_low': [6, 10],
        'dropped/not_finite': [0, 2],
        'dropped/expired': [2, 0],
    }
    assert set(arrays) == set(expected)
    for name, values in expected.items():
        np.testing.assert_allclose(arrays[name], values, err_msg=name)
    assert [name for name in arrays if '/' in name] == [
        'shortfalls/fallback',
        'shortfalls/pad',
        'dropped/too_low',
        'dropped/not_finite',
        'dropped/expired',
    ]


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


def test_the_headline_has_the_totals() -> None:
    rows = [row(50), row(100, judged=1200, passed=300, shortfalls={'raise': 2, 'fallback': 1})]
    assert headline(rows).split('  ·  ') == [
        '100 steps, up to iteration 100',
        'pass rate 35.0 % of 2,000 samples judged',
        '800 samples dropped',
        '4 shortfalls (fallback 2, raise 2)',
    ]
    assert headline([row(50, shortfalls={}, dropped={})]).endswith(
        '0 samples dropped  ·  0 shortfalls'
    )


def test_a_long_run_is_merged_to_few_points_with_the_same_totals() -> None:
    rows = [row(50 * (index + 1), surplus=index, judged=800 + index) for index in range(7)]
    few = merged(rows, 3)
    assert iterations(few) == [150, 300, 350]
    assert [interval['surplus'] for interval in few] == [2, 5, 6]
    assert [interval['judged'] for interval in few] == [2403, 2412, 806]
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


def test_a_line_that_a_resumed_run_appended_to_a_torn_line_counts(tmp_path: Path) -> None:
    torn = json.dumps(row(100))
    for cut in (1, 60, torn.index('fallback') + 3, len(torn) - 1):
        path = record(
            tmp_path,
            [row(50)],
            torn[:cut] + json.dumps(row(75)) + '\n\n' + json.dumps(row(125)) + '\n',
        )
        assert iterations(read_steps(path)) == [50, 75, 125], cut


def test_further_keys_are_ignored(tmp_path: Path) -> None:
    assert iterations(read_steps(record(tmp_path, [row(50, new={'a': [1]}, other=None)]))) == [50]


@pytest.mark.parametrize(
    'text, message',
    [
        ('', 'no whole line yet; train'),
        ('{"iter": 50', 'no whole line yet; train'),
        ('nonsense\n{"iter": 50}\n', 'line 1 of .*steps.jsonl is .nonsense., expected'),
        (
            '{"iter": 50}\n',
            'steps in line 1 of .*steps.jsonl is None, expected a number; plot with',
        ),
        (json.dumps(row(50, judged='8')), "judged in line 1 of .* is '8', expected a number"),
        (json.dumps(row(50, judged=True)), 'judged in line 1'),
        (json.dumps(row(50, judged={'a': 1})), 'judged in line 1'),
        (json.dumps(row(50, dropped=3)) + '\n', 'dropped in line 1 of .* is 3, expected an object'),
        (json.dumps(row(50, dropped={'too_low': None})) + '\n', 'dropped in line 1'),
    ],
)
def test_wrong_lines_are_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / 'steps.jsonl'
    path.write_text(text)
    with pytest.raises(SamplingPlotError, match=message):
        read_steps(path)


def test_damaged_tiles_are_named(tmp_path: Path) -> None:
    path = write_tiles(tmp_path)
    whole = path.read_bytes()
    for damaged in (
        b'',
        whole[: len(whole) // 2],
        b'PK' + whole[:40],
        b'nonsense',
        whole[:300] + bytes(200) + whole[500:],
    ):
        path.write_bytes(damaged)
        with pytest.raises(SamplingPlotError, match='tiles.npz cannot be read .*remove the file'):
            read_tiles(path)


@pytest.mark.parametrize(
    'changes, message',
    [
        (dict(kept_images=np.zeros((5, SIDE, SIDE), np.uint8)), 'kept tiles of uint8'),
        (dict(kept_images=np.zeros((5, SIDE, SIDE, 3))), 'kept tiles of float64'),
        (dict(dropped_labels=np.zeros((6, SIDE, 9), np.uint8)), 'dropped tiles'),
        (dict(dropped_labels=np.zeros((6, SIDE, SIDE))), 'dropped tiles of uint8 and float64'),
        (dict(dropped_scores=np.zeros(5)), 'dropped tiles'),
        (dict(dropped_reasons=np.array(['too_low'])), 'dropped tiles'),
        (tile_arrays(side=416), 'T up to 415'),
        (dict(palette=np.zeros((2, 4))), 'palette'),
        (dict(classes=np.array([None, {}])), 'allow_pickle'),
    ],
)
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
