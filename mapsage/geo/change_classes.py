"""Classes of change: 'unchanged', and 'changed' or from-to names such as 'forest > building'.

A from-to class is an ordinary class of a segmentation, so losses, heads, metrics and maps need no
second head. Its name holds both dates' classes; everything about the dates is read from it here.
"""

from __future__ import annotations

from typing import Dict, List, Optional, Sequence, Tuple

from mapsage.base.errors import UserError

UNCHANGED, CHANGED = 'unchanged', 'changed'
# Between the class of the first date and the class of the second date.
ARROW = ' > '


class ChangeClassError(UserError, ValueError):
    """Classes of change that contradict each other, or do not suit what is asked of them."""


def transition_name(old: str, new: str) -> str:
    """Return the name of the class of pixels that were ``old`` and are ``new``."""
    return f'{old}{ARROW}{new}'


def transition_of(name: str) -> Optional[Tuple[str, str]]:
    """Return the classes at both dates of a from-to name; None for any other name."""
    old, arrow, new = name.partition(ARROW)
    return (old, new) if arrow else None


def from_to_classes(
    land_classes: Sequence[str], transitions: Optional[Sequence[str]] = None
) -> Tuple[str, ...]:
    """Return 'unchanged' and the from-to classes of a set of land classes.

    Args:
        land_classes: Names of the classes at one date.
        transitions: From-to names that can occur; None for all pairs of different classes.

    Raises:
        ChangeClassError: If a name contains the arrow, is repeated or unknown, or there are more
            classes than a map of 8 bits holds.
    """
    names = list(map(str, land_classes))
    if (
        len(set(names)) < len(names)
        or len(names) < 2
        or any(ARROW in name or name == UNCHANGED for name in names)
    ):
        raise ChangeClassError(
            f'land_classes={names}, expected two or more different names, none '
            f'of them {UNCHANGED!r} or with {ARROW!r} in it.'
        )
    pairs = [transition_name(old, new) for old in names for new in names if old != new]
    if transitions is not None:
        unknown = [name for name in transitions if name not in pairs]
        if unknown or len(set(transitions)) < len(transitions) or not transitions:
            raise ChangeClassError(
                f'transitions={list(transitions)}, expected different names such as '
                f'{pairs[0]!r}, of the land classes {names}; unknown: {unknown}.'
            )
        pairs = list(transitions)
    if len(pairs) + 1 >= 255:
        raise ChangeClassError(
            f'{len(names)} land classes make {len(pairs)} from-to classes, and '
            f'a map of 8 bits holds 254: list those that occur in transitions.'
        )
    return (UNCHANGED, *pairs)


def transition_palette(
    names: Sequence[str], land_classes: Sequence[str], land_palette: Sequence[Sequence[int]]
) -> List[List[int]]:
    """Return a color for each class of change: white, or mostly the color of the new class.

    Args:
        names: Classes of change, as from :func:`from_to_classes`.
        land_classes: Names of the classes at one date.
        land_palette: Red, green and blue, 0..255, of each of them.
    """
    colors: Dict[str, Sequence[int]] = dict(zip(land_classes, land_palette))
    palette: List[List[int]] = []
    for name in names:
        pair = transition_of(name)
        palette.append(
            [255, 255, 255]
            if pair is None
            else [
                round(0.3 * old + 0.7 * new) for old, new in zip(colors[pair[0]], colors[pair[1]])
            ]
        )
    return palette


def reversed_classes(
    names: Sequence[str], symmetric: Sequence[str] = (UNCHANGED, CHANGED)
) -> List[int]:
    """Return the class that each class becomes when the dates are exchanged, as indices.

    Args:
        names: Classes of change.
        symmetric: Names that mean the same in both directions.

    Raises:
        ChangeClassError: If a class has no reverse.
    """
    indices = {name: index for index, name in enumerate(names)}
    reverse: List[int] = []
    for name in names:
        pair = transition_of(name)
        back = name if name in symmetric else transition_name(*pair[::-1]) if pair else None
        if back not in indices:
            raise ChangeClassError(
                f'class {name!r} means another thing when the dates are exchanged'
                + (f', and {back!r} is no class' if back else '')
                + f'; classes: {list(names)}. '
                'Leave ExchangeDates out, or name the classes that mean the same in both '
                'directions in its symmetric.'
            )
        reverse.append(indices[str(back)])
    return reverse
