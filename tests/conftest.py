"""Fixtures and the import path of the checkout."""

import atexit
import faulthandler
import gc
import importlib.util
import os
import re
import shutil
import signal
import sys
import tempfile
import zlib
from functools import partial
from pathlib import Path
from typing import Dict, Iterator, List, Optional, Tuple

import pytest
from hypothesis import settings

# The same examples in every run, and no deadline: a change is judged by itself, also on a busy
# machine. MAPSAGE_HYPOTHESIS=explore looks further.
settings.register_profile('steady', deadline=None, derandomize=True)
settings.register_profile('explore', deadline=None, max_examples=3000)
settings.load_profile(os.environ.get('MAPSAGE_HYPOTHESIS', 'steady'))

# Before torch is imported: a fork of a process whose OpenMP has threads waits for them for ever.
os.environ.setdefault('OMP_NUM_THREADS', '1')

# The XLA leg's CPU code is compiled fast, not well; every process of a test inherits it.
os.environ.setdefault('XLA_FLAGS', '--xla_backend_optimization_level=0')

# Not the one of this user's jobs. The launchers of the tests pass it on, as Slurm's do.
os.environ.setdefault('MAPSAGE_SECRET', os.urandom(32).hex())

# What is kept of scenes between runs; the processes of a test session share it.
if 'MAPSAGE_SCENE_CACHE' not in os.environ:
    os.environ['MAPSAGE_SCENE_CACHE'] = tempfile.mkdtemp(prefix='mapsage-tests-scenes-')
    atexit.register(shutil.rmtree, os.environ['MAPSAGE_SCENE_CACHE'], ignore_errors=True)

ROOT = Path(__file__).resolve().parents[1]
for folder in (ROOT, ROOT / 'tests'):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import quick_host  # noqa: E402, F401
import torch  # noqa: E402
from mmengine.registry import DefaultScope  # noqa: E402
from range_server import IMPATIENT, RangeServer  # noqa: E402
from support import no_simulated_cards, write_tiny_config, write_tiny_data  # noqa: E402
from warm_python import warm_python  # noqa: E402

import mapsage  # noqa: E402, F401  (closes the hosts' gaps before a test imports mmseg)
from mapsage.accelerator import resolve_accelerator, set_current_accelerator  # noqa: E402
from mapsage.extras import simulator  # noqa: E402
from mapsage_launcher.stop_request import SIGNALS  # noqa: E402

PID = os.getpid()


def load_in_a_fork() -> simulator.SimulatorSettings:
    """Load the simulator in a fork of this process; skip a test that wants it in this process."""
    if os.getpid() == PID:
        pytest.skip(
            f'simulated cards need a process of their own where there are other devices: '
            f'{simulator.ONE_OF_BOTH}'
        )
    return load_simulator()


load_simulator = simulator.load_simulator
if torch.cuda.device_count() or importlib.util.find_spec('torch_xla') is not None:
    simulator.load_simulator = load_in_a_fork
elif no_simulated_cards() is None:
    # Before any test: PyTorch counts the devices at the first backward pass of the process.
    resolve_accelerator('sim')

# Folders and files whose tests are all marked `long`: each run of CI takes a part of them, by the date.
LONG = tuple(str(ROOT / 'tests' / name) for name in ('long', 'engines', 'cuda/test_on_gpu.py'))

# Folders of tests whose processes mostly wait for each other.
WAITING = (('distributed',), ('integration',))

STACKS = pytest.StashKey[int]()  # file to which the stacks of a hanging process go


@pytest.hookimpl(tryfirst=True)  # before pytest selects by markers
def pytest_collection_modifyitems(config: pytest.Config, items: List[pytest.Item]) -> None:
    for item in items:
        if str(item.path).startswith(LONG):
            item.add_marker('long')
    part = os.environ.get('MAPSAGE_LONG_PART')
    if part:
        left_out = {
            item
            for item in items
            if item.get_closest_marker('long') and not in_part(item.nodeid, part)
        }
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]
    items[:] = spread_waiting_files(items)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> Optional[bool]:
    """Leave out files without a long test where only long tests are wanted."""
    wanted = (
        config.getoption('markexpr') != 'long'
        or collection_path.suffix != '.py'
        or str(collection_path).startswith(LONG)
        or re.search(r'mark\.long|rest_is_long', collection_path.read_text())
    )
    return None if wanted else True


def in_part(name: str, part: str) -> bool:
    """Return whether a test belongs to a part, such as '2/5': the third of five, by its name."""
    number, parts = map(int, part.split('/'))
    return zlib.crc32(name.encode()) % parts == number % parts


