"""A script forked from the fork server behaves as under a new Python."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Dict, List

import pytest
from support import PATIENT, ROOT, on_host
from warm_python import rank_start, warm_python

from mapsage_launcher.ranks import fork_server

pytestmark = on_host

TELL = """
import json, os, signal, sys
import torch
import beside
asked = ['GIVEN', 'OPENBLAS_NUM_THREADS', 'PYTHONPATH', 'OMP_NUM_THREADS']
print(json.dumps(dict(
    argv=sys.argv, path=sys.path[:3], folder=os.getcwd(), name=__name__, file=__file__,
    environ={name: os.environ.get(name) for name in asked}, stdin=sys.stdin.read(),
    encodings=[sys.stdout.encoding, sys.stdin.encoding, sys.getfilesystemencoding()],
    write_through=sys.stdout.write_through, threads=torch.get_num_threads(),
    main=sys.modules['__main__'].__dict__ is globals(),
    signals=[str(signal.getsignal(n)) for n in (1, 2, 3, 10, 13, 15, 17)],
    open=sorted(map(int, os.listdir('/proc/self/fd')))[:3])), end='')
print('to stderr', file=sys.stderr)
"""


def run(python: str, script: Path, *arguments: str, **kwargs: Any) -> subprocess.CompletedProcess:
    return subprocess.run(
        [python, '-u', str(script), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        universal_newlines=True,
        timeout=PATIENT,
        **kwargs,
    )


@pytest.mark.parametrize('threads', ['1', '3'])
def test_a_script_sees_what_it_would_see(threads: str, tmp_path: Path) -> None:
    folder = tmp_path / 'folder'
    folder.mkdir()
    (folder / 'beside.py').write_text('')
    script = folder / 'tell.py'
    script.write_text(TELL)
    environ = {**os.environ, 'GIVEN': 'ä', 'OMP_NUM_THREADS': threads, 'PYTHONPATH': str(tmp_path)}
    new, forked = (
        run(python, script, 'a', '--b c', input='typed', cwd=str(tmp_path), env=environ)
        for python in (sys.executable, warm_python())
    )
    assert forked.returncode == new.returncode == 0, forked.stderr
    assert json.loads(forked.stdout) == json.loads(new.stdout)
    assert forked.stderr == new.stderr


ENDINGS = {
    'end': 'pass',
    'status': 'import sys; sys.exit(3)',
    'words': 'import sys; sys.exit("words")',
    'error_seen_at_the_end': 'import atexit, sys\natexit.register(lambda: print(sys.last_type))\n'
    'raise ValueError("late")',
    'error': 'def f():\n    raise ValueError("told")\nf()',
    'interrupt': 'raise KeyboardInterrupt',
    'signal': 'import os, signal; os.kill(os.getpid(), signal.SIGTERM)',
    'killed': 'import os, signal; os.kill(os.getpid(), signal.SIGKILL)',
    'at exit': 'import atexit; atexit.register(print, "late")\nprint("soon")',
    'thread': 'import threading; threading.Timer(0.1, print, ["late"]).start()',
}


@pytest.mark.parametrize('script', ENDINGS.values(), ids=list(ENDINGS))
def test_a_script_ends_as_it_would_end(script: str, tmp_path: Path) -> None:
    (tmp_path / 'script.py').write_text(script)
    new, forked = (
        run(python, tmp_path / 'script.py') for python in (sys.executable, warm_python())
    )
    assert (forked.returncode, forked.stdout) == (new.returncode, new.stdout)
    assert forked.stderr == new.stderr


def test_forks_draw_different_random_numbers(tmp_path: Path) -> None:
    script = tmp_path / 'draw.py'
    script.write_text('import random\nimport numpy as np\nprint(random.random(), np.random.rand())')
    draws = [run(warm_python(), script).stdout.split() for _ in range(2)]
    assert draws[0][0] != draws[1][0] and draws[0][1] != draws[1][1]


TAKES_SIGTERM = 1 << (signal.SIGTERM - 1)


def test_a_signal_reaches_the_fork(tmp_path: Path) -> None:
    script = tmp_path / 'wait.py'
    script.write_text(
        'import signal, sys\n'
        'signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\n'
        'print("ready", flush=True)\nsignal.pause()'
    )
    with subprocess.Popen([warm_python(), str(script)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b'ready\n'
        # The script may be ready a moment before the process that passes signals on to it.
        status = Path(f'/proc/{process.pid}/status')
        while not int(re.search(r'SigCgt:\s*(\w+)', status.read_text())[1], 16) & TAKES_SIGTERM:
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=PATIENT) == 5


def ask(more: List[str], environ: Dict[str, str], tmp_path: Path) -> subprocess.CompletedProcess:
    """Have a script forked by a server of its own that imports ``more``."""
    script = tmp_path / 'script.py'
    script.write_text('import os, sys; print(os.getppid(), sys.argv[1:]); sys.exit(3)')
    owner = tmp_path / 'owner.py'
    owner.write_text(f"""
