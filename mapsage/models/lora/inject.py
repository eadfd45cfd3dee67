"""Finds the layers of a backbone that ``lora.targets`` names, and gives them adapters."""
from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Iterable, Iterator, List, Optional, Tuple, Union

import torch
from mmengine.logging import print_log
from torch import nn

from .adapted import (
    PARTS,
    WHOLE,
    Adapted,
    AdaptedBEiTLinear,
    AdaptedLinear,
    AdaptedMultiheadAttention,
    adapt,
    is_adapter,
    restore,
)
from .settings import LoRAError, LoRASettings, parse_lora

# Last part of the names of layers that compute queries, keys or values alone, and all three.
_SINGLE = dict(q='q', q_proj='q', query='q', k='k', k_proj='k', key='k', v='v', v_proj='v',
               value='v')
_FUSED = ('qkv', 'in_proj', 'Wqkv')


@dataclass(frozen=True)
class _Place:
    """A layer that can be adapted, and the parts of its output by name."""

    name: str
    module: nn.Module
    parts: Tuple[str, ...]


def add_lora(backbone: nn.Module, config: Any, skip: Iterable[nn.Module] = ()) -> LoRASettings:
    """Give a backbone adapters, and freeze everything else in it.

    Args:
        backbone: Backbone, changed in place. It computes the same until its adapters are trained.
        config: Settings, as ``dict(rank=16, targets=('q', 'v'), alpha=None, dropout=0.)``.
        skip: Modules of the backbone whose layers get none, such as those of frozen stages.

    Raises:
        LoRAError: If a setting is wrong, or a target matches no layer; the message lists those
            that there are.
    """
    settings = parse_lora(config)
    if any(isinstance(each, Adapted) for each in backbone.modules()):
        raise LoRAError(f'{type(backbone).__name__} has adapters already')
    skip = list(skip)
    skipped = {id(each) for part in skip for each in part.modules()}
    places = [place for place in _places(backbone) if id(place.module) not in skipped]
    if skip and not places:
        raise LoRAError(f'frozen_stages leaves no block of {type(backbone).__name__} to adapt: '
                        f'expected fewer frozen stages than blocks')
    _check_targets(backbone, settings, places)
    for module in backbone.modules():  # an attention computes by itself what is adapted within it
        if isinstance(module, nn.MultiheadAttention) and id(module) not in skipped:
            _adapt_attention(module, settings, next(
                place for place in places if place.module is module))
    for place in places:
        if not isinstance(place.module, nn.MultiheadAttention):
            _adapt_linear(backbone, place, settings)
    freeze_all_but_adapters(backbone)
    backbone.register_forward_hook(_check_used)
    for part in backbone.modules():
        if isinstance(part, nn.ModuleList):
            for block in part:
                block.register_forward_pre_hook(_let_gradients_pass)
    print_log(f'LoRA: {describe_lora(backbone)}', logger='current')
    return settings


def freeze_all_but_adapters(backbone: nn.Module) -> None:
    """Make the adapters the only trained parameters of a backbone."""
    for name, parameter in backbone.named_parameters():
        if not is_adapter(name):
            parameter.requires_grad_(False)


def merge_lora(model: nn.Module) -> int:
    """Add all adapters in a model to the weights, and make its layers what they were.

    The parameters of the model stay frozen.

    Returns:
        The number of layers that had adapters.
    """
    layers = [each for each in model.modules() if isinstance(each, Adapted)]
    for layer in layers:
        restore(layer)  # type: ignore[arg-type]
    for module in model.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for key in [key for key, hook in hooks.items()
                        if hook in (_check_used, _let_gradients_pass)]:
                del hooks[key]
    return len(layers)


def describe_lora(model: nn.Module) -> str:
    """Return a text: layers, rank, and the share of parameters that is trained."""
    layers = [each for each in model.modules() if isinstance(each, Adapted)]
    count = sum(value.numel() for name, value in model.named_parameters() if is_adapter(name))
    every = sum(value.numel() for value in model.parameters())
    settings = layers[0].lora
    return (f"rank {settings.rank}, targets {', '.join(settings.targets)}, scale "
            f'{settings.scale:g}, in {sum(bool(each.adapted_parts) for each in layers)} layers of '
            f'{type(model).__name__}: {count:,} of {every:,} parameters are trained '
            f'({100 * count / every:.2f} %)')


def has_attention(backbone: nn.Module) -> bool:
    """Return whether a backbone is a transformer: whether it has queries, keys and values."""
    parts = {part for place in _places(backbone) for part in place.parts}
    return parts == set(PARTS)


def _places(backbone: nn.Module) -> Iterator[_Place]:
    for name, module in backbone.named_modules():
        last = name.rsplit('.', 1)[-1]
        if isinstance(module, nn.MultiheadAttention):
            whole = module.in_proj_weight is not None
            yield _Place(name, module, PARTS if whole else ())
        elif isinstance(module, nn.Linear):
            fused = last in _FUSED and module.out_features == 3 * module.in_features
            yield _Place(name, module, PARTS if fused else tuple(
                each for each in (_SINGLE.get(last), ) if each))


