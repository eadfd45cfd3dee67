"""Rotary positions of DINOv3 (axial, no learned weights, any grid of patches) and its attention."""
from __future__ import annotations

import math
from typing import Tuple

import torch
import torch.nn.functional as F
from torch import nn

from .dinov3_weights import Arch

# torch >= 2.0; before, the same is computed in four operations.
_fused_attention = getattr(F, 'scaled_dot_product_attention', None)


class RotaryPositions(nn.Module):
    """Sine and cosine of each token's position, as DINOv3 computes them for patches.

    Coordinates are the patch centers, each axis scaled on its own to -1..1 (``separate``), so a
    grid of any size covers the same range. Everything is float32 whatever the model's precision.
    The random rescaling of coordinates that DINOv3's own training does is left out: fine-tuning
    and evaluation see the same positions.

    ``periods`` is a buffer, because the official files carry it rounded to bfloat16 and their
    features were made with those values; files of other formats leave the computed ones.

    The class and register tokens before the patches have sine 0 and cosine 1, which turns them by
    nothing: rotating all tokens costs less than taking the patches out and putting them back.

    Source: facebookresearch/dinov3@6876159, dinov3/layers/rope_position_encoding.py.

    Args:
        head_dims: Channels of one attention head, a multiple of 4.
        prefix: Tokens before the patches.
        base: Ratio between the longest period and the shortest (100 in every released model).
    """

    periods: torch.Tensor

    def __init__(self, head_dims: int, prefix: int, base: float = 100.) -> None:
        super().__init__()
        self.prefix = prefix
        quarter = head_dims // 4
        exponents = 2 * torch.arange(quarter, dtype=torch.float32) / (head_dims // 2)
        self.register_buffer('periods', base**exponents)

    def forward(self, rows: int, columns: int) -> Tuple[torch.Tensor, torch.Tensor]:
        """Sine and cosine, float32, each (prefix + rows * columns, head_dims)."""
        periods = self.periods.float()  # a model cast to half precision casts its buffers
        axes = [(torch.arange(count, dtype=torch.float32, device=periods.device) + 0.5) / count
                for count in (rows, columns)]
        grid = torch.stack(torch.meshgrid(axes[0], axes[1], indexing='ij'), dim=-1)
        centers = 2 * grid.flatten(0, 1) - 1  # (rows * columns, 2)
        angles = (2 * math.pi * centers[:, :, None] / periods).flatten(1).tile(2)
        angles = F.pad(angles, (0, 0, self.prefix, 0))
        return angles.sin(), angles.cos()


def rotate(x: torch.Tensor, sine: torch.Tensor, cosine: torch.Tensor) -> torch.Tensor:
    """Rotate queries or keys.

    Args:
        x: (..., tokens, head_dims).
        sine: float32 (tokens, head_dims), of :class:`RotaryPositions`.
        cosine: Likewise.

    Returns:
        Shape and dtype of ``x``; computed in float32.
    """
    wide = x.to(sine.dtype)
    first, second = wide.chunk(2, dim=-1)
    return (wide * cosine + torch.cat((-second, first), dim=-1) * sine).to(x.dtype)


class RotaryAttention(nn.Module):
    """Self-attention with rotary positions; keys have no bias, which DINOv3 masks."""

    def __init__(self, arch: Arch) -> None:
        super().__init__()
        self.num_heads = arch.num_heads
        self.qkv = nn.Linear(arch.embed_dims, 3 * arch.embed_dims, bias=False)
        if arch.qkv_bias:
            self.q_bias = nn.Parameter(torch.zeros(arch.embed_dims))
            self.v_bias = nn.Parameter(torch.zeros(arch.embed_dims))
        self.has_bias = arch.qkv_bias
        self.proj = nn.Linear(arch.embed_dims, arch.embed_dims)

    def forward(self, x: torch.Tensor, sine: torch.Tensor, cosine: torch.Tensor) -> torch.Tensor:
        """From and to (N, tokens, embed_dims); ``sine`` and ``cosine`` as for :func:`rotate`."""
        bias = None
        if self.has_bias:
            # A bias of the keys would matter: rotation makes it differ between them.
            bias = torch.cat((self.q_bias, torch.zeros_like(self.q_bias), self.v_bias))
        count, tokens, dims = x.shape
        qkv = F.linear(x, self.qkv.weight, bias).view(count, tokens, 3, self.num_heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        query, key = rotate(query, sine, cosine), rotate(key, sine, cosine)
        attend = _fused_attention or explicit_attention
        return self.proj(attend(query, key, value).transpose(1, 2).reshape(count, tokens, dims))


def explicit_attention(query: torch.Tensor, key: torch.Tensor,
                       value: torch.Tensor) -> torch.Tensor:
    """``scaled_dot_product_attention`` for torch < 2.0; all are (N, heads, tokens, head_dims)."""
    weights = (query * query.shape[-1]**-.5) @ key.transpose(-2, -1)
    return weights.softmax(dim=-1).to(value.dtype) @ value
