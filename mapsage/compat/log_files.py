"""Continue a run whose log files cannot be written, with one sentence that names the file.

Gap: on a full disk, MMEngine's ``LocalVisBackend`` ends the run with an error that names no file,
and may leave half a line. Python's ``logging`` prints a traceback for every line of the log.
Remove when: mmengine warns where it cannot append to its scalars and its log.
"""

from __future__ import annotations

import logging
import sys
from typing import Any, Dict

from mmengine.fileio import dump
from mmengine.logging import MMLogger
from mmengine.visualization import LocalVisBackend

_host_init = MMLogger.__init__


def _append_scalars(
    self: LocalVisBackend, value_dict: Dict[str, Any], file_path: str, file_format: str
) -> None:
    """Append a line of scalars, in the bytes of MMEngine."""
    # Not at the top: this room is imported before the others.
    from mapsage.host.log_lines import append_line

    append_line(file_path, dump(value_dict, file_format=file_format))


def _make_logger(self: MMLogger, *args: Any, **kwargs: Any) -> None:
    """Make a logger whose file handlers report a file that cannot be written once."""
    _host_init(self, *args, **kwargs)
    for handler in self.handlers:
        if isinstance(handler, logging.FileHandler):
            handler.handleError = _Reporter(handler)  # type: ignore[method-assign]


class _Reporter:
    """Handles errors of a file handler.

    Args:
        handler: The handler.
    """

    def __init__(self, handler: logging.FileHandler) -> None:
        self._handler, self._has_reported = handler, False

    def __call__(self, record: logging.LogRecord) -> None:
        """Print a sentence for the first OSError; leave other errors to Python."""
        from mapsage.host.log_lines import describe_lost_lines

        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            logging.FileHandler.handleError(self._handler, record)
        elif not self._has_reported:
            self._has_reported = True
            text = describe_lost_lines(self._handler.baseFilename, error)
            sys.stderr.write(f'warning: {text}\n')


def apply() -> None:
    """Replace the method that writes scalars, and the error handling of log files."""
    LocalVisBackend._dump = _append_scalars
    MMLogger.__init__ = _make_logger  # type: ignore[method-assign]
