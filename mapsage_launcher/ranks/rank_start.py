"""How the launcher's ranks start: as forks of one process that has done their imports, or each as a
new Python process.
"""
from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import List, Optional, Sequence

from mapsage_launcher.drivers import possible_driver

# Environment variable with the address of a fork server that is already running. Test sessions set
# it.
ADDRESS = 'MAPSAGE_FORK_SERVER'

# What the fork server imports for ranks, by its name: this process must not import it.
RANK_IMPORTS = ('mapsage.commands.rank_imports', )

_FORK_SERVER = Path(__file__).with_name('fork_server.py')


class ForkServer:
    """A running fork server. It begins its imports at once and ends with this process.

    It must be made in the main thread, since the kernel treats the end of the thread that started a
    process as the death of its parent.

    Args:
        preloads: Names of the modules to import, those with the largest imports first.

    Attributes:
        address: Name of the server's Unix socket, for :func:`caller_command`.
    """

    def __init__(self, preloads: Sequence[str]) -> None:
        self.address = f'mapsage-{os.urandom(16).hex()}'
        with socket.socket(socket.AF_UNIX) as listener:
            # A leading zero byte means an abstract socket, which leaves no file behind.
            listener.bind(f'\0{self.address}')
            listener.listen(128)
            # OpenBLAS starts threads when numpy is imported, and a process with threads cannot fork
            # safely.
            environ = dict(os.environ, OPENBLAS_NUM_THREADS='1')
            self._process = subprocess.Popen(
                [sys.executable, '-u', str(_FORK_SERVER), '--serve', str(listener.fileno()),
                 str(os.getpid()), *preloads],
                stdin=subprocess.DEVNULL, env=environ, pass_fds=[listener.fileno()],
                start_new_session=True)  # Ctrl-C goes to the launcher alone, which passes it on

    def stop(self) -> None:
        """End the server and all of its forks."""
        self._process.kill()
        self._process.wait()


def caller_command(address: str, parent: str) -> List[str]:
    """Return a command that runs the script behind it as a fork of the server at ``address``.

    Args:
        address: Address of the server, :attr:`ForkServer.address`.
        parent: Pid of the process that will start the command.
    """
    return [sys.executable, '-I', '-S', str(_FORK_SERVER), '--call', address, parent]


def become_command(parent: str) -> List[str]:
    """Return a command that runs the one behind it, and lets it die with its parent.

    Args:
        parent: Pid of the process that will start the command.
    """
    return [sys.executable, '-I', '-S', str(_FORK_SERVER), '--become', parent]


class RankStart:
    """Decides how ranks start. If they are forked, the fork server begins its imports here.

    It is made before the launcher imports torch, so that both imports run side by side.

    Args:
        arguments: Command line arguments of the launcher.

    Attributes:
        driver: What ranks with these arguments may drive on this machine, see ``possible_driver``.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        self._server = None
        self._address = ''
        self.driver = _driver_of(arguments)
        self._why_new = _why_new_processes(self.driver)
        if not self._why_new:
            self._address = os.environ.get(ADDRESS, '')
        if not self._why_new and not self._address:
            self._server = ForkServer(RANK_IMPORTS)
            self._address = self._server.address

    def apply(self, args: argparse.Namespace) -> str:
        """Change torchrun's parsed arguments; return a line that says how ranks start."""
        run_path = getattr(args, 'run_path', False)  # torchrun then starts no command
        if args.no_python or args.module or run_path:
            self._why_new = 'not a Python script'
        if self._why_new:
            self.stop()
            if sys.platform == 'linux' and not run_path:
                _run_through(args, become_command(str(os.getpid())), _command_of_torchrun(args))
            return f'ranks: each started as a new process ({self._why_new})'
        _run_through(args, caller_command(self._address, str(os.getpid())),
                     ['-u', args.training_script])
        return 'ranks: forked from one process that imported everything (CPU)'

    def stop(self) -> None:
        """End the server, if this launcher has started one."""
        if self._server is not None:
            self._server.stop()


def _run_through(args: argparse.Namespace, command: List[str], program: List[str]) -> None:
    """Let torchrun start ``command`` with ``program`` and the script's arguments behind it."""
    args.training_script_args = [*command[1:], *program, *args.training_script_args]
    args.training_script, args.no_python, args.module = command[0], True, False


def _command_of_torchrun(args: argparse.Namespace) -> List[str]:
    """Return what torchrun would start (config_from_args in torch/distributed/run.py)."""
    if args.no_python:
        return [args.training_script]
    return [os.getenv('PYTHON_EXEC', sys.executable), '-u', *(['-m'] if args.module else []),
            args.training_script]


def _why_new_processes(driver: Optional[str]) -> str:
    """Return why ranks cannot be forks; empty if they can."""
    if sys.platform != 'linux':
        return sys.platform
    if 'PYTHON_EXEC' in os.environ:
        return 'PYTHON_EXEC is set'
    if ADDRESS in os.environ:
        return ''
    return driver or ''


def _driver_of(arguments: Sequence[str]) -> Optional[str]:
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument('--accelerator')
    return possible_driver(options.parse_known_args(arguments)[0].accelerator)