import subprocess, sys, os
sys.path.insert(0, {str(ROOT)!r})
from mapsage_launcher.ranks import rank_start
server = rank_start.ForkServer([*rank_start.RANK_IMPORTS, *{more!r}])
command = rank_start.caller_command(server.address, str(os.getpid()))
print(os.getpid(), flush=True)
sys.exit(subprocess.call([*command, '-u', {str(script)!r}, 'given']))
""")
    return run(sys.executable, owner, env={**os.environ, **environ})


def check_started_anew(finished: subprocess.CompletedProcess) -> None:
    owner, reported = finished.stdout.splitlines()
    assert reported == f"{owner} ['given']"  # in the caller's place, so a signal still reaches it
    assert finished.returncode == 3
    assert 'this rank starts as a new Python process' in finished.stderr


@pytest.mark.long
def test_a_server_with_two_threads_refuses(tmp_path: Path) -> None:
    (tmp_path / 'starts_a_thread.py').write_text(
        'import threading, time\n'
        'threading.Thread(target=time.sleep, args=[1000], daemon=True).start()'
    )
    refused = ask(['starts_a_thread'], {'PYTHONPATH': str(tmp_path)}, tmp_path)
    assert 'cannot be forked from a process with 2 threads' in refused.stderr
    assert 'PYTHON_EXEC=' in refused.stderr
    check_started_anew(refused)


@pytest.mark.long
def test_an_import_error_that_utf8_cannot_encode_is_said(tmp_path: Path) -> None:
    # a file name in GBK, as os.listdir gives it
    (tmp_path / 'names_a_file.py').write_text("raise OSError('\\udcb5\\udcd8.so is damaged')")
    refused = ask(['names_a_file'], {'PYTHONPATH': str(tmp_path)}, tmp_path)
    assert r'an import fails: OSError: \udcb5\udcd8.so is damaged' in refused.stderr
    check_started_anew(refused)


def test_a_failing_import_is_said_and_the_script_runs(tmp_path: Path) -> None:
    refused = ask(['module_that_is_not_there'], {}, tmp_path)
    assert "an import fails: ModuleNotFoundError: No module named 'module_that" in refused.stderr
    check_started_anew(refused)


def test_a_signal_that_comes_behind_the_end_does_not_replace_its_status() -> None:
    # A stand-in for the server, so that the signal is there before the caller reads the status.
    address = f'mapsage-test-{os.urandom(8).hex()}'
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f'\0{address}')
        listener.listen(1)
        caller = subprocess.Popen(
            [*rank_start.caller_command(address, str(os.getpid())), 'x.py'], stderr=subprocess.PIPE
        )
        connection, _ = listener.accept()
        with connection:
            (left,) = struct.unpack('<q', connection.recv(8))
            while left:
                left -= len(connection.recv(left))
            connection.sendall(b'started')
            while not has_handler(caller.pid, signal.SIGUSR2):  # the last that it sets
                time.sleep(0.01)
            os.kill(caller.pid, signal.SIGSTOP)
            connection.sendall(struct.pack('<q', 3))
    os.kill(caller.pid, signal.SIGTERM)  # nobody is there to pass it on to
    os.kill(caller.pid, signal.SIGCONT)
    _, words = caller.communicate(timeout=PATIENT)
    assert caller.returncode == 3 and words == b''


def has_handler(pid: int, number: int) -> bool:
    """Return whether a process handles a signal itself."""
    line = next(
        line
        for line in Path(f'/proc/{pid}/status').read_text().splitlines()
        if line.startswith('SigCgt:')
    )
    return bool(int(line.split()[1], 16) >> (number - 1) & 1)


def test_cards_in_use_are_no_fork(tmp_path: Path) -> None:
    """An import that begins to use a plugin's cards would leave its forks without them."""
    torch = SimpleNamespace(_C=SimpleNamespace(_get_privateuse1_backend_name=lambda: 'npu'))
    fork_server._refuse_devices_in_use(torch)
    torch.npu = SimpleNamespace(is_initialized=lambda: False)
    fork_server._refuse_devices_in_use(torch)
    torch.npu.is_initialized = lambda: True
    with pytest.raises(RuntimeError, match='begins to use the devices of torch.npu'):
        fork_server._refuse_devices_in_use(torch)
    fork_server._refuse_devices_in_use(SimpleNamespace(_C=SimpleNamespace()))
