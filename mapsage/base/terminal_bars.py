"""Bars of progress on a terminal, which training and prediction share.

The thread that does the work also draws the bars. Rich's own refresh thread could hold a lock at
the moment when a data loader forks a worker, and that worker would hang at its first print. What a
training adds, the log above its bars, is in ``engine/display/progress_hook.py``; the lines that
other commands print without a terminal are in ``progress.py``.
"""

from __future__ import annotations

import time
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from .console import accept_any_text, printable, raw_stream


def can_redraw(stream: TextIO) -> bool:
    """Return whether a stream is a terminal on which a bar can be drawn again and again."""
    return stream.isatty() and not Console(file=stream).is_dumb_terminal


class TerminalBars:
    """Bars at the bottom of a terminal, from the start to :meth:`stop`.

    Meanwhile Rich replaces ``sys.stdout`` and ``sys.stderr`` by streams that print above the bars.

    Args:
        terminal: Stream of a terminal, see :func:`can_redraw`.

    Raises:
        OSError: If the terminal cannot be written to. All methods but :meth:`due` and :meth:`stop`
            raise it too.
    """

    def __init__(self, terminal: TextIO) -> None:
        self._drawn = 0.0
        self._progress = Progress(
            TextColumn('{task.description}'),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn('{task.fields[numbers]}'),
            console=_Console(file=raw_stream(terminal)),
            auto_refresh=False,
        )
        self._progress.start()
        # Rich has replaced the streams by its own.
        accept_any_text()

    def add(self, label: str, total: int, done: int = 0) -> TaskID:
        """Add a bar below the others, and draw them."""
        return self._progress.add_task(printable(label), total=total, completed=done, numbers='')

    def remove(self, bar: TaskID) -> None:
        """Remove a bar."""
        self._progress.remove_task(bar)

    def due(self, interval: float) -> bool:
        """Return whether ``interval`` seconds have passed since the last drawing."""
        return time.monotonic() - self._drawn >= interval

    def show(self, bar: TaskID, done: int, label: str, numbers: str) -> None:
        """Change a bar, and draw all of them.

        Args:
            bar: The bar.
            done: Number of finished steps.
            label: Text before the bar.
            numbers: Text behind the bar.
        """
        self._drawn = time.monotonic()
        self._progress.update(
            bar,
            completed=done,
            description=printable(label),
            numbers=printable(numbers),
            refresh=True,
        )

    def stop(self) -> None:
        """Draw a last time, leave the bars on the terminal and restore the streams."""
        try:
            self._progress.stop()
        except OSError:
            # Only the last drawing is lost: Rich restores the streams even if drawing fails.
            pass


class _Console(Console):
    """A console that never hides the cursor.

    Rich hides it while a bar is shown. A rank that torchrun ends with SIGTERM could not show it
    again, and the user's terminal would be left without a cursor.
    """

    def show_cursor(self, show: bool = True) -> bool:
        return False
