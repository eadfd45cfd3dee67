"""Requests to save a checkpoint and leave (SIGTERM, SIGUSR1), and how ranks answer them.

A scheduler or a person sends the signal to the launcher, to all ranks or to one rank. In a rank the
handler only sets a flag, which StopHook reads after each step. A launcher does not pass the signal
on, because ranks that are starting would lose it: it writes a file into the folder of its notes,
where its ranks look as well. A rank that leaves writes another file there, so that the launcher
ends with :data:`STATUS` in place of 0.

The first half of this module runs in ranks, the second half in the launcher.
`scripts/slurm_train.sh` reads and writes the same files.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Dict, Iterator, Optional

from mapsage_launcher.rank_notes import FOLDER_VARIABLE

# Exit status of a run that has saved a checkpoint and wants to be started again. No shell, signal
# or entry of sysexits.h uses it; HTCondor's manual uses it for the same purpose.
STATUS = 85
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
# A second signal means: end at once. Slurm sends a signal to every process of a task, and some of
# them pass it on, so a copy of the first one may arrive shortly after it.
REPEATED_SECONDS = 1.0
# The signal by which a launcher ends its ranks. Ranks keep its default action, which the kernel
# carries out even if the rank hangs in a collective.
END = signal.SIGUSR2
# Files in the folder of the launcher's notes: a rank handles the signals; the launcher or a rank was
# asked; a rank has left.
_LISTENS, ASKED, LEFT = 'listens', 'stop', 'left'

# Signals that this process has received, and when.
_received: Dict[int, float] = {}


class StoppedEarly(SystemExit):
    """The run has saved a checkpoint because it was asked to, and this process ends."""


# --- in a rank


@contextmanager
def listening(wanted: bool = True) -> Iterator[None]:
    """Treat SIGTERM and SIGUSR1 as requests inside the block, unless they have handlers already.

    Does nothing outside the main thread. Under a plain torchrun SIGTERM keeps its action, because
    torchrun ends the remaining ranks with it after one of them has failed.

    Args:
        wanted: Whether the run will look at requests; if False, nothing happens.
    """
    plain_torchrun = 'TORCHELASTIC_RUN_ID' in os.environ and FOLDER_VARIABLE not in os.environ
    possible = wanted and threading.current_thread() is threading.main_thread()
    handled = [
        number
        for number in SIGNALS
        if possible
        and signal.getsignal(number) == signal.SIG_DFL
        and not (plain_torchrun and number == signal.SIGTERM)
    ]
    for number in handled:
        signal.signal(number, _receive)
    if handled:
        write_note(_LISTENS)
    try:
        yield
    finally:
        for number in handled:
            if signal.getsignal(number) is _receive:
                signal.signal(number, signal.SIG_DFL)
        if handled:
            _received.clear()


def is_listening() -> bool:
    """Return whether this process treats SIGTERM or SIGUSR1 as a request."""
    return any(signal.getsignal(number) is _receive for number in SIGNALS)


def asked() -> str:
    """Return the name of the signal that asked this rank or its launcher to stop, or ''."""
    for number in _received:
        return signal.Signals(number).name
    return asked_launcher()


def asked_launcher() -> str:
    """Return the name of the signal that asked this machine's launcher to stop; '' if none did.

    A rank that receives a signal passes the request to its launcher, so this covers all ranks of
    the machine.
    """
    folder = os.environ.get(FOLDER_VARIABLE)
    try:
        text = Path(folder, ASKED).read_text(encoding='utf-8') if folder else ''
    except OSError:  # there is no request
        return ''
    return text.strip() or ('a signal' if folder else '')


def leave() -> StoppedEarly:
    """Return the exception that ends this process. From now on it ignores both signals.

    Under a launcher the exit status is 0 and a note gives the reason: with another status the
    launcher, or srun, would treat the rank as failed and kill ranks that have not ended yet. If the
    folder of the notes is on another machine, the status is 0 as well, and a rank on that machine
    writes the note.
    """
    for number in SIGNALS:
        if signal.getsignal(number) is _receive:
            signal.signal(number, signal.SIG_IGN)
    folder = os.environ.get(FOLDER_VARIABLE, '')
    on_other_machine = bool(folder) and not os.path.isdir(folder)
    return StoppedEarly(0 if write_note(LEFT) or on_other_machine else STATUS)


def spare_worker() -> None:
    """Let a loader's worker survive the first SIGTERM and SIGUSR1; the second one ends it.

    The rank needs the worker until its current step is done.
    """
    _received.clear()
    for number in SIGNALS:
        signal.signal(number, _receive_in_worker)


def _receive(number: int, _: Optional[FrameType]) -> None:
    now = time.monotonic()
    if now - _received.setdefault(number, now) >= REPEATED_SECONDS:
        _end_by(number)
    # Through the launcher the request reaches encoders, which take no part in the ranks' agreement.
    write_note(ASKED, signal.Signals(number).name)


def _receive_in_worker(number: int, _: Optional[FrameType]) -> None:
    if number in _received:
        _end_by(number)
    _received[number] = time.monotonic()


def _restore_default_actions() -> None:
    """Restore the default actions in a process that a rank has forked.

    Requests are meant for the rank only.
    """
    for number in SIGNALS:
        if signal.getsignal(number) is _receive:
            signal.signal(number, signal.SIG_DFL)
    _received.clear()


os.register_at_fork(after_in_child=_restore_default_actions)


def _end_by(number: int) -> None:
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def write_note(name: str, text: str = '') -> bool:
    """Write a file into the folder of the launcher's notes; return whether it is there.

    Args:
        name: Name of the file, or a folder and a name with ``/`` between.
        text: Content.
    """
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder:
        return False
    path = Path(folder, name)
    try:
        if '/' in name:
            path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding='utf-8')
    # The folder is on another machine, its disk is full, or the launcher has gone.
    except OSError:
        return False
    return True


# --- in the launcher


def take_requests(torchrun: Any, folder: Path, nodes_leave: bool) -> None:
    """Let the launcher treat SIGTERM and SIGUSR1 as requests once its ranks do.

    Before that, and the second time, a signal ends all ranks at once, as torchrun's other signals
    do.

    Args:
        torchrun: The module ``torch.distributed.elastic.multiprocessing.api``; its handler of
            signals and its way of ending ranks are replaced.
        folder: Folder of the launcher's notes.
        nodes_leave: Whether the job is elastic. Then SIGTERM ends the ranks of this machine at
            once, and the training continues on the others.
    """
    raise_signal, close = torchrun._terminate_process_handler, torchrun.PContext.close
    received: Dict[int, float] = {}

    def handle(number: int, frame: Optional[FrameType]) -> None:
        now = time.monotonic()
        if (
            number not in SIGNALS
            or (nodes_leave and number == signal.SIGTERM)
            or not (folder / _LISTENS).exists()
            or now - received.setdefault(number, now) >= REPEATED_SECONDS
        ):
            raise_signal(number, frame)
        name = signal.Signals(number).name
        (folder / ASKED).write_text(name, encoding='utf-8')
        os.write(
            2,
            f'\n{name}: the ranks save a checkpoint at the end of their step and leave; '
            f'if it comes again, they end at once\n'.encode(),
        )

    def close_at_once(context: Any, death_sig: Optional[int] = None, timeout: int = 30) -> None:
        # Torchrun would send SIGTERM, which ranks treat as a request.
        close(context, END if death_sig in (None, *SIGNALS) else death_sig, timeout)

    # Torchrun installs this handler for the signals that it handles itself.
    torchrun._terminate_process_handler = handle
    torchrun.PContext.close = close_at_once
    signal.signal(signal.SIGUSR1, handle)


def has_left(folder: Path) -> bool:
    """Return whether the ranks have left after a request, with a checkpoint saved."""
    return (folder / LEFT).exists()
