"""Free memory that the C library keeps, and its return to the system."""

from __future__ import annotations

import ctypes


def return_free_memory() -> None:
    """Return the free memory of this process to the system; takes about a millisecond.

    After blocks of many sizes were allocated and freed, glibc keeps tens of megabytes for later.
    Other C libraries have no such call; then this does nothing.
    """
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return
    trim(0)
