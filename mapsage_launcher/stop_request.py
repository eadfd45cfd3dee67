"""A request to save and leave, SIGTERM or SIGUSR1: how it reaches the ranks, and how they answer.

A scheduler or a person sends the signal to the launcher, to all ranks or to one of them. The
handler in a rank sets a flag, and StopHook looks at it. A launcher makes a file in the folder of
its notes, where its ranks look as well, so that no request is lost while they start; it sends them
no signal. Whoever leaves after such a request notes that too, for the launcher to end with
:data:`STATUS`.
"""
from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Dict, Iterator

# The exit status of a run that has saved and wants to be started again. It is none of a shell's, of
# sysexits.h or of a signal, and the one that HTCondor's manual uses for this.
STATUS = 85
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
# A signal that comes again means: end at once. Slurm sends one to every process of a task, and some
# of them pass it on to others, so the same signal may come twice in a moment.
REPEATED_SECONDS = 1.0
# With this one a launcher ends its ranks. Its action is the default one there, which the kernel
# carries out even if the rank is stuck in a collective.
END = signal.SIGUSR2
_FOLDER = 'MAPSAGE_ERROR_NOTES'  # of the launcher
_LISTENS, _ASKED, _LEFT = 'listens', 'stop', 'left'

_received: Dict[int, float] = {}  # signals that this process got, and when


class StoppedEarly(SystemExit):
    """The run has saved a checkpoint because it was asked to, and this process ends."""


# --- in a rank

@contextmanager
def listening(wanted: bool = True) -> Iterator[None]:
    """Take SIGTERM and SIGUSR1 for a request in the block, where they have their default action.

    Nothing happens outside the main thread. Under a torchrun that is not tools/launch.py SIGTERM
    keeps its action, since torchrun ends the ranks with it when one of them has failed.

    Args:
        wanted: Whether somebody will look; nothing happens otherwise.
    """
    foreign = 'TORCHELASTIC_RUN_ID' in os.environ and _FOLDER not in os.environ
    possible = wanted and threading.current_thread() is threading.main_thread()
    taken = [number for number in SIGNALS if possible
             and signal.getsignal(number) == signal.SIG_DFL
             and not (foreign and number == signal.SIGTERM)]
    for number in taken:
        signal.signal(number, _receive)
    if taken:
        _note(_LISTENS)
    try:
        yield
    finally:
        for number in taken:
            if signal.getsignal(number) is _receive:
                signal.signal(number, signal.SIG_DFL)
        if taken:
            _received.clear()


def is_listening() -> bool:
    """Return whether this process takes SIGTERM or SIGUSR1 for a request."""
    return any(signal.getsignal(number) is _receive for number in SIGNALS)


def asked() -> str:
    """Return the name of the signal by which this rank or its launcher was asked; '' if not."""
    for number in _received:
        return signal.Signals(number).name
    return asked_launcher()


def asked_launcher() -> str:
    """Return the name of the signal by which the launcher on this machine was asked; '' if not.

    A rank that was asked tells its launcher.
    """
    folder = os.environ.get(_FOLDER)
    try:
        text = Path(folder, _ASKED).read_text(encoding='utf-8') if folder else ''
    except OSError:  # there is none
        return ''
    return text.strip() or ('a signal' if folder else '')


def leave() -> StoppedEarly:
    """Return the exception that ends this process. From now on it ignores both signals.

    Under a launcher the status is 0, and a note says why: another one would count as a failure,
    for which the launcher, or srun, would kill ranks that have not ended yet. On another machine
    than that of the notes it is 0 as well, since a rank beside them writes the note.
    """
    for number in SIGNALS:
        if signal.getsignal(number) is _receive:
            signal.signal(number, signal.SIG_IGN)
    folder = os.environ.get(_FOLDER, '')
    elsewhere = bool(folder) and not os.path.isdir(folder)
    return StoppedEarly(0 if _note(_LEFT) or elsewhere else STATUS)


def spare_worker() -> None:
    """Let a loader's worker outlive the first SIGTERM and SIGUSR1; the second one ends it.

    The rank still needs it for the step that it is in.
    """
    _received.clear()
    for number in SIGNALS:
        signal.signal(number, _receive_in_worker)


def _receive(number: int, _: Any) -> None:
    now = time.monotonic()
    if now - _received.setdefault(number, now) >= REPEATED_SECONDS:
        _end_by(number)
    _note(_ASKED, signal.Signals(number).name)  # an encoder is no part of what the ranks agree on


def _receive_in_worker(number: int, _: Any) -> None:
    if number in _received:
        _end_by(number)
    _received[number] = time.monotonic()


def _as_by_default() -> None:
    """Give a process that a rank has forked the default actions; nobody asks it for the run."""
    for number in SIGNALS:
        if signal.getsignal(number) is _receive:
            signal.signal(number, signal.SIG_DFL)
    _received.clear()


os.register_at_fork(after_in_child=_as_by_default)


def _end_by(number: int) -> None:
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _note(name: str, text: str = '') -> bool:
    folder = os.environ.get(_FOLDER)
    if not folder:
        return False
    try:
        Path(folder, name).write_text(text, encoding='utf-8')
        return True
    except OSError:  # the folder is on another machine, its disk is full, or the launcher has gone
        return False


# --- in the launcher

def take_requests(torchrun: Any, folder: Path, nodes_leave: bool) -> None:
    """Let tools/launch.py take SIGTERM and SIGUSR1 for a request, once its ranks do.

    Before that, and if it comes again, the signal ends all ranks at once, as torchrun's others do.

    Args:
        torchrun: The module ``torch.distributed.elastic.multiprocessing.api``.
        folder: Folder of the launcher's notes.
        nodes_leave: Whether the training goes on without this node when its launcher is terminated:
            then SIGTERM ends its ranks at once.
    """
    raise_signal, close = torchrun._terminate_process_handler, torchrun.PContext.close
    received: Dict[int, float] = {}

    def handle(number: int, frame: Any) -> None:
        now = time.monotonic()
        if (number not in SIGNALS or (nodes_leave and number == signal.SIGTERM)
                or not (folder / _LISTENS).exists()
                or now - received.setdefault(number, now) >= REPEATED_SECONDS):
            raise_signal(number, frame)
        name = signal.Signals(number).name
        (folder / _ASKED).write_text(name, encoding='utf-8')
        os.write(2, f'\n{name}: the ranks save a checkpoint at the end of their step and leave; '
                    f'if it comes again, they end at once\n'.encode())

    def close_at_once(context: Any, death_sig: Any = None, timeout: int = 30) -> None:
        # Ranks take SIGTERM, which torchrun would send, for a request.
        close(context, END if death_sig in (None, *SIGNALS) else death_sig, timeout)

    torchrun._terminate_process_handler = handle  # for the signals that torchrun handles
    torchrun.PContext.close = close_at_once
    signal.signal(signal.SIGUSR1, handle)


def has_left(folder: Path) -> bool:
    """Return whether the ranks have left at a request, with everything saved."""
    return (folder / _LEFT).exists()
