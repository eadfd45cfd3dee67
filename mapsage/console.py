"""Output of programs: streams that accept any character, and help texts with examples."""
from __future__ import annotations

import argparse
import sys
from typing import Any, Dict, Optional

from mapsage_launcher.shipped import name_installed_commands


def accept_any_text() -> None:
    """Make stdout and stderr print characters that they cannot encode as backslash escapes.

    A console in ASCII or Latin-1 cannot print Chinese, and no console can print the bytes of a file
    name in another encoding. Without this, printing them raises an error.
    """
    for stream in (sys.stdout, sys.stderr):
        make_lenient(stream)


def make_lenient(stream: Any, **encoding: str) -> None:
    """Make a text stream write characters that it cannot encode as backslash escapes.

    Args:
        stream: Stream; nothing happens if it cannot be changed, such as None.
        **encoding: Keyword ``encoding``, to change the encoding as well.
    """
    try:
        stream.reconfigure(errors='backslashreplace', **encoding)
    # There is no stream, or it is a user's class, or closed.
    except (AttributeError, OSError, ValueError):
        pass


def examples(doc: Optional[str]) -> Dict[str, Any]:
    """Return the arguments of ``ArgumentParser`` that show the indented lines of a docstring.

    In an installed wheel the examples name the command ``mapsage`` instead of files of a checkout.

    Args:
        doc: ``__doc__`` of the program.
    """
    lines = [line[4:] for line in (doc or '').split('\n') if line.startswith('    ')]
    text = name_installed_commands('\n'.join(['examples:', *(f'  {line}' for line in lines)]))
    return dict(epilog=text if lines else None,
                formatter_class=argparse.RawDescriptionHelpFormatter)
