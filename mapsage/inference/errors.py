"""What can be wrong with what a prediction was asked for."""
from __future__ import annotations


class PredictError(ValueError):
    """An input, a checkpoint or an output folder that a prediction cannot use."""
