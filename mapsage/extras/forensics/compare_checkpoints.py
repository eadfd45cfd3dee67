"""Compare the weights of two checkpoints of one model, tensor by tensor.

    python tools/compare_checkpoints.py A.pth B.pth [--tolerance 0.01]

Prints the number of tensors that are equal bit for bit, and the largest difference relative to the
size (root mean square) of its tensor. The exit status is 0 if this difference is at most the
tolerance; by default all bits must be equal. If weights differ, the checkpoints' records of their
conditions (number of threads, devices, versions) often tell the reason; see
`mapsage/engine/guards/reproducibility.py`.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Sequence, Tuple

if TYPE_CHECKING:
    import torch

    from mapsage.engine.guards.reproducibility import ConditionDifference


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the program with a command line (default: ``sys.argv``); return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
    parser.add_argument('first', help='checkpoint of a run (.pth)')
    parser.add_argument('second', help='checkpoint to compare it with')
    parser.add_argument(
        '--tolerance',
        type=float,
        default=0.0,
        help='largest relative difference that is accepted (default: 0, all bits)',
    )
    args = parser.parse_args(argv)
    comparison = compare_checkpoints(args.first, args.second)
    print(comparison)
    if args.tolerance:
        return 0 if comparison.largest <= args.tolerance else 1
    return 0 if comparison.equal == comparison.total else 1


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
    from mmengine.runner import CheckpointLoader

    from mapsage.engine.guards.reproducibility import differences

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
    from mapsage.engine.guards.reproducibility import META_KEY

    meta = checkpoint.get('meta') if isinstance(checkpoint, dict) else None
    return meta.get(META_KEY) if isinstance(meta, dict) else None


def _weights(checkpoint: object, path: str) -> Dict[str, torch.Tensor]:
    import torch

    state = checkpoint.get('state_dict', checkpoint) if isinstance(checkpoint, dict) else {}
    weights = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    if not weights:
        raise ValueError(
            f'{path} holds no weights: expected a checkpoint of a run, or a dict of tensors.'
        )
    return weights


def _difference(first: Optional[torch.Tensor], second: Optional[torch.Tensor]) -> Optional[float]:
    """Return the relative difference of two tensors; None if all bits are equal."""
    import torch

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
    import torch

    host = tensor.detach().contiguous().reshape(-1)
    if host.dtype == torch.bfloat16:
        # NumPy has no bfloat16.
        host = host.view(torch.int16)
    return host.numpy().tobytes()


def run() -> None:
    """Run the command line and exit."""
    from mapsage.commands import cli

    cli.run(main)
