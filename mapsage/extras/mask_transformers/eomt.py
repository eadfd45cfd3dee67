"""EoMT: a segmentor whose last transformer blocks process queries and patches together.

There is no decoder. The segmentor runs the backbone's last blocks itself, with the queries among
the tokens, and the head only holds the queries, the prediction layers and the loss.
"""

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
from .query_head import QueryHead, find_pretrained_cfg


@MODELS.register_module()
class EoMTHead(QueryHead):
    """The queries, prediction layers and loss of :class:`EoMT`; its blocks are the backbone's.

    Args:
        in_channels: Channels of the backbone's tokens.
        num_blocks: Number of the backbone's last blocks that see the queries: 3 for ViT-S and B, 4
            for L, 5 for larger models.
        num_queries: Number of queries.
        num_prefix: Number of class and register tokens of the backbone, 5 in DINOv3.
        **kwargs: ``num_classes``, ``loss_decode``, ``ignore_index``, ``align_corners``.
    """

    def __init__(
        self,
        in_channels: int,
        num_blocks: int = 4,
        num_queries: int = 100,
        num_prefix: int = 5,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            in_channels,
            num_blocks=num_blocks,
            num_queries=num_queries,
            num_prefix=num_prefix,
            **kwargs,
        )

    def forward(self, inputs: List[QueryPrediction]) -> List[QueryPrediction]:
        """Return ``inputs``, the predictions that the segmentor computed with :meth:`decode`."""
        return inputs


@MODELS.register_module()
class EoMT(EncoderDecoder):
    """Encoder-only mask transformer on a DINOv3 ViT.

    The queries join the tokens before the backbone's last ``num_blocks`` blocks, and the backbone's
    final norm is applied before every prediction. There is neither neck nor decoder, so inference
    with a trained model is one pass of the ViT. The last blocks of the backbone must be trained;
    for a frozen backbone, use :class:`PMTHead`.

    Source: Kerssies et al. 2025, https://arxiv.org/abs/2503.19108; tue-mps/eomt@7bd19dd.

    Args:
        backbone: Config of a DINOv3ViT with its final norm, whose last block is in ``out_indices``.
        decode_head: Config of an :class:`EoMTHead`.
        **kwargs: ``data_preprocessor``, ``train_cfg``, ``test_cfg``, ``init_cfg``.

    Published weights are loaded by ``init_cfg=dict(type='Pretrained', checkpoint=...)``, which
    accepts the authors' DINOv3 files and files with the names of transformers. The authors' files
    contain only the difference from DINOv3's encoder, because access to that is gated; name its
    weights in ``backbone.init_cfg``. ``delta`` in ``init_cfg`` says whether the encoder's tensors
    are such differences (by default True for the authors' files). ``class_head=False`` skips the
    class head, for a dataset with other classes.

    Raises:
        ValueError: If backbone and head do not fit each other, or there is a neck or an auxiliary
            head.
    """

    def __init__(self, backbone: Any, decode_head: Any, **kwargs: Any) -> None:
        extra = [name for name in ('neck', 'auxiliary_head') if kwargs.get(name) is not None]
        if extra:
            raise ValueError(
                f'EoMT with {extra}: the queries read the tokens of the backbone, and '
                'there are no other features. Remove it from the config'
            )
        super().__init__(backbone, decode_head, **kwargs)
        _check_fit(self.backbone, self.decode_head)

    def init_weights(self) -> None:
        """Load the published weights that ``init_cfg`` names; otherwise do what MMEngine does."""
        cfg = find_pretrained_cfg(self)
        if cfg is None:
            super().init_weights()
            return
        path = cfg['checkpoint']
        weights = published.split_checkpoint(read_checkpoint(path))
        if not weights.encoder:
            raise WeightsError(
                f'{path} has no encoder: it is a {weights.kind.upper()} checkpoint, '
                'which belongs to a PMTHead (decode_head.init_cfg)'
            )
        delta = cfg.get('delta', weights.kind == 'eomt')
        if delta and not self.backbone.init_cfg:
            raise WeightsError(
                f'{path} contains differences from an encoder, but the config names none: set '
                "backbone.init_cfg=dict(type='Pretrained', checkpoint=<DINOv3 weights that it was "
                'trained from>), or delta=False in init_cfg if its encoder is complete'
            )
        self.backbone.init_weights()
        base = self.backbone.state_dict()
        fitted, filled = fit(weights.encoder, base, self.backbone.arch)
        if delta:
            for key in filled:
                del fitted[key]
            fitted = published.add_delta(base, fitted)
        self.backbone.load_state_dict(fitted)
        self.decode_head.load_state_dict(
            published.fit_head(weights, self.decode_head.state_dict(), cfg.get('class_head', True))
        )
        print_log(
            f'EoMT: {weights.kind} weights of {path}, {len(weights.encoder)} tensors of the '
            f'encoder{" added to its own" if delta else ""}, {len(weights.head)} of the head',
            logger='current',
        )
        self.is_init = True

    def compiled_calls(self) -> Dict[str, List[Tuple[nn.Module, str]]]:
        """Return the methods that ``compile=dict(backbone=True, decode_head=True)`` compiles.

        The segmentor never calls the backbone's ``forward``, only its blocks. Queries and last
        blocks run in the head's ``decode``.
        """
        return dict(
            backbone=[(block, 'forward') for block in self.backbone.blocks],
            decode_head=[(self.decode_head, 'decode')],
        )

    def extract_feat(self, inputs: torch.Tensor) -> List[QueryPrediction]:
        """Return the queries' predictions for images, (N, bands, H, W), as from ``decode``."""
        backbone, head = self.backbone, self.decode_head
        tokens, grid = backbone.embed(inputs)
        sine, cosine = backbone.rope(*grid)
        first = len(backbone.blocks) - len(head.attn_mask_probs)
        for index in range(first):
            tokens = backbone.apply_block(index, tokens, sine, cosine)
        blocks: Sequence[Any] = [
            partial(backbone.apply_block, index) for index in range(first, len(backbone.blocks))
        ]
        return head.decode(tokens, grid, sine, cosine, blocks, backbone.norm)


