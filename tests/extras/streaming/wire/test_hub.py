"""The thread of all connections leaves none of them open when it ends."""

from __future__ import annotations

import selectors
import socket

from mapsage.extras.streaming.wire.hub import Hub


def test_a_connection_that_comes_at_the_end_is_closed() -> None:
    """Its peer would wait for an answer until its timeout."""
    hub = Hub(peer_timeout=30.0)
    ours, theirs = socket.socketpair()
    hub.at_end(lambda: hub.call(lambda: hub.watch(ours, selectors.EVENT_READ, lambda events: None)))
    hub.start().stop()
    theirs.settimeout(2.0)
    assert theirs.recv(1) == b''
    theirs.close()
