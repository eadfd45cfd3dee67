"""The error of this room: a prediction that the user can correct."""
from __future__ import annotations

from mapsage.errors import UserError


class PredictError(UserError, ValueError):
    """An input, a checkpoint or an output folder that a prediction cannot use."""
