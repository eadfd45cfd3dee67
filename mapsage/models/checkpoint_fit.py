"""Checks whether the weights of a checkpoint fit a model, before they are loaded.

MMEngine loads the weights that fit and logs the rest, so a checkpoint of another model would leave
random weights behind. Commands that need a complete model (``test``, ``predict``, ``export``,
``suggest``, ``--resume``) call :func:`check_whole`; ``load_from`` may fill only a part of the model
and calls :func:`check_start`.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Tuple

import numpy as np
import torch
from torch import nn

from mapsage.base.errors import UserError

# Prefix of weights that only training uses.
_TRAINING_ONLY = 'auxiliary_head.'
# BatchNorm's counter of batches: missing in checkpoints of old versions, and predictions ignore it.
_COUNTER = 'num_batches_tracked'
# Prefix that DistributedDataParallel and EMAHook add, and that MMEngine removes when it loads.
_WRAPPER = 'module.'
# load_from must match at least this share of the model's or the checkpoint's weights, whichever
# has fewer. It is not 0, because unrelated models share names such as 'decode_head.conv_seg.bias'.
_LEAST_SHARE = 0.1


class CheckpointFitError(UserError, ValueError):
    """The weights of a checkpoint do not fit the model."""

    on_every_rank = True


@dataclass(frozen=True)
class Fit:
    """What loading a checkpoint would do to a model.

    Attributes:
        fitting: Number of weights with the same name and shape in both.
        wanted: Number of weights of the model.
        available: Number of weights of the checkpoint.
        missing: Names of the model's weights that the checkpoint lacks.
        unexpected: Names of the checkpoint's weights that the model lacks.
        misshapen: Names in both with different shapes, and the two shapes.
        prefix: Prefix of the checkpoint's names without which more of them would fit, or ''.
    """

    fitting: int
    wanted: int
    available: int
    missing: Tuple[str, ...]
    unexpected: Tuple[str, ...]
    misshapen: Tuple[str, ...]
    prefix: str

    def describe(self) -> str:
        """Return what does not fit, as the end of a sentence; '' if everything fits."""
        return '; '.join(
            _summarize(problem, names)
            for problem, names in (
                ('missing', self.missing),
                ('left over', self.unexpected),
                ('of another shape', self.misshapen),
            )
            if names
        )

    def hint(self) -> str:
        """Return the next step as a sentence if a prefix is the cause; '' otherwise."""
        return (
            (
                f' The names in the checkpoint begin with {self.prefix!r}, without which they fit: '
                f'save its weights without that prefix.'
            )
            if self.prefix
            else ''
        )


def plain_weights(checkpoint: Any, path: str) -> Dict[str, Any]:
    """Return the weights of a checkpoint under their names in an unwrapped model.

    Args:
        checkpoint: Checkpoint of a training, or just a state dict.
        path: Path of the checkpoint, for messages.

    Raises:
        CheckpointFitError: If it contains no weights.
    """
    weights = checkpoint.get('state_dict', checkpoint) if isinstance(checkpoint, Mapping) else None
    if (
        not isinstance(weights, Mapping)
        or not weights
        or not all(isinstance(name, str) for name in weights)
    ):
        raise CheckpointFitError(f'{path} is not a checkpoint of a training: it has no state_dict.')
    return {
        name[len(_WRAPPER) :] if name.startswith(_WRAPPER) else name: weight
        for name, weight in weights.items()
    }


def compare(model: nn.Module, weights: Mapping[str, Any], training: bool = False) -> Fit:
    """Return how weights fit a model, without loading them.

    Args:
        model: Model, or a wrapper of it.
        weights: Weights by name, see :func:`plain_weights`.
        training: Whether the model will be trained. If not, auxiliary heads, which only training
            uses, may be missing or left over.
    """
    model = unwrap_model(model)
    state = model.state_dict()
    converted = _find_converted_prefixes(model)

    def is_required(name: str) -> bool:
        return _is_used(name, training) and not name.startswith(converted)

    misshapen = tuple(
        f'{name} is {tuple(np.shape(weights[name]))}, expected {tuple(tensor.shape)}'
        for name, tensor in state.items()
        if name in weights
        and isinstance(tensor, torch.Tensor)
        and np.shape(weights[name]) != tensor.shape
        and not name.startswith(converted)
    )
    missing = tuple(name for name in state if name not in weights and is_required(name))
    unexpected = tuple(name for name in weights if name not in state and is_required(name))
    fitting = sum(name in weights for name in state) - len(misshapen)
    return Fit(
        fitting,
        len(state),
        len(weights),
        missing,
        unexpected,
        misshapen,
        _find_prefix(list(state), list(unexpected), fitting),
    )


def check_whole(
    model: nn.Module, weights: Mapping[str, Any], path: str, training: bool = False
) -> None:
    """Check that a checkpoint has exactly the weights of a model.

    Args:
        model: Model, or a wrapper of it.
        weights: Weights by name, see :func:`plain_weights`.
        path: Path of the checkpoint, for messages.
        training: Whether the model will be trained, so that auxiliary heads must fit too.

    Raises:
        CheckpointFitError: If weights do not fit; the message has their number and first names.
    """
    fit = compare(model, weights, training)
    if fit.missing or fit.misshapen or fit.unexpected:
        raise CheckpointFitError(
            f"{path} does not fit the config's model: {fit.describe()}.{fit.hint()} Give the "
            f'config that the checkpoint was trained with, or the checkpoint of this config.'
        )


def check_start(model: nn.Module, weights: Mapping[str, Any], path: str) -> Fit:
    """Return how weights fit a model whose training starts from them.

    The weights may cover a part of the model, such as its backbone, or belong to a larger model.

    Raises:
        CheckpointFitError: If hardly any weight fits, so that the training would start from random
            weights.
    """
    fit = compare(model, weights, training=True)
    if fit.fitting < _LEAST_SHARE * min(fit.wanted, fit.available) or not fit.fitting:
        raise CheckpointFitError(
            f"load_from={path!r} has nothing in common with the config's model: {fit.fitting} of "
            f'its {fit.available} weights fit; {fit.describe()}.{fit.hint()} The training would '
            f'start from random weights. Weights of just a backbone belong in '
            f"model.backbone.init_cfg=dict(type='Pretrained', checkpoint=...)."
        )
    return fit


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the model inside of wrappers such as DDP and test-time augmentation."""
    while isinstance(getattr(model, 'module', None), nn.Module):
        model = model.module  # type: ignore[assignment]
    return model


