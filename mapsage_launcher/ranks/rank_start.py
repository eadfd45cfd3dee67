"""Decides how the launcher's ranks start: as forks of one process, or each as a new Python process.

Forks are faster, because one process (`fork_server.py`) does the imports for all ranks. They are
possible only on Linux and only for the CPU: a device driver does not survive a fork.
:class:`RankStart` decides, and changes torchrun's arguments so that torchrun starts the right
command.
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
RANK_IMPORTS = ('mapsage.commands.rank_imports',)

_FORK_SERVER = Path(__file__).with_name('fork_server.py')


class ForkServer:
    """A running fork server. It begins its imports at once and ends with this process.

    Create it in the main thread: for the kernel, the end of the thread that started a process is
    the death of its parent.

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
                [
                    sys.executable,
                    '-u',
                    str(_FORK_SERVER),
                    '--serve',
                    str(listener.fileno()),
                    str(os.getpid()),
                    *preloads,
                ],
                stdin=subprocess.DEVNULL,
                env=environ,
                pass_fds=[listener.fileno()],
                # Ctrl-C then reaches only the launcher, which passes it on.
                start_new_session=True,
            )

    def stop(self) -> None:
        """End the server and all of its forks."""
        self._process.kill()
        self._process.wait()


def caller_command(address: str, parent: str) -> List[str]:
    """Return a command that runs the script in its last arguments as a fork of a server.

    Args:
        address: Address of the server, :attr:`ForkServer.address`.
        parent: Pid of the process that will start the command.
    """
    return [sys.executable, '-I', '-S', str(_FORK_SERVER), '--call', address, parent]


def become_command(parent: str) -> List[str]:
    """Return a command that runs the command in its last arguments, tied to the life of its parent.

    Args:
        parent: Pid of the process that will start the command.
    """
    return [sys.executable, '-I', '-S', str(_FORK_SERVER), '--become', parent]


class RankStart:
    """Decides how ranks start. If they are forked, the fork server begins its imports here.

    Create it before the launcher imports torch, so that both imports run at the same time.

    Args:
        arguments: Command line arguments of the launcher.

    Attributes:
        driver: Kind of device that ranks with these arguments may use on this machine, see
            ``possible_driver``; None for the CPU.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        self._server: Optional[ForkServer] = None
        self._address = ''
        self.driver = _find_driver(arguments)
        self._obstacle = _find_obstacle(self.driver)
        if not self._obstacle:
            self._address = os.environ.get(ADDRESS, '')
        if not self._obstacle and not self._address:
            self._server = ForkServer(RANK_IMPORTS)
            self._address = self._server.address

    def apply(self, args: argparse.Namespace) -> str:
        """Change torchrun's parsed arguments; return a line that says how ranks start."""
        # With --run_path (torch 2) torchrun starts no command.
        run_path = getattr(args, 'run_path', False)
        if args.no_python or args.module or run_path:
            self._obstacle = 'not a Python script'
        if self._obstacle:
            self.stop()
            if sys.platform == 'linux' and not run_path:
                _wrap_command(args, become_command(str(os.getpid())), _torchrun_command(args))
            return f'ranks: each started as a new process ({self._obstacle})'
        _wrap_command(
            args, caller_command(self._address, str(os.getpid())), ['-u', args.training_script]
        )
        return 'ranks: forked from one process that imported everything (CPU)'

    def program_command(self, program: Sequence[str]) -> List[str]:
        """Return the command that runs a Python program for this launcher, as a fork if possible.

        Args:
            program: Path of the program, and its arguments.
        """
        if self._obstacle:
            start = become_command(str(os.getpid())) if sys.platform == 'linux' else []
            return [*start, sys.executable, *program]
        return [*caller_command(self._address, str(os.getpid())), *program]

    def stop(self) -> None:
        """End the server, if this launcher has started one."""
        if self._server is not None:
            self._server.stop()


def _wrap_command(args: argparse.Namespace, command: List[str], program: List[str]) -> None:
    """Let torchrun start ``command``, followed by ``program`` and the script's arguments."""
    args.training_script_args = [*command[1:], *program, *args.training_script_args]
    args.training_script, args.no_python, args.module = command[0], True, False


def _torchrun_command(args: argparse.Namespace) -> List[str]:
    """Return torchrun's command for a rank (config_from_args in torch/distributed/run.py)."""
    if args.no_python:
        return [args.training_script]
    return [
        os.getenv('PYTHON_EXEC', sys.executable),
        '-u',
        *(['-m'] if args.module else []),
        args.training_script,
    ]


def _find_obstacle(driver: Optional[str]) -> str:
    """Return the reason why ranks cannot be forked; empty if they can."""
    if sys.platform != 'linux':
        return sys.platform
    if 'PYTHON_EXEC' in os.environ:
        return 'PYTHON_EXEC is set'
    if ADDRESS in os.environ:
        return ''
    return driver or ''


def _find_driver(arguments: Sequence[str]) -> Optional[str]:
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument('--accelerator')
    return possible_driver(options.parse_known_args(arguments)[0].accelerator)
