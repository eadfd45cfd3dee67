"""Lines of logs that a run can do without: a full disk costs the lines, not the run.

MMEngine's scalars (`compat/log_files.py`) and the statistics of sampling are appended here. The
next checkpoint ends a run on a disk that stays full, with an error of its own.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Set

from mmengine.logging import print_log

# Files that a warning has named.
_reported: Set[str] = set()


def append_line(path: str, line: str) -> None:
    """Append a line to a log. If it cannot be written, warn once for this file and continue.

    Args:
        path: File, which is made if it does not exist.
        line: Text without an end of line. It is written completely or not at all.
    """
    data = memoryview(f'{line}\n'.encode())
    try:
        with open(path, 'ab', buffering=0) as file:
            end = file.seek(0, 2)
            try:
                while data:
                    data = data[file.write(data) :]
            except OSError:
                with contextlib.suppress(OSError):
                    file.truncate(end)
                raise
    except OSError as error:
        if path not in _reported:
            _reported.add(path)
            print_log(describe_lost_lines(path, error), logger='current', level=logging.WARNING)


def describe_lost_lines(path: str, error: OSError) -> str:
    """Return the warning about a log that cannot be written."""
    return (
        f'{path} cannot be written: {error.strerror or error}. The run continues, and this '
        f'file lacks what is logged until it can be written again.'
    )
