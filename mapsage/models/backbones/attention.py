"""Self-attention of the encoders, and the plain transformer block that several of them share.

The scores of 12 dates can need gigabytes, so queries are processed in chunks of bounded size.

Shapes: N images, T tokens, D channels of one attention head.
"""

from __future__ import annotations

import functools
from typing import Callable, Optional

import torch
import torch.nn.functional as F
from torch import nn

from mapsage.models.backbones.dinov3_blocks import Mlp, run_recomputed

# Since torch 2.0; the explicit form computes the same for older versions.
_fused_attention = getattr(F, 'scaled_dot_product_attention', None)

# Largest size of the attention scores of one chunk of queries, in bytes of float32. Fused kernels
# do not hold the scores, but not every device and mask has one, so the limit applies always.
SCORE_BYTES = 1 << 29


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    valid: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """Return the attention of queries to keys.

    If the scores would be larger than :data:`SCORE_BYTES`, queries are processed in chunks, and
    the backward pass computes the scores of each chunk again.

    Args:
        query: Queries, (N, heads, T, D).
        key: Keys of the same shape.
        value: Values of the same shape.
        valid: Which tokens may be attended to, bool (N, T), at least one in each row; None if all.

    Returns:
        Attended values, (N, heads, T, D).
    """
    count, heads, tokens, _ = query.shape
    rows = max(SCORE_BYTES // (4 * count * heads * tokens), 1)
    if rows >= tokens:
        return _attend(query, key, value, valid)
    chunks = query.split(rows, 2)
    if torch.is_grad_enabled():
        return torch.cat([run_recomputed(_attend, chunk, key, value, valid) for chunk in chunks], 2)
    return torch.cat([_attend(chunk, key, value, valid) for chunk in chunks], 2)


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, valid: Optional[torch.Tensor]
) -> torch.Tensor:
    mask = None if valid is None else valid[:, None, None]
    if _fused_attention is not None:
        return _fused_attention(query, key, value, mask)
    scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-2, -1)
    if mask is not None:
        scores = scores.masked_fill(~mask, float('-inf'))
    return scores.softmax(-1).to(value.dtype) @ value


def attend_to_any(valid: torch.Tensor) -> torch.Tensor:
    """Return a mask for :func:`attend`, in which a row without a valid token is all True.

    The softmax of such a row would be NaN. Its output does not matter: the features of cells
    without a valid token are 0.

    Args:
        valid: bool (N, T).
    """
    return valid | ~valid.any(1, keepdim=True)


def with_class_token(valid: torch.Tensor) -> torch.Tensor:
    """Return a mask for :func:`attend` with a class token first, which may always be attended to.

    Args:
        valid: bool (N, T).

    Returns:
        bool (N, 1 + T).
    """
    # Not padding: the exporter of torch 1.10 cannot pad bool.
    return torch.cat([torch.ones_like(valid[:, :1]), valid], 1)


def split_heads(tokens: torch.Tensor, heads: int) -> torch.Tensor:
    """Return tokens (N, T, heads * D) as (N, heads, T, D)."""
    count, length, channels = tokens.shape
    return tokens.view(count, length, heads, channels // heads).transpose(1, 2)


def join_heads(tokens: torch.Tensor) -> torch.Tensor:
    """Return tokens (N, heads, T, D) as (N, T, heads * D)."""
    return tokens.transpose(1, 2).flatten(2)


class Attention(nn.Module):
    """Self-attention with one layer for queries, keys and values, as in timm.

    Args:
        channels: Channels of the tokens.
        heads: Number of attention heads.
        bias: Whether the two linear layers have a bias.
    """

    def __init__(self, channels: int, heads: int, bias: bool = True) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(channels, 3 * channels, bias=bias)
        self.proj = nn.Linear(channels, channels, bias=bias)

    def forward(self, tokens: torch.Tensor, valid: Optional[torch.Tensor]) -> torch.Tensor:
        """Transform tokens (N, T, channels); ``valid`` as in :func:`attend`."""
        query, key, value = (
            split_heads(projected, self.heads) for projected in self.qkv(tokens).chunk(3, -1)
        )
        return self.proj(join_heads(attend(query, key, value, valid)))


class LayerScale(nn.Module):
    """Learned factor for each channel; named as in timm's files."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((channels,), 1e-5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Scale tokens, (..., channels)."""
        return tokens * self.gamma


class PreNormBlock(nn.Module):
    """Pre-norm transformer block with the names of timm's ``Block``.

    Args:
        channels: Channels of the tokens.
        attn: Attention, called with the normed tokens and the further arguments of the block.
        mlp: Feed-forward network.
        norm: Function that makes a norm of so many channels.
        layer_scale: Whether each branch ends with a :class:`LayerScale`.
    """

    def __init__(
        self,
        channels: int,
        attn: nn.Module,
        mlp: nn.Module,
        norm: Callable[[int], nn.Module],
        layer_scale: bool = False,
    ) -> None:
        super().__init__()
        self.norm1 = norm(channels)
        self.attn = attn
        self.ls1 = LayerScale(channels) if layer_scale else nn.Identity()
        self.norm2 = norm(channels)
        self.mlp = mlp
        self.ls2 = LayerScale(channels) if layer_scale else nn.Identity()

    def forward(self, tokens: torch.Tensor, *inputs: Optional[torch.Tensor]) -> torch.Tensor:
        """Transform tokens (N, T, channels); ``inputs`` are the attention's."""
        tokens = tokens + self.ls1(self.attn(self.norm1(tokens), *inputs))
        return tokens + self.ls2(self.mlp(self.norm2(tokens)))


def vit_block(channels: int, heads: int, eps: float, layer_scale: bool = False) -> PreNormBlock:
    """Return the block of a plain vision transformer.

    Args:
        channels: Channels of the tokens.
        heads: Number of attention heads.
        eps: Epsilon of the norms.
        layer_scale: As in :class:`PreNormBlock`.
    """
    return PreNormBlock(
        channels,
        Attention(channels, heads),
        Mlp(channels, 4 * channels),
        functools.partial(nn.LayerNorm, eps=eps),
        layer_scale,
    )
