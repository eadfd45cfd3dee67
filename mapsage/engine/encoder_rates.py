"""Warns where a pretrained encoder trains at a learning rate that has collapsed others. Pure.

Sources: Earth-Adapter (AAAI 2026, https://github.com/VisionXLab/Earth-Adapter), domain
generalization, DINOv2-L with Mask2Former at 1e-4; UniMatch V2 (https://github.com/LiheYoung/
UniMatch-V2), DINOv2 at 5e-6 with a head at 40 times that.
"""
from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional

from torch import nn

from mapsage.models.frozen_weights import pretrained_source
from mapsage.models.lora import is_adapter
from mapsage.models.lora.inject import has_attention

# Rate from which on a warning is due, and one that has trained pretrained encoders well.
COLLAPSED_RATE, SAFE_RATE = 1e-4, 1e-5
# Optimizers whose step has the size of the learning rate, whatever the size of the gradient.
_NORMALIZING = ('adam', 'lion', 'lamb', 'adan')


class RateWarning(NamedTuple):
    """What was found, and what to set."""

    text: str
    next_step: str


def encoder_rate_warning(model: nn.Module, optim_wrapper: Any,
                         load_from: Optional[str] = None) -> Optional[RateWarning]:
    """Return a warning if the pretrained encoder of a model trains at too high a rate.

    The mean over the trained numbers counts, so that layer decay and ``lr_mult`` do. Only vision
    transformers with an optimizer of the kind of Adam are judged, as in the published figures.

    Args:
        model: Model with a ``backbone``; others are never warned about.
        optim_wrapper: Built ``OptimWrapper``, or ``OptimWrapperDict``, of the model.
        load_from: Checkpoint from which the whole model begins, if there is one.

    Returns:
        None if the encoder is frozen, begins from random weights, or trains slowly enough.
    """
    backbone = getattr(model, 'backbone', None)
    if not isinstance(backbone, nn.Module) or not has_attention(backbone):
        return None
    source = pretrained_source(backbone) or load_from
    if not source:
        return None
    rates = _rates(optim_wrapper)
    found = [(rates[id(each)], each.numel(), is_adapter(name))
             for name, each in backbone.named_parameters()
             if each.requires_grad and id(each) in rates]
    weights = [(rate, count) for rate, count, adapter in found if not adapter]
    chosen = weights or [(rate, count) for rate, count, _ in found]
    count = sum(count for _, count in chosen)
    mean = sum(rate * count for rate, count in chosen) / max(count, 1)
    if mean < COLLAPSED_RATE * (1 - 1e-6):
        return None
    low, high = min(rate for rate, _ in chosen), max(rate for rate, _ in chosen)
    span = f'{mean:.2g}' if low == high else f'{mean:.2g} on average ({low:.2g} to {high:.2g})'
    what = f'the pretrained encoder ({type(backbone).__name__}, {source})'
    figures = ('At 1e-4 a DINOv2-L with Mask2Former fell from 51.8 mIoU frozen to 21.3 fine-tuned '
               'and 24.3 with LoRA (Earth-Adapter, unseen domains)')
    if not weights:
        return RateWarning(
            f'the LoRA adapters of {what} train at a learning rate of {span}. {figures}',
            f'optim_wrapper.optimizer.lr below {COLLAPSED_RATE:g} if the first validation is worse '
            f'than that of a frozen encoder')
    return RateWarning(
        f'{what} trains at a learning rate of {span}, after layer decay and lr_mult. {figures}; '
        f'UniMatch V2 fine-tunes at 5e-6, with the head at 40 times that',
        f'optim_wrapper.paramwise_cfg=dict(custom_keys=dict(backbone=dict(lr_mult='
        f'{SAFE_RATE / mean:.2g}))), for {SAFE_RATE:g}; or a lower lr, layer decay, lora, or a '
        f'frozen encoder')


def _rates(optim_wrapper: Any) -> Dict[int, float]:
    """Return the learning rate of each trained parameter before any warm-up, by its id."""
    found: Dict[int, float] = {}
    for optimizer in _optimizers(optim_wrapper):
        name = type(optimizer).__name__.lower()
        if not any(kind in name for kind in _NORMALIZING):
            continue
        for group in optimizer.param_groups:
            for parameter in group['params']:
                found[id(parameter)] = float(group.get('initial_lr', group.get('lr', 0.)))
    return found


def _optimizers(optim_wrapper: Any) -> List[Any]:
    if not hasattr(optim_wrapper, 'items'):
        return [optim_wrapper.optimizer]
    return [each.optimizer for _, each in optim_wrapper.items()]
