"""From what a model thinks of windows to those that are suggested, each with its reason."""
from __future__ import annotations

from typing import Any, List, Mapping, Optional, Sequence

import numpy as np

from . import choice
from .suggestions import Suggestion
from .window_facts import Place, WindowFacts

_DOUBT = 0.005  # score below which a model is sure of a window


def most_uncertain(facts: Sequence[WindowFacts], polygons: Sequence[Any], positions: np.ndarray,
                   names: Sequence[str], count: int, apart: float, tta: bool,
                   leading: Optional[Mapping[Place, str]] = None) -> List[Suggestion]:
    """Return the windows to label next, the first one first; see ``choice.choose``.

    Args:
        facts: What the model thinks of each window.
        polygons: Outlines of the windows, or Nones.
        positions: Their middles in sides of a window, ``(windows, 2)``.
        names: Names of the classes.
        count: Largest number of windows.
        apart: Least distance of two middles in sides of a window.
        tta: Whether mirror images were looked at.
        leading: Windows that come before all others, and why.
    """
    leading = leading or {}
    pixels = np.sum([each.pixels for each in facts], 0)
    weights, share = choice.class_weights(pixels), pixels / max(1, pixels.sum())
    scores = np.array([float(each.doubt @ weights) for each in facts])
    scores[scores < _DOUBT] = 0
    order = choice.choose(np.round(scores, 6), positions, count, apart,
                          np.stack([each.feature for each in facts]),
                          [n for n in np.argsort(-scores, kind='stable')
                           if facts[n].place in leading])
    found = []
    for number in order:
        each = facts[number]
        main = int((each.doubt * weights).argmax())
        one, other = each.rivals
        reason = f'{names[one]} or {names[other]}'
        if share[main] < 1 / len(names) / 2:
            reason += f', rare {names[main]} ({100 * share[main]:.1f} %)'
        if tta:
            reason += f', mirror images disagree on {100 * each.disagreement:.0f} %'
        if each.place in leading:
            reason = f'{leading[each.place]}; {reason}'
        found.append(_suggestion(each, polygons[number], scores[number], names[main], reason, tta))
    return found


def most_suspicious(facts: Sequence[WindowFacts], polygons: Sequence[Any], names: Sequence[str],
                    count: int, tta: bool,
                    leading: Optional[Mapping[Place, str]] = None) -> List[Suggestion]:
    """Return the windows whose labels a sure model contradicts, those with most such pixels first.

    Args:
        facts: What the model thinks of each window and its labels.
        polygons, names, count, tta, leading: As in :func:`most_uncertain`.
    """
    leading = leading or {}
    scores = np.array([each.contradicted / each.size for each in facts])
    found = []
    order = sorted(np.argsort(-scores, kind='stable'),
                   key=lambda number: facts[number].place not in leading)
    for number in order[:count]:
        each = facts[number]
        if not each.contradicted and each.place not in leading:
            break
        label, says = (names[index] for index in each.mistaken)
        part = 100 * each.contradicted / max(1, each.labeled)
        reason = f'labeled {label}, the model is sure of {says}: {part:.0f} % of labels'
        if not each.contradicted:
            label, reason = names[each.rivals[0]], 'the model contradicts no label'
        if each.place in leading:
            reason = f'{leading[each.place]}; {reason}'
        found.append(_suggestion(each, polygons[number], scores[number], label, reason, tta))
    return found


def _suggestion(facts: WindowFacts, polygon: Any, score: float, main: str, reason: str,
                tta: bool) -> Suggestion:
    return Suggestion(facts.place, polygon, float(score), main, reason, facts.margin,
                      facts.disagreement if tta else None)
