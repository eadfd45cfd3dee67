"""The transformer block of DINOv3."""
from __future__ import annotations

from typing import Optional

import torch
import torch.nn.functional as F
from torch import nn

from .dinov3_weights import Arch
from .rope import RotaryAttention

NORM_EPS = 1e-5  # norm_layer='layernormbf16' of every model in dinov3/hub/backbones.py


class Mlp(nn.Module):
    """Feed-forward network of two layers with an exact GELU."""

    def __init__(self, arch: Arch) -> None:
        super().__init__()
        self.fc1 = nn.Linear(arch.embed_dims, arch.feedforward_channels)
        self.fc2 = nn.Linear(arch.feedforward_channels, arch.embed_dims)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Transform features, (..., embed_dims)."""
        return self.fc2(F.gelu(self.fc1(x)))


class GatedMlp(nn.Module):
    """SwiGLU network: ``w1`` gates ``w2``, as in dinov3/layers/ffn_layers.py."""

    def __init__(self, arch: Arch) -> None:
        super().__init__()
        self.w1 = nn.Linear(arch.embed_dims, arch.feedforward_channels)
        self.w2 = nn.Linear(arch.embed_dims, arch.feedforward_channels)
        self.w3 = nn.Linear(arch.feedforward_channels, arch.embed_dims)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Transform features, (..., embed_dims)."""
        return self.w3(F.silu(self.w1(x)) * self.w2(x))


class Block(nn.Module):
    """Transformer block: attention and MLP, each with a norm before and LayerScale after it.

    Args:
        arch: Structure of the backbone.
        drop_path: Probability (0..1) of leaving out either branch of a sample, in training only.
    """

    def __init__(self, arch: Arch, drop_path: float = 0.) -> None:
        super().__init__()
        self.drop_path = drop_path
        self.norm1 = nn.LayerNorm(arch.embed_dims, eps=NORM_EPS)
        self.attn = RotaryAttention(arch)
        self.gamma_1 = nn.Parameter(torch.full((arch.embed_dims, ), 1e-5))
        self.norm2 = nn.LayerNorm(arch.embed_dims, eps=NORM_EPS)
        self.mlp = GatedMlp(arch) if arch.gated_mlp else Mlp(arch)
        self.gamma_2 = nn.Parameter(torch.full((arch.embed_dims, ), 1e-5))

    def forward(self, x: torch.Tensor, sine: torch.Tensor, cosine: torch.Tensor,
                kept: Optional[torch.Tensor] = None,
                allowed: Optional[torch.Tensor] = None) -> torch.Tensor:
        """Transform tokens, (N, tokens, embed_dims).

        ``kept`` comes from :meth:`draw_kept`, ``allowed`` is that of the attention.
        """
        attended = self.gamma_1 * self.attn(self.norm1(x), sine, cosine, allowed)
        x = x + (attended if kept is None else attended * kept[0])
        transformed = self.gamma_2 * self.mlp(self.norm2(x))
        return x + (transformed if kept is None else transformed * kept[1])

    def draw_kept(self, x: torch.Tensor) -> Optional[torch.Tensor]:
        """Draw the factors of both branches, (2, N, 1, 1), 0 or 1 / (1 - drop_path).

        They are drawn outside of ``forward``, so that recomputing it needs no random state, which
        old torch versions restore on CUDA and the CPU only.

        Returns:
            The factors, or None if no branch can be left out.
        """
        if not self.training or not self.drop_path:
            return None
        keep = 1 - self.drop_path
        return torch.full((2, len(x), 1, 1), keep, device=x.device).bernoulli_(keep) / keep
