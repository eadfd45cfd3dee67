"""Jobs that share a folder of maps: the same bytes, nothing twice, faults that cost little."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List

import pytest
from map_jobs import (
    count_windows,
    digests,
    read_log,
    run_job,
    run_with_faults,
    start_job,
    write_scenes,
)

from mapsage.maps import ledger, sharing


@pytest.fixture(autouse=True)
def _unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo what `run_job` sets for its process."""
    for module, name in (
        (ledger, 'LEASE_SECONDS'),
        (ledger, 'PAUSE_SECONDS'),
        (ledger, '_machine'),
        (sharing, 'PAUSE_SECONDS'),
    ):
        monkeypatch.setattr(module, name, getattr(module, name))


@pytest.fixture(scope='module')
def scenes(tmp_path_factory: Any) -> List[Path]:
    return write_scenes(tmp_path_factory.mktemp('scenes') / 'in', 10)


@pytest.fixture(scope='module')
def alone(scenes: List[Path], tmp_path_factory: Any) -> Dict[str, str]:
    """Digests of the maps of one process."""
    folder = tmp_path_factory.mktemp('alone')
    run_job(scenes, folder / 'out', folder / 'log')
    counts = read_log(folder / 'log')
    assert len(counts['window']) == count_windows(scenes)
    assert sum(counts['window'].values()) <= 1.05 * count_windows(scenes)
    assert [path.name for path in (folder / 'out').glob('.*')] == []
    return digests(folder / 'out')


@pytest.mark.parametrize(
    'jobs, ranks',
    [
        (1, 3),
        (2, 1),
        (8, 3),
        *(pytest.param(*each, marks=pytest.mark.long) for each in [(1, 2), (3, 2), (8, 1)]),
    ],
)
def test_any_number_of_jobs_and_ranks_make_the_same_bytes(
    scenes: List[Path], alone: Dict[str, str], tmp_path: Path, jobs: int, ranks: int
) -> None:
    processes = [
        start_job(
            scenes,
            tmp_path / 'out',
            tmp_path / 'log',
            ranks,
            0.002,
            options=dict(shard=n, shards=jobs),
        )
        for n in range(jobs)
    ]
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * jobs
    assert digests(tmp_path / 'out') == alone
    counts = read_log(tmp_path / 'log')
    assert set(counts['strip'].values()) == set(counts['map'].values()) == {1}
    assert sum(counts['window'].values()) <= 1.1 * count_windows(scenes)
    assert [path.name for path in (tmp_path / 'out').glob('.*')] == []


def test_faults_cost_little_and_no_byte(
    scenes: List[Path], alone: Dict[str, str], tmp_path: Path
) -> None:
    cost = run_with_faults(
        scenes,
        tmp_path / 'out',
        tmp_path / 'log',
        jobs=4,
        faults=6,
        seed=1,
        lease=1.0,
        seconds=0.02,
    )
    assert cost.kills + cost.stops + cost.full_disks > 0
    assert digests(tmp_path / 'out') == alone
    assert [path.name for path in (tmp_path / 'out').glob('.*') if 'ledger' in path.name] == []
