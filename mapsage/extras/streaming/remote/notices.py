"""Warnings about encoders that fail, are lost or come back.

A failing encoder may fail thousands of items for one reason, so each cause is logged once per
encoder.
"""

from __future__ import annotations

import logging
import re
from typing import Callable, Optional, Set, Tuple

from mapsage.extras.streaming.wire.link import Link

Log = Callable[[int, str], None]


def log_plainly(level: int, text: str) -> None:
    """Log a text with Python's own logger, which writes warnings to stderr."""
    logging.getLogger('mapsage.extras.streaming').log(level, text)


def cause_of(text: str) -> str:
    """Return a text without its numbers, decimal or hex, which differ between items."""
    return re.sub(r'\b(0x)?(?=[a-f]*\d)[0-9a-f]+\b|\d+', '', text)


class Notices:
    """Logs warnings, each once per encoder and cause.

    Args:
        log: Function that logs a text at a level of :mod:`logging`.
        encodes: Whether the head encodes locally if no encoder does.
    """

    def __init__(self, log: Log, encodes: bool) -> None:
        self._log, self._encodes = log, encodes
        self._logged: Set[Tuple[str, str]] = set()

    def failed(self, link: Link, cause: str) -> None:
        """Log why an encoder did not encode an item."""
        instead = 'the head encodes it' if self._encodes else 'it fails'
        self._once(
            link.peer,
            cause_of(cause),
            f'{link.peer} did not encode an item: {cause}. The item goes to another '
            f'encoder; if none is left, {instead}. The same cause is not logged again.',
        )

    def lost(self, link: Link, reason: Optional[str], has_others: bool) -> None:
        """Log that a connection is lost, or was closed by the encoder if ``reason`` is None."""
        again = (
            'It is opened again as soon as the encoder can be reached'
            if link.reopens
            else 'It is not opened again, because the encoder has finished'
            if reason is None
            else 'It is not opened again, because the process of the encoder has ended'
        )
        instead = (
            'the other encoders encode'
            if has_others
            else 'the head encodes locally, which is slower'
            if self._encodes
            else 'items wait, and fail in the end'
        )
        self._log(
            logging.WARNING,
            f'the connection to {link.peer} is lost: '
            f'{reason or "it closed its link"}. {again}; '
            f'without it {instead}.',
        )

    def opened(self, link: Link) -> None:
        """Log that a lost connection is open again."""
        self._logged.discard(('the head', 'local'))
        self._log(logging.WARNING, f'the connection to {link.peer} is open again')

    def encodes_locally(self) -> None:
        """Log that no encoder is available for an item."""
        self._once(
            'the head',
            'local',
            'the head encodes locally: no encoder is connected and answers in time',
        )

    def _once(self, peer: str, cause: str, text: str) -> None:
        if (peer, cause) not in self._logged:
            self._logged.add((peer, cause))
            self._log(logging.WARNING, text)
