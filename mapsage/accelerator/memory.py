"""Errors that say that a device, or the host, has too little memory."""
from __future__ import annotations

# torch's OutOfMemoryError (since 1.13) has the first text, whatever the device; older versions and
# vendors raise a RuntimeError with it. The others are those of torch's allocator on a CPU, and of
# PJRT.
_TEXTS = ('out of memory', "can't allocate memory", 'not enough memory', 'RESOURCE_EXHAUSTED')


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a computation failed only because there is too little memory for it."""
    return isinstance(error, (RuntimeError, MemoryError)) and any(
        text in str(error) for text in _TEXTS)
