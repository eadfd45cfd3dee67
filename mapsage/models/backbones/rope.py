"""Rotary position embedding (RoPE) of DINOv3, and the self-attention that uses it.

The embedding is axial and not learned, so it works for any grid of patches. It is applied to
queries and keys inside the attention, never added to the tokens.

Shapes: N images, T tokens (class and register tokens, then patches in row order), D channels of one
attention head, Q leading tokens with an attention mask (the queries of extras/mask_transformers).
"""

from __future__ import annotations

import math
from typing import Optional, Tuple

import torch
import torch.nn.functional as F
from torch import nn

from mapsage.models.lora.adapted import Adapted

from .dinov3_weights import Arch

# Since torch 2.0; explicit_attention computes the same for older versions and for the ONNX export.
_fused_attention = getattr(F, 'scaled_dot_product_attention', None)
# Since torch 2.1.
_is_compiling = getattr(getattr(torch, 'compiler', None), 'is_compiling', None)


def joins_kernels(x: torch.Tensor) -> bool:
    """Return whether a product and a sum of ``x`` may be one kernel: on a card, without gradients.

    With gradients the backward pass would need more kernels, and a compiler joins them itself. On a
    CPU the joint kernel rounds once less, and maps would differ from those of earlier versions.
    """
    return (
        x.is_cuda
        and not torch.is_grad_enabled()
        and _is_compiling is not None
        and not _is_compiling()
    )


