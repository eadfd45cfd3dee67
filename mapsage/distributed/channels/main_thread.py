"""Where the main thread of a process is: which ranks wait, and which one they wait for.

When a collective does not complete, several ranks may be missing from it: one that hangs, and
others that wait for it in another collective. Each rank reads the stack of its main thread on
another thread and reports it; `lost_ranks.py` collects the reports and calls
:func:`find_stragglers`.
"""

from __future__ import annotations

import os
import sys
import threading
from types import FrameType
from typing import Optional

from mapsage.distributed.lost_ranks import Activity, Position

_CHANNELS = __name__.rpartition('.')[0]
# Process groups written in Python, which wait as torch's do.
_GROUPS = 'mapsage.distributed.groups'


# Line of the collective in which this process has waited in vain; empty if it has not.
_broken_line = ''


def set_broken_collective(error: Optional[BaseException]) -> None:
    """Remember the error of a collective that broke on this rank, or forget it with None.

    The main thread then collects facts for its report, but others see it where it has waited.
    """
    global _broken_line
    _broken_line = '' if error is None else line_of(error)


def main_thread_position() -> Position:
    """Return where the main thread of this process is. Call it from another thread."""
    if _broken_line:
        return Position(Activity.IN_COLLECTIVE, _broken_line)
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return Position(_classify(frame), _describe(frame))


def _classify(frame: Optional[FrameType]) -> Activity:
    innermost = _module(frame)
    if innermost.startswith(('torch.distributed.distributed_c10d', _GROUPS)) or _waits_in_channel(
        frame
    ):
        return Activity.IN_COLLECTIVE
    # The engine itself is native code: a hook in Python would be the innermost frame.
    if innermost.startswith('torch.autograd'):
        return Activity.IN_BACKWARD
    return Activity.RUNS


def _waits_in_channel(frame: Optional[FrameType]) -> bool:
    while frame is not None:
        if _module(frame).startswith(_CHANNELS):
            return True
        frame = frame.f_back
    return False


def line_of(error: BaseException) -> str:
    """Return the line at which an error was raised, in the form of :attr:`Position.line`."""
    traceback, line = error.__traceback__, ''
    while traceback is not None:
        if not _is_waiting(traceback.tb_frame):
            line = _format_line(traceback.tb_frame, traceback.tb_lineno)
        traceback = traceback.tb_next
    return line


def _describe(frame: Optional[FrameType]) -> str:
    while frame is not None and frame.f_back is not None and _is_waiting(frame):
        frame = frame.f_back
    return _format_line(frame, frame.f_lineno) if frame is not None else ''


def _is_waiting(frame: FrameType) -> bool:
    return _module(frame).startswith(
        (
            _CHANNELS,
            _GROUPS,
            'mapsage.distributed.lost_ranks',
            'mapsage.distributed.store',
            'torch.distributed',
            'torch.futures',
            'torch.autograd',
            'threading',
            'selectors',
        )
    )


def _format_line(frame: FrameType, number: int) -> str:
    folder, name = os.path.split(frame.f_code.co_filename)
    path = os.path.join(os.path.basename(folder), name)
    return f'{path}:{number} in {frame.f_code.co_name}'


def _module(frame: Optional[FrameType]) -> str:
    return str(frame.f_globals.get('__name__', '')) if frame is not None else ''
