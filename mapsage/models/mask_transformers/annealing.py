"""How the masks of the attention fade out in training, so that inference needs none.

Source: tue-mps/eomt@7bd19dd, ``training/lightning_module.py``; equal phases as in LightlyTrain.
"""
from __future__ import annotations

from typing import List, Optional, Sequence, Tuple

from mapsage.errors import UserError


class AnnealingError(UserError, ValueError):
    """A schedule of masks does not fit the model."""


def mask_probability(step: int, start: int, end: int, power: float = 0.9) -> float:
    """Return the probability (0..1) that a query's attention is masked in a step.

    Args:
        step: Number of the step, from 0.
        start: Step until which it is 1.
        end: Step from which on it is 0.
        power: Exponent of the fall between the two.
    """
    if step < start:
        return 1.
    if step >= end:
        return 0.
    return (1 - (step - start) / (end - start))**power


def equal_phases(blocks: int, steps: int) -> Tuple[List[int], List[int]]:
    """Return starts and ends, one of each a block, for a training of so many steps.

    The training has ``blocks + 2`` phases: in the first all masks are full, then one block's after
    the other's fades out, and in the last there are none.
    """
    bounds = [steps * phase // (blocks + 2) for phase in range(1, blocks + 2)]
    return bounds[:-1], bounds[1:]


def check_phases(starts: Optional[Sequence[int]], ends: Optional[Sequence[int]]) -> None:
    """Raise AnnealingError unless both are None, or of one length with each start before its end.
    """
    if starts is None and ends is None:
        return
    if starts is None or ends is None or len(starts) != len(ends) or not starts or any(
            not 0 <= start < end for start, end in zip(starts, ends)):
        raise AnnealingError(f'starts={starts} and ends={ends}: expected as many of both, one for '
                             'each masked block, each start of 0 or more before its end; or leave '
                             'both out for phases of equal length')
