"""PMT: a light transformer decoder with mask queries on the tokens of a frozen ViT.

The head reads the tokens of several backbone levels, which may also come from a feature cache or
from encoder ranks. For a backbone that is trained, use EoMT (eomt.py).

Shapes: N images, C channels of a level, P prefix tokens (class and register tokens), T tokens (P
prefix tokens, then rows * columns patches).
"""

from __future__ import annotations

from functools import partial
from typing import Any, Dict, List, Sequence, Tuple

import torch
from mmcv.cnn import build_norm_layer
from mmengine.logging import print_log
from mmengine.registry import MODELS
from torch import nn

from mapsage.base.errors import UserError
from mapsage.models.backbones.dinov3_blocks import NORM_EPS, Block
from mapsage.models.backbones.dinov3_weights import Arch, WeightsError, read_checkpoint
from mapsage.models.backbones.rope import RotaryPositions

from . import published
from .loss import QueryPrediction
from .query_head import QueryHead, find_pretrained_cfg


class TokensError(UserError, ValueError):
    """The features do not have the shapes that a head on tokens expects."""


class Lateral(nn.Module):
    """Prepares the tokens of one level: norm, residual MLP and channel-wise scale.

    Args:
        channels: Channels of the tokens.
        norm_cfg: Config of the norm.
    """

    def __init__(self, channels: int, norm_cfg: Dict[str, Any]) -> None:
        super().__init__()
        self.norm = build_norm_layer(norm_cfg, channels)[1]
        self.mlp = nn.Sequential(
            nn.Linear(channels, channels // 2), nn.GELU(), nn.Linear(channels // 2, channels)
        )
        self.scale = nn.Parameter(torch.ones(channels))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Transform tokens, (N, C, T), to (N, T, C)."""
        tokens = self.norm(tokens).transpose(1, 2)
        return (tokens + self.mlp(tokens)) * self.scale


@MODELS.register_module()
class PMTHead(QueryHead):
    """Plain mask transformer: a few blocks over queries and the summed tokens of several levels.

    It needs the features of ``DINOv3ViT(frozen=True, prefix_tokens=True)``, computed in place, read
    from a cache or received from encoder ranks: first the maps of all levels, then the maps of
    their class and register tokens. Token positions are encoded as in the backbone. The authors'
    checkpoints contain the decoder only: ``init_cfg=dict(type='Pretrained', checkpoint=...)`` loads
    it, and ``class_head=False`` in it skips the class head.

    Source: PMT, https://arxiv.org/abs/2603.25398; tue-mps/pmt@54d73c9.

    Args:
        in_channels: Channels of each level, all the same.
        num_heads: Number of attention heads of the blocks, equal to the encoder's: 6 for ViT-S, 12
            for B, 16 for L.
        num_blocks: Number of blocks.
        num_queries: Number of queries.
        num_prefix: Number of class and register tokens of a level; 0 for backbones that return
            maps only, such as OlmoEarth.
        norm_cfg: Config of the norm for each level's channels.
        **kwargs: ``num_classes``, ``loss_decode``, ``ignore_index``, ``align_corners``,
            ``init_cfg``.

    Raises:
        ValueError: If the levels have different numbers of channels, or the number is not a
            multiple of 4 x num_heads.
    """

    def __init__(
        self,
        in_channels: Sequence[int],
        num_heads: int,
        num_blocks: int = 6,
        num_queries: int = 100,
        num_prefix: int = 5,
        norm_cfg: Dict[str, Any] = dict(type='SyncBN'),  # noqa: B006
        **kwargs: Any,
    ) -> None:
        if len(set(in_channels)) != 1 or in_channels[0] % (4 * num_heads):
            raise ValueError(
                f'in_channels={list(in_channels)} with num_heads={num_heads}: '
                'expected the same number for each level, a multiple of 4 x num_heads'
            )
        dims = in_channels[0]
        super().__init__(
            dims, num_blocks=num_blocks, num_queries=num_queries, num_prefix=num_prefix, **kwargs
        )
        self.num_levels = len(in_channels)
        self.laterals = nn.ModuleList(Lateral(dims, norm_cfg) for _ in in_channels)
        self.rope = RotaryPositions(dims // num_heads, num_prefix)
        arch = Arch(dims, num_blocks, num_heads, feedforward_channels=dims)
        blocks = [Block(arch) for _ in range(num_blocks)]
        for block in blocks:
            nn.init.ones_(block.gamma_1)
            nn.init.ones_(block.gamma_2)
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(dims, eps=NORM_EPS)

    def init_weights(self) -> None:
        """Load the published decoder that ``init_cfg`` names; otherwise do what MMEngine does."""
        cfg = find_pretrained_cfg(self)
        if cfg is None:
            super().init_weights()
            return
        weights = published.split_checkpoint(read_checkpoint(cfg['checkpoint']))
        if weights.kind != 'pmt':
            raise WeightsError(
                f'{cfg["checkpoint"]} has the format {weights.kind!r}, expected a '
                'checkpoint of PMT (names network.decoder.*)'
            )
        self.load_state_dict(
            published.fit_head(weights, self.state_dict(), cfg.get('class_head', True))
        )
        print_log(
            f'PMTHead: weights of {cfg["checkpoint"]}, {len(weights.head)} tensors',
            logger='current',
        )
        self.is_init = True

    def forward(self, inputs: Sequence[torch.Tensor]) -> List[QueryPrediction]:
        """Return the queries' predictions, as from :meth:`decode`.

        Args:
            inputs: Maps of the levels, float (N, C, rows, columns), then of their prefix tokens,
                (N, C, P, 1).

        Raises:
            TokensError: If the features have other shapes.
        """
        maps, prefixes = self._split_levels(inputs)
        tokens_of_levels = [patches.flatten(2) for patches in maps]
        if self.num_prefix:
            tokens_of_levels = [
                torch.cat((prefix.flatten(2), patches), dim=2)
                for prefix, patches in zip(prefixes, tokens_of_levels)
            ]
        levels = [lateral(level) for lateral, level in zip(self.laterals, tokens_of_levels)]
        tokens = torch.stack(levels).sum(0)
        rows, columns = maps[0].shape[2:]
        sine, cosine = self.rope(rows, columns)
        blocks = [partial(_apply_block, block) for block in self.blocks]
        return self.decode(tokens, (rows, columns), sine, cosine, blocks, self.norm)

    def _split_levels(
        self, inputs: Sequence[torch.Tensor]
    ) -> Tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """Return the maps and the prefix tokens of all levels, after a check of their shapes."""
        maps, prefixes = inputs[: self.num_levels], inputs[self.num_levels :]
        count, shape = len(inputs[0]), tuple(inputs[0].shape[2:])
        expected = [(count, self.in_channels, *shape)] * self.num_levels
        if self.num_prefix:
            expected += [(count, self.in_channels, self.num_prefix, 1)] * self.num_levels
        shapes = [tuple(features.shape) for features in inputs]
        if shapes != expected:
            raise TokensError(
                f'PMTHead got features of the shapes {shapes}, expected {self.num_levels} maps '
                f'(N, {self.in_channels}, rows, columns) and then as many of the class and '
                f'register tokens, (N, {self.in_channels}, {self.num_prefix}, 1). Use '
                f'DINOv3ViT(prefix_tokens=True) with {self.num_levels} out_indices, without a '
                'neck; cached features have the layout of the backbone that the cache was made '
                'with'
            )
        return maps, prefixes


def _apply_block(
    block: nn.Module,
    tokens: torch.Tensor,
    sine: torch.Tensor,
    cosine: torch.Tensor,
    attn_mask: torch.Tensor,
) -> torch.Tensor:
    return block(tokens, sine, cosine, None, attn_mask)
