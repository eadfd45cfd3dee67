"""Layers with low-rank adapters: what a layer computes, plus ``scale * B A x``.

A layer gets its adapters in place: its class becomes one that inherits from it, so that names in
the state dict stay, ``isinstance`` still holds, and the weights of a pretrained model load as
before. Two parameter dicts are added, ``lora_A`` and ``lora_B``, with an entry for each part of the
output that is adapted.

Source: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, ICLR 2022.
"""
from __future__ import annotations

import functools
import math
import re
from typing import Any, Dict, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import nn

from .settings import LoRASettings

_NAME = re.compile(r'(^|\.)lora_[AB]\.')
# Parts of the output of a layer, in their order; one layer often computes all three.
PARTS = ('q', 'k', 'v')
WHOLE = 'all'

_fused_attention = getattr(F, 'scaled_dot_product_attention', None)  # since torch 2.0


def is_adapter(name: str) -> bool:
    """Return whether a name of a state dict is that of an adapter."""
    return _NAME.search(name) is not None


class Adapted:
    """Mixin of a layer with adapters.

    Attributes:
        lora_A: Parameters A of each part, (rank, inputs). They begin as those of a linear layer.
        lora_B: Parameters B of each part, (outputs of the part, rank). They begin as zeros.
        adapted_parts: Names of the parts, in the order of the outputs.
        part_count: Number of equal parts of the output.
        class_before: Class of the layer without adapters.
        lora_used: Whether the adapters were ever computed.
    """

    lora_A: nn.ParameterDict  # noqa: N815  (peft's and the paper's names)
    lora_B: nn.ParameterDict  # noqa: N815
    lora: LoRASettings
    adapted_parts: Tuple[str, ...]
    part_count: int
    class_before: type
    lora_used: bool
    training: bool

    def delta(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the adapters add to the output for an input (..., inputs)."""
        self.lora_used = True
        down, up = self.matrices()
        if self.training and self.lora.dropout:
            x = F.dropout(x, self.lora.dropout)
        return F.linear(F.linear(x, down), up) * self.lora.scale

    def part_delta(self, part: str, x: torch.Tensor) -> Optional[torch.Tensor]:
        """Return what the adapter of one part adds to it; None if that has no adapter."""
        self.lora_used = True
        if part not in self.adapted_parts:
            return None
        if self.training and self.lora.dropout:
            x = F.dropout(x, self.lora.dropout)
        return F.linear(F.linear(x, self.lora_A[part]), self.lora_B[part]) * self.lora.scale

    def matrices(self) -> Tuple[torch.Tensor, torch.Tensor]:
        """Return A (ranks, inputs) and B (outputs, ranks) of all parts, without the scale.

        B has a block of zeros for each part of the output and adapter that do not go together.
        """
        names = self.adapted_parts
        if self.part_count == 1:
            return self.lora_A[names[0]], self.lora_B[names[0]]
        rank = self.lora.rank
        outputs = len(self.lora_B[names[0]])
        rows = []
        for part in PARTS:
            if part in names:
                before = names.index(part) * rank
                rows.append(F.pad(self.lora_B[part],
                                  (before, (len(names) - 1) * rank - before)))
            else:
                rows.append(self.lora_B[names[0]].new_zeros(outputs, len(names) * rank))
        return torch.cat([self.lora_A[name] for name in names]), torch.cat(rows)

    def merged_weight(self, weight: torch.Tensor) -> torch.Tensor:
        """Return a weight (outputs, inputs) to which the adapters are added, in its dtype."""
        down, up = (each.detach().double() for each in self.matrices())
        return (weight.detach().double() + self.lora.scale * (up @ down)).to(weight.dtype)


class AdaptedLinear(Adapted):
    """Mixin of a linear layer that is called."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Transform features, (..., inputs)."""
        return super().forward(x) + self.delta(x)  # type: ignore[misc]

    def merge(self) -> None:
        """Add the adapters to the weight."""
        layer: Any = self
        layer.weight.data = self.merged_weight(layer.weight)


class AdaptedBEiTLinear(AdaptedLinear):
    """Mixin of ``qkv`` of MMSegmentation's BEiTAttention, which reads its weight and is not called.

    The attention has the biases of queries and values. Once its ``bias`` is no longer
    ``'qv_bias'``, it calls the layer, which then adds them.
    """

    attention: Tuple[nn.Module]  # in a tuple, since it is no child of its own child

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Transform tokens, (N, tokens, inputs), to queries, keys and values."""
        query, value = self.attention[0].q_bias, self.attention[0].v_bias
        bias = torch.cat((query, torch.zeros_like(query), value))  # type: ignore[arg-type]
        layer: Any = self
        return F.linear(x, layer.weight, bias) + self.delta(x)


class AdaptedMultiheadAttention(Adapted):
    """Mixin of ``torch.nn.MultiheadAttention``, whose layers are not called.

    It attends to all tokens: masks are an error. It returns no attention weights.
    """

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                key_padding_mask: Any = None, need_weights: bool = True, attn_mask: Any = None,
                **_: Any) -> Tuple[torch.Tensor, None]:
        """Return the attended tokens, in the layout of torch's ``MultiheadAttention``."""
        if key_padding_mask is not None or attn_mask is not None:
            raise NotImplementedError('MultiheadAttention with LoRA takes no masks')
        module: Any = self
        biases = [None] * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
        inputs = zip(PARTS, (query, key, value), module.in_proj_weight.chunk(3), biases)
        heads = []
        for part, x, weight, bias in inputs:
            y, delta = F.linear(x, weight, bias), self.part_delta(part, x)
            y = y if delta is None else y + delta
            y = y if module.batch_first else y.transpose(0, 1)
            heads.append(y.view(*y.shape[:2], module.num_heads, -1).transpose(1, 2))
        attended = _attend(heads[0], heads[1], heads[2],
                           module.dropout if self.training else 0.)
        attended = attended.transpose(1, 2).flatten(2)
        attended = attended if module.batch_first else attended.transpose(0, 1)
        return module.out_proj(attended), None

    def merge(self) -> None:
        """Add the adapters to the weight of queries, keys and values."""
        module: Any = self
        if self.adapted_parts:
            module.in_proj_weight.data = self.merged_weight(module.in_proj_weight)


def adapt(module: nn.Module, kind: type, parts: Sequence[str], settings: LoRASettings,
          shape: Tuple[int, int]) -> None:
    """Turn a layer into one of the class ``kind`` with adapters.

    Args:
        module: Layer, changed in place.
        kind: Class, one of the mixins above.
        parts: Names of the parts of the output that get an adapter: of :data:`PARTS`, or
            :data:`WHOLE`; none for an attention whose output layer alone has one.
        settings: Settings of the adapters.
        shape: Outputs of a part, and inputs.
    """
    outputs, inputs = shape
    layer: Any = module
    known: Any = _class_of  # mypy finds that classes of modules have no hash
    layer.__class__ = known(kind, type(module))
    layer.lora, layer.lora_used = settings, False
    layer.adapted_parts = tuple(part for part in (*PARTS, WHOLE) if part in parts)
    layer.part_count = 1 if layer.adapted_parts == (WHOLE, ) else len(PARTS)
    device = next(module.parameters()).device
    down: Dict[str, nn.Parameter] = {}
    for part in layer.adapted_parts:
        down[part] = nn.Parameter(torch.empty(settings.rank, inputs, device=device))
        nn.init.kaiming_uniform_(down[part], a=math.sqrt(5))  # that of nn.Linear, as in peft
    layer.lora_A = nn.ParameterDict(down)
    layer.lora_B = nn.ParameterDict(
        {part: nn.Parameter(torch.zeros(outputs, settings.rank, device=device)) for part in down})


def restore(module: nn.Module) -> None:
    """Merge the adapters of a layer into its weight, and make it what it was."""
    layer: Any = module
    layer.merge()
    if isinstance(layer, AdaptedBEiTLinear):
        layer.attention[0].bias = 'qv_bias'  # type: ignore[assignment]
        del layer.attention
    layer.__class__ = layer.class_before
    for name in ('lora_A', 'lora_B', 'lora', 'lora_used', 'adapted_parts', 'part_count'):
        delattr(layer, name)


@functools.lru_cache(maxsize=None)
def _class_of(kind: Any, base: Any) -> type:
    return type(f'LoRA{base.__name__}', (kind, base),
                dict(__module__=__name__, __doc__=kind.__doc__, class_before=base))


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
            dropout: float) -> torch.Tensor:
    if _fused_attention is not None:
        return _fused_attention(query, key, value, dropout_p=dropout)
    weights = ((query * query.shape[-1]**-.5) @ key.transpose(-2, -1)).softmax(dim=-1)
    return F.dropout(weights, dropout).to(value.dtype) @ value
