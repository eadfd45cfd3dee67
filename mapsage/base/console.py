"""Output of programs: streams that print any text harmlessly, and help texts with examples."""

from __future__ import annotations

import argparse
import re
import sys
from typing import Any, Dict, Iterable, List, Optional, Sequence

from mapsage_launcher.shipped import name_installed_commands

from .stand_ins import Delegate

# C0 (without tab and newline), delete, C1, and characters that reverse the direction of a line.
_CONTROL = re.compile('[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]')

# How a command line in a docstring begins.
_STARTS = ('python tools/', 'bash scripts/', 'mapsage ')


class PrintableText(str):
    """Text that a stream of :func:`accept_any_text` writes as it is, with the colors of a log."""

    def __add__(self, other: str) -> PrintableText:
        return PrintableText(str(self) + printable(other))


def printable(text: str) -> str:
    """Return a text with backslash escapes in place of control characters.

    The name of a file or of a class may contain any character. A terminal obeys some of them: they
    move the cursor, clear the screen, or change the title of the window.
    """
    return _CONTROL.sub(lambda match: match.group().encode('unicode_escape').decode(), text)


def shorten_list(items: Sequence[object], most: int) -> str:
    """Return text with the first items of a list, at most ``most``, and the number of the others."""
    more = f' and {len(items) - most} more' * (len(items) > most)
    return ', '.join(map(str, items[:most])) + more


def accept_any_text() -> None:
    """Make stdout and stderr print any text: what a console cannot show, as backslash escapes.

    A console in ASCII or Latin-1 cannot print Chinese, and no console can print the bytes of a file
    name in another encoding; without this, printing them raises an error. Control characters would
    act on the terminal, see :func:`printable`.
    """
    for name in ('stdout', 'stderr'):
        stream = getattr(sys, name)
        make_lenient(stream)
        if stream is not None and not isinstance(stream, _PrintableStream):
            setattr(sys, name, _PrintableStream(stream))


def raw_stream(stream: Any) -> Any:
    """Return the stream that a stream of :func:`accept_any_text` writes to, for drawing bars."""
    return stream.original if isinstance(stream, _PrintableStream) else stream


class _PrintableStream(Delegate):
    """A text stream that writes control characters as backslash escapes."""

    def write(self, text: str) -> int:
        if not isinstance(text, PrintableText):
            # A text that begins with a carriage return replaces the line, as a count of steps does.
            start = '\r' if text.startswith('\r') else ''
            text = start + printable(text[len(start) :])
        self.original.write(str(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)


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
    """Return the arguments of ``ArgumentParser`` that show the command lines of a docstring.

    In an installed wheel the examples name the command ``mapsage`` instead of files of a checkout.

    Args:
        doc: ``__doc__`` of the program.
    """
    lines: List[str] = []
    for line in (doc or '').split('\n'):
        # The indentation of a docstring is the formatter's; deeper lines continue a command line.
        if line.strip().startswith(_STARTS):
            lines.append(line.strip())
        elif lines and line.startswith('    '):
            lines.append(line)
    text = name_installed_commands('\n'.join(['examples:', *(f'  {line}' for line in lines)]))
    return dict(
        epilog=text if lines else None, formatter_class=argparse.RawDescriptionHelpFormatter
    )
