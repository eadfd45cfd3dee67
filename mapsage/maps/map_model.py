"""The interface between a prediction and its model, whether a checkpoint or an exported file.

Implementations are `commands/checkpoint_model.py` (PyTorch, any number of ranks) and
`exported.ExportedModel` (one process without PyTorch). Only `rank` and `world_size` are known
before `load`: everything else is read from the checkpoint or the file.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Dict, List, Mapping, Optional, Protocol, Sequence, Tuple

from mapsage.geo import Raster

from .description import Bands, Classes
from .strips import Predictor


class PlaceSource(Protocol):
    """Finds and opens places for a model of scene stacks, which sees many files as one raster.

    Attributes:
        training_days: Days of the year that training had, by sensor; empty if unknown.
    """

    training_days: Mapping[str, Sequence[int]]

    def find(self, paths: Sequence[str]) -> Dict[str, str]:
        """Return the places in folders and lists: name -> path of the file with their grid.

        Raises:
            GeoError, PredictError: If a path has no place, or files of a place do not fit.
        """

    def open(self, path: str) -> Raster:
        """Return the place whose grid is a file's, with the bands that the model takes."""

    def describe(self, path: str) -> List[str]:
        """Return what a user should know about a place, such as missing dates."""

    def dates(self, path: str) -> List[str]:
        """Return the dates of a place's images as ISO text, in the order of the model's input."""


class MapModel(Protocol):
    """A model that predicts windows, and the ranks that share the work.

    Attributes:
        rank, world_size: Rank of this process, and number of ranks.
        classes, bands: Classes of the map, and bands that the model takes.
        window: Height and width of a window in pixels.
        overlap: Pixels that neighboring windows share.
        window_origin: Setting that decided the window, for the user.
        predictor: Computes weighted scores of windows.
        batch_size: Number of windows that are predicted at a time.
        places: Places of a model of scene stacks; None for models of single scenes.
        folded_norms: Names of the batch normalizations that are folded into convolutions; known
            after ``load`` on rank 0, which decides for all.
    """

    rank: int
    world_size: int
    classes: Classes
    bands: Bands
    window: Tuple[int, int]
    overlap: int
    window_origin: str
    predictor: Predictor
    batch_size: int
    places: Optional[PlaceSource]
    folded_norms: Sequence[str]

    def load(self) -> None:
        """Read the weights, and set the attributes that depend on them."""

    def prepare(self, folded_norms: Sequence[str]) -> None:
        """Make the model ready for its first window, as rank 0 decided."""

    def settings(self) -> Dict[str, Any]:
        """Return the settings of the model that a map depends on, in types of JSON."""

    def describe(self) -> str:
        """Return precision and device as the end of a line for the user."""

    def fail_together(self, task: str) -> AbstractContextManager:
        """Return a context that raises an error of one rank on all ranks."""

    def gather_texts(self, text: str) -> List[str]:
        """Return the texts of all ranks, in the order of ranks, on every rank. Collective."""

    def note_for_launcher(self, text: str) -> None:
        """Give the launcher, if there is one, a text to end its output with."""