def _check_targets(backbone: nn.Module, settings: LoRASettings, places: List[_Place]) -> None:
    for target in settings.targets:
        if any(target in place.parts or _named(place, target) for place in places):
            continue
        parts = [part for part in PARTS if any(part in place.parts for place in places)]
        linear = dict.fromkeys(_short(place.name) for place in places
                               if isinstance(place.module, nn.Linear))
        convolutional = any(isinstance(each, nn.Conv2d) and each.kernel_size[0] > 1
                            and each.groups > 1 for each in backbone.modules())
        raise LoRAError(
            f'lora.targets: {target!r} matches no layer of {type(backbone).__name__}. It has '
            + (f"the attention's {', '.join(parts)}" if parts else 'no attention'
               + (', since it is a convolutional network' if convolutional else ''))
            + f", and the linear layers {', '.join(linear) or 'none'}"
            + ('.' if parts else '. Adapters are for vision transformers, such as DINOv3ViT.'))
    for place in places:
        if isinstance(place.module, nn.Linear) and settings.rank > place.module.in_features \
                and _parts_of(place, settings):
            raise LoRAError(f'lora.rank={settings.rank} is more than the {place.module.in_features}'
                            f' inputs of {place.name}: expected far fewer, such as 16')


def _parts_of(place: _Place, settings: LoRASettings) -> List[str]:
    """Return the parts of a layer's output that get an adapter."""
    if isinstance(place.module, nn.Linear) and any(
            _named(place, target) for target in settings.targets):
        return list(PARTS) if len(place.parts) == len(PARTS) else [WHOLE]
    parts = [part for part in place.parts if part in settings.targets]
    return [WHOLE] if parts and len(place.parts) == 1 else parts


def _named(place: _Place, target: str) -> bool:
    return isinstance(place.module, nn.Linear) and (
        place.name == target or place.name.endswith(f'.{target}'))


def _short(name: str) -> str:
    """Return a layer's name within its block."""
    return re.sub(r'^.*?\.\d+\.', '', name)


def _adapt_attention(module: nn.MultiheadAttention, settings: LoRASettings, place: _Place) -> None:
    parts = _parts_of(place, settings)
    inner = any(place.name.endswith('out_proj') and _named(place, target)
                for place in (_Place(f'{place.name}.out_proj', module.out_proj, ()), )
                for target in settings.targets)
    if parts or inner:
        adapt(module, AdaptedMultiheadAttention, parts, settings,
              (module.embed_dim, module.embed_dim))


def _adapt_linear(backbone: nn.Module, place: _Place, settings: LoRASettings) -> None:
    parts, layer = _parts_of(place, settings), place.module
    if not parts:
        return
    assert isinstance(layer, nn.Linear)
    outputs = layer.out_features // (1 if parts == [WHOLE] else len(PARTS))
    owner = _parent(backbone, place.name)
    reads = layer is getattr(owner, 'qkv', None) and getattr(owner, 'bias', None) == 'qv_bias'
    adapt(layer, AdaptedBEiTLinear if reads else AdaptedLinear, parts, settings,
          (outputs, layer.in_features))
    if reads:
        layer.attention = (owner, )  # type: ignore[assignment]
        owner.bias = 'of qkv'  # type: ignore[assignment]


def _parent(backbone: nn.Module, name: str) -> nn.Module:
    for part in name.split('.')[:-1]:
        backbone = getattr(backbone, part)
    return backbone


def _check_used(backbone: nn.Module, inputs: Any, outputs: Any) -> None:
    """Raise an error behind the first forward pass if a layer was not called.

    Some attentions read the weight of a layer and compute by themselves; an adapter there would
    never be trained, and nothing would tell.
    """
    unused = [name for name, each in backbone.named_modules()
              if isinstance(each, Adapted) and not each.lora_used]
    if unused:
        owner = type(_parent(backbone, unused[0])).__name__
        raise LoRAError(
            f'the adapters of {len(unused)} layer(s) of {type(backbone).__name__} have no effect, '
            f'the first {unused[0]}: {owner} does not call that layer, but reads its weight. '
            f'Choose other lora.targets.')


def _let_gradients_pass(block: nn.Module, inputs: Tuple[Any, ...]) -> None:
    """Let a block that is recomputed by ``cfg.activation_checkpointing`` train its adapters.

    That kind of checkpointing gives no gradients unless an input wants them, and the output of a
    frozen embedding does not.
    """
    first: Optional[Union[torch.Tensor, Any]] = inputs[0] if inputs else None
    if 'forward' in vars(block) and torch.is_grad_enabled() and isinstance(first, torch.Tensor) \
            and first.is_floating_point() and not first.requires_grad:
        first.requires_grad_()
