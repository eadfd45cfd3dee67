"""Fitting the tensors of a published file to an encoder: every tensor is used or named as unused.

Non-strict loading would leave random weights behind, so a missing tensor is an error, and so is one
that nobody expects.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Mapping, NamedTuple, Sequence, Tuple

import torch

from mapsage.models.backbones.weight_files import State, WeightsError


class PublishedNames(NamedTuple):
    """Names of tensors in a published file.

    Attributes:
        renames: Pattern of a published name and its replacement, as for ``re.sub``; all of them
            are applied in this order.
        unused: Pattern of a published name, matched at its beginning, and the reason why this
            encoder does not use the tensor.
    """

    renames: Sequence[Tuple[str, str]]
    unused: Sequence[Tuple[str, str]]


def fit_published(
    state: State,
    target: Mapping[str, torch.Tensor],
    names: PublishedNames,
    num_layers: int,
    model: str,
) -> Tuple[State, str]:
    """Select exactly the tensors of an encoder from a file.

    Args:
        state: Tensors of the file.
        target: State dict of the encoder. A file that has all of its names is taken for one that
            this encoder saved, and its names are not changed.
        names: How the published file names its tensors.
        num_layers: Number of blocks of the whole model, including those that are not built.
        model: Encoder and variant, for messages.

    Returns:
        State dict to load, and a summary of the tensors that are not used, for the log.

    Raises:
        WeightsError: If tensors are not finite, missing, left over or of another shape; the message
            lists their names.
    """
    not_finite = [
        key
        for key, value in state.items()
        if value.is_floating_point() and not bool(torch.isfinite(value).all())
    ]
    if not_finite:
        raise WeightsError(
            f'weights for {model} that are not finite: {not_finite}. The file is '
            'damaged; download it again.'
        )
    renames = () if set(target) <= set(state) else names.renames
    reasons: Counter = Counter()
    fitted: State = {}
    left_over = []
    for key, value in state.items():
        reason = next((reason for pattern, reason in names.unused if re.match(pattern, key)), None)
        if reason is not None:
            reasons[reason] += 1
            continue
        name = key
        for pattern, replacement in renames:
            name = re.sub(pattern, replacement, name)
        if name in target:
            fitted[name] = value
        elif _is_beyond(name, target, num_layers):
            reasons['blocks after the last of out_indices'] += 1
        else:
            left_over.append(key)
    missing = [key for key in target if key not in fitted]
    shapes = [
        f'{key} {tuple(fitted[key].shape)} instead of {tuple(target[key].shape)}'
        for key in fitted
        if fitted[key].shape != target[key].shape
    ]
    if missing or left_over or shapes:
        raise WeightsError(
            f'the weights do not fit {model}: missing {missing}, left over '
            f'{left_over}, of another shape {shapes}. Choose the arch and the '
            'sensors that the weights are for.'
        )
    return fitted, ', '.join(f'{count} of {reason}' for reason, count in reasons.items()) or 'none'


def _is_beyond(name: str, target: Mapping[str, torch.Tensor], num_layers: int) -> bool:
    """Return whether a tensor belongs to a block, or to the final norm, that is not built."""
    block = re.match(r'blocks\.(\d+)\.(.+)', name)
    built = 1 + max(int(key.split('.')[1]) for key in target if key.startswith('blocks.'))
    if block is None:
        return name.startswith('norm.') and built < num_layers
    return built <= int(block.group(1)) < num_layers and f'blocks.0.{block.group(2)}' in target
