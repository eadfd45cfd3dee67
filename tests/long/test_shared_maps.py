"""Eight jobs of one to three ranks share 40 scenes while jobs are killed, stopped and out of disk.

`python -m pytest tests/long/test_shared_maps.py -n 0 -s` prints the figures of docs/testing.md.
MAPSAGE_FAULTS is the number of faults, 200 by default.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from map_jobs import (
    OVERLAP,
    WINDOW,
    Ranks,
    TinyModel,
    count_windows,
    digests,
    read_log,
    run_with_faults,
    start_job,
    write_scenes,
)

from mapsage.maps.options import MapOptions
from mapsage.maps.prediction import Prediction
from mapsage.maps.windows import Grid


def run_of_strips() -> int:
    """Return the most windows that a rank computes for a claim: a scene of 24 strips, in halves."""
    grid = Grid(600, 72, (WINDOW, WINDOW), OVERLAP)
    return (len(grid.rows) // 2 + 2) * len(grid.columns)


def measure(folder: Path, faults: int) -> None:
    """Run rounds until so many faults have struck, check each, and print the sums."""
    scenes = write_scenes(folder / 'in', 40)
    alone = start_job(scenes, folder / 'alone', folder / 'log')
    alone.join()
    expected, windows = digests(folder / 'alone'), count_windows(scenes)
    assert len(expected) == 40
    struck = rounds = total = most = starts = 0
    while struck < faults:
        out, log = folder / f'out{rounds}', folder / f'log{rounds}'
        cost = run_with_faults(scenes, out, log, 8, faults - struck, seed=rounds)
        strikes = cost.kills + cost.stops + cost.full_disks
        print(f'round {rounds}: {cost}', flush=True)
        assert digests(out) == expected
        # A job has at most three ranks, and each loses its claim.
        assert cost.windows <= 1.05 * windows + strikes * 3 * run_of_strips()
        if strikes == 0:
            assert set(read_log(log)['strip'].values()) == {1}
        struck, rounds, total, starts = (
            struck + strikes,
            rounds + 1,
            total + cost.windows,
            starts + cost.starts,
        )
        most = max(most, cost.windows)
    print(
        f'{struck} faults in {rounds} rounds, {starts} starts of jobs: the same bytes; '
        f'{total / rounds / windows:.3f} times the windows of the grids ({windows}), at most '
        f'{most / windows:.3f}; {(total - rounds * windows) / max(1, struck):.1f} windows a fault'
    )


def test_faults_cost_no_byte(tmp_path: Path) -> None:
    measure(tmp_path, int(os.environ.get('MAPSAGE_FAULTS', '200')))


def test_2000_small_scenes_start(tmp_path: Path) -> None:
    scenes = [str(path) for path in write_scenes(tmp_path / 'in', 2000)]
    start, processor = time.monotonic(), time.process_time()
    model = TinyModel(0, Ranks(1), lambda line: None, 0)
    Prediction(MapOptions(scenes, str(tmp_path / 'out')), model, lambda line: None)
    seconds = time.process_time() - processor
    print(f'2,000 scenes: {time.monotonic() - start:.1f} s, {seconds:.1f} s of processor time')
    # Processor time, because other tests may run beside this one.
    assert seconds < 10
