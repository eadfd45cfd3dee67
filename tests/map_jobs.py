"""Jobs that share a folder of maps: processes with ranks, a model without PyTorch, and faults.

A job is a process of :func:`start_job`, its ranks are threads. What it does is written to a
file line by line: ``window DIGEST``, ``strip MAP NUMBER``, ``map NAME``.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import resource
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Sequence

import numpy as np
import rasterio
from rasterio.transform import Affine

from mapsage.geo import content_of  # noqa: F401  (imports GDAL before the forks)
from mapsage.maps import ledger, map_job, sharing
from mapsage.maps.description import Bands, Classes
from mapsage.maps.map_model import MapModel, Predictor
from mapsage.maps.options import MapOptions
from mapsage.maps.prediction import Prediction
from mapsage.maps.strips import StripStore
from mapsage.maps.windows import Grid, blend_weights

WINDOW, OVERLAP = 32, 8


class Ranks:
    """The ranks of a job: they exchange texts, and an error of one ends all."""

    def __init__(self, count: int) -> None:
        self.barrier = threading.Barrier(count)
        self.texts = [''] * count
        self.errors: List[Exception] = []


class TinyModel(MapModel, Predictor):
    """Scores that depend on the pixel, its window and the place in it, so that blending shows."""

    scores, threshold, overlap, window_origin = 3, 0.5, OVERLAP, 'tests'
    classes = Classes(('a', 'b', 'c'), np.array([[255, 0, 0], [0, 255, 0], [0, 0, 255]], np.uint8))
    bands = Bands(3, False, None, (), None, 'color', None)
    window = (WINDOW, WINDOW)

    def __init__(self, rank: int, ranks: Ranks, log: Any, seconds: float, **settings: Any) -> None:
        self.rank, self.world_size = rank, len(ranks.texts)
        self._ranks, self._log, self._seconds = ranks, log, seconds
        self._settings = dict(checkpoint='tiny')
        self._settings.update(settings.pop('settings', {}))
        self.predictor: Any = self
        self.weights = np.outer(*(blend_weights(WINDOW, OVERLAP),) * 2)
        self.required = dict(device='tests', **settings)
        self.decisions = dict(dict(device='tests', batch_size=2), **settings)
        self.batch_size = 2

    def load(self) -> None:
        pass

    def prepare(self, decisions: Any) -> None:
        self.batch_size = decisions['batch_size']

    def settings(self) -> Dict[str, Any]:
        return self._settings

    def describe(self) -> str:
        return ''

    def gather_texts(self, text: str) -> List[str]:
        self._ranks.texts[self.rank] = text
        self._ranks.barrier.wait()
        texts = list(self._ranks.texts)
        self._ranks.barrier.wait()
        return texts

    @contextmanager
    def fail_together(self, task: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._ranks.errors.append(error)
        self._ranks.barrier.wait()
        if self._ranks.errors:
            raise self._ranks.errors[0]

    def __call__(self, windows: Any) -> np.ndarray:
        time.sleep(self._seconds * len(windows))
        for window in windows:
            self._log(f'window {hashlib.sha256(window.tobytes()).hexdigest()[:16]}')
        values = np.asarray(windows, np.float32) + 1
        return values * values.mean((1, 2, 3), keepdims=True) * self.weights


def write_scenes(folder: Path, count: int, seed: int = 0) -> List[Path]:
    """Write scenes of random pixels: most have few strips, every tenth has several runs."""
    folder.mkdir()
    generator, paths = np.random.RandomState(seed), []
    for number in range(count):
        height = 600 if number % 10 == 9 else int(generator.randint(40, 190))
        path = folder / f'scene{number:04d}.tif'
        with rasterio.open(
            path,
            'w',
            driver='GTiff',
            height=height,
            width=72,
            count=3,
            dtype='uint8',
            crs='EPSG:32633',
            transform=Affine(1, 0, 500000 + 80 * number, 0, -1, 5000000),
        ) as file:
            file.write(generator.randint(0, 256, (3, height, 72)).astype(np.uint8))
        paths.append(path)
    return paths


def count_windows(scenes: Sequence[Path]) -> int:
    """Return the number of windows of the scenes' grids, each counted once."""
    total = 0
    for path in scenes:
        with rasterio.open(path) as file:
            grid = Grid(file.height, file.width, (WINDOW, WINDOW), OVERLAP)
        total += len(grid.rows) * len(grid.columns)
    return total