class RotaryPositions(nn.Module):
    """Sine and cosine of the position of each token, as in DINOv3.

    The position of a patch is its center. Each axis is scaled independently to -1..1 (``separate``
    in DINOv3), so a grid of any size covers the same range. Positions are float32 whatever the
    model's precision. DINOv3's pre-training rescales coordinates at random; this module does not,
    so fine-tuning and evaluation see the same positions.

    ``periods`` is a buffer because the official files contain it, rounded to bfloat16, and the
    features were trained with those values. Other file formats lack it, and the model then keeps
    the computed values.

    The class and register tokens before the patches get sine 0 and cosine 1, which leaves them
    unchanged: rotating all tokens is cheaper than splitting off the patches.

    Source: facebookresearch/dinov3@6876159, dinov3/layers/rope_position_encoding.py.

    Args:
        head_dims: Number of channels of one attention head, a multiple of 4.
        prefix: Number of tokens before the patches.
        base: Ratio of the longest to the shortest period (100 in every released model).
    """

    periods: torch.Tensor

    def __init__(self, head_dims: int, prefix: int, base: float = 100.0) -> None:
        super().__init__()
        self.prefix = prefix
        quarter = head_dims // 4
        exponents = 2 * torch.arange(quarter, dtype=torch.float32) / (head_dims // 2)
        self.register_buffer('periods', base**exponents)

    def forward(self, rows: int, columns: int) -> Tuple[torch.Tensor, torch.Tensor]:
        """Return sine and cosine for a grid of patches, float32 (T, D) each."""
        # Casting the model to half precision casts this buffer too.
        periods = self.periods.float()
        axes = [
            (torch.arange(count, dtype=torch.float32, device=periods.device) + 0.5) / count
            for count in (rows, columns)
        ]
        grid = torch.stack(torch.meshgrid(axes[0], axes[1], indexing='ij'), dim=-1)
        # (rows * columns, 2), in -1..1
        centers = 2 * grid.flatten(0, 1) - 1
        angles = (2 * math.pi * centers[:, :, None] / periods).flatten(1).tile(2)
        angles = F.pad(angles, (0, 0, self.prefix, 0))
        return angles.sin(), angles.cos()


def rotate(x: torch.Tensor, sine: torch.Tensor, cosine: torch.Tensor) -> torch.Tensor:
    """Rotate queries or keys by the positions of their tokens.

    Args:
        x: Queries or keys, (..., T, D).
        sine: Sine from :class:`RotaryPositions`, float32 (T, D), or a view of it that broadcasts.
        cosine: Cosine of the same shape and dtype.

    Returns:
        Rotated tensor with the shape and dtype of ``x``, computed in float32.
    """
    if joins_kernels(x):
        half = x.shape[-1] // 2
        # A product of 16-bit and float32 numbers is float32 without a kernel for the cast, and
        # autocast does not see operators that write into a given tensor.
        turned, result = x * cosine, torch.empty_like(x)
        parts = ((slice(half), slice(half, None), -1), (slice(half, None), slice(half), 1))
        for target, source, sign in parts:
            torch.addcmul(
                turned[..., target],
                x[..., source],
                sine[..., target],
                value=sign,
                out=result[..., target],
            )
        return result
    wide = x.to(sine.dtype)
    first, second = wide.chunk(2, dim=-1)
    return (wide * cosine + torch.cat((-second, first), dim=-1) * sine).to(x.dtype)


class RotaryAttention(nn.Module):
    """Self-attention with rotary positions. Keys have no bias, because DINOv3 masks it to zero.

    Attributes:
        joined_bias: Bias of queries, keys and values, (3 * embed_dims,), of a frozen copy; None
            where the parameters are read in each forward pass.
    """

    joined_bias: Optional[torch.Tensor] = None

    def __init__(self, arch: Arch) -> None:
        super().__init__()
        self.num_heads = arch.num_heads
        self.qkv = nn.Linear(arch.embed_dims, 3 * arch.embed_dims, bias=False)
        if arch.qkv_bias:
            self.q_bias = nn.Parameter(torch.zeros(arch.embed_dims))
            self.v_bias = nn.Parameter(torch.zeros(arch.embed_dims))
        self.has_bias = arch.qkv_bias
        self.proj = nn.Linear(arch.embed_dims, arch.embed_dims)

    def join_bias(self) -> Optional[torch.Tensor]:
        """Return the bias of queries, keys and values, (3 * embed_dims,); None without a bias."""
        if not self.has_bias:
            return None
        # A constant bias on the keys would not stay constant: each key is rotated differently.
        return torch.cat((self.q_bias, torch.zeros_like(self.q_bias), self.v_bias))

    def forward(
        self,
        x: torch.Tensor,
        sine: torch.Tensor,
        cosine: torch.Tensor,
        attn_mask: Optional[torch.Tensor] = None,
    ) -> torch.Tensor:
        """Transform tokens.

        Args:
            x: Tokens, (N, T, embed_dims).
            sine: Sine, as in :func:`rotate`.
            cosine: Cosine, as in :func:`rotate`.
            attn_mask: Where the first Q tokens may attend, bool (N, Q, T), at least one True per
                row; all later tokens attend everywhere. None if no token is masked.

        Returns:
            Tokens of the shape of ``x``.
        """
        bias = self.joined_bias if self.joined_bias is not None else self.join_bias()
        count, tokens, dims = x.shape
        qkv = F.linear(x, self.qkv.weight, bias)
        if isinstance(self.qkv, Adapted):
            qkv = qkv + self.qkv.delta(x)
        qkv = qkv.view(count, tokens, 3, self.num_heads, -1)
        # Queries and keys at once, (N, T, 2, heads, D), which halves the number of kernels.
        turned = rotate(qkv[:, :, :2], sine[:, None, None], cosine[:, None, None])
        query, key, value = (
            projected.transpose(1, 2) for projected in (*turned.unbind(2), qkv[:, :, 2])
        )
        attend = _fused_attention or explicit_attention
        if attn_mask is None:
            attended = attend(query, key, value)
        else:
            # A full (T, T) mask would need more memory and rule out the fast kernels for all
            # tokens, so only the masked tokens pay for it.
            masked = attn_mask.shape[1]
            attended = torch.cat(
                (
                    attend(query[:, :, :masked], key, value, attn_mask[:, None]),
                    attend(query[:, :, masked:], key, value),
                ),
                dim=2,
            )
        return self.proj(attended.transpose(1, 2).reshape(count, tokens, dims))


def explicit_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """Return the attention of tensors (N, heads, T, D), without the fused kernel of torch 2.0.

    A key gets no weight where ``attn_mask``, bool (N, 1, queries, keys), is False.
    """
    weights = (query * query.shape[-1] ** -0.5) @ key.transpose(-2, -1)
    if attn_mask is not None:
        weights = weights.masked_fill(~attn_mask, float('-inf'))
    return weights.softmax(dim=-1).to(value.dtype) @ value
