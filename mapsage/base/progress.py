"""Progress of a command: a bar on a terminal, or else a line every few seconds."""

from __future__ import annotations

import datetime
import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Callable, Optional, Type, TypeVar

if TYPE_CHECKING:
    from rich.progress import TaskID

    from mapsage.base.terminal_bars import TerminalBars

_Self = TypeVar('_Self', bound='ProgressLine')
# Least time between two lines, and between two drawings of the bar.
_LINE_SECONDS = 5.0
_DRAW_SECONDS = 0.2


class ProgressLine:
    """Shows the number of finished items, their rate and the remaining time.

    Args:
        total: Number of items.
        label: Name of the work, in one or two words.
        say: Function that prints a line.
        shown: Whether to show anything; False on ranks that do not print.
        unit: What an item is, in the plural.

    Attributes:
        done: Number of items that have been counted.
    """

    _bars: Optional[TerminalBars] = None
    _bar: TaskID

    def __init__(
        self,
        total: int,
        label: str,
        say: Callable[[str], None],
        shown: bool = True,
        unit: str = 'windows',
    ) -> None:
        self._total, self._label, self._say, self._shown = total, label, say, shown
        self._unit = unit
        self.done = 0
        self._start = self._last = time.monotonic()

    def __enter__(self: _Self) -> _Self:
        self._start = self._last = time.monotonic()
        if self._shown and self._total and sys.stdout.isatty():
            # Rich is imported only where a bar may be drawn.
            from mapsage.base.terminal_bars import TerminalBars, can_redraw

            if can_redraw(sys.stdout):
                self._bars = TerminalBars(sys.stdout)
                self._bar = self._bars.add(self._label, self._total)
        return self

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def advance(self, count: int) -> None:
        """Count finished items, and show the progress if it is time to."""
        self.done += count
        self.show()

    def reach(self, done: int) -> None:
        """Count up to ``done`` finished items, but no more than all."""
        if self.done < min(done, self._total):
            self.advance(min(done, self._total) - self.done)

    def show(self, note: str = '') -> None:
        """Show the progress if it is time to, with a note in place of rate and remaining time."""
        now = time.monotonic()
        finished = 0 < self._total <= self.done
        if not self._shown or not (
            finished or now - self._last >= (_LINE_SECONDS if self._bars is None else _DRAW_SECONDS)
        ):
            return
        self._last = now
        rate = self.done / max(now - self._start, 1e-9)
        remaining = (
            datetime.timedelta(seconds=round((self._total - self.done) / rate)) if rate else '?'
        )
        facts = note or f'{rate:.1f} {self._unit}/s  eta {remaining}'
        if self._bars is None:
            self._say(f'{self._label}: {self.done}/{self._total} {self._unit}  {facts}')
        else:
            self._bars.show(self._bar, self.done, self._label, facts)
