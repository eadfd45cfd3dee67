"""Ranking of measured windows: which ones are suggested, in which order, and for what reason.

`most_uncertain` ranks windows to label, `most_suspicious` windows with labels that may be wrong.
The selection by score and diversity itself is in `choice.py`.
"""

from __future__ import annotations

from typing import Any, List, Mapping, Optional, Sequence

import numpy as np
import shapely

from . import choice
from .suggestions import Suggestion
from .window_facts import FileWindow, WindowFacts

# The model is sure of a window with a score below this one, and the window is not suggested.
_MIN_SCORE = 0.005


def most_uncertain(
    facts: Sequence[WindowFacts],
    polygons: Sequence[Any],
    positions: np.ndarray,
    names: Sequence[str],
    count: int,
    apart: float,
    tta: bool,
    leading: Optional[Mapping[FileWindow, str]] = None,
) -> List[Suggestion]:
    """Return the windows to label next, the most useful one first; see ``choice.choose``.

    Args:
        facts: Measurements of the windows.
        polygons: Outlines of the windows; None for windows without coordinates.
        positions: Centers in units of a window's side, ``(windows, 2)``.
        names: Names of the classes.
        count: Largest number of windows.
        apart: Minimum distance between two centers, in units of a window's side.
        tta: Whether mirror images were predicted too.
        leading: Windows that come before all others -> the reason.
    """
    leading = leading or {}
    pixels = np.sum([window.pixels for window in facts], 0)
    weights, share = choice.class_weights(pixels), pixels / max(1, pixels.sum())
    scores = np.array([float(window.doubt @ weights) for window in facts])
    scores[scores < _MIN_SCORE] = 0
    # Rounded scores, so that the last bits of a sum do not decide between equal windows.
    order = choice.choose(
        np.round(scores, 6),
        positions,
        count,
        apart,
        np.stack([window.feature for window in facts]),
        [index for index in np.argsort(-scores, kind='stable') if facts[index].place in leading],
    )
    suggestions = []
    for index in order:
        window = facts[index]
        main = int((window.doubt * weights).argmax())
        first, second = window.rivals
        reason = f'{names[first]} or {names[second]}'
        if share[main] < 1 / len(names) / 2:
            reason += f', rare {names[main]} ({100 * share[main]:.1f} %)'
        if tta:
            reason += f', mirror images disagree on {100 * window.disagreement:.0f} %'
        if window.place in leading:
            reason = f'{leading[window.place]}; {reason}'
        suggestions.append(
            _build_suggestion(window, polygons[index], scores[index], names[main], reason, tta)
        )
    return suggestions


def most_suspicious(
    facts: Sequence[WindowFacts],
    polygons: Sequence[Any],
    names: Sequence[str],
    count: int,
    tta: bool,
    leading: Optional[Mapping[FileWindow, str]] = None,
) -> List[Suggestion]:
    """Return the windows with labels that a confident model contradicts, most such pixels first.

    Args:
        facts: Measurements of the windows, with their labels.
        polygons, names, count, tta, leading: As in :func:`most_uncertain`.
    """
    leading = leading or {}
    scores = np.array([window.contradicted / window.size for window in facts])
    suggestions = []
    order = sorted(
        np.argsort(-scores, kind='stable'), key=lambda index: facts[index].place not in leading
    )
    for index in order[:count]:
        window = facts[index]
        if not window.contradicted and window.place not in leading:
            break
        label, prediction = (names[number] for number in window.mistaken)
        percent = 100 * window.contradicted / max(1, window.labeled)
        reason = f'labeled {label}, the model is sure of {prediction}: {percent:.0f} % of labels'
        if not window.contradicted:
            label, reason = names[window.rivals[0]], 'the model contradicts no label'
        if window.place in leading:
            reason = f'{leading[window.place]}; {reason}'
        suggestions.append(
            _build_suggestion(window, polygons[index], scores[index], label, reason, tta)
        )
    return suggestions


def _build_suggestion(
    window: WindowFacts,
    polygon: Optional[shapely.Polygon],
    score: float,
    doubtful_class: str,
    reason: str,
    tta: bool,
) -> Suggestion:
    return Suggestion(
        window.place,
        polygon,
        float(score),
        doubtful_class,
        reason,
        window.margin,
        window.disagreement if tta else None,
    )
