"""Output that never fails because of a character."""
from __future__ import annotations

import sys
from typing import Any


def accept_any_text() -> None:
    """Let stdout and stderr show what they cannot encode as backslash escapes.

    A console in ASCII or Latin-1 has no Chinese characters, and none has the bytes of a file name
    that is not in the encoding of the file system. Without this, printing them raises an error.
    """
    for stream in (sys.stdout, sys.stderr):
        make_lenient(stream)


def make_lenient(stream: Any, **encoding: str) -> None:
    """Let a text stream write what it cannot encode as backslash escapes.

    Args:
        stream: Stream; one that cannot be changed, such as None, is left as it is.
        **encoding: Keyword ``encoding``, to change that as well.
    """
    try:
        stream.reconfigure(errors='backslashreplace', **encoding)
    except (AttributeError, OSError, ValueError):  # None, somebody's own stream, or a closed one
        pass
