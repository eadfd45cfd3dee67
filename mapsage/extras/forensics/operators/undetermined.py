"""Results that two right kernels need not share: indices of equal values, and random numbers.

Where a maximum or a sort meets equal values, each kernel may name another one of them. Such indices
are right if they are distinct and lead to the right values. Random results cannot be compared; what
must hold for any draw is checked.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Tuple

import torch

from .dispatch import tensors_in

Results = List[torch.Tensor]


def indices_mistake(name: str, args: Tuple[Any, ...], card: Results, cpu: Results) -> Optional[str]:
    """Return what is wrong with the indices among an operator's results, or None.

    Args:
        name: Name of the operator, one for which :func:`returns_indices` is true.
        args: Its positional arguments on the CPU.
        card: Results of the card, copied to the CPU.
        cpu: Results of the CPU.
    """
    source, indices = args[0], card[-1]
    if indices.shape != cpu[-1].shape or indices.dtype != cpu[-1].dtype:
        return f'indices of shape {tuple(indices.shape)} and type {indices.dtype}'
    base = name.split('.')[0]
    dim = -1
    if base == 'max_pool2d_with_indices':
        flat, flat_indices = source.flatten(-2), indices.flatten(-2)
        expected = cpu[0].flatten(-2)
    else:
        reduced = _dimension(name, args)
        if reduced is None:
            flat, flat_indices = source.flatten(), indices.reshape(1)
        else:
            flat, flat_indices, dim = source, indices, reduced
        if flat_indices.dim() < flat.dim():
            flat_indices = flat_indices.unsqueeze(dim)
        expected = _expected_values(base, flat, dim, cpu)
    if (
        flat_indices.numel()
        and not 0 <= int(flat_indices.min()) <= int(flat_indices.max()) < flat.shape[dim]
    ):
        return f'indices outside 0 to {flat.shape[dim] - 1}'
    values = flat.gather(dim, flat_indices)
    if not torch.equal(torch.nan_to_num(values), torch.nan_to_num(expected)):
        return 'indices of other values than the right ones'
    if base in ('sort', 'argsort', 'topk'):
        ordered = flat_indices.sort(dim=dim)[0]
        if bool((ordered.diff(dim=dim) == 0).any()):
            return 'indices that occur twice'
    return None


def returns_indices(name: str) -> bool:
    """Return whether an operator's last result has indices that ties leave undetermined."""
    return name in (
        'max.dim',
        'min.dim',
        'argmax',
        'argmin',
        'max_pool2d_with_indices',
    ) or name.split('.')[0] in ('sort', 'argsort', 'topk')


def _dimension(name: str, args: Tuple[Any, ...]) -> Optional[int]:
    position = {'topk': 2, 'sort.stable': 2}.get(name, 1)
    if len(args) > position:
        return args[position]
    return None if name in ('argmax', 'argmin') else -1


def _expected_values(base: str, source: torch.Tensor, dim: int, cpu: Results) -> torch.Tensor:
    if base in ('argmax', 'argmin'):
        extreme = torch.amax if base == 'argmax' else torch.amin
        return extreme(source, dim, keepdim=True)
    if base == 'argsort':
        return source.gather(dim, cpu[-1])
    values = cpu[0]
    return values if values.dim() == source.dim() else values.unsqueeze(dim)


def random_mistake(name: str, args: Tuple[Any, ...], card: Results, cpu: Results) -> Optional[str]:
    """Return what cannot be right about random results, or None. The arguments are as above."""
    for drawn, expected in zip(card, cpu):
        if drawn.shape != expected.shape or drawn.dtype != expected.dtype:
            return (
                f'{drawn.dtype} {tuple(drawn.shape)} instead of {expected.dtype} '
                f'{tuple(expected.shape)}'
            )
        if drawn.is_floating_point() and _all_finite(args) and not _all_finite(drawn):
            return 'random numbers that are not finite'
    check = _RANDOM_CHECKS.get(name.split('.')[0].rstrip('_'))
    return check(args, card) if check is not None and card else None


def _all_finite(*values: object) -> bool:
    return all(
        bool(torch.isfinite(tensor).all())
        for tensor in tensors_in(values)
        if tensor.is_floating_point()
    )


def _dropout_mistake(args: Tuple[Any, ...], card: Results) -> Optional[str]:
    source, probability = args[0], args[1]
    if args[2] is False or not 0 <= probability < 1:
        return None
    expected = source * card[1] / (1 - probability)
    tolerance = 4 * torch.finfo(source.dtype).eps
    return (
        None
        if torch.allclose(card[0], expected, tolerance, 0.0, equal_nan=True)
        else 'values that do not fit the mask'
    )


def _bernoulli_mistake(args: Tuple[Any, ...], card: Results) -> Optional[str]:
    return None if bool(((card[0] == 0) | (card[0] == 1)).all()) else 'values other than 0 and 1'


_RANDOM_CHECKS: Dict[str, Callable[[Tuple[Any, ...], Results], Optional[str]]] = {
    'native_dropout': _dropout_mistake,
    'bernoulli': _bernoulli_mistake,
}
