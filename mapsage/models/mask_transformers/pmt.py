"""PMT: a light transformer decoder with mask queries on the tokens of a frozen ViT."""
from __future__ import annotations

from functools import partial
from typing import Any, Dict, List, Sequence, Tuple

import torch
from mmcv.cnn import build_norm_layer
from mmengine.logging import print_log
from mmengine.registry import MODELS
from torch import nn

from mapsage.errors import UserError
from mapsage.models.backbones.dinov3_blocks import NORM_EPS, Block
from mapsage.models.backbones.dinov3_weights import Arch, WeightsError, read_checkpoint
from mapsage.models.backbones.rope import RotaryPositions

from . import published
from .loss import QueryPrediction
from .query_head import QueryHead, pretrained_of


class TokensError(UserError, ValueError):
    """The features are not those that a head on tokens wants."""


class Lateral(nn.Module):
    """Prepares the tokens of one level: norm over channels, residual MLP, scale of channels.

    Args:
        channels: Channels of the tokens.
        norm_cfg: Config of the norm.
    """

    def __init__(self, channels: int, norm_cfg: Dict[str, Any]) -> None:
        super().__init__()
        self.norm = build_norm_layer(norm_cfg, channels)[1]
        self.mlp = nn.Sequential(nn.Linear(channels, channels // 2), nn.GELU(),
                                 nn.Linear(channels // 2, channels))
        self.scale = nn.Parameter(torch.ones(channels))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return tokens, (N, tokens, channels), for (N, channels, tokens)."""
        tokens = self.norm(tokens).transpose(1, 2)
        return (tokens + self.mlp(tokens)) * self.scale


@MODELS.register_module()
class PMTHead(QueryHead):
    """Plain mask transformer: queries and the summed tokens of several levels, in a few blocks.

    For ``DINOv3ViT(frozen=True, prefix_tokens=True)``, whose features may be computed in place,
    read from a cache or come from encoder ranks. The maps come first, then the maps of the class
    and register tokens of the same levels. Positions are those of the encoder. The authors'
    checkpoints hold the decoder alone: ``init_cfg=dict(type='Pretrained', checkpoint=...)`` loads
    it, with ``class_head=False`` but for the class head.

    Source: PMT, https://arxiv.org/abs/2603.25398; tue-mps/pmt@54d73c9.

    Args:
        in_channels: Channels of each level, all the same.
        num_heads: Number of attention heads of the blocks, that of the encoder: 6 for ViT-S, 12 for
            B, 16 for L.
        num_blocks: Number of blocks.
        num_queries: Number of queries.
        num_prefix: Number of class and register tokens of a level.
        norm_cfg: Config of the norm of each level's channels.
        **kwargs: ``num_classes``, ``loss_decode``, ``ignore_index``, ``align_corners``,
            ``init_cfg``.

    Raises:
        ValueError: If the levels have unequal channels, or 4 x num_heads does not divide them.
    """

    def __init__(self, in_channels: Sequence[int], num_heads: int, num_blocks: int = 6,
                 num_queries: int = 100, num_prefix: int = 5,
                 norm_cfg: Dict[str, Any] = dict(type='SyncBN'),  # noqa: B006
                 **kwargs: Any) -> None:
        if len(set(in_channels)) != 1 or in_channels[0] % (4 * num_heads):
            raise ValueError(f'in_channels={list(in_channels)} with num_heads={num_heads}: '
                             'expected the same number for each level, a multiple of 4 x num_heads')
        dims = in_channels[0]
        super().__init__(dims, num_blocks=num_blocks, num_queries=num_queries,
                         num_prefix=num_prefix, **kwargs)
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
        """Load the published decoder that ``init_cfg`` names; without any, as MMEngine does."""
        cfg = pretrained_of(self)
        if cfg is None:
            super().init_weights()
            return
        parts = published.split(read_checkpoint(cfg['checkpoint']))
        if parts.kind != 'pmt':
            raise WeightsError(f"{cfg['checkpoint']} is of the format {parts.kind!r}, expected a "
                               'checkpoint of PMT (names network.decoder.*)')
        self.load_state_dict(published.fitted_head(parts, self.state_dict(),
                                                   cfg.get('class_head', True)))
        print_log(f"PMTHead: weights of {cfg['checkpoint']}, {len(parts.head)} tensors",
                  logger='current')
        self.is_init = True

    def forward(self, inputs: Sequence[torch.Tensor]) -> List[QueryPrediction]:
        """Return the predictions, one before each block that masks and one at the end.

        Args:
            inputs: Maps of the levels, float (N, channels, rows, columns), then of their prefixes,
                (N, channels, prefix, 1).

        Raises:
            TokensError: If the features are others.
        """
        maps, prefixes = self._levels(inputs)
        levels = [lateral(torch.cat((prefix.flatten(2), patches.flatten(2)), dim=2))
                  for lateral, prefix, patches in zip(self.laterals, prefixes, maps)]
        tokens = torch.stack(levels).sum(0)
        rows, columns = maps[0].shape[2:]
        sine, cosine = self.rope(rows, columns)
        blocks = [partial(_apply, block) for block in self.blocks]
        return self.decode(tokens, (rows, columns), sine, cosine, blocks, self.norm)

    def _levels(self, inputs: Sequence[torch.Tensor]
                ) -> Tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        maps, prefixes = inputs[:self.num_levels], inputs[self.num_levels:]
        count, shape = len(inputs[0]), tuple(inputs[0].shape[2:])
        wanted = [(count, self.in_channels, *shape)] * self.num_levels
        wanted += [(count, self.in_channels, self.num_prefix, 1)] * self.num_levels
        found = [tuple(each.shape) for each in inputs]
        if found != wanted:
            raise TokensError(
                f'PMTHead got features of the shapes {found}, expected {self.num_levels} maps '
                f'(N, {self.in_channels}, rows, columns) and then as many of the class and '
                f'register tokens, (N, {self.in_channels}, {self.num_prefix}, 1). Use '
                f'DINOv3ViT(prefix_tokens=True) with {self.num_levels} out_indices, without a '
                'neck; features in a cache have the layout of the backbone that made it')
        return maps, prefixes


def _apply(block: nn.Module, tokens: torch.Tensor, sine: torch.Tensor, cosine: torch.Tensor,
           allowed: torch.Tensor) -> torch.Tensor:
    return block(tokens, sine, cosine, None, allowed)
