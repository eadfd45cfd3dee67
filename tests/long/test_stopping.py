"""However a run ends, all of it ends."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Callable, List, Set

import pytest
from support import Launch, on_host, write_tiny_config

WAITING = """
custom_imports = dict(imports=['mapsage', 'fault_hooks'])
custom_hooks = [dict(type='StopBeforeIteration', iteration=2)]
train_dataloader['num_workers'] = 1
"""


def start(tmp_path: Path, tiny_data: Path, ranks: int) -> Launch:
    """Launch ranks that create ``tmp_path / 'reached'`` before their iteration 2, and wait."""
    config = write_tiny_config(tmp_path / 'tiny.py', tiny_data, WAITING)
    return Launch(
        config,
        '--work-dir',
        tmp_path / 'work',
        cold=True,
        ranks=ranks,
        environ={
            'PYTHONPATH': str(Path(__file__).parents[1] / 'integration'),
            'MAPSAGE_TEST_REACHED': str(tmp_path / 'reached'),
        },
    )


def server(run: Launch) -> int:
    """Return the process that this launcher's ranks are forked from."""
    return next(pid for pid in processes(run, '--serve') if parent(pid) == run.process.pid)


def forks(run: Launch) -> List[int]:
    """Return the ranks themselves, where :meth:`Launch.ranks` returns who stands for them."""
    return [pid for pid in processes(run, '--serve') if parent(pid) == server(run)]


def processes(run: Launch, word: str) -> List[int]:
    return [pid for pid, command in run.running().items() if word in command]


def parent(pid: int) -> int:
    return int(Path(f'/proc/{pid}/stat').read_text().rsplit(')', 1)[1].split()[1])


def sockets(pid: int) -> Set[str]:
    """Return the inodes of a process's sockets."""
    targets = [os.readlink(str(fd)) for fd in Path(f'/proc/{pid}/fd').iterdir()]
    return {target[len('socket:[') : -1] for target in targets if target.startswith('socket:')}


def listening() -> Set[str]:
    """Return the inodes of all sockets of this machine that somebody may connect to."""
    tcp = [
        line.split()
        for name in ('tcp', 'tcp6')
        for line in Path(f'/proc/net/{name}').read_text().splitlines()[1:]
    ]
    unix = [line.split() for line in Path('/proc/net/unix').read_text().splitlines()[1:]]
    accepts = '00010000'  # __SO_ACCEPTCON, include/uapi/linux/net.h
    return {f[9] for f in tcp if f[3] == '0A'} | {f[6] for f in unix if f[3] == accepts}


def interrupt_launcher(run: Launch) -> None:
    os.kill(run.process.pid, signal.SIGINT)  # bash has become the launcher


def press_ctrl_c(run: Launch) -> None:
    os.killpg(run.process.pid, signal.SIGINT)  # what a terminal sends


def kill_launcher(run: Launch) -> None:
    os.kill(run.process.pid, signal.SIGKILL)


def terminate_launcher(run: Launch) -> None:
    os.kill(run.process.pid, signal.SIGTERM)
    time.sleep(3)  # the first one asks the ranks, which hang, to save and leave
    os.kill(run.process.pid, signal.SIGTERM)


def kill_rank(run: Launch) -> None:
    os.kill(run.ranks()[1], signal.SIGKILL)


def kill_fork(run: Launch) -> None:
    os.kill(forks(run)[0], signal.SIGKILL)


def kill_server(run: Launch) -> None:
    os.kill(server(run), signal.SIGKILL)