def _check_fit(backbone: nn.Module, head: nn.Module) -> None:
    if not isinstance(backbone, DINOv3ViT) or not isinstance(head, EoMTHead):
        raise ValueError(
            f'EoMT with backbone {type(backbone).__name__} and decode_head '
            f'{type(head).__name__}: expected DINOv3ViT, whose last blocks process '
            'the queries, and EoMTHead'
        )
    blocks, dims = len(backbone.blocks), backbone.arch.embed_dims
    if isinstance(backbone.norm, nn.Identity):
        raise ValueError('EoMT needs the norm of the backbone: set backbone.final_norm=True')
    if not 0 < len(head.attn_mask_probs) <= blocks:
        raise ValueError(
            f'decode_head.num_blocks={len(head.attn_mask_probs)}, but the backbone '
            f'has {blocks} blocks (up to the last of out_indices)'
        )
    if backbone.frozen_stages > blocks - len(head.attn_mask_probs):
        raise ValueError(
            f"EoMT trains the backbone's last {len(head.attn_mask_probs)} blocks, "
            f'but {backbone.frozen_stages} of {blocks} are frozen. Set '
            f'backbone.frozen=False and frozen_stages to at most '
            f'{blocks - len(head.attn_mask_probs)}, or use PMTHead, which is for '
            'frozen encoders'
        )
    tokens = (head.in_channels, head.num_prefix)
    if tokens != (dims, 1 + backbone.arch.num_registers):
        raise ValueError(
            f'decode_head.in_channels, num_prefix={tokens}, expected the values of '
            f"the backbone's tokens, {(dims, 1 + backbone.arch.num_registers)}"
        )
