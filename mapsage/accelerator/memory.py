"""Recognize errors by which a device or the host reports too little memory."""

from __future__ import annotations

# torch's OutOfMemoryError (since 1.13) has the first text on every device; older versions and
# vendors raise a RuntimeError with it. The next two come from torch's CPU allocator, the last from
# PJRT.
_TEXTS = ('out of memory', "can't allocate memory", 'not enough memory', 'RESOURCE_EXHAUSTED')


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a computation failed only because there is too little memory for it."""
    return isinstance(error, (RuntimeError, MemoryError)) and any(
        text in str(error) for text in _TEXTS
    )
