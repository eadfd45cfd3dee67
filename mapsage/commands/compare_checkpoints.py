"""Compare the weights of two checkpoints, tensor by tensor, and how they were computed."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, List, Tuple

import torch
from mmengine.runner import CheckpointLoader

from mapsage.hooks.reproducibility import META_KEY, Difference, differences


@dataclass(frozen=True)
class CheckpointComparison:
    """How far the weights of two checkpoints differ.

    Attributes:
        equal: Number of tensors that are equal bit for bit.
        total: Number of tensors in either checkpoint.
        largest: Largest absolute difference of two elements relative to the root mean square of
            their tensor in the first checkpoint; infinite where a tensor is missing or of another
            shape, and where only one of two elements is a number.
        name: Name of the tensor with that difference; empty where all are equal.
        conditions: What differs of that on which the bits of a training depend, such as the number
            of threads; empty where nothing does, or where a file does not say.
    """

    equal: int
    total: int
    largest: float
    name: str
    conditions: Tuple[Difference, ...] = ()

    def __str__(self) -> str:
        told = f'{self.equal} of {self.total} tensors are equal bit for bit'
        if self.name:
            told += f'; the largest difference is {self.largest:.2g} of the size of {self.name!r}'
        if self.conditions:
            told += '\nThey were computed under other conditions:'
        return '\n'.join([told, *(f'  {each.name}: {each.before} and {each.now}'
                                  for each in self.conditions)])


def compare_checkpoints(first: str, second: str) -> CheckpointComparison:
    """Compare the weights of two checkpoint files.

    Args:
        first: Path of a checkpoint of a run, or of a file of weights alone.
        second: Path of the other one.

    Raises:
        OSError: If a file cannot be read.
        ValueError: If a file has no tensors.
    """
    files = [CheckpointLoader.load_checkpoint(path, map_location='cpu')
             for path in (first, second)]
    one, other = _weights(files[0], first), _weights(files[1], second)
    equal, largest, worst = 0, 0.0, ''
    names: List[str] = list(dict.fromkeys([*one, *other]))
    for name in names:
        difference = _difference(one.get(name), other.get(name))
        if difference is None:
            equal += 1
        elif not worst or difference > largest:
            largest, worst = difference, name
    before, now = map(_conditions, files)
    return CheckpointComparison(equal, len(names), largest, worst,
                                tuple(differences(before, now)) if before and now else ())


def _conditions(checkpoint: Any) -> Any:
    meta = checkpoint.get('meta') if isinstance(checkpoint, dict) else None
    return meta.get(META_KEY) if isinstance(meta, dict) else None


def _weights(checkpoint: Any, path: str) -> Dict[str, torch.Tensor]:
    state = checkpoint.get('state_dict', checkpoint) if isinstance(checkpoint, dict) else {}
    found = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    if not found:
        raise ValueError(f'{path} holds no weights: expected a checkpoint of a run, or a dict of '
                         f'tensors.')
    return found


def _difference(one: Any, other: Any) -> Any:
    """Return the relative difference of two tensors; None where all bits are equal."""
    if one is None or other is None or one.shape != other.shape or one.dtype != other.dtype:
        return float('inf')
    if _bits(one) == _bits(other):
        return None
    wide = torch.complex128 if one.is_complex() else torch.float64
    a, b = one.to(wide), other.to(wide)
    apart = (a - b).abs()
    apart[(a == b) | (a.isnan() & b.isnan())] = 0.0  # also equal infinities
    size = float(a.abs().pow(2).mean().sqrt())
    largest = float(apart.max())
    if largest == 0.0:
        return 0.0  # other bits, equal numbers: 0 and -0, two kinds of NaN
    relative = largest / size if size else float('inf')
    return relative if relative == relative else float('inf')


def _bits(tensor: torch.Tensor) -> bytes:
    host = tensor.detach().contiguous().reshape(-1)
    if host.dtype == torch.bfloat16:
        host = host.view(torch.int16)  # numpy has no bfloat16
    return host.numpy().tobytes()