def _find_converted_prefixes(model: nn.Module) -> Tuple[str, ...]:
    """Return the name prefixes of modules that may convert weights while they load.

    Modules of other packages convert checkpoints of their old versions (mmcv's deformable
    convolutions, mmpretrain's position embeddings). What they accept is known only after loading,
    from PyTorch's report, so their names are not checked here.
    """

    def is_foreign(function: Any) -> bool:
        # torch 2 wraps hooks.
        function = getattr(function, 'hook', function)
        function = function.func if isinstance(function, functools.partial) else function
        module = getattr(function, '__module__', None) or ''
        return not module.startswith(('torch.', 'mapsage.'))

    return tuple(
        f'{name}.' if name else ''
        for name, module in model.named_modules()
        if is_foreign(type(module)._load_from_state_dict)
        or any(map(is_foreign, module._load_state_dict_pre_hooks.values()))
    )


def _is_used(name: str, training: bool) -> bool:
    return (training or not name.startswith(_TRAINING_ONLY)) and not name.endswith(_COUNTER)


def _find_prefix(model_names: List[str], unexpected: List[str], fitting: int) -> str:
    """Return the prefix of unexpected names without which more of them fit than now, or ''."""
    names = set(model_names)
    counts = Counter(
        name[: match.end()]
        for name in unexpected
        for match in re.finditer(r'[._]', name)
        if name[match.end() :] in names
    )
    prefix, count = counts.most_common(1)[0] if counts else ('', 0)
    return prefix if count > fitting else ''


def _summarize(problem: str, names: Tuple[str, ...], limit: int = 4) -> str:
    more = f' and {len(names) - limit} more' if len(names) > limit else ''
    return f'{len(names)} {problem}: {", ".join(names[:limit])}{more}'
