"""Rotary positions of DINOv3 (axial, not learned, for any grid of patches) and its attention."""
from __future__ import annotations

import math
from typing import Optional, Tuple

import torch
import torch.nn.functional as F
from torch import nn

from mapsage.models.lora.adapted import Adapted

from .dinov3_weights import Arch

# Available since torch 2.0; explicit_attention computes the same for older versions.
_fused_attention = getattr(F, 'scaled_dot_product_attention', None)


class RotaryPositions(nn.Module):
    """Sine and cosine of the position of each token, as DINOv3 computes them for patches.

    Coordinates are those of the patch centers. Each axis is scaled independently to -1..1
    (``separate``), so that a grid of any size covers the same range. Positions are float32 whatever
    the precision of the model. The random rescaling of coordinates in DINOv3's pre-training is left
    out, so that fine-tuning and evaluation use the same positions.

    ``periods`` is a buffer because the official files contain it, rounded to bfloat16, and the
    features were trained with those values. Files of other formats do not contain it and keep the
    computed values.

    The class and register tokens before the patches get sine 0 and cosine 1, which leaves them
    unchanged: rotating all tokens costs less than separating the patches from the others.

    Source: facebookresearch/dinov3@6876159, dinov3/layers/rope_position_encoding.py.

    Args:
        head_dims: Number of channels of one attention head, a multiple of 4.
        prefix: Number of tokens before the patches.
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
        """Return sine and cosine, float32, each (prefix + rows * columns, head_dims)."""
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
        x: Queries or keys, (..., tokens, head_dims).
        sine: Sine from :class:`RotaryPositions`, float32 (tokens, head_dims).
        cosine: Cosine of the same shape and type.

    Returns:
        Rotated tensor with the shape and dtype of ``x``, computed in float32.
    """
    wide = x.to(sine.dtype)
    first, second = wide.chunk(2, dim=-1)
    return (wide * cosine + torch.cat((-second, first), dim=-1) * sine).to(x.dtype)


class RotaryAttention(nn.Module):
    """Self-attention with rotary positions; the keys have no bias, because DINOv3 masks it."""

    def __init__(self, arch: Arch) -> None:
        super().__init__()
        self.num_heads = arch.num_heads
        self.qkv = nn.Linear(arch.embed_dims, 3 * arch.embed_dims, bias=False)
        if arch.qkv_bias:
            self.q_bias = nn.Parameter(torch.zeros(arch.embed_dims))
            self.v_bias = nn.Parameter(torch.zeros(arch.embed_dims))
        self.has_bias = arch.qkv_bias
        self.proj = nn.Linear(arch.embed_dims, arch.embed_dims)

    def forward(self, x: torch.Tensor, sine: torch.Tensor, cosine: torch.Tensor,
                allowed: Optional[torch.Tensor] = None) -> torch.Tensor:
        """Transform tokens.

        Args:
            x: Tokens, (N, tokens, embed_dims).
            sine: Sine, as in :func:`rotate`.
            cosine: Cosine, as in :func:`rotate`.
            allowed: Tokens that the first ones may attend to, bool (N, first tokens, tokens), at
                least one each; all others attend to every token. None if all do.

        Returns:
            Tokens of the shape of ``x``.
        """
        bias = None
        if self.has_bias:
            # Keys have no bias. Rotation would turn it by a different angle for each key.
            bias = torch.cat((self.q_bias, torch.zeros_like(self.q_bias), self.v_bias))
        count, tokens, dims = x.shape
        qkv = F.linear(x, self.qkv.weight, bias)
        if isinstance(self.qkv, Adapted):
            qkv = qkv + self.qkv.delta(x)
        qkv = qkv.view(count, tokens, 3, self.num_heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        query, key = rotate(query, sine, cosine), rotate(key, sine, cosine)
        attend = _fused_attention or explicit_attention
        if allowed is None:
            attended = attend(query, key, value)
        else:
            # A mask of all tokens by all tokens would cost memory and the fast kernels.
            first = allowed.shape[1]
            attended = torch.cat((attend(query[:, :, :first], key, value, allowed[:, None]),
                                  attend(query[:, :, first:], key, value)), dim=2)
        return self.proj(attended.transpose(1, 2).reshape(count, tokens, dims))


def explicit_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                       allowed: Optional[torch.Tensor] = None) -> torch.Tensor:
    """Return the attention of tensors (N, heads, tokens, head_dims), for torch before 2.0.

    Keys that ``allowed``, bool (N, 1, queries, keys), leaves out get no weight.
    """
    weights = (query * query.shape[-1]**-.5) @ key.transpose(-2, -1)
    if allowed is not None:
        weights = weights.masked_fill(~allowed, float('-inf'))
    return weights.softmax(dim=-1).to(value.dtype) @ value
