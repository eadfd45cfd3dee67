"""Gives adapters to the layers of a backbone that ``lora.targets`` names.

Layers are recognized by their names and types, not by the class of the backbone, so backbones of
any package work. Some attentions read the weight of a layer instead of calling it, and an adapter
there would have no effect; the first forward pass checks for that.
``LoRABackbone`` is a builder, not a wrapper: the result is the backbone itself, so ``init_cfg``, layer
decay and checkpoints see the usual names.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Dict, Iterable, Iterator, List, Optional, Tuple, Union

import torch
from mmengine.logging import print_log
from mmengine.registry import MODELS
from torch import nn

from .adapted import (
    PROJECTIONS,
    WHOLE,
    Adapted,
    AdaptedBEiTLinear,
    AdaptedLinear,
    AdaptedMultiheadAttention,
    LoRAError,
    LoRASettings,
    adapt,
    is_adapter,
    parse_lora,
    restore,
)

# Last component of the names of layers that compute one projection, and of layers that compute all.
_SINGLE = dict(
    q='q', q_proj='q', query='q', k='k', k_proj='k', key='k', v='v', v_proj='v', value='v'
)
_FUSED = ('qkv', 'in_proj', 'Wqkv')


@dataclass(frozen=True)
class _AdaptableLayer:
    """A layer that can be adapted, and which of q, k, v it computes."""

    name: str
    module: nn.Module
    projections: Tuple[str, ...]


def add_lora(backbone: nn.Module, config: Any, skip: Iterable[nn.Module] = ()) -> LoRASettings:
    """Give a backbone adapters, and freeze everything else in it.

    Args:
        backbone: Backbone, changed in place. Its output is the same until the adapters are trained.
        config: Settings, as ``dict(rank=16, targets=('q', 'v'), alpha=None, dropout=0.)``.
        skip: Modules of the backbone whose layers get no adapters, such as frozen stages.

    Raises:
        LoRAError: If a setting is wrong, or a target matches no layer; the message lists the
            layers that exist.
    """
    settings = parse_lora(config)
    if any(isinstance(module, Adapted) for module in backbone.modules()):
        raise LoRAError(f'{type(backbone).__name__} has adapters already')
    skip = list(skip)
    skipped = {id(module) for root in skip for module in root.modules()}
    candidates = [
        candidate for candidate in _find_candidates(backbone) if id(candidate.module) not in skipped
    ]
    if skip and not candidates:
        raise LoRAError(
            f'frozen_stages leaves no block of {type(backbone).__name__} to adapt: '
            f'expected fewer frozen stages than blocks'
        )
    _check_targets(backbone, settings, candidates)
    for module in backbone.modules():
        if isinstance(module, nn.MultiheadAttention) and id(module) not in skipped:
            _adapt_attention(
                module,
                settings,
                next(candidate for candidate in candidates if candidate.module is module),
            )
    for candidate in candidates:
        if not isinstance(candidate.module, nn.MultiheadAttention):
            _adapt_linear(backbone, candidate, settings)
    freeze_all_but_adapters(backbone)
    backbone.register_forward_hook(_check_used)
    for module in backbone.modules():
        if isinstance(module, nn.ModuleList):
            for block in module:
                block.register_forward_pre_hook(_let_gradients_pass)
    print_log(f'LoRA: {describe_lora(backbone)}', logger='current')
    return settings


def freeze_all_but_adapters(backbone: nn.Module) -> None:
    """Freeze all parameters of a backbone except its adapters."""
    for name, parameter in backbone.named_parameters():
        if not is_adapter(name):
            parameter.requires_grad_(False)


def merge_lora(model: nn.Module) -> int:
    """Merge all adapters of a model into its weights, and restore the layers' classes.

    The parameters of the model stay frozen.

    Returns:
        The number of layers that had adapters.
    """
    layers = [module for module in model.modules() if isinstance(module, Adapted)]
    for layer in layers:
        restore(layer)  # type: ignore[arg-type]
    for module in model.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for key in [
                key for key, hook in hooks.items() if hook in (_check_used, _let_gradients_pass)
            ]:
                del hooks[key]
    return len(layers)


def describe_lora(model: nn.Module) -> str:
    """Return a one-line summary: settings, adapted layers, and the share of trained parameters."""
    layers = [module for module in model.modules() if isinstance(module, Adapted)]
    trained = sum(value.numel() for name, value in model.named_parameters() if is_adapter(name))
    total = sum(value.numel() for value in model.parameters())
    adapted = sum(bool(layer.adapted_projections) for layer in layers)
    settings = layers[0].lora
    return (
        f'rank {settings.rank}, targets {", ".join(settings.targets)}, scale '
        f'{settings.scale:g}, in {adapted} layers of {type(model).__name__}: {trained:,} of '
        f'{total:,} parameters are trained ({100 * trained / total:.2f} %)'
    )


def has_attention(backbone: nn.Module) -> bool:
    """Return whether a backbone is a transformer, that is, computes queries, keys and values."""
    projections = {
        projection
        for candidate in _find_candidates(backbone)
        for projection in candidate.projections
    }
    return projections == set(PROJECTIONS)


def _find_candidates(backbone: nn.Module) -> Iterator[_AdaptableLayer]:
    for name, module in backbone.named_modules():
        last = name.rsplit('.', 1)[-1]
        if isinstance(module, nn.MultiheadAttention):
            # Without in_proj_weight, q, k and v have different widths and separate weights.
            fused = module.in_proj_weight is not None
            yield _AdaptableLayer(name, module, PROJECTIONS if fused else ())
        elif isinstance(module, nn.Linear):
            fused = last in _FUSED and module.out_features == 3 * module.in_features
            single = (_SINGLE[last],) if last in _SINGLE else ()
            yield _AdaptableLayer(name, module, PROJECTIONS if fused else single)


def _check_targets(
    backbone: nn.Module, settings: LoRASettings, candidates: List[_AdaptableLayer]
) -> None:
    for target in settings.targets:
        if any(
            target in candidate.projections or _has_name(candidate, target)
            for candidate in candidates
        ):
            continue
        projections = [
            projection
            for projection in PROJECTIONS
            if any(projection in candidate.projections for candidate in candidates)
        ]
        linear = dict.fromkeys(
            _name_in_block(candidate.name)
            for candidate in candidates
            if isinstance(candidate.module, nn.Linear)
        )
        # A depthwise convolution with a kernel larger than 1 is the mark of a ConvNet.
        convolutional = any(
            isinstance(module, nn.Conv2d) and module.kernel_size[0] > 1 and module.groups > 1
            for module in backbone.modules()
        )
        raise LoRAError(
            f'lora.targets: {target!r} matches no layer of {type(backbone).__name__}. It has '
            + (
                f"the attention's {', '.join(projections)}"
                if projections
                else 'no attention'
                + (', since it is a convolutional network' if convolutional else '')
            )
            + f', and the linear layers {", ".join(linear) or "none"}'
            + ('.' if projections else '. Adapters are for vision transformers, such as DINOv3ViT.')
        )
    for candidate in candidates:
        layer = candidate.module
        if (
            isinstance(layer, nn.Linear)
            and settings.rank > layer.in_features
            and _choose_projections(candidate, settings)
        ):
            raise LoRAError(
                f'lora.rank={settings.rank} is more than the {layer.in_features} '
                f'inputs of {candidate.name}: expected far fewer, such as 16'
            )


def _choose_projections(candidate: _AdaptableLayer, settings: LoRASettings) -> List[str]:
    """Return the projections of a layer that get an adapter; [WHOLE] for a layer with only one."""
    if isinstance(candidate.module, nn.Linear) and any(
        _has_name(candidate, target) for target in settings.targets
    ):
        return list(PROJECTIONS) if len(candidate.projections) == len(PROJECTIONS) else [WHOLE]
    projections = [name for name in candidate.projections if name in settings.targets]
    return [WHOLE] if projections and len(candidate.projections) == 1 else projections


def _has_name(candidate: _AdaptableLayer, target: str) -> bool:
    return isinstance(candidate.module, nn.Linear) and (
        candidate.name == target or candidate.name.endswith(f'.{target}')
    )


def _name_in_block(name: str) -> str:
    return re.sub(r'^.*?\.\d+\.', '', name)


def _adapt_attention(
    module: nn.MultiheadAttention, settings: LoRASettings, candidate: _AdaptableLayer
) -> None:
    projections = _choose_projections(candidate, settings)
    # A plain MultiheadAttention reads the weight of out_proj and never calls the layer. So it also
    # needs the adapted class if only out_proj has an adapter.
    output = _AdaptableLayer(f'{candidate.name}.out_proj', module.out_proj, ())
    adapts_output = any(_has_name(output, target) for target in settings.targets)
    if projections or adapts_output:
        adapt(
            module,
            AdaptedMultiheadAttention,
            projections,
            settings,
            (module.embed_dim, module.embed_dim),
        )


def _adapt_linear(backbone: nn.Module, candidate: _AdaptableLayer, settings: LoRASettings) -> None:
    projections, layer = _choose_projections(candidate, settings), candidate.module
    if not projections:
        return
    assert isinstance(layer, nn.Linear)
    outputs = layer.out_features // (1 if projections == [WHOLE] else len(PROJECTIONS))
    owner = _get_parent(backbone, candidate.name)
    # True for MMSegmentation's BEiTAttention, which reads the layer's weight (AdaptedBEiTLinear).
    reads_weight = (
        layer is getattr(owner, 'qkv', None) and getattr(owner, 'bias', None) == 'qv_bias'
    )
    adapt(
        layer,
        AdaptedBEiTLinear if reads_weight else AdaptedLinear,
        projections,
        settings,
        (outputs, layer.in_features),
    )
    if reads_weight:
        layer.attention = (owner,)  # type: ignore[assignment]
        # Any value except 'qv_bias' makes the attention call the layer.
        owner.bias = 'of qkv'  # type: ignore[assignment]


def _get_parent(backbone: nn.Module, name: str) -> nn.Module:
    return backbone.get_submodule(name.rpartition('.')[0])


def _check_used(backbone: nn.Module, inputs: Any, outputs: Any) -> None:
    """Raise an error after the first forward pass if an adapter was not used.

    Some attentions read the weight of a layer and compute its output themselves. An adapter there
    would never be trained, and nothing else would show it.
    """
    unused = [
        name
        for name, module in backbone.named_modules()
        if isinstance(module, Adapted) and not module.lora_used
    ]
    if unused:
        owner = type(_get_parent(backbone, unused[0])).__name__
        raise LoRAError(
            f'the adapters of {len(unused)} layer(s) of {type(backbone).__name__} have no effect, '
            f'the first in {unused[0]}: {owner} does not call that layer, but reads its weight. '
            f'Choose other lora.targets.'
        )


def _let_gradients_pass(block: nn.Module, inputs: Tuple[Any, ...]) -> None:
    """Let a block that ``cfg.activation_checkpointing`` recomputes train its adapters.

    Reentrant checkpointing gives no gradients unless an input requires some, and the output of a
    frozen embedding does not.
    """
    first: Optional[Union[torch.Tensor, Any]] = inputs[0] if inputs else None
    if (
        'forward' in vars(block)
        and torch.is_grad_enabled()
        and isinstance(first, torch.Tensor)
        and first.is_floating_point()
        and not first.requires_grad
    ):
        first.requires_grad_()


@MODELS.register_module(name='LoRABackbone')
def build_lora_backbone(of: Any, lora: Dict[str, Any], **settings: Any) -> nn.Module:
    """Build a backbone with low-rank adapters and freeze everything else in it.

    The names of its state dict do not change, so ``init_cfg`` and layer-wise learning rates work
    as without adapters. In a config that inherits another:
    ``model=dict(backbone=dict(type='LoRABackbone', of='BEiT', lora=dict(rank=16)))``.
    ``DINOv3ViT`` has its own setting ``lora`` and needs no ``LoRABackbone``.

    Args:
        of: Type of the backbone, such as ``'VisionTransformer'``, ``'BEiT'`` or ``'MAE'``.
        lora: Settings of the adapters; see :class:`LoRASettings`.
        **settings: Settings of the backbone.

    Raises:
        LoRAError: If a setting is wrong, or a target matches no layer.
    """
    if of == 'DINOv3ViT':
        raise LoRAError(
            "LoRABackbone(of='DINOv3ViT'): DINOv3ViT accepts lora itself. Set "
            "type='DINOv3ViT' and remove 'of'"
        )
    backbone = MODELS.build(dict(settings, type=of))
    add_lora(backbone, lora)
    return backbone