@pytest.mark.parametrize(
    'ranks, end, words',
    [
        pytest.param(2, interrupt_launcher, ['stopped by SIGINT'], marks=on_host),
        pytest.param(3, press_ctrl_c, ['stopped by SIGINT'], marks=on_host),
        (2, terminate_launcher, ['stopped by SIGTERM']),
        pytest.param(3, kill_launcher, [], marks=on_host),
        (2, kill_rank, ['failed first', 'killed by SIGKILL']),
        pytest.param(3, kill_fork, ['failed first', 'killed by SIGKILL'], marks=on_host),
        pytest.param(2, kill_server, ['failed first', 'killed by SIGKILL'], marks=on_host),
    ],
)
def test_nothing_is_left_running(
    ranks: int, end: Callable[[Launch], None], words: list, tiny_data: Path, tmp_path: Path
) -> None:
    run = start(tmp_path, tiny_data, ranks)
    run.wait_for(tmp_path / 'reached')
    assert len(run.ranks()) == ranks
    end(run)
    finished = run.finish()
    assert finished.status != 0
    assert finished.left_running == []
    tail = finished.output[-600:]
    assert all(word in tail for word in words), finished.output[-4000:]


@on_host
def test_forks_hold_no_sockets_of_others_and_no_port_stays(tiny_data: Path, tmp_path: Path) -> None:
    run = start(tmp_path, tiny_data, 2)
    run.wait_for(tmp_path / 'reached')
    others = [run.process.pid, server(run)]
    assert len(forks(run)) == 2
    held = [sockets(pid) for pid in forks(run)]
    assert all(held) and not held[0] & held[1]
    assert not any(sockets(pid) & of_rank for pid in others for of_rank in held)
    open_ports = set().union(*map(sockets, run.running())) & listening()
    assert open_ports  # of torchrun, and of the fork server
    kill_launcher(run)
    assert run.finish().left_running == []
    assert not open_ports & listening()


def server_is_there(run: Launch) -> bool:
    return bool(processes(run, '--serve'))


def server_imports(run: Launch) -> bool:
    return server_is_there(run) and 'libtorch' in Path(f'/proc/{server(run)}/maps').read_text()


def ranks_are_asked_for(run: Launch) -> bool:
    return bool(run.ranks())


SLEEPING = """
import time
time.sleep(600)  # as a rank does that imports, and has called nothing of MapSage yet
"""


def command_has_begun(run: Launch) -> bool:
    return (
        len(
            [
                pid
                for pid in processes(run, 'rank.py')
                if 'launch.py' not in run.running().get(pid, 'launch.py')
            ]
        )
        == 3
    )


def start_sleeping(folder: Path, **environ: str) -> Launch:
    script = folder / 'rank.py'
    script.write_text(SLEEPING)
    return Launch(
        '--standalone',
        '--nproc_per_node',
        3,
        script,
        cold=True,
        environ=environ,
        command=[sys.executable, 'tools/launch.py'],
    )


@on_host
def test_launcher_killed_before_new_ranks_have_imported(tmp_path: Path) -> None:
    run = start_sleeping(tmp_path, PYTHON_EXEC=sys.executable)
    while not command_has_begun(run):
        assert run.process.poll() is None
        time.sleep(0.01)
    kill_launcher(run)
    finished = run.finish()
    assert finished.status == -signal.SIGKILL and finished.left_running == []


@on_host
@pytest.mark.parametrize('environ', [{}, {'PYTHON_EXEC': sys.executable}])
def test_launcher_killed_at_a_random_moment(environ: dict, tmp_path: Path) -> None:
    seed = random.randrange(1000)
    seconds = random.Random(seed).uniform(0, 2)
    print(f'seed {seed}: killed after {seconds:.3f} s')
    run = start_sleeping(tmp_path, **environ)
    time.sleep(seconds)
    kill_launcher(run)
    assert run.finish().left_running == []


@on_host
@pytest.mark.parametrize(
    'ranks, moment', [(2, server_is_there), (3, server_imports), (3, ranks_are_asked_for)]
)
def test_launcher_killed_while_it_starts(
    ranks: int, moment: Callable[[Launch], bool], tiny_data: Path, tmp_path: Path
) -> None:
    run = start(tmp_path, tiny_data, ranks)
    while not moment(run):
        assert run.process.poll() is None
        time.sleep(0.01)
    kill_launcher(run)
    finished = run.finish()
    assert finished.status == -signal.SIGKILL
    assert finished.left_running == []
