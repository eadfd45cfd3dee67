"""Errors of this room: a prediction that the user can correct, and one broken input of many."""

from __future__ import annotations

from mapsage.base.errors import UserError


class PredictError(UserError, ValueError):
    """An input, a checkpoint or an output folder that a prediction cannot use."""


class BrokenInputError(PredictError):
    """An input cannot be read, or has changed, after the prediction was planned.

    With ``--skip-broken`` it costs the map of this input only.
    """
