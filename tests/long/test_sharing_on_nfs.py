"""Jobs share maps in a folder whose client is late, as on NFS (`tests/doubles/nfs/nfs.c`)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Dict, List

import pytest
from map_jobs import count_windows, digests, read_log, run_job, write_scenes

# Seconds of a lease, of a window, and milliseconds for which a client may know old things.
LEASE, WINDOW, LATE = 3.0, 0.01, 300
TESTS = Path(__file__).parents[1]
SOURCE = TESTS / 'doubles/nfs/nfs.c'
JOB = (
    'import json, sys, map_jobs; print("ready", flush=True); input(); '
    'map_jobs.run_job(*json.loads(sys.argv[1]), **json.loads(sys.argv[2]))'
)


@pytest.fixture(scope='module')
def library(tmp_path_factory: Any) -> Path:
    """The double, compiled."""
    compiler = shutil.which('gcc') or shutil.which('clang')
    if compiler is None:
        pytest.skip('no C compiler for the double of NFS')
    path = tmp_path_factory.mktemp('nfs') / 'nfs.so'
    subprocess.run(
        [compiler, '-shared', '-fPIC', '-Wall', '-Werror', '-o', str(path), str(SOURCE), '-ldl'],
        check=True,
        timeout=60,
    )
    return path


def client(library: Path, folder: Path, lost: int, number: int) -> Dict[str, str]:
    """Return the environment of a client whose clock is an hour later or earlier than others'."""
    return dict(
        os.environ,
        PYTHONPATH=os.pathsep.join([str(TESTS), str(TESTS.parent)]),
        LD_PRELOAD=str(library),
        NFS_FOLDER=str(folder),
        NFS_MILLISECONDS=str(LATE),
        NFS_LOST=str(lost),
        NFS_SKEW=str(3600 * (number - 1)),
    )


def test_the_double_is_late(library: Path, tmp_path: Path) -> None:
    program = (
        'import os, sys, time; from pathlib import Path; folder = Path(sys.argv[1]);\n'
        'def look(): return os.listdir(folder), (folder / "a").exists()\n'
        'first = look(); print("ready", flush=True); input(); second = look(); time.sleep(0.5)\n'
        'third = look(); (folder / "c").touch(); print(first, second, third, look(), sep="\\n")\n'
        'open(folder / "d", "x").close()\n'
        'try: open(folder / "e", "x")\n'
        'except FileExistsError: print(int((folder / "e").exists()), end=" ")\n'
        'print(int(os.stat(folder / "e").st_mtime - time.time()) // 3600)'
    )
    process = subprocess.Popen(
        [sys.executable, '-c', program, str(tmp_path)],
        env=client(library, tmp_path, 2, 3),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        universal_newlines=True,
    )
    assert process.stdout is not None and process.stdout.readline() == 'ready\n'
    (tmp_path / 'a').touch()
    lines = process.communicate('\n', timeout=30)[0].splitlines()
    assert lines[:3] == ['([], False)', '([], False)', "(['a'], True)"]
    assert "'c'" in lines[3]
    assert lines[4] in ('1 1', '1 2')


def test_clients_that_claim_at_the_same_moment(library: Path, tmp_path: Path) -> None:
    program = (
        'import sys, time; from pathlib import Path; from mapsage.maps import ledger\n'
        'folder = Path(sys.argv[1]); ledger._machine = lambda: sys.argv[2]\n'
        'with ledger.Worker(folder) as worker:\n'
        '    print("ready", flush=True); begin = float(input())\n'
        '    for number in range(40):\n'
        '        time.sleep(max(0, begin + number / 20 - time.monotonic()))\n'
        '        if worker.claim(folder / "strips", f"run{number}"): print(number)\n'
        '    print("done", flush=True); input()'
    )
    clients = [
        subprocess.Popen(
            [sys.executable, '-c', program, str(tmp_path / 'out'), f'machine {number}'],
            env=client(library, tmp_path / 'out', 0, number),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            universal_newlines=True,
        )
        for number in range(3)
    ]
    for process in clients:
        assert process.stdout is not None and process.stdout.readline() == 'ready\n'
    for process in clients:
        assert process.stdin is not None
        process.stdin.write(f'{time.monotonic() + 0.5}\n')
        process.stdin.flush()
    claimed: List[str] = []
    for process in clients:
        assert process.stdout is not None
        claimed += iter(process.stdout.readline, 'done\n')
    for process in clients:
        process.communicate('\n', timeout=30)
    assert sorted(map(int, claimed)) == list(range(40))


def test_jobs_on_nfs_make_the_same_bytes(library: Path, tmp_path: Path) -> None:
    scenes, out = write_scenes(tmp_path / 'in', 5), tmp_path / 'out'
    run_job(scenes, tmp_path / 'alone', tmp_path / 'log-alone')
    jobs = []
    for number, lost in enumerate((0, 3, 9)):
        settings = dict(
            ranks=1 + number % 2,
            seconds=WINDOW,
            machine=f'machine {number}',
            lease=LEASE,
            options=dict(shard=number, shards=3),
        )
        places = [list(map(str, scenes)), str(out), str(tmp_path / 'log')]
        job = subprocess.Popen(
            [sys.executable, '-c', JOB, json.dumps(places), json.dumps(settings)],
            env=client(library, out, lost, number),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            universal_newlines=True,
        )
        jobs.append(job)
    # They have imported what they need, and begin together.
    for job in jobs:
        assert job.stdout is not None and job.stdout.readline() == 'ready\n'
    for job in jobs:
        assert job.stdin is not None
        job.stdin.write('\n')
        job.stdin.flush()
    outputs = [job.communicate(timeout=180)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0, 0], outputs
    assert digests(out) == digests(tmp_path / 'alone')
    counts = read_log(tmp_path / 'log')
    assert set(counts['strip'].values()) == set(counts['map'].values()) == {1}
    assert sum(counts['window'].values()) <= 1.1 * count_windows(scenes)
