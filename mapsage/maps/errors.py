"""What can be wrong with what a prediction was asked for."""
from __future__ import annotations

from mapsage.errors import UserError


class PredictError(UserError, ValueError):
    """An input, a checkpoint or an output folder that a prediction cannot use."""
