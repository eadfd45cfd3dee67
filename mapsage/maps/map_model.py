"""The model of a map, and its predictor, which computes scores of windows.

A checkpoint is `commands/checkpoint_model.py` (any number of ranks) with the predictor of
`predictor.py`. An exported file is both at once: `exported.py`, one process without PyTorch. Only
`rank`, `world_size` and `places` are known before `load`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import (
    TYPE_CHECKING,
    Any,
    Dict,
    List,
    Mapping,
    Optional,
    Protocol,
    Sequence,
    Tuple,
    Union,
)

import numpy as np

from mapsage.geo import Raster

from .blending import RowBlender
from .description import Bands, Classes

if TYPE_CHECKING:
    # Exported models run on machines without PyTorch.
    import torch

# Numbers in host memory, or on the device that has computed them.
Scores = Union[np.ndarray, 'torch.Tensor']


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


class Predictor:
    """Computes weighted scores of windows; without PyTorch unless a subclass says so.

    Attributes:
        scores: Number of scores of a pixel.
        threshold: Score above which a model with a single score means class 1.
        weights: ``(height, width)`` float32 factors of the scores, where the scores are.
        batch_size: Largest number of windows that are computed at a time.
        parallel: Number of threads that may compute a batch at the same time.
        dtypes: Types of pixels that it takes beside float32.
    """

    scores: int
    threshold: float
    weights: Any
    batch_size: int
    parallel = 1
    dtypes: Tuple[type, ...] = (np.uint8,)

    def stack(self, windows: Sequence[np.ndarray]) -> Scores:
        """Return a batch of ``(bands, h, w)`` windows, in memory that suits the device.

        The thread that reads calls this, while the batch before is computed.
        """
        return np.stack(windows)

    def __call__(self, windows: Scores) -> Any:
        """Return ``(batch, scores, height, width)`` float32 for ``(batch, bands, h, w)``."""
        raise NotImplementedError

    def blender(
        self, window: Tuple[int, int], width: int, shared_rows: int, **planes: bool
    ) -> RowBlender:
        """Return what blends the scores where they are; arguments of :class:`RowBlender`."""
        return RowBlender(self.scores, window, width, shared_rows, self.threshold, **planes)


class MapModel:
    """A model that predicts windows, and the ranks that share the work: one, unless overridden.

    Attributes:
        rank, world_size: Rank of this process, and number of ranks.
        classes, bands: Classes of the map, and bands that the model takes.
        window: Height and width of a window in pixels.
        overlap: Pixels that neighboring windows share.
        window_origin: Setting that decided the window, for the user.
        predictor: Computes weighted scores of windows.
        batch_size: Number of windows that are predicted at a time.
        places: Places of a model of scene stacks; None for models of single scenes.
        passport: Passport of the model's training, None without one; known after ``load``.
        passport_problem: Why scenes cannot be compared with a passport, or ''.
        decisions: What rank 0 of the first job decides for all ranks of all jobs that share maps, in
            types of JSON; known after ``load``.
        required: The decisions that this job cannot change.
    """

    rank, world_size = 0, 1
    classes: Classes
    bands: Bands
    window: Tuple[int, int]
    overlap: int
    window_origin: str
    predictor: Predictor
    batch_size: int
    places: Optional[PlaceSource] = None
    passport: Optional[Dict[str, Any]] = None
    passport_problem = ''
    decisions: Mapping[str, Any] = {}
    required: Mapping[str, Any] = {}

    def load(self) -> None:
        """Read the weights, and set the attributes that depend on them."""
        raise NotImplementedError

    def prepare(self, decisions: Mapping[str, Any]) -> None:
        """Make the model ready for its first window, as the first job decided."""

    def settings(self) -> Dict[str, Any]:
        """Return the settings of the model that a map depends on, in types of JSON."""
        raise NotImplementedError

    def describe(self) -> str:
        """Return precision and device as the end of a line for the user."""
        raise NotImplementedError

    def fail_together(self, task: str) -> AbstractContextManager:
        """Return a context that raises an error of one rank on all ranks."""
        return nullcontext()

    def gather_texts(self, text: str) -> List[str]:
        """Return the texts of all ranks, in the order of ranks, on every rank. Collective."""
        return [text]

    def note_for_launcher(self, text: str) -> None:
        """Give the launcher, if there is one, a text to end its output with."""
