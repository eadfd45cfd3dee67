"""Schedule by which attention masks fade out in training, so that inference needs none.

``MaskAnnealingHook`` sets the probabilities in every step; the head reads them from its buffer
``attn_mask_probs``. Blocks fade one after the other, the first block first.

Source: tue-mps/eomt@7bd19dd, ``training/lightning_module.py``; equal phases as in LightlyTrain.
"""
from __future__ import annotations

from typing import List, Optional, Sequence, Tuple

from mapsage.errors import UserError


class AnnealingError(UserError, ValueError):
    """An annealing schedule is invalid or does not fit the model."""


def mask_probability(step: int, start: int, end: int, power: float = 0.9) -> float:
    """Return the probability (0..1) that a query's attention is masked in a step.

    Args:
        step: Number of the step, counted from 0.
        start: Last step with the probability 1.
        end: First step with the probability 0.
        power: Exponent of the polynomial between ``start`` and ``end``.
    """
    if step < start:
        return 1.
    if step >= end:
        return 0.
    return (1 - (step - start) / (end - start))**power


def equal_phases(blocks: int, steps: int) -> Tuple[List[int], List[int]]:
    """Return the starts and ends of fading, one per block, for a training of ``steps`` steps.

    The training has ``blocks + 2`` phases of equal length. In the first phase all blocks mask, then
    one block after the other fades out, and in the last phase none masks.
    """
    bounds = [steps * phase // (blocks + 2) for phase in range(1, blocks + 2)]
    return bounds[:-1], bounds[1:]


def check_phases(starts: Optional[Sequence[int]], ends: Optional[Sequence[int]]) -> None:
    """Check that both are None, or have one length and every start is before its end.

    Raises:
        AnnealingError: If they are not.
    """
    if starts is None and ends is None:
        return
    if starts is None or ends is None or len(starts) != len(ends) or not starts or any(
            not 0 <= start < end for start, end in zip(starts, ends)):
        raise AnnealingError(f'starts={starts} and ends={ends}: expected one start and one end per '
                             'masked block, each start of 0 or more before its end; or leave '
                             'both out for phases of equal length')
