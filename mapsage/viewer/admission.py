"""Who may ask the viewer: a browser that has opened one of its links.

Every user of a machine reaches 127.0.0.1, so the address is no proof. A link carries a
token that works once; the browser that opens it gets a cookie for as long as the viewer and the
browser run. A used link is replaced at once, so there is always exactly one that works.
"""
from __future__ import annotations

import hmac
import secrets
import threading
from typing import Sequence

_COOKIE = 'mapsage_view_{}'


class Admission:
    """The token of the next link, and the cookie of the browsers that have opened one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._token, self._pass = secrets.token_urlsafe(32), secrets.token_urlsafe(32)

    @property
    def token(self) -> str:
        """The token that works now."""
        with self._lock:
            return self._token

    def redeem(self, token: str) -> bool:
        """Return whether a token is the one that works now; from then on another one is."""
        with self._lock:
            is_valid = _is_same(token, self._token)
            if is_valid:
                self._token = secrets.token_urlsafe(32)
            return is_valid

    def cookie(self, port: str) -> str:
        """Return the ``Set-Cookie`` header of an admitted browser.

        Args:
            port: Port by which the browser knows the viewer, for example the port of ``ssh -L``. A
                browser sends a cookie to all ports of a host, so its name holds the port.
        """
        return f'{_COOKIE.format(port)}={self._pass}; HttpOnly; SameSite=Strict; Path=/'

    def admits(self, cookies: Sequence[str], port: str) -> bool:
        """Return whether one of the ``Cookie`` headers holds the cookie of this viewer."""
        name = _COOKIE.format(port)
        pairs = [pair.strip().partition('=') for header in cookies for pair in header.split(';')]
        return any(key == name and _is_same(value, self._pass) for key, _, value in pairs)


def _is_same(given: str, secret: str) -> bool:
    return hmac.compare_digest(given.encode('utf-8', 'replace'), secret.encode())
