"""A stand-in for a terminal that keeps what is written to it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Optional

BAR = '\u2501'
COLOR = re.compile(r'\x1b\[[\d;]*m')


class FakeTerminal:
    """A file that says it is a terminal, and can break as one whose session was closed."""

    encoding = 'utf-8'

    def __init__(self, path: Path, fails_after: Optional[str] = None) -> None:
        self._file = open(path, 'w+', encoding='utf-8')
        self._fails_after = fails_after

    def write(self, text: str) -> int:
        if self._fails_after and self._fails_after in self.text():
            raise OSError(5, 'Input/output error')
        return self._file.write(text)

    def text(self) -> str:
        self._file.flush()
        return COLOR.sub('', Path(self._file.name).read_text(encoding='utf-8'))

    def flush(self) -> None:
        self._file.flush()

    def fileno(self) -> int:
        return self._file.fileno()

    def isatty(self) -> bool:
        return True
