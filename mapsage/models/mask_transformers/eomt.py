"""EoMT: a segmentor whose last transformer blocks see queries and patches together."""
from __future__ import annotations

from functools import partial
from typing import Any, Dict, List, Sequence, Tuple

import torch
from mmengine.logging import print_log
from mmengine.registry import MODELS
from mmseg.models.segmentors import EncoderDecoder
from torch import nn

from mapsage.models.backbones.dinov3 import DINOv3ViT
from mapsage.models.backbones.dinov3_weights import WeightsError, fit, read_checkpoint

from . import published
from .loss import QueryPrediction
from .query_head import QueryHead, pretrained_of


@MODELS.register_module()
class EoMTHead(QueryHead):
    """The queries, heads and loss of :class:`EoMT`, whose blocks are those of the backbone.

    Args:
        in_channels: Channels of the backbone's tokens.
        num_blocks: Number of the backbone's last blocks that see the queries: 3 for ViT-S and B, 4
            for L, 5 for larger ones.
        num_queries: Number of queries.
        num_prefix: Number of class and register tokens of the backbone, 5 in DINOv3.
        **kwargs: ``num_classes``, ``loss_decode``, ``ignore_index``, ``align_corners``.
    """

    def __init__(self, in_channels: int, num_blocks: int = 4, num_queries: int = 100,
                 num_prefix: int = 5, **kwargs: Any) -> None:
        super().__init__(in_channels, num_blocks=num_blocks, num_queries=num_queries,
                         num_prefix=num_prefix, **kwargs)

    def forward(self, inputs: List[QueryPrediction]) -> List[QueryPrediction]:
        """Return what the segmentor computed with :meth:`decode`, one prediction an output."""
        return inputs


