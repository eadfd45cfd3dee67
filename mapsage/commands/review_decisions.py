"""What reviews of tools/view.py say of the windows that may be suggested."""
from __future__ import annotations

from typing import Sequence, Tuple

from mapsage.geo import AreaOfInterest
from mapsage.labeling.exclusions import Ground
from mapsage.labeling.window_facts import Place
from mapsage.viewer.decisions import WRONG_LABEL, WRONG_MAP, read_windows


def split_reviews(paths: Sequence[str], suspicious: bool) -> Tuple[Ground, Ground]:
    """Return the windows that come first, and those that are left out.

    A label is worth most where the map was found wrong; labels that were found wrong are what
    ``suspicious`` looks for. Whatever else was decided needs no second look.

    Args:
        paths: Files that the reviews have written.
        suspicious: Whether labels are checked, not windows chosen to be labeled.

    Raises:
        ViewError: If a file cannot be read.
    """
    wanted = WRONG_LABEL if suspicious else WRONG_MAP
    first, others = Ground([], []), Ground([], [])
    for path in paths:
        windows = read_windows(path)
        for (areas, places), decided, test in (
                (first, [each for each in windows if each.decision == wanted], '='),
                (others, [each for each in windows if each.decision != wanted], '<>')):
            if any(each.has_place for each in decided):
                areas.append(AreaOfInterest(path, f"decision {test} '{wanted}'"))
            places += [Place(each.path, *each.box) for each in decided if not each.has_place]
    return first, others
