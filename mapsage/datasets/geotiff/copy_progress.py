"""Progress of making fast copies, in megabytes of decoded values.

The numbers include the copies that other processes make, for which this process waits.
`fast_copies.py` uses it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Callable, Mapping, Optional, Sequence

from mapsage.base.progress import ProgressLine
from mapsage.geo import decoded_bytes


class CopyProgress(ProgressLine):
    """Shows how many megabytes have been copied, and for whom this process waits.

    Args:
        sources: Rasters that are copied.
        folder: Folder of the copies.
        say: Function that prints a line; None to show nothing.
    """

    def __init__(
        self, sources: Sequence[str], folder: Path, say: Optional[Callable[[str], None]]
    ) -> None:
        self._sizes = {source: decoded_bytes(source) for source in sources}
        self._copied = dict.fromkeys(sources, 0)
        total = _megabytes(self._sizes)
        super().__init__(total, 'fast copies', say or print, shown=say is not None, unit='MB')
        if say is not None:
            say(f'{len(self._sizes)} fast copies are made in {folder}, of {total:,} MB')

    def copied(self, source: str, count: int) -> None:
        """Count copied bytes."""
        if count:
            self._copied[source] += count
            self.done = _megabytes(self._copied)
            self.show()

    def finish(self, source: str) -> None:
        """Count a copy that this or another process has completed."""
        self.copied(source, self._sizes[source] - self._copied[source])


def _megabytes(sizes: Mapping[str, int]) -> int:
    return sum(sizes.values()) // 10**6
