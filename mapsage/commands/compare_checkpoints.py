"""tools/compare_checkpoints.py: compare the weights of two checkpoints, tensor by tensor.

"Equal" means equal bit for bit. If weights differ, the checkpoints' records of their conditions
(number of threads, devices, versions) often tell the reason; see
`mapsage/engine/guards/reproducibility.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Tuple

import torch
from mmengine.runner import CheckpointLoader

from mapsage.engine.guards.reproducibility import META_KEY, ConditionDifference, differences


@dataclass(frozen=True)
class CheckpointComparison:
    """Differences between the weights of two checkpoints.

    Attributes:
        equal: Number of tensors that are equal bit for bit.
        total: Number of tensors in either checkpoint.
        largest: Largest absolute difference of two elements, divided by the root mean square of
            their tensor in the first checkpoint; infinite if a tensor is missing or has another
            shape, or if only one of two elements is a number.
        name: Name of the tensor with this difference; empty if all tensors are equal.
        conditions: Conditions of the trainings that differ and that the bits depend on, such as the
            number of threads; empty if none differs or a file does not record them.
    """

    equal: int
    total: int
    largest: float
    name: str
    conditions: Tuple[ConditionDifference, ...] = ()

    def __str__(self) -> str:
        text = f'{self.equal} of {self.total} tensors are equal bit for bit'
        if self.name:
            text += f'; the largest difference is {self.largest:.2g} of the size of {self.name!r}'
        if self.conditions:
            text += '\nThey were computed under other conditions:'
        return '\n'.join(
            [
                text,
                *(
                    f'  {condition.name}: {condition.before} and {condition.now}'
                    for condition in self.conditions
                ),
            ]
        )


def compare_checkpoints(first: str, second: str) -> CheckpointComparison:
    """Compare the weights of two checkpoint files.

    Args:
        first: Path of a checkpoint of a run, or of a file with weights only.
        second: Path of the file to compare with.

    Raises:
        OSError: If a file cannot be read.
        ValueError: If a file has no tensors.
    """
    files = [CheckpointLoader.load_checkpoint(path, map_location='cpu') for path in (first, second)]
    first_weights, second_weights = _weights(files[0], first), _weights(files[1], second)
    equal, largest, worst = 0, 0.0, ''
    names: List[str] = list(dict.fromkeys([*first_weights, *second_weights]))
    for name in names:
        difference = _difference(first_weights.get(name), second_weights.get(name))
        if difference is None:
            equal += 1
        elif not worst or difference > largest:
            largest, worst = difference, name
    first_conditions, second_conditions = map(_conditions, files)
    different_conditions = (
        tuple(differences(first_conditions, second_conditions))
        if first_conditions and second_conditions
        else ()
    )
    return CheckpointComparison(equal, len(names), largest, worst, different_conditions)


def _conditions(checkpoint: object) -> Any:
    """Return the conditions under which a checkpoint was computed, or None without a record."""
    meta = checkpoint.get('meta') if isinstance(checkpoint, dict) else None
    return meta.get(META_KEY) if isinstance(meta, dict) else None


def _weights(checkpoint: object, path: str) -> Dict[str, torch.Tensor]:
    state = checkpoint.get('state_dict', checkpoint) if isinstance(checkpoint, dict) else {}
    weights = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    if not weights:
        raise ValueError(
            f'{path} holds no weights: expected a checkpoint of a run, or a dict of tensors.'
        )
    return weights


def _difference(first: Optional[torch.Tensor], second: Optional[torch.Tensor]) -> Optional[float]:
    """Return the relative difference of two tensors; None if all bits are equal."""
    if (
        first is None
        or second is None
        or first.shape != second.shape
        or first.dtype != second.dtype
    ):
        return float('inf')
    if _bits(first) == _bits(second):
        return None
    wide = torch.complex128 if first.is_complex() else torch.float64
    a, b = first.to(wide), second.to(wide)
    distance = (a - b).abs()
    # Equal infinities and two NaNs have no difference.
    distance[(a == b) | (a.isnan() & b.isnan())] = 0.0
    size = float(a.abs().pow(2).mean().sqrt())
    largest = float(distance.max())
    # The numbers may be equal without equal bits: 0 and -0, two kinds of NaN.
    if largest == 0.0:
        return 0.0
    relative = largest / size if size else float('inf')
    # NaN: one of two elements is not a number.
    return relative if relative == relative else float('inf')


def _bits(tensor: torch.Tensor) -> bytes:
    host = tensor.detach().contiguous().reshape(-1)
    if host.dtype == torch.bfloat16:
        # NumPy has no bfloat16.
        host = host.view(torch.int16)
    return host.numpy().tobytes()
