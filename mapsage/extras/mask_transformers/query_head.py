"""Base class of the decode heads of EoMT and PMT.

It puts the queries in front of the tokens, runs the blocks, and turns queries into masks and class
scores. Its predictions are scores, not logits: code that blends or averages them checks
``gives_scores`` and must not apply a softmax. A mask is the product of a query's mask embedding and
the pixel features at stride 4. The modules keep the names of the authors' code, so checkpoints can
be compared key by key.

Sources: tue-mps/eomt@7bd19dd (``models/eomt.py``, ``models/scale_block.py``).

Shapes: N images, T tokens (P prefix tokens, that is class and register tokens, then patches in row
order), Q queries, C classes, h x w cells of a mask (stride 4), H x W pixels.
"""

from __future__ import annotations

import math
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch
from mmengine.model import BaseModule
from mmseg.models.decode_heads.decode_head import BaseDecodeHead
from mmseg.models.utils import resize
from torch import nn
from torch.nn import functional

from mapsage.models.frozen_weights import initializer_name

from .loss import MaskClassLoss, QueryPrediction

# A transformer block, called with tokens, sine and cosine of their positions, and attention mask.
MaskedBlock = Callable[..., torch.Tensor]
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
        self.conv2 = nn.Conv2d(
            channels, channels, kernel_size=3, padding=1, groups=channels, bias=False
        )
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
        nn.Linear(channels, channels),
        nn.GELU(),
        nn.Linear(channels, channels),
        nn.GELU(),
        nn.Linear(channels, channels),
    )


