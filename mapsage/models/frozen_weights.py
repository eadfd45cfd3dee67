"""Checkpoints without the frozen weights of a pretrained backbone.

With ``TrainedWeightsHook``, a checkpoint leaves out the backbone's frozen weights and stores their
hash instead. Loading restores them from ``backbone.init_cfg``, and the hash proves that they are
the weights that the checkpoint was trained with; other weights are an error.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any, Dict, Iterable, List, Mapping, Optional

import torch
from torch import nn

from mapsage.base.errors import UserError

from .checkpoint_fit import unwrap_model

# Key in a checkpoint's ``meta``: names, digest and source of the weights that it leaves out.
LEFT_OUT = 'left_out_weights'
_PREFIX = 'backbone.'
# Ends of the names of buffers that training changes.
_STATISTICS = re.compile(r'(^|\.)(running_mean|running_var|num_batches_tracked)$')


class FrozenWeightsError(UserError, ValueError):
    """The frozen weights that a checkpoint leaves out cannot be restored, or there are none."""

    on_every_rank = True


def left_out_names(model: nn.Module) -> List[str]:
    """Return the names of the frozen parameters and constant buffers of ``model.backbone``.

    Raises:
        FrozenWeightsError: If nothing is frozen, or ``backbone.init_cfg`` names no pretrained
            weights from which they could be restored.
    """
    backbone = _get_backbone(model)
    constant = {name for name, value in backbone.named_parameters() if not value.requires_grad}
    if not constant:
        raise FrozenWeightsError(
            f'TrainedWeightsHook leaves frozen weights out of checkpoints, but nothing in '
            f'model.backbone ({type(backbone).__name__}) is frozen. Set backbone.lora or '
            f'backbone.frozen=True, or remove the hook from the config.'
        )
    if pretrained_source(backbone) is None:
        raise FrozenWeightsError(
            f'TrainedWeightsHook leaves frozen weights out of checkpoints, but model.backbone '
            f'({type(backbone).__name__}) names no pretrained weights to restore them from. Set '
            f"backbone.init_cfg=dict(type='Pretrained', checkpoint=...), or remove the hook from "
            f'the config.'
        )
    constant |= {name for name, _ in backbone.named_buffers() if not _STATISTICS.search(name)}
    return [_PREFIX + name for name in backbone.state_dict() if name in constant]


def digest_of(model: nn.Module, names: Iterable[str]) -> str:
    """Return a hash of the names, shapes, dtypes and bytes of the named weights of a model."""
    state, digest = model.state_dict(), hashlib.sha256()
    for name in sorted(names):
        value = state[name].detach().cpu().contiguous()
        digest.update(f'{name} {tuple(value.shape)} {value.dtype};'.encode())
        # NumPy has no bfloat16.
        if value.dtype == torch.bfloat16:
            value = value.view(torch.int16)
        digest.update(value.numpy().tobytes())
    return digest.hexdigest()[:16]


def leave_out(model: nn.Module, checkpoint: Dict[str, Any], names: List[str], digest: str) -> None:
    """Remove the named weights from a checkpoint and from EMAHook's average, and note them."""
    for state, prefix in _list_states(checkpoint):
        for name in names:
            state.pop(prefix + name, None)
    checkpoint['meta'][LEFT_OUT] = dict(
        names=list(names), digest=digest, source=str(pretrained_source(_get_backbone(model)))
    )


def restore_left_out(model: nn.Module, checkpoint: Any, path: str = 'the checkpoint') -> bool:
    """Put the weights that a checkpoint leaves out back into it.

    They come from the model, or, if its weights are different, from ``backbone.init_cfg``. A
    complete checkpoint stays unchanged.

    Args:
        model: Model of the config, or a wrapper of it.
        checkpoint: Loaded checkpoint, changed in place.
        path: Path of the checkpoint, for messages.

    Returns:
        Whether weights were put back.

    Raises:
        FrozenWeightsError: If the weights cannot be read, or are not the ones that the checkpoint
            was trained with.
    """
    meta = checkpoint.get('meta') if isinstance(checkpoint, Mapping) else None
    left_out = meta.get(LEFT_OUT) if isinstance(meta, Mapping) else None
    if left_out is None:
        return False
    if (
        not isinstance(left_out, dict)
        or not isinstance(left_out.get('names'), list)
        or not all(
            isinstance(text, str)
            for text in (*left_out['names'], left_out.get('digest'), left_out.get('source'))
        )
    ):
        raise FrozenWeightsError(
            f'{path} is damaged: its {LEFT_OUT} are {str(left_out)[:80]}, expected a list of '
            f'names, a digest and a source. Take another checkpoint of the run.'
        )
    model = unwrap_model(model)
    names, origin = (
        list(left_out['names']),
        (
            f'{path} contains trained weights only; its {len(left_out["names"])} frozen weights come '
            f'from {left_out["source"]}'
        ),
    )
    unknown = [name for name in names if name not in model.state_dict()]
    if unknown:
        raise FrozenWeightsError(
            f"{origin}, but the config's model has no {unknown[0]}. Give the "
            f'config that the checkpoint was trained with.'
        )
    backbone = _get_backbone(model)
    digest = digest_of(model, names)
    if digest != left_out['digest'] and not getattr(backbone, 'is_init', False):
        _initialize(backbone, origin)
        digest = digest_of(model, names)
    if digest != left_out['digest']:
        raise FrozenWeightsError(
            f"{origin} (hash {left_out['digest']}). This model's weights, from backbone.init_cfg "
            f'{pretrained_source(backbone)}, are different (hash {digest}). Point '
            f'model.backbone.init_cfg.checkpoint at the file that the checkpoint was trained with.'
        )
    frozen = model.state_dict()
    for state, prefix in _list_states(checkpoint):
        state.update((prefix + name, frozen[name].detach().cpu()) for name in names)
    return True


