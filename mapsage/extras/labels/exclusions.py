"""Filter for the windows that may be suggested: no labeled ground, no excluded ground.

"Half covered" counts as covered everywhere in this module. Ground comes in two forms: polygons in a
CRS (`AreaOfInterest`) and, for images without coordinates, windows in pixels of a file
(`FileWindow`).
"""

from __future__ import annotations

import os
from typing import List, NamedTuple, Sequence, Set, Tuple

from mapsage.extras.viewer.decisions import WRONG_LABEL, WRONG_MAP, read_windows
from mapsage.geo import AreaOfInterest, SceneArea

from .known_labels import KnownLabels, labeled_share
from .outlines import overlap
from .suggestions import read_table
from .window_facts import FileWindow
from .window_source import WindowCandidate, WindowSource

# A window counts as covered, or as labeled, from this share of its pixels on.
_COVERED_SHARE = 0.5
# A window counts as having labels to check from this share of its pixels on.
_LABELED_SHARE = 0.01


class Ground(NamedTuple):
    """Ground as polygons in a CRS, and as windows in the pixels of files without coordinates."""

    areas: List[AreaOfInterest]
    places: List[FileWindow]


_NOWHERE = Ground([], [])


class Exclusions:
    """Removes the windows that must not be chosen.

    Args:
        known: Index of the existing labels.
        files: Paths of polygons, in any CRS, and of tables of earlier suggestions (``.csv``).
            Windows that they cover by half are left out.
        with_labels: Whether to return windows that have labels, to check these, instead of
            windows without labels.
        decided: Further ground that is left out.
        first: Ground whose windows are chosen before all others.

    Attributes:
        leading: Windows among the candidates that are half covered by ``first``.

    Raises:
        GeoError: If a file cannot be read.
    """

    def __init__(
        self,
        known: KnownLabels,
        files: Sequence[str],
        with_labels: bool,
        decided: Ground = _NOWHERE,
        first: Ground = _NOWHERE,
    ) -> None:
        self._known, self._with_labels = known, with_labels
        self._decided, self._first = decided, first
        self._tables = [box for path in files if _is_table(path) for box in read_table(path)]
        self._areas = [AreaOfInterest(path) for path in files if not _is_table(path)]
        self.leading: Set[FileWindow] = set()

    def candidates(self, source: WindowSource, path: str) -> List[WindowCandidate]:
        """Return the windows of an image or scene that may be chosen."""
        scene = source.scene(path)
        with scene.raster as raster:
            areas = [area.of_scene(raster) for area in self._areas]
            first, decided = (
                [area.of_scene(raster) for area in ground.areas] if raster.is_georeferenced else []
                for ground in (self._first, self._decided)
            )
            excluded_boxes = [*self._tables, *self._decided.places]
            candidates = [
                window
                for window in source.grid(scene)
                if not _is_covered(window.place, [*areas, *decided], excluded_boxes)
                and self._has_expected_labels(window.place)
            ]
        self.leading.update(
            window.place
            for window in candidates
            if _is_covered(window.place, first, self._first.places)
        )
        return candidates

    def _has_expected_labels(self, box: FileWindow) -> bool:
        """Return whether a window has labels (``with_labels``) or is mostly without."""
        share = 0.0
        if box.path in self._known:
            # What is labeled between two parts needs no label again, though no dataset takes it.
            share = labeled_share(self._known.read(*box, of_all_parts=not self._with_labels))
        return share >= _LABELED_SHARE if self._with_labels else share < _COVERED_SHARE


def split_reviews(paths: Sequence[str], suspicious: bool) -> Tuple[Ground, Ground]:
    """Return the reviewed windows that are chosen first, and those that are left out.

    A new label helps most where a reviewer found the map wrong. With ``suspicious``, windows come
    first whose label the reviewer found wrong. Windows with any other decision are left out.

    Args:
        paths: Files of reviews, written by tools/view.py.
        suspicious: Whether labels are checked, instead of windows chosen to be labeled.

    Raises:
        ViewError: If a file cannot be read.
    """
    leading_decision = WRONG_LABEL if suspicious else WRONG_MAP
    first, decided = Ground([], []), Ground([], [])
    for path in paths:
        windows = read_windows(path)
        for ground, is_first, operator in ((first, True, '='), (decided, False, '<>')):
            chosen = [
                window for window in windows if (window.decision == leading_decision) == is_first
            ]
            if any(window.has_place for window in chosen):
                ground.areas.append(
                    AreaOfInterest(path, f"decision {operator} '{leading_decision}'")
                )
            ground.places.extend(
                FileWindow(window.path, *window.box) for window in chosen if not window.has_place
            )
    return first, decided


def _is_covered(
    box: FileWindow, areas: Sequence[SceneArea], excluded_boxes: Sequence[FileWindow]
) -> bool:
    """Return whether half of a window lies in one area, or in one window of the same file."""
    box = box._replace(path=os.path.realpath(box.path))
    pixels = box[1:]
    return any(
        excluded.path == box.path and overlap(box, excluded) >= _COVERED_SHARE
        for excluded in excluded_boxes
    ) or any(area.meets(*pixels) and area.mask(*pixels).mean() >= _COVERED_SHARE for area in areas)


def _is_table(path: str) -> bool:
    return path.lower().endswith('.csv')