def run_job(
    scenes: Sequence[Path],
    out: Path,
    log_path: Path,
    ranks: int = 1,
    seconds: float = 0.0,
    machine: str = '',
    lease: float = 120.0,
    say: Any = None,
    options: Any = None,
    **settings: Any,
) -> None:
    """Make the maps with threads as ranks; errors are raised.

    Args:
        scenes: Scenes of the job.
        out: Folder of the maps.
        log_path: File that gets a line for each window, strip and map.
        ranks: Number of ranks.
        seconds: Time that a window takes.
        machine: Name of the machine for the ledger, such as ``machine 3``, whose clocks are three
            hours ahead; '' for this one. Not undone.
        lease: Seconds of a lease. Not undone.
        say: Function that receives the lines of rank 0.
        options: Further options of the prediction.
        settings: Decisions of the model that the job requires, and ``settings``.
    """
    ledger.LEASE_SECONDS = lease
    sharing.PAUSE_SECONDS = ledger.PAUSE_SECONDS = min(0.5, lease / 10)
    if machine:
        ledger._machine = lambda: machine
        clock, since_start, ahead = time.time, ledger._seconds, 3600 * int(machine.split()[-1])
        time.time = lambda: clock() + ahead
        ledger._seconds = lambda: since_start() + ahead
    descriptor = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def log(line: str) -> None:
        os.write(descriptor, f'{line}\n'.encode())

    group = Ranks(ranks)
    shared = MapOptions([str(path) for path in scenes], str(out), previews=False, **(options or {}))

    def work(rank: int) -> None:
        try:
            model = TinyModel(rank, group, log, seconds, **settings)
            Prediction(shared, model, say or (lambda line: None)).run()
        except threading.BrokenBarrierError:
            pass
        except Exception as error:
            group.errors.append(error)
            group.barrier.abort()

    with _logging(log):
        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(1, ranks)]
        for thread in threads:
            thread.start()
        work(0)
        for thread in threads:
            thread.join()
    os.close(descriptor)
    if group.errors:
        raise group.errors[0]


@contextmanager
def _logging(log: Any) -> Iterator[None]:
    """Log the strips and maps that this process writes."""
    write, assemble = StripStore.write, map_job.assemble

    def logged_write(store: StripStore, strip: Any) -> None:
        write(store, strip)
        log(f'strip {store.folder.name} {strip.number}')

    def logged_assemble(outputs: Any, *arguments: Any) -> None:
        assemble(outputs, *arguments)
        log(f'map {outputs.map.name}')

    StripStore.write, map_job.assemble = logged_write, logged_assemble  # type: ignore
    try:
        yield
    finally:
        StripStore.write, map_job.assemble = write, assemble  # type: ignore


def start_job(*arguments: Any, **options: Any) -> Any:
    """Start a process that runs :func:`run_job`, and return it; its exit code is 0 or 1.

    It is forked from a process that has used no GDAL thread, which a fork would wait for.
    """
    context = multiprocessing.get_context('forkserver')
    context.set_forkserver_preload(['map_jobs'])
    process = context.Process(target=_run_quietly, args=(arguments, options), daemon=True)
    before = os.environ.get('PYTHONPATH')
    # Python 3.11 gives its server no sys.path, and says nothing if it cannot import the module; then
    # every job imports everything.
    os.environ['PYTHONPATH'] = os.pathsep.join(sys.path)
    try:
        process.start()
    finally:
        del os.environ['PYTHONPATH']
        if before is not None:
            os.environ['PYTHONPATH'] = before
    return process


