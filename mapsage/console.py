"""What programs print: any character, and examples in their help."""
from __future__ import annotations

import argparse
import sys
from typing import Any, Dict, Optional

from mapsage_launcher.shipped import name_installed_commands


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


def examples(doc: Optional[str]) -> Dict[str, Any]:
    """Return the arguments of ``ArgumentParser`` that show the indented lines of a docstring.

    In an installed wheel they name the command ``mapsage`` in place of files of a checkout.

    Args:
        doc: Docstring of a program in tools/; its ``__doc__``.
    """
    lines = [line[4:] for line in (doc or '').split('\n') if line.startswith('    ')]
    text = name_installed_commands('\n'.join(['examples:', *(f'  {line}' for line in lines)]))
    return dict(epilog=text if lines else None,
                formatter_class=argparse.RawDescriptionHelpFormatter)