class QueryHead(BaseDecodeHead):
    """Decode head whose queries each predict a mask and a class.

    :meth:`predict` returns scores, not logits: the sum over the queries of p(class) x p(mask),
    which is at least 0 and not normalized over the classes. Code that averages predictions checks
    ``gives_scores`` and averages scores without a softmax.

    In training, the queries make a prediction before every block that sees them. It gets a loss,
    and each query attends only to the patches inside its predicted mask. MaskAnnealingHook fades
    these attention masks out, so a trained model needs one pass and one prediction. Until then,
    evaluation masks the blocks whose probability is above 0.5.

    Args:
        embed_dims: Channels of the tokens.
        num_classes: Number of classes.
        num_queries: Number of queries, at least the number of classes.
        num_blocks: Number of blocks that see the queries.
        num_prefix: Number of class and register tokens.
        loss_decode: Config of the loss, a ``MaskClassLoss``.
        ignore_index: Label of ignored pixels.
        **kwargs: ``align_corners``, ``in_index``.

    Attributes:
        gives_scores: Whether :meth:`predict` returns scores instead of logits.
        attn_mask_probs: Probability that each block masks a query's attention, float
            (num_blocks,).

    Raises:
        ValueError: If the numbers of queries and classes do not fit, or ``loss_decode`` has another
            type.
    """

    gives_scores = True
    attn_mask_probs: torch.Tensor

    def __init__(
        self,
        embed_dims: int,
        *,
        num_classes: int,
        num_queries: int,
        num_blocks: int,
        num_prefix: int,
        loss_decode: Optional[Dict[str, Any]] = None,
        ignore_index: int = 255,
        init_cfg: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            embed_dims,
            embed_dims,
            num_classes=num_classes,
            out_channels=num_classes,
            dropout_ratio=0.0,
            ignore_index=ignore_index,
            init_cfg=None,
            loss_decode=loss_decode or dict(type='MaskClassLoss'),
            **kwargs,
        )
        if not isinstance(self.loss_decode, MaskClassLoss):
            raise ValueError(
                f'loss_decode={loss_decode}, expected a MaskClassLoss: the outputs '
                'are masks and classes of queries'
            )
        self.loss_decode.bind(num_classes, num_queries, ignore_index)
        self.init_cfg = init_cfg
        del self.conv_seg
        self.num_queries, self.num_prefix = num_queries, num_prefix
        self.queries = nn.Embedding(num_queries, embed_dims)
        self.class_head = nn.Linear(embed_dims, num_classes + 1)
        self.mask_head = build_mask_mlp(embed_dims)
        self.upscale = build_upscaler(embed_dims)
        self.register_buffer('attn_mask_probs', torch.ones(num_blocks))
        # Whether each block masks attention in evaluation; None until attn_mask_probs is read.
        self._masked_blocks: Optional[List[bool]] = None

    def decode(
        self,
        tokens: torch.Tensor,
        grid: Tuple[int, int],
        sine: torch.Tensor,
        cosine: torch.Tensor,
        blocks: Sequence[MaskedBlock],
        norm: Callable[[torch.Tensor], torch.Tensor],
    ) -> List[QueryPrediction]:
        """Run blocks over queries and tokens, and return the queries' predictions.

        Args:
            tokens: Class, register and patch tokens, float (N, T, embed_dims).
            grid: Rows and columns of patches.
            sine: Sine of the tokens' positions, (T, head_dims).
            cosine: Cosine of the same shape.
            blocks: Blocks that see the queries.
            norm: Norm applied before every prediction.

        Returns:
            One prediction before each block that masks attention, and one after the last block.
        """
        # With model parallelism, the blocks of an EoMT may be on other devices than its head.
        queries = self.queries.weight.to(tokens).expand(tokens.shape[0], -1, -1)
        tokens = torch.cat((queries, tokens), dim=1)
        # Queries have no position; sine 0 and cosine 1 leave them unrotated.
        sine = functional.pad(sine, (0, 0, self.num_queries, 0))
        cosine = functional.pad(cosine, (0, 0, self.num_queries, 0), value=1.0)
        predictions: List[QueryPrediction] = []
        for index, block in enumerate(blocks):
            attn_mask = None
            if self.training or self._read_masked_blocks()[index]:
                predictions.append(self.predict_queries(norm(tokens), grid))
                attn_mask = self._attention_mask(predictions[-1].masks, grid, index)
            tokens = block(tokens, sine, cosine, attn_mask)
        predictions.append(self.predict_queries(norm(tokens), grid))
        return predictions

    def predict_queries(self, tokens: torch.Tensor, grid: Tuple[int, int]) -> QueryPrediction:
        """Return the prediction from normed tokens, (N, Q + T, embed_dims)."""
        tokens = tokens.to(self.queries.weight.device)
        queries = tokens[:, : self.num_queries]
        patches = tokens[:, self.num_queries + self.num_prefix :].transpose(1, 2)
        pixels = self.upscale(patches.reshape(tokens.shape[0], -1, *grid))
        masks = self.mask_head(queries) @ pixels.flatten(2)
        masks = masks.view(tokens.shape[0], -1, *pixels.shape[2:])
        return QueryPrediction(masks, self.class_head(queries))

    def loss_by_feat(
        self, seg_logits: Any, batch_data_samples: Sequence[Any]
    ) -> Dict[str, torch.Tensor]:
        """Return the losses of all predictions, including the ones before the last."""
        labels = self._stack_batch_gt(batch_data_samples).squeeze(1)
        # The ignored label may be a valid class index, such as 0.
        labels = labels.masked_fill(labels == self.ignore_index, -1)
        names = [str(sample.metainfo.get('img_path', '')) for sample in batch_data_samples]
        return self.loss_decode(seg_logits, labels, names)

    def predict_by_feat(
        self, seg_logits: Any, batch_img_metas: Sequence[Dict[str, Any]]
    ) -> torch.Tensor:
        """Return the class scores of the last prediction, float32 (N, C, H, W).

        Masks are resized before the sigmoid, as in the published code.
        """
        meta = batch_img_metas[0]
        size = meta['img_shape']
        # MMSegmentation passes a torch.Size for windows of slide inference, which have no padding.
        if not isinstance(size, torch.Size):
            size = meta.get('pad_shape', size)[:2]
        masks = resize(
            seg_logits[-1].masks.float(),
            size=tuple(size),
            mode='bilinear',
            align_corners=self.align_corners,
        )
        return class_scores(masks, seg_logits[-1].classes.float())

    def train(self, mode: bool = True) -> QueryHead:
        """Set the mode. Evaluation reads the current ``attn_mask_probs``."""
        self._masked_blocks = None
        if not mode:
            # Read here rather than in decode(), where it would break a compiled graph.
            self._read_masked_blocks()
        return super().train(mode)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._masked_blocks = None
        super()._load_from_state_dict(*args, **kwargs)

    def _read_masked_blocks(self) -> List[bool]:
        # tolist() waits for the device, so the result is cached.
        if self._masked_blocks is None:
            self._masked_blocks = [value > 0.5 for value in self.attn_mask_probs.tolist()]
        return self._masked_blocks

    @torch.no_grad()
    def _attention_mask(
        self, masks: torch.Tensor, grid: Tuple[int, int], index: int
    ) -> torch.Tensor:
        """Return where each query may attend, bool (N, Q, Q + T).

        Queries and prefix tokens are always visible, so no row of the mask is empty.

        Args:
            masks: Mask logits of the queries, (N, Q, h, w).
            grid: Rows and columns of patches.
            index: Index of the block.
        """
        resized = functional.interpolate(
            masks.float(), size=grid, mode='bilinear', align_corners=False
        )
        patches = resized.flatten(2) > 0
        # In training, a query's mask is dropped with the probability 1 - attn_mask_probs.
        if self.training:
            drawn = torch.rand(patches.shape[:2], device=masks.device)
            patches = patches | (drawn > self.attn_mask_probs[index])[..., None]
        visible = patches.new_ones(*patches.shape[:2], self.num_queries + self.num_prefix)
        return torch.cat((visible, patches), dim=2)


def find_pretrained_cfg(module: BaseModule) -> Optional[Dict[str, Any]]:
    """Return the ``init_cfg`` that names a checkpoint; None without one, or if already loaded."""
    cfgs = module.init_cfg if isinstance(module.init_cfg, (list, tuple)) else [module.init_cfg]
    pretrained = [
        cfg for cfg in cfgs if cfg and initializer_name(cfg) in ('Pretrained', 'PretrainedInit')
    ]
    return pretrained[-1] if pretrained and not module.is_init else None


def class_scores(mask_logits: torch.Tensor, class_logits: torch.Tensor) -> torch.Tensor:
    """Return the class scores of every pixel, float (N, C, H, W).

    Args:
        mask_logits: Float (N, Q, H, W).
        class_logits: Float (N, Q, C + 1), 'no object' last.
    """
    classes = class_logits.softmax(-1)[..., :-1].transpose(1, 2)
    scores = classes @ mask_logits.sigmoid().flatten(2)
    return scores.view(scores.shape[0], -1, *mask_logits.shape[2:])