@MODELS.register_module()
class EoMT(EncoderDecoder):
    """Encoder-only mask transformer on a DINOv3 ViT.

    The queries are put in front of the tokens before the backbone's last ``num_blocks`` blocks; the
    backbone's final norm is in front of every prediction. There is neither neck nor decoder, and
    after the training inference is one pass of the ViT. The backbone is to be trained, at least its
    last blocks; for a frozen one there is :class:`PMTHead`.

    Source: Kerssies et al. 2025, https://arxiv.org/abs/2503.19108; tue-mps/eomt@7bd19dd.

    Args:
        backbone: Config of a DINOv3ViT with its final norm, whose last block is in ``out_indices``.
        decode_head: Config of an :class:`EoMTHead`.
        **kwargs: ``data_preprocessor``, ``train_cfg``, ``test_cfg``, ``init_cfg``.

    Published weights are loaded by ``init_cfg=dict(type='Pretrained', checkpoint=...)``: the
    authors' files of DINOv3, which hold the difference from the gated encoder, whose weights
    ``backbone.init_cfg`` names, and files under the names of transformers. ``delta`` in it says
    whether the encoder's entries are such differences (by default those of the authors' names are);
    ``class_head=False`` leaves out the head of other classes.

    Raises:
        ValueError: If backbone and head do not fit each other, or there is a neck or auxiliary
            head.
    """

    def __init__(self, backbone: Any, decode_head: Any, **kwargs: Any) -> None:
        extra = [name for name in ('neck', 'auxiliary_head') if kwargs.get(name) is not None]
        if extra:
            raise ValueError(f'EoMT with {extra}: the queries read the tokens of the backbone, and '
                             'there are no other features. Take it out')
        super().__init__(backbone, decode_head, **kwargs)
        _check(self.backbone, self.decode_head)

    def init_weights(self) -> None:
        """Load the published weights that ``init_cfg`` names; without any, as MMEngine does."""
        cfg = pretrained_of(self)
        if cfg is None:
            super().init_weights()
            return
        path = cfg['checkpoint']
        parts = published.split(read_checkpoint(path))
        if not parts.encoder:
            raise WeightsError(f'{path} has no encoder: it is a {parts.kind.upper()} checkpoint, '
                               'whose weights are those of a PMTHead (decode_head.init_cfg)')
        delta = cfg.get('delta', parts.kind == 'eomt')
        if delta and not self.backbone.init_cfg:
            raise WeightsError(
                f'{path} holds differences from an encoder, and the config names none: set '
                "backbone.init_cfg=dict(type='Pretrained', checkpoint=<DINOv3 weights that it was "
                'trained from>), or delta=False in init_cfg if the encoder in it is whole')
        self.backbone.init_weights()
        own = self.backbone.state_dict()
        fitted, filled = fit(parts.encoder, own, self.backbone.arch)
        if delta:
            for key in filled:
                del fitted[key]
            fitted = published.added(own, fitted)
        self.backbone.load_state_dict(fitted)
        self.decode_head.load_state_dict(published.fitted_head(
            parts, self.decode_head.state_dict(), cfg.get('class_head', True)))
        print_log(f'EoMT: {parts.kind} weights of {path}, {len(parts.encoder)} tensors of the '
                  f'encoder{" added to its own" if delta else ""}, {len(parts.head)} of the head',
                  logger='current')
        self.is_init = True

    def compiled_calls(self) -> Dict[str, List[Tuple[nn.Module, str]]]:
        """Return what ``compile=dict(backbone=True, decode_head=True)`` compiles.

        The backbone's forward is not called, its blocks are; the head's last ones with the queries.
        """
        return dict(backbone=[(block, 'forward') for block in self.backbone.blocks],
                    decode_head=[(self.decode_head, 'decode')])

    def extract_feat(self, inputs: torch.Tensor) -> List[QueryPrediction]:
        """Return the predictions for images, (N, bands, H, W), one an output."""
        backbone, head = self.backbone, self.decode_head
        tokens, grid = backbone.embed(inputs)
        sine, cosine = backbone.rope(*grid)
        first = len(backbone.blocks) - len(head.attn_mask_probs)
        for index in range(first):
            tokens = backbone.apply_block(index, tokens, sine, cosine)
        blocks: Sequence[Any] = [partial(backbone.apply_block, index)
                                 for index in range(first, len(backbone.blocks))]
        return head.decode(tokens, grid, sine, cosine, blocks, backbone.norm)


def _check(backbone: nn.Module, head: nn.Module) -> None:
    if not isinstance(backbone, DINOv3ViT) or not isinstance(head, EoMTHead):
        raise ValueError(f'EoMT with backbone {type(backbone).__name__} and decode_head '
                         f'{type(head).__name__}: expected DINOv3ViT, whose last blocks take the '
                         'queries, and EoMTHead')
    blocks, dims = len(backbone.blocks), backbone.arch.embed_dims
    if isinstance(backbone.norm, nn.Identity):
        raise ValueError('EoMT needs the norm of the backbone: set backbone.final_norm=True')
    if not 0 < len(head.attn_mask_probs) <= blocks:
        raise ValueError(f'decode_head.num_blocks={len(head.attn_mask_probs)}, and the backbone '
                         f'has {blocks} blocks (up to the last of out_indices)')
    if backbone.frozen_stages > blocks - len(head.attn_mask_probs):
        raise ValueError(f'EoMT trains the backbone\'s last {len(head.attn_mask_probs)} blocks, '
                         f'but {backbone.frozen_stages} of {blocks} are frozen. Set '
                         f'backbone.frozen=False and frozen_stages to at most '
                         f'{blocks - len(head.attn_mask_probs)}, or use PMTHead, which is for '
                         'frozen encoders')
    found = (head.in_channels, head.num_prefix)
    if found != (dims, 1 + backbone.arch.num_registers):
        raise ValueError(f'decode_head.in_channels, num_prefix={found}, expected those of the '
                         f"backbone's tokens, {(dims, 1 + backbone.arch.num_registers)}")
