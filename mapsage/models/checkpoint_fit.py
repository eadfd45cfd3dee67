"""Whether the weights of a checkpoint fit a model, asked before they are loaded.

MMEngine loads what fits and logs the rest, so a checkpoint of another model leaves random weights
behind. Whoever needs a whole model (``test``, ``predict``, ``export``, ``suggest``, ``--resume``)
asks for :func:`check_whole`; ``load_from`` may fill a part of it and asks for :func:`check_start`.
"""
from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Tuple

import numpy as np
import torch
from torch import nn

from mapsage.errors import UserError

# Beginning of the names of modules that only training uses.
_TRAINING_ONLY = 'auxiliary_head.'
# A counter of batches, absent in checkpoints of old versions and of no use for predictions.
_COUNTER = 'num_batches_tracked'
# MMEngine removes this of DistributedDataParallel and of EMAHook.
_WRAPPER = 'module.'
# A start needs this share of the model's weights or of the checkpoint's, whichever are fewer.
# Two models that have nothing in common share names such as 'decode_head.conv_seg.bias'.
_LEAST_SHARE = 0.1


class CheckpointFitError(UserError, ValueError):
    """The weights of a checkpoint are not those of the model."""


@dataclass(frozen=True)
class Fit:
    """What loading a checkpoint would do to a model.

    Attributes:
        fitting: Number of weights that have the name and the shape of one of the model's.
        wanted: Number of weights of the model.
        given: Number of weights of the checkpoint.
        missing: Names of the model's weights that the checkpoint lacks.
        unexpected: Names of the checkpoint's weights that the model lacks.
        misshapen: Names of both, with the two shapes.
        prefix: Beginning of the checkpoint's names without which more of them would fit; '' if
            there is none.
    """

    fitting: int
    wanted: int
    given: int
    missing: Tuple[str, ...]
    unexpected: Tuple[str, ...]
    misshapen: Tuple[str, ...]
    prefix: str

    def describe(self) -> str:
        """Return what does not fit, as the end of a sentence; '' if everything does."""
        parts = [_count(what, names) for what, names in
                 (('missing', self.missing), ('left over', self.unexpected),
                  ('of another shape', self.misshapen)) if names]
        return '; '.join(parts)

    def hint(self) -> str:
        """Return the next step where a prefix is the reason, as a sentence; else ''."""
        return (f' The names in the checkpoint begin with {self.prefix!r}, without which they fit: '
                f'save its weights without that prefix.') if self.prefix else ''


def plain_weights(checkpoint: Any, path: str) -> Dict[str, Any]:
    """Return the weights of a checkpoint by the names that they have in a model.

    Args:
        checkpoint: Checkpoint of a training, or a state dict alone.
        path: Where it came from, for messages.

    Raises:
        CheckpointFitError: If there are none.
    """
    weights = checkpoint.get('state_dict', checkpoint) if isinstance(checkpoint, Mapping) else None
    if not isinstance(weights, Mapping) or not weights:
        raise CheckpointFitError(f'{path} is not a checkpoint of a training: it has no state_dict.')
    return {name[len(_WRAPPER):] if name.startswith(_WRAPPER) else name: weight
            for name, weight in weights.items()}


def compare(model: nn.Module, weights: Mapping[str, Any], training: bool = False) -> Fit:
    """Return how weights fit a model; neither is changed.

    Args:
        model: Model, or a wrapper of it.
        weights: Weights by name, see :func:`plain_weights`.
        training: Whether the model is trained. Otherwise auxiliary heads, which only training
            uses, may be missing or left over.
    """
    while isinstance(getattr(model, 'module', None), nn.Module):  # DDP, test-time augmentation
        model = model.module  # type: ignore[assignment]
    state = model.state_dict()
    converted = _converted_names(model)

    def counts(name: str) -> bool:
        return _counts(name, training) and not name.startswith(converted)

    misshapen = tuple(f'{name} is {tuple(np.shape(weights[name]))}, expected {tuple(tensor.shape)}'
                      for name, tensor in state.items()
                      if name in weights and isinstance(tensor, torch.Tensor)
                      and np.shape(weights[name]) != tensor.shape
                      and not name.startswith(converted))
    missing = tuple(name for name in state if name not in weights and counts(name))
    unexpected = tuple(name for name in weights if name not in state and counts(name))
    fitting = sum(name in weights for name in state) - len(misshapen)
    return Fit(fitting, len(state), len(weights), missing, unexpected, misshapen,
               _find_prefix(list(state), list(unexpected), fitting))


