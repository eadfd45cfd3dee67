"""The base class of errors that a user can act upon.

A command prints the message of a `UserError` as one sentence, and any other exception with its
traceback. `mapsage/base/errors.py` exports the same class for the rest of the project; it is defined
here because the launcher must not import `mapsage`.
"""

from __future__ import annotations

from typing import Sequence


class UserError(Exception):
    """A message with the value, what was expected and the next step.

    Derive an error class from it and from the built-in exception that callers expect, such as
    ``class ConfigError(UserError, ValueError)``.

    Attributes:
        final: Whether the same run would fail again after a restart of its ranks. An elastic job
            does not restart its ranks after a final error.
        on_every_rank: Whether every rank raises it for the same reason, such as a wrong config, so
            that no rank is to blame.
        ranks: Global ranks that are at fault; empty if it is the rank that raises the error, or if
            they are not known.
    """

    final = True
    on_every_rank = False
    ranks: Sequence[int] = ()
