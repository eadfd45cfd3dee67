"""The states of an item on its way from an encoder to a head, and which may follow which."""
from __future__ import annotations

import enum


class State(enum.IntEnum):
    """Where an item is. Numbers grow along the way, so the slowest of several ranks is their min.

    FAILED is smaller than all: one rank's failure is everybody's.
    """

    FAILED = 0
    NEW = 1
    RESERVED = 2
    FILLING = 3
    PARTIAL = 4
    RESUMING = 5
    READY = 6
    CONSUMED = 7