def check_whole(model: nn.Module, weights: Mapping[str, Any], path: str,
                training: bool = False) -> None:
    """Check that a model gets all of its weights from a checkpoint, and the checkpoint has no more.

    Args:
        model: Model, or a wrapper of it.
        weights: Weights by name, see :func:`plain_weights`.
        path: Where they came from, for messages.
        training: Whether the model is trained, so that auxiliary heads count too.

    Raises:
        CheckpointFitError: With the number of weights that do not fit, and the first names.
    """
    fit = compare(model, weights, training)
    if fit.missing or fit.misshapen or fit.unexpected:
        raise CheckpointFitError(
            f"{path} does not fit the config's model: {fit.describe()}.{fit.hint()} Give the "
            f'config that the checkpoint was trained with, or the checkpoint of this config.')


def check_start(model: nn.Module, weights: Mapping[str, Any], path: str) -> Fit:
    """Return how weights fit a model whose training begins with them.

    They may be a part of the model, such as its backbone, or of a larger one.

    Raises:
        CheckpointFitError: If hardly any of them fits, so that the training would begin with
            random weights.
    """
    fit = compare(model, weights, training=True)
    if fit.fitting < _LEAST_SHARE * min(fit.wanted, fit.given) or not fit.fitting:
        raise CheckpointFitError(
            f"load_from={path!r} has nothing in common with the config's model: {fit.fitting} of "
            f'its {fit.given} weights fit; {fit.describe()}.{fit.hint()} The training would begin '
            f'with random weights. Weights of a backbone alone belong in '
            f"model.backbone.init_cfg=dict(type='Pretrained', checkpoint=...).")
    return fit


def _converted_names(model: nn.Module) -> Tuple[str, ...]:
    """Return the beginnings of names that modules change when they load.

    Modules of other packages do so for checkpoints of their old versions (deformable convolutions
    of mmcv, position embeddings of mmpretrain), and PyTorch's report is all that tells the result.
    """
    def is_foreign(function: Any) -> bool:
        function = getattr(function, 'hook', function)  # torch 2 wraps hooks
        module = getattr(getattr(function, 'func', function), '__module__', None) or ''
        return not module.startswith(('torch.', 'mapsage.'))

    return tuple(f'{name}.' if name else '' for name, module in model.named_modules()
                 if is_foreign(type(module)._load_from_state_dict)
                 or any(map(is_foreign, module._load_state_dict_pre_hooks.values())))


def _counts(name: str, training: bool) -> bool:
    return (training or not name.startswith(_TRAINING_ONLY)) and not name.endswith(_COUNTER)


def _find_prefix(wanted: List[str], unexpected: List[str], fitting: int) -> str:
    """Return the prefix of unexpected names without which more of them fit than now; '' if none."""
    names = set(wanted)
    counts = Counter(name[:match.end()] for name in unexpected
                     for match in re.finditer(r'[._]', name) if name[match.end():] in names)
    prefix, count = counts.most_common(1)[0] if counts else ('', 0)
    return prefix if count > fitting else ''


def _count(what: str, names: Tuple[str, ...], limit: int = 4) -> str:
    more = f' and {len(names) - limit} more' if len(names) > limit else ''
    return f"{len(names)} {what}: {', '.join(names[:limit])}{more}"
