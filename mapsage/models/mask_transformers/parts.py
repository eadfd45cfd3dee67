"""Layers of EoMT and PMT after the transformer: mask embeddings and upscaled pixel features.

A mask is the product of a query's mask embedding and the pixel features at stride 4. The modules
keep the names of the authors' code, so checkpoints can be compared key by key.

Sources: tue-mps/eomt@7bd19dd (``models/eomt.py``, ``models/scale_block.py``).
"""
from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

# Strides of the patch tokens and of the masks.
_PATCH_SIZE, _STRIDE = 16, 4


class ChannelNorm(nn.LayerNorm):
    """Layer norm over the channels of each pixel of (N, C, H, W)."""

    def __init__(self, channels: int) -> None:
        # The eps of timm's LayerNorm2d.
        super().__init__(channels, eps=1e-6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize features, (N, C, H, W)."""
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ScaleBlock(nn.Module):
    """Upscales a map by 2: transposed convolution, GELU, depthwise convolution, norm."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.ConvTranspose2d(channels, channels, kernel_size=2, stride=2)
        self.conv2 = nn.Conv2d(channels, channels, kernel_size=3, padding=1, groups=channels,
                               bias=False)
        self.norm = ChannelNorm(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (N, C, 2 H, 2 W) for (N, C, H, W)."""
        return self.norm(self.conv2(functional.gelu(self.conv1(x))))


def build_upscaler(channels: int) -> nn.Sequential:
    """Return the blocks that upscale patch features from stride 16 to the masks' stride, 4."""
    doublings = int(math.log2(_PATCH_SIZE // _STRIDE))
    return nn.Sequential(*(ScaleBlock(channels) for _ in range(doublings)))


def build_mask_mlp(channels: int) -> nn.Sequential:
    """Return the network that turns a query's token into its mask embedding."""
    return nn.Sequential(
        nn.Linear(channels, channels), nn.GELU(), nn.Linear(channels, channels), nn.GELU(),
        nn.Linear(channels, channels))
