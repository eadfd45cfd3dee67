"""Which windows may be suggested: not those that are labeled, excluded, or without labels."""
from __future__ import annotations

import os
from typing import List, NamedTuple, Sequence, Set

from mapsage.geo import AreaOfInterest, SceneArea

from .known_labels import KnownLabels, labeled_share
from .outlines import overlap
from .suggestions import read_table
from .window_facts import Place
from .window_source import WindowCandidate, WindowSource

_DONE = 0.5  # share of a window from which on, if labeled or excluded, it is not suggested
_LABELS = 0.01  # share of a window that must have a label for the label to be checked


class Ground(NamedTuple):
    """Windows with a place on the ground, and those with one in the pixels of a file only."""

    areas: List[AreaOfInterest]
    places: List[Place]


_NOWHERE = Ground([], [])


class Exclusions:
    """Sorts out windows that are not to be chosen.

    Args:
        known: Labels that are there already.
        files: Paths of polygons, in any CRS, and of tables of earlier suggestions (``.csv``):
            windows of which they cover half are left out.
        with_labels: Whether windows with labels are wanted, in place of those without.
        decided: Ground of further windows that are left out.
        first: Ground of those that are to be chosen before all others.

    Attributes:
        leading: The windows among the candidates that are half covered by ``first``.

    Raises:
        GeoError: If a file cannot be read.
    """

    def __init__(self, known: KnownLabels, files: Sequence[str], with_labels: bool,
                 decided: Ground = _NOWHERE, first: Ground = _NOWHERE) -> None:
        self._known, self._with_labels = known, with_labels
        self._decided, self._first = decided, first
        self._tables = [place for path in files if _is_table(path) for place in read_table(path)]
        self._areas = [AreaOfInterest(path) for path in files if not _is_table(path)]
        self.leading: Set[Place] = set()

    def candidates(self, source: WindowSource, path: str) -> List[WindowCandidate]:
        """Return the windows of an image or scene that may be chosen."""
        scene = source.scene(path)
        with scene.raster as raster:
            areas = [area.of_scene(raster) for area in self._areas]
            first, decided = ([area.of_scene(raster) for area in ground.areas]
                              if raster.is_georeferenced else []
                              for ground in (self._first, self._decided))
            places = [*self._tables, *self._decided.places]
            found = [window for window in source.grid(scene)
                     if not _is_covered(window.place, [*areas, *decided], places)
                     and self._fits(window.place)]
        self.leading.update(window.place for window in found
                            if _is_covered(window.place, first, self._first.places))
        return found

    def _fits(self, place: Place) -> bool:
        """Return whether a window has labels, or has none, as it is wanted."""
        share = 0.0
        if place.path in self._known:
            share = labeled_share(self._known.read(*place))
        return share >= _LABELS if self._with_labels else share < _DONE


def _is_covered(place: Place, areas: Sequence[SceneArea], places: Sequence[Place]) -> bool:
    """Return whether half of a window lies in one of the areas, or in a window of its file."""
    here, box = place._replace(path=os.path.realpath(place.path)), place[1:]
    return (any(each.path == here.path and overlap(here, each) >= _DONE for each in places)
            or any(area.meets(*box) and area.mask(*box).mean() >= _DONE for area in areas))


def _is_table(path: str) -> bool:
    return path.lower().endswith('.csv')
