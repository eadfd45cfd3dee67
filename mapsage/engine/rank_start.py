"""How the launcher's ranks start: forked from one process that has done their imports, or anew.

Needs the standard library alone: tools/launch.py and test sessions load this file by its path.
"""
from __future__ import annotations

import argparse
import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, List, Sequence

# Names a fork server that already runs, that of a test session.
ADDRESS = 'MAPSAGE_FORK_SERVER'

_FORK_SERVER = Path(__file__).with_name('fork_server.py')
_DRIVERS = Path(__file__).resolve().parents[1] / 'accelerator' / 'drivers.py'


class ForkServer:
    """A running fork server. It begins its imports at once and ends with this process.

    To be made in the main thread: the kernel takes the end of the thread that started a process for
    the end of its parent.

    Args:
        more: Names of more modules to import.
    """

    def __init__(self, more: Sequence[str] = ()) -> None:
        self.address = f'mapsage-{os.urandom(16).hex()}'
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f'\0{self.address}')  # in no file system, so that nothing is left of it
            listener.listen(128)
            # OpenBLAS would start its threads while numpy is imported, and then nothing may fork.
            environ = dict(os.environ, OPENBLAS_NUM_THREADS='1')
            self._process = subprocess.Popen(
                [sys.executable, '-u', str(_FORK_SERVER), '--serve', str(listener.fileno()),
                 str(os.getpid()), *more],
                stdin=subprocess.DEVNULL, env=environ, pass_fds=[listener.fileno()],
                start_new_session=True)  # Ctrl-C reaches the launcher, which passes it on

    def stop(self) -> None:
        """End the server, and with it what it has forked."""
        self._process.kill()
        self._process.wait()


def caller_command(address: str, parent: str) -> List[str]:
    """Return the command that, put before a script, has it forked by the server at ``address``.

    Args:
        address: :attr:`ForkServer.address`.
        parent: Pid of the process that will start the command.
    """
    return [sys.executable, '-I', '-S', str(_FORK_SERVER), '--call', address, parent]


class RankStart:
    """Decides how ranks start; where they are forked, the server begins its imports here.

    Made before torch is imported, so that both imports run side by side.

    Args:
        arguments: What the launcher was called with.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        self._server = None
        self._address = ''
        self._anew = _why_anew(arguments)
        if not self._anew:
            self._address = os.environ.get(ADDRESS, '')
        if not self._anew and not self._address:
            self._server = ForkServer()
            self._address = self._server.address

    def apply(self, args: argparse.Namespace) -> str:
        """Change torchrun's parsed arguments; return a line that says how ranks start."""
        if args.no_python or args.module:
            self._anew = 'not a Python script'
        if self._anew:
            self.stop()
            return f'ranks: started anew ({self._anew})'
        command = caller_command(self._address, str(os.getpid()))
        args.training_script_args = [*command[1:], '-u', args.training_script,
                                     *args.training_script_args]
        args.training_script, args.no_python = command[0], True
        return 'ranks: forked from one process that imported everything (CPU)'

    def stop(self) -> None:
        """End the server, if there is one of this launcher's."""
        if self._server is not None:
            self._server.stop()


def _why_anew(arguments: Sequence[str]) -> str:
    """Return why each rank has to be a new Python, '' when it can be a fork."""
    if sys.platform != 'linux':
        return sys.platform
    if 'PYTHON_EXEC' in os.environ:
        return 'PYTHON_EXEC is set'
    if ADDRESS in os.environ:
        return ''
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument('--accelerator')
    spec: Any = importlib.util.spec_from_file_location('drivers', _DRIVERS)
    drivers = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(drivers)
    return drivers.possible_driver(options.parse_known_args(arguments)[0].accelerator) or ''
