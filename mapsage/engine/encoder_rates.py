"""Warning about a pretrained encoder whose learning rate is known to destroy its features. Pure.

Only vision transformers under Adam and its relatives are judged, because only for them there are
published figures. Sources: Earth-Adapter (AAAI 2026,
https://github.com/VisionXLab/Earth-Adapter), domain generalization, DINOv2-L with Mask2Former at
1e-4; UniMatch V2 (https://github.com/LiheYoung/UniMatch-V2), DINOv2 at 5e-6 with a head at 40 times
that.
"""

from __future__ import annotations

from typing import Dict, List, NamedTuple, Optional

from mmengine.optim import OptimWrapperDict
from torch import nn
from torch.optim import Optimizer

from mapsage.host.runner import OptimWrappers
from mapsage.host.segmentors import child_module
from mapsage.models.frozen_weights import pretrained_source
from mapsage.models.lora import is_adapter
from mapsage.models.lora.inject import has_attention

# Lowest rate with a warning, and a rate that has trained pretrained encoders well.
COLLAPSED_RATE, SAFE_RATE = 1e-4, 1e-5
# Names of optimizers whose step is as large as the learning rate, whatever the gradient's norm.
_NORMALIZING = ('adam', 'lion', 'lamb', 'adan')


class RateWarning(NamedTuple):
    """A warning about a learning rate.

    Attributes:
        text: The finding, with published figures.
        next_step: Setting that would help.
    """

    text: str
    next_step: str


def encoder_rate_warning(
    model: nn.Module, optim_wrapper: OptimWrappers, load_from: Optional[str] = None
) -> Optional[RateWarning]:
    """Return a warning if the pretrained encoder of a model trains at too high a rate.

    The rate is the mean over all trained numbers of the encoder, which takes layer decay and
    ``lr_mult`` into account.

    Args:
        model: Model with a ``backbone``; a model without one gets no warning.
        optim_wrapper: Built optimizers of the model.
        load_from: Checkpoint from which the whole model begins, if there is one.

    Returns:
        The warning; None if the encoder is frozen, begins from random weights, or trains slowly
        enough.
    """
    backbone = child_module(model, 'backbone')
    if backbone is None or not has_attention(backbone):
        return None
    source = pretrained_source(backbone) or load_from
    if not source:
        return None
    rates = _rates(optim_wrapper)
    trained = [
        (rates[id(parameter)], parameter.numel(), is_adapter(name))
        for name, parameter in backbone.named_parameters()
        if parameter.requires_grad and id(parameter) in rates
    ]
    weights = [(rate, count) for rate, count, adapter in trained if not adapter]
    judged = weights or [(rate, count) for rate, count, _ in trained]
    total = sum(count for _, count in judged)
    mean = sum(rate * count for rate, count in judged) / max(total, 1)
    if mean < COLLAPSED_RATE * (1 - 1e-6):
        return None
    low, high = min(rate for rate, _ in judged), max(rate for rate, _ in judged)
    span = f'{mean:.2g}' if low == high else f'{mean:.2g} on average ({low:.2g} to {high:.2g})'
    encoder = f'the pretrained encoder ({type(backbone).__name__}, {source})'
    figures = (
        'At 1e-4 a DINOv2-L with Mask2Former fell from 51.8 mIoU frozen to 21.3 fine-tuned '
        'and 24.3 with LoRA (Earth-Adapter, unseen domains)'
    )
    if not weights:
        return RateWarning(
            f'the LoRA adapters of {encoder} train at a learning rate of {span}. {figures}',
            f'optim_wrapper.optimizer.lr below {COLLAPSED_RATE:g} if the first validation is worse '
            f'than with a frozen encoder',
        )
    return RateWarning(
        f'{encoder} trains at a learning rate of {span}, after layer decay and lr_mult. {figures}; '
        f'UniMatch V2 fine-tunes at 5e-6, with the head at 40 times that',
        f'optim_wrapper.paramwise_cfg=dict(custom_keys=dict(backbone=dict(lr_mult='
        f'{SAFE_RATE / mean:.2g}))), for {SAFE_RATE:g}; or a lower lr, layer decay, lora, or a '
        f'frozen encoder',
    )


def _rates(optim_wrapper: OptimWrappers) -> Dict[int, float]:
    """Return the learning rates before any warm-up: id of a trained parameter -> rate."""
    rates: Dict[int, float] = {}
    for optimizer in _optimizers(optim_wrapper):
        name = type(optimizer).__name__.lower()
        if not any(kind in name for kind in _NORMALIZING):
            continue
        for group in optimizer.param_groups:
            for parameter in group['params']:
                rates[id(parameter)] = float(group.get('initial_lr', group.get('lr', 0.0)))
    return rates


def _optimizers(optim_wrapper: OptimWrappers) -> List[Optimizer]:
    wrappers = (
        [wrapper for _, wrapper in optim_wrapper.items()]
        if isinstance(optim_wrapper, OptimWrapperDict)
        else [optim_wrapper]
    )
    return [wrapper.optimizer for wrapper in wrappers]
