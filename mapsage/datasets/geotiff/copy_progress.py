"""Progress of making fast copies: a bar on a terminal, or else a line of the log every ten seconds.

The numbers are megabytes of decoded values and include the copies that other processes make, for
which this process waits. `fast_copies.py` uses it.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Callable, Mapping, Optional, Sequence

from mapsage.geo import decoded_bytes

if TYPE_CHECKING:
    from rich.progress import TaskID

    from mapsage.base.terminal_bars import TerminalBars

# Least seconds between two lines of a log, and between two drawings of a bar.
_LINE_SECONDS, _DRAW_SECONDS = 10.0, 0.2


class CopyProgress:
    """Shows how many megabytes have been copied, and for whom this process waits.

    Args:
        sources: Rasters that are copied.
        folder: Folder of the copies.
        say: Function that prints a line; None to show nothing.
    """

    _bars: Optional[TerminalBars] = None
    _bar: TaskID

    def __init__(
        self, sources: Sequence[str], folder: Path, say: Optional[Callable[[str], None]]
    ) -> None:
        self._sizes = {source: decoded_bytes(source) for source in sources}
        self._done = dict.fromkeys(sources, 0)
        self._folder, self._say = folder, say
        self._start = self._last = time.monotonic()

    def __enter__(self) -> CopyProgress:
        if self._say is not None:
            if sys.stdout.isatty():
                # Rich is imported only where a bar may be drawn.
                from mapsage.base.terminal_bars import TerminalBars, can_redraw

                if can_redraw(sys.stdout):
                    self._bars = TerminalBars(sys.stdout)
                    self._bar = self._bars.add('fast copies, MB', _megabytes(self._sizes))
            if self._bars is None:
                self._say(
                    f'{len(self._sizes)} fast copies are made in {self._folder}, of '
                    f'{_megabytes(self._sizes):,} MB'
                )
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def advance(self, source: str, count: int) -> None:
        """Count copied bytes."""
        self._done[source] += count
        self._show('')

    def finish(self, source: str) -> None:
        """Count a copy that this or another process has completed."""
        self._done[source] = self._sizes[source]
        self._show('')

    def wait(self, holder: str) -> None:
        """Show which process is waited for."""
        self._show(f'waiting: {holder.strip()}')

    def _show(self, text: str) -> None:
        now = time.monotonic()
        done, total = _megabytes(self._done), _megabytes(self._sizes)
        interval = _LINE_SECONDS if self._bars is None else _DRAW_SECONDS
        is_complete = self._bars is not None and done == total
        if self._say is None or (now - self._last < interval and not is_complete):
            return
        self._last = now
        text = text or f'{done / (now - self._start):.0f} MB/s'
        if self._bars is None:
            self._say(f'fast copies: {done:,} of {total:,} MB, {text}')
        else:
            self._bars.show(self._bar, done, 'fast copies, MB', text)


def _megabytes(sizes: Mapping[str, int]) -> int:
    return sum(sizes.values()) // 10**6
