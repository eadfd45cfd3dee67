"""Checkpoints without the frozen weights of a pretrained backbone, and how they come back."""
from __future__ import annotations

import hashlib
import re
from typing import Any, Dict, Iterable, List, Mapping, Optional

import torch
from torch import nn

from mapsage.errors import UserError

# Key in ``meta`` of a checkpoint: names, digest and source of the weights that it leaves out.
LEFT_OUT = 'left_out_weights'
_PREFIX = 'backbone.'
# Buffers that training changes, by the last part of their names.
_STATISTICS = re.compile(r'(^|\.)(running_mean|running_var|num_batches_tracked)$')


class FrozenWeightsError(UserError, ValueError):
    """A checkpoint holds trained weights alone, and the others are missing or not the same."""


def left_out_names(model: nn.Module) -> List[str]:
    """Return the names of the frozen parameters and constant buffers of ``model.backbone``.

    Raises:
        FrozenWeightsError: If there are none, or if no pretrained weights are named from which
            they could be restored.
    """
    backbone = _backbone(model)
    constant = {name for name, value in backbone.named_parameters() if not value.requires_grad}
    if not constant:
        raise FrozenWeightsError(
            f'TrainedWeightsHook leaves frozen weights out of checkpoints, and none of '
            f'model.backbone ({type(backbone).__name__}) is frozen. Set backbone.lora or '
            f'backbone.frozen=True, or take the hook out of the config.')
    if _source(backbone) is None:
        raise FrozenWeightsError(
            f'TrainedWeightsHook leaves frozen weights out of checkpoints, and model.backbone '
            f'({type(backbone).__name__}) names no pretrained weights to restore them from. Set '
            f"backbone.init_cfg=dict(type='Pretrained', checkpoint=...), or take the hook out of "
            f'the config.')
    constant |= {name for name, _ in backbone.named_buffers() if not _STATISTICS.search(name)}
    return [_PREFIX + name for name in backbone.state_dict() if name in constant]


def digest_of(model: nn.Module, names: Iterable[str]) -> str:
    """Return a hash of the names, shapes, dtypes and bytes of some weights of a model."""
    state, digest = model.state_dict(), hashlib.sha256()
    for name in sorted(names):
        value = state[name].detach().cpu().contiguous()
        digest.update(f'{name} {tuple(value.shape)} {value.dtype};'.encode())
        if value.dtype == torch.bfloat16:  # NumPy has none
            value = value.view(torch.int16)
        digest.update(value.numpy().tobytes())
    return digest.hexdigest()[:16]


def leave_out(model: nn.Module, checkpoint: Dict[str, Any], names: List[str], digest: str) -> None:
    """Remove weights from a checkpoint, also from the average of EMAHook, and note which."""
    for state, prefix in _states(checkpoint):
        for name in names:
            state.pop(prefix + name, None)
    checkpoint['meta'][LEFT_OUT] = dict(
        names=list(names), digest=digest, source=str(_source(_backbone(model))))


def restore_left_out(model: nn.Module, checkpoint: Any, path: str = 'the checkpoint') -> bool:
    """Put the weights that a checkpoint leaves out back into it; whole ones stay as they are.

    They are those of the model, or, where it has others, of its ``backbone.init_cfg``.

    Args:
        model: Model of the config, or a wrapper of it.
        checkpoint: Checkpoint as loaded, changed in place.
        path: Where it came from, for messages.

    Returns:
        Whether weights were put back.

    Raises:
        FrozenWeightsError: If those weights cannot be read, or are not the ones that the
            checkpoint was trained with.
    """
    meta = checkpoint.get('meta') if isinstance(checkpoint, Mapping) else None
    noted = meta.get(LEFT_OUT) if isinstance(meta, Mapping) else None
    if noted is None:
        return False
    while isinstance(getattr(model, 'module', None), nn.Module):  # DDP, test-time augmentation
        model = model.module  # type: ignore[assignment]
    names, about = list(noted['names']), (
        f"{path} holds trained weights alone; its {len(noted['names'])} frozen ones come from "
        f"{noted['source']}")
    unknown = [name for name in names if name not in model.state_dict()]
    if unknown:
        raise FrozenWeightsError(f"{about}, and the config's model has no {unknown[0]}. Give the "
                                 f'config that it was trained with.')
    backbone = _backbone(model)
    found = digest_of(model, names)
    if found != noted['digest'] and not getattr(backbone, 'is_init', False):
        _initialize(backbone, about)
        found = digest_of(model, names)
    if found != noted['digest']:
        raise FrozenWeightsError(
            f"{about} (hash {noted['digest']}). Those of this model, of backbone.init_cfg "
            f'{_source(backbone)}, are others (hash {found}). Point '
            f'model.backbone.init_cfg.checkpoint at the file that it was trained with.')
    state = model.state_dict()
    for held, prefix in _states(checkpoint):
        held.update((prefix + name, state[name].detach().cpu()) for name in names)
    return True


def pretrained_source(backbone: nn.Module) -> Optional[str]:
    """Return what the config of a backbone names as its pretrained weights; None without any."""
    return _source(backbone)


def _states(checkpoint: Mapping[str, Any]) -> List[Any]:
    """Return the state dicts in a checkpoint, each with the prefix of the model's names in it."""
    averaged = checkpoint.get('ema_state_dict')
    return [(checkpoint['state_dict'], ''), *([] if averaged is None else [(averaged, 'module.')])]


def _initialize(backbone: nn.Module, about: str) -> None:
    if _source(backbone) is None:
        raise FrozenWeightsError(f'{about}, and model.backbone of this config names no pretrained '
                                 f'weights. Give the config that it was trained with.')
    try:
        backbone.init_weights()  # type: ignore[operator]
    except (OSError, RuntimeError, ValueError) as error:  # of each backbone its own
        raise FrozenWeightsError(f'{about}, and these cannot be loaded: {error}') from error


def _backbone(model: nn.Module) -> nn.Module:
    backbone = getattr(model, 'backbone', None)
    if not isinstance(backbone, nn.Module):
        raise FrozenWeightsError(f'{type(model).__name__} has no backbone, whose frozen weights a '
                                 f'checkpoint could leave out')
    return backbone


def _source(backbone: nn.Module) -> Optional[str]:
    cfgs = getattr(backbone, 'init_cfg', None) or []
    for cfg in cfgs if isinstance(cfgs, (list, tuple)) else [cfgs]:
        kind = cfg.get('type')
        if str(getattr(kind, '__name__', kind)).startswith('Pretrained'):
            return str(cfg.get('checkpoint'))
    return None
