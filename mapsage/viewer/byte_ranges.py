"""Which bytes a request asks for, however long its numbers are.

Python refuses to read a number of more than 4,300 digits, and older versions take seconds for one.
"""
from __future__ import annotations

import re
import sys
from typing import Optional, Tuple


def requested_part(header: Optional[str], size: int) -> Optional[Tuple[int, int]]:
    """Return the first and the last byte + 1 that a ``Range`` header asks for.

    None stands for the whole file: without the header, and for what a server may ignore (several
    parts, other units, a malformed header), as RFC 9110, section 14.2, has it. A part that the file
    does not have is empty.
    """
    found = re.fullmatch('bytes=([0-9]*)-([0-9]*)', header or '')
    if found is None or found.group(0) == 'bytes=-':
        return None
    first, last = found.groups()
    if not first:  # the last bytes
        length = as_bytes(last)
        return (max(0, size - length), size) if length else (size, size)
    if last and _order(last) < _order(first):
        return None
    return as_bytes(first), min(size, as_bytes(last) + 1 if last else size)


def as_bytes(digits: str) -> int:
    """Return a number of bytes; more than any file has for one that Python would refuse to read."""
    digits = digits.lstrip('0') or '0'
    return int(digits) if len(digits) < 19 else sys.maxsize


def _order(digits: str) -> Tuple[int, str]:
    """Return what compares as the numbers do, however long they are."""
    digits = digits.lstrip('0')
    return len(digits), digits
