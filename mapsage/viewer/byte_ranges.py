"""Parser of the HTTP header ``Range``, safe for numbers of any length.

Python refuses to convert a number of more than 4,300 digits, and older versions take seconds for
it, so a stranger's header must not reach ``int()``. Used by `server.py`.
"""
from __future__ import annotations

import re
import sys
from typing import Optional, Tuple


def requested_part(header: Optional[str], size: int) -> Optional[Tuple[int, int]]:
    """Return start and end (exclusive) of the bytes that a ``Range`` header asks for.

    Returns:
        None for the whole file: without a header, and for headers that a server may ignore (several
        ranges, other units, a malformed header; RFC 9110, section 14.2). A range beyond the end of
        the file is empty: its start is not below its end.
    """
    match = re.fullmatch('bytes=([0-9]*)-([0-9]*)', header or '')
    if match is None or match.group(0) == 'bytes=-':
        return None
    first, last = match.groups()
    if not first:
        # 'bytes=-500' asks for the last 500 bytes.
        length = as_bytes(last)
        return (max(0, size - length), size) if length else (size, size)
    if last and _sort_key(last) < _sort_key(first):
        return None
    return as_bytes(first), min(size, as_bytes(last) + 1 if last else size)


def as_bytes(digits: str) -> int:
    """Return a number of bytes; ``sys.maxsize``, more than any file has, for 19 digits or more."""
    digits = digits.lstrip('0') or '0'
    return int(digits) if len(digits) < 19 else sys.maxsize


def _sort_key(digits: str) -> Tuple[int, str]:
    """Return a key that orders numbers of any length by their value."""
    digits = digits.lstrip('0')
    return len(digits), digits
