"""The layers of EoMT and PMT behind the transformer: mask embeddings and a finer map of pixels.

Sources: tue-mps/eomt@7bd19dd (``models/eomt.py``, ``models/scale_block.py``), whose names the
modules have, so that checkpoints can be compared key by key.
"""
from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

_PATCH_SIZE, _STRIDE = 16, 4  # of the tokens, and of the masks


class ChannelNorm(nn.LayerNorm):
    """Layer norm over the channels of each pixel of (N, C, H, W)."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, eps=1e-6)  # as timm's LayerNorm2d

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the shape of ``x``, (N, C, H, W)."""
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ScaleBlock(nn.Module):
    """Doubles the side lengths of a map: transposed convolution, GELU, depthwise one, norm."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.ConvTranspose2d(channels, channels, kernel_size=2, stride=2)
        self.conv2 = nn.Conv2d(channels, channels, kernel_size=3, padding=1, groups=channels,
                               bias=False)
        self.norm = ChannelNorm(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (N, C, 2 H, 2 W) for (N, C, H, W)."""
        return self.norm(self.conv2(functional.gelu(self.conv1(x))))


def upscaler(channels: int) -> nn.Sequential:
    """Return the blocks that bring a map of stride 16 to the stride of the masks, 4."""
    doublings = int(math.log2(_PATCH_SIZE // _STRIDE))
    return nn.Sequential(*(ScaleBlock(channels) for _ in range(doublings)))


def mask_mlp(channels: int) -> nn.Sequential:
    """Return the network that makes a query's mask embedding of its token."""
    return nn.Sequential(
        nn.Linear(channels, channels), nn.GELU(), nn.Linear(channels, channels), nn.GELU(),
        nn.Linear(channels, channels))
