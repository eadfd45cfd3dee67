"""What may follow what on the way of an item, without links and blocks."""

from __future__ import annotations

import pytest

from mapsage.extras.streaming.remote.state import Progress, ProgressError, State


def test_what_a_state_does_not_allow_is_an_error():
    new = Progress()
    filled = new.offered(10).reserved(10).received(0, 10)
    assert filled.state == State.READY
    assert new.offered(0).state == State.READY
    assert new.offered(9).reserved(5).received(0, 5).state == State.PARTIAL
    assert (
        new.offered(9).reserved(5).received(0, 5).reserved(4).received(5, 2).state == State.RESUMING
    )
    for step in (
        lambda: new.reserved(1),
        lambda: new.offered(3).reserved(4),
        lambda: new.offered(3).offered(3),
        lambda: new.offered(-1),
        lambda: new.received(0, 1),
        lambda: new.consumed(),
        lambda: new.offered(9).reserved(5).received(1, 1),
        lambda: new.offered(9).reserved(5).received(0, 6),
        lambda: new.offered(9).reserved(5).received(0, 0),
        lambda: filled.requeued(),
        lambda: filled.failed(),
        lambda: filled.consumed().consumed(),
        lambda: new.failed().failed(),
        lambda: new.failed().requeued(),
        lambda: new.offered(3).encoded(3),
    ):
        with pytest.raises(ProgressError, match='an item cannot be'):
            step()
