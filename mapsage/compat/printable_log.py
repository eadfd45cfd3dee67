"""Write control characters into the log as backslash escapes.

Gap: mmengine's formatter writes them as they are, so the name of a file can move the cursor of the
terminal that shows the log, clear the screen or change the window's title.
Remove when: the host's formatter escapes the message and not its own colors.
"""

from __future__ import annotations

import logging

from mmengine.logging.logger import MMFormatter

from mapsage.base.console import PrintableText, printable

_format = MMFormatter.format


def _format_printable(formatter: MMFormatter, record: logging.LogRecord) -> PrintableText:
    """Format a record; only the colors of the formatter's own prefix stay."""
    trace = record.exc_text
    if record.exc_info and not trace:
        trace = formatter.formatException(record.exc_info)
    return PrintableText(
        _format(
            formatter,
            logging.makeLogRecord(
                dict(
                    vars(record),
                    msg=printable(record.getMessage()),
                    args=None,
                    exc_text=printable(trace) if trace else None,
                )
            ),
        )
    )


def apply() -> None:
    """Make the formatter of mmengine's loggers escape control characters."""
    MMFormatter.format = _format_printable
