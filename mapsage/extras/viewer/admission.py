"""Access to the viewer: only a browser that has opened one of its links gets answers.

Every user of a machine can reach 127.0.0.1, so the address proves nothing. A link carries a token
that works once. The browser that opens the link gets a cookie that is valid while the viewer and
the browser run. A used link is replaced at once, so exactly one link is valid at any time.
`server.py` asks :class:`Admission` before it answers.
"""

from __future__ import annotations

import hmac
import secrets
import threading
from typing import Sequence

_COOKIE = 'mapsage_view_{}'


class Admission:
    """The token of the valid link, and the cookie of the browsers that have opened a link."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._token, self._cookie_value = secrets.token_urlsafe(32), secrets.token_urlsafe(32)

    @property
    def token(self) -> str:
        """The token of the valid link."""
        with self._lock:
            return self._token

    def redeem(self, token: str) -> bool:
        """Return whether a token is valid. A valid token is replaced by a new one."""
        with self._lock:
            is_valid = _is_same(token, self._token)
            if is_valid:
                self._token = secrets.token_urlsafe(32)
            return is_valid

    def cookie(self, port: str) -> str:
        """Return the ``Set-Cookie`` header of an admitted browser.

        Args:
            port: Port by which the browser knows the viewer, for example the port of ``ssh -L``.
                Browsers send a cookie to all ports of a host, so the cookie's name has the port.
        """
        return f'{_COOKIE.format(port)}={self._cookie_value}; HttpOnly; SameSite=Strict; Path=/'

    def admits(self, cookies: Sequence[str], port: str) -> bool:
        """Return whether one of the ``Cookie`` headers contains the cookie of this viewer."""
        name = _COOKIE.format(port)
        pairs = [pair.strip().partition('=') for header in cookies for pair in header.split(';')]
        return any(key == name and _is_same(value, self._cookie_value) for key, _, value in pairs)


def _is_same(text: str, secret: str) -> bool:
    return hmac.compare_digest(text.encode('utf-8', 'replace'), secret.encode())
