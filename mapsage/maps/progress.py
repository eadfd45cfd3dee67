"""Progress of a prediction: a bar on a terminal, or else a line every few seconds."""
from __future__ import annotations

import datetime
import sys
import time
from types import TracebackType
from typing import Any, Callable, Optional, Type

# Least time between two lines, and between two updates of the bar.
_LINE_SECONDS = 5.0
_DRAW_SECONDS = 0.2


class ProgressLine:
    """Shows the number of finished windows, their rate and the remaining time.

    Args:
        total: Number of windows.
        label: Name of the work, in one or two words.
        say: Function that prints a line.
        shown: Whether to show anything; False on ranks that do not print.
    """

    def __init__(self, total: int, label: str, say: Callable[[str], None],
                 shown: bool = True) -> None:
        self._total, self._label, self._say, self._shown = total, label, say, shown
        self._done = 0
        self._start = self._last = time.monotonic()
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> ProgressLine:
        self._start = self._last = time.monotonic()
        if self._shown and self._total and sys.stdout.isatty():
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
            # Without a refresh thread: the bar is drawn when windows are done.
            self._bar = Progress(TextColumn(self._label), BarColumn(bar_width=30),
                                 MofNCompleteColumn(), TextColumn('{task.fields[facts]}'),
                                 auto_refresh=False)
            self._bar.start()
            self._task = self._bar.add_task(self._label, total=self._total, facts='')
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], error: Optional[BaseException],
                 trace: Optional[TracebackType]) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, windows: int) -> None:
        """Count finished windows, and show the progress if it is time to."""
        self._done += windows
        now = time.monotonic()
        finished = self._done >= self._total
        if not self._shown or not (finished or now - self._last >= (
                _LINE_SECONDS if self._bar is None else _DRAW_SECONDS)):
            return
        self._last = now
        rate = self._done / max(now - self._start, 1e-9)
        remaining = datetime.timedelta(
            seconds=round((self._total - self._done) / rate)) if rate else '?'
        facts = f'{rate:.1f} windows/s  eta {remaining}'
        if self._bar is None:
            self._say(f'{self._label}: {self._done}/{self._total} windows  {facts}')
        else:
            self._bar.update(self._task, completed=self._done, facts=facts, refresh=True)