def _run_quietly(arguments: Any, options: Any) -> None:
    try:
        run_job(*arguments, **options)
    except Exception:
        if os.environ.get('MAP_JOBS_ERRORS'):
            traceback.print_exc()
        sys.exit(1)


def digests(folder: Path) -> Dict[str, str]:
    """Return the SHA-256 of every map of a folder."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.glob('*.tif'))
    }


def read_log(path: Path) -> Dict[str, Counter]:
    """Return how often each window, strip and map was computed or written."""
    counts: Dict[str, Counter] = dict(window=Counter(), strip=Counter(), map=Counter())
    for line in path.read_text().splitlines():
        kind, _, name = line.partition(' ')
        counts[kind][name] += 1
    return counts


class Faults(NamedTuple):
    """What a run with faults has cost.

    Attributes:
        kills, stops, full_disks: Numbers of faults.
        starts: Number of jobs that were started.
        windows: Number of windows that were computed.
        seconds: Duration.
    """

    kills: int
    stops: int
    full_disks: int
    starts: int
    windows: int
    seconds: float


def run_with_faults(
    scenes: Sequence[Path],
    out: Path,
    log_path: Path,
    jobs: int,
    faults: int,
    seed: int,
    seconds: float = 0.05,
    lease: float = 2.0,
    pause: float = 0.15,
) -> Faults:
    """Run jobs of 1 to 3 ranks, each on a machine of its own, while faults strike; start them again.

    Args:
        scenes, out, log_path: As for :func:`run_job`.
        jobs: Number of jobs at a time.
        faults: Most faults; the maps may be finished before.
        seed: Decides which faults strike when.
        seconds: Time that a window takes.
        lease: Seconds of a lease.
        pause: Mean seconds between two faults.
    """
    generator = random.Random(seed)
    counts = Counter()  # type: Counter
    running: Dict[Any, int] = {}
    wake: Dict[Any, float] = {}
    start = time.monotonic()
    waiting = list(range(jobs))
    strike = start + pause
    while waiting or running:
        for slot in waiting:
            counts['start'] += 1
            running[
                start_job(
                    scenes,
                    out,
                    log_path,
                    ranks=1 + slot % 3,
                    seconds=seconds,
                    machine=f'machine {slot}',
                    lease=lease,
                    options=dict(shard=slot, shards=jobs),
                )
            ] = slot
        waiting = []
        for process in list(running):
            if process.exitcode is not None:
                slot = running.pop(process)
                wake.pop(process, None)
                if process.exitcode != 0:
                    waiting.append(slot)
        now = time.monotonic()
        for process in [process for process, moment in wake.items() if moment <= now]:
            os.kill(process.pid, signal.SIGCONT)
            del wake[process]
        targets = [process for process in running if process not in wake]
        if (
            now > strike
            and targets
            and sum(map(counts.get, ('kill', 'stop', 'disk'), (0,) * 3)) < faults
        ):
            strike = now + generator.expovariate(1 / pause)
            process = generator.choice(targets)
            fault = generator.choices(('kill', 'stop', 'disk'), (6, 2, 2))[0]
            counts[fault] += 1
            if fault == 'kill':
                os.kill(process.pid, signal.SIGKILL)
            elif fault == 'stop':
                os.kill(process.pid, signal.SIGSTOP)
                wake[process] = now + lease * generator.uniform(1.2, 2)
            else:
                # Every write of more bytes fails from now on, as on a full disk.
                resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (300, resource.RLIM_INFINITY))
        time.sleep(0.02)
    windows = sum(read_log(log_path)['window'].values())
    return Faults(
        counts['kill'],
        counts['stop'],
        counts['disk'],
        counts['start'],
        windows,
        time.monotonic() - start,
    )