def spread_waiting_files(items: List[pytest.Item]) -> List[pytest.Item]:
    """Spread the files whose ranks wait for each other evenly among the files that compute.

    Workers take files in this order. With all files of ranks at first, as in the order of their
    names, the processors would be idle for half of that time and too few for the rest. The files
    of ranks end a little before the others, because one of them may take a minute.
    """
    files: Dict[Path, List[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    waiting = [path for path in files if path.relative_to(ROOT).parts[1:2] in WAITING]
    others = [path for path in files if path not in set(waiting)]
    share = {path: 0.85 * number / len(waiting) for number, path in enumerate(waiting)}
    share.update({path: number / len(others) for number, path in enumerate(others)})
    return [item for path in sorted(files, key=share.__getitem__) for item in files[path]]


def pytest_configure(config: pytest.Config) -> None:
    """Prepare what the workers of ``-n 3`` share, before they are started."""
    config.stash[STACKS] = os.dup(2)  # which is not captured yet
    # and of its forks: what .ci/run ends shows where it hangs
    faulthandler.register(signal.SIGQUIT, file=config.stash[STACKS], chain=True)
    for plugin in config.pluginmanager.get_plugins():
        if type(plugin).__name__ == 'WorkerInteractor':  # this is one of the workers
            io = plugin.channel.gateway._io  # type: ignore[attr-defined]
            os.register_at_fork(
                after_in_child=partial(let_go, io.infile.fileno(), io.outfile.fileno())
            )
    if getattr(config.option, 'numprocesses', None):
        warm_python()  # its address is in the environment that the workers inherit
        # Files start in the order of spread_waiting_files, not by their number of tests.
        config.option.loadscopereorder = False


def let_go(*files: int) -> None:
    """Close what joins a worker to pytest, in a process that it has forked.

    pytest learns by the end of these files that a worker has ended. A fork that outlives its worker
    because it hangs would keep them open, and the session would wait for ever.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for file in files:
        os.dup2(null, file)  # and not closed: the numbers would be those of other files
    os.close(null)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """End a process with the stacks of its threads that hangs outside Python."""
    marker = item.get_closest_marker('timeout')
    seconds = float(marker.args[0] if marker and marker.args else item.config.getini('timeout'))
    faulthandler.dump_traceback_later(seconds + 60, exit=True, file=item.config.stash[STACKS])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def pytest_enter_pdb() -> None:
    """Leave a process alone in which somebody looks for an error."""
    faulthandler.cancel_dump_traceback_later()


def pytest_report_header() -> str:
    return 'random stock configs: MAPSAGE_FUZZ_CONFIGS={}, MAPSAGE_FUZZ_SEED={}'.format(
        os.environ.get('MAPSAGE_FUZZ_CONFIGS', 20), os.environ.get('MAPSAGE_FUZZ_SEED', 0)
    )


def pytest_collection_finish() -> None:
    """Take the 340,000 objects that were imported until now out of garbage collection."""
    gc.freeze()


@pytest.fixture
def mmseg_scope() -> Iterator[None]:
    """The scope of a config for MMSegmentation; a run of another test may have left its own."""
    with DefaultScope.overwrite_default_scope('mmseg'):
        yield


@pytest.fixture
def own_environment() -> Iterator[None]:
    """Give back the variables and the accelerator that a run in this process has changed."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
    set_current_accelerator(resolve_accelerator('cpu'))


@pytest.fixture
def signals_as_before() -> Iterator[None]:
    """Give back what a run that left at a request has changed: it ignores the next one."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope='session')
def tiny_data(tmp_path_factory) -> Path:
    """A dataset of 16 training and 4 validation tiles; do not change it."""
    return write_tiny_data(tmp_path_factory.mktemp('tiny') / 'data')


@pytest.fixture
def tiny_config(tmp_path, tiny_data) -> Path:
    """The tiny config on :func:`tiny_data`."""
    return write_tiny_config(tmp_path / 'tiny.py', tiny_data)


@pytest.fixture(scope='module')
def model(tmp_path_factory) -> Tuple[Path, Path]:
    """Config and checkpoint of a model that tells classes by their colors."""
    # Few files need it, and importing it costs seconds.
    from color_model import write_checkpoint, write_config

    folder = tmp_path_factory.mktemp('model')
    return write_config(folder), write_checkpoint(folder)


@pytest.fixture
def server(tmp_path, monkeypatch) -> Iterator[RangeServer]:
    """A server of the files in ``tmp_path / 'served'``, and a GDAL that soon gives up."""
    for name, value in IMPATIENT.items():
        monkeypatch.setenv(name, value)
    (tmp_path / 'served').mkdir()
    server = RangeServer(tmp_path / 'served')
    yield server
    server.close()