def pretrained_source(backbone: nn.Module) -> Optional[str]:
    """Return the checkpoint that a backbone's ``init_cfg`` names; None if it names none."""
    cfgs = getattr(backbone, 'init_cfg', None) or []
    for cfg in cfgs if isinstance(cfgs, (list, tuple)) else [cfgs]:
        if initializer_name(cfg).startswith('Pretrained'):
            return str(cfg.get('checkpoint'))
    return None


def initializer_name(cfg: Mapping[str, Any]) -> str:
    """Return the name of an ``init_cfg``'s type, which may be a registry name or a class."""
    kind = cfg.get('type')
    return kind.__name__ if isinstance(kind, type) else str(kind)


def _list_states(checkpoint: Mapping[str, Any]) -> List[Any]:
    """Return (state dict, prefix of the model's names in it) for all state dicts of weights."""
    averaged = checkpoint.get('ema_state_dict')
    return [(checkpoint['state_dict'], ''), *([] if averaged is None else [(averaged, 'module.')])]


def _initialize(backbone: nn.Module, origin: str) -> None:
    if pretrained_source(backbone) is None:
        raise FrozenWeightsError(
            f'{origin}, but model.backbone of this config names no pretrained '
            f'weights. Give the config that the checkpoint was trained with.'
        )
    try:
        backbone.init_weights()  # type: ignore[operator]
    # Every backbone has its own errors for weights that it cannot load.
    except (OSError, RuntimeError, ValueError) as error:
        raise FrozenWeightsError(f'{origin}, but these cannot be loaded: {error}') from error


def _get_backbone(model: nn.Module) -> nn.Module:
    backbone = getattr(model, 'backbone', None)
    if not isinstance(backbone, nn.Module):
        raise FrozenWeightsError(
            f'{type(model).__name__} has no backbone with frozen weights that '
            f'a checkpoint could leave out'
        )
    return backbone


def why_not_frozen(encoder: nn.Module, setting: str) -> Optional[str]:
    """Return why an encoder gives other features from step to step, and the remedy; None if not.

    Puts the encoder into training mode, as the next ``train()`` of its model would.

    Args:
        encoder: ``model.backbone``.
        setting: Setting that needs a frozen encoder, for the text.
    """
    trained = [name for name, parameter in encoder.named_parameters() if parameter.requires_grad]
    if any('.lora_A.' in name for name in trained):
        return (
            f'{setting} needs a frozen encoder, and model.backbone ({type(encoder).__name__}) '
            f'has LoRA adapters, which change its features in every step. Leave lora out of '
            f'the backbone, with frozen=True, or take {setting} out of the config.'
        )
    if trained:
        return (
            f'{setting} needs a frozen encoder, and {len(trained)} parameter(s) of '
            f'model.backbone ({type(encoder).__name__}) are trained, the first {trained[0]!r}. Set '
            f'backbone.frozen=True (DINOv3ViT; other backbones: frozen_stages), or take '
            f'{setting} out of the config.'
        )
    encoder.train()
    training = [
        f'{name or "itself"} ({type(module).__name__})'
        for name, module in encoder.named_modules()
        if module.training and _differs_in_training(module)
    ]
    if training:
        return (
            f'{setting} needs an encoder that computes the same in every step, and '
            f'{training[0]} of model.backbone is in training mode after model.train(). Set '
            f'backbone.norm_eval=True, or the rate of its dropout to 0.'
        )
    return None


def _differs_in_training(module: nn.Module) -> bool:
    if isinstance(module, nn.modules.batchnorm._NormBase):
        return True
    if isinstance(module, nn.MultiheadAttention):
        return module.dropout > 0
    rate = getattr(module, 'p', getattr(module, 'drop_prob', 0))
    return 'drop' in type(module).__name__.lower() and bool(rate)
