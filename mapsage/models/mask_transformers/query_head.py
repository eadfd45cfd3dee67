"""What the decode heads of EoMT and PMT share: queries that read patches, and their surface."""
from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch
from mmseg.models.decode_heads.decode_head import BaseDecodeHead
from mmseg.models.utils import resize
from torch import nn
from torch.nn import functional

from .loss import MaskClassLoss, QueryPrediction
from .parts import mask_mlp, upscaler

# A transformer block: tokens, sine and cosine of their positions, what the queries may attend to.
MaskedBlock = Callable[..., torch.Tensor]


class QueryHead(BaseDecodeHead):
    """Queries in front of tokens, which predict a mask and a class each.

    The output of :meth:`predict` are scores and not logits: the sum over the queries of
    p(class) x p(mask), from 0 up, not normalized over the classes. What reads them asks
    ``gives_scores``: scores are averaged as they are, without a softmax.

    In training, before each block that sees the queries, a prediction is made, which gets a loss,
    and each query attends only to the patches in its mask. MaskAnnealingHook lets these masks fade
    out, so that after the training one pass and one prediction suffice. Until then evaluation keeps
    the masks of the blocks whose probability is above 0.5.

    Args:
        embed_dims: Channels of the tokens.
        num_classes: Number of classes.
        num_queries: Number of queries, at least that of the classes.
        num_blocks: Number of blocks that see the queries.
        num_prefix: Number of class and register tokens.
        loss_decode: Config of the loss, a ``MaskClassLoss``.
        ignore_index: Label of pixels that do not count.
        **kwargs: ``align_corners``, ``in_index``.

    Attributes:
        gives_scores: Whether the output of :meth:`predict` are scores, and not logits.
        attn_mask_probs: Probability that the mask of each block counts, float (num_blocks,).

    Raises:
        ValueError: If the numbers of queries and classes do not fit, or ``loss_decode`` is of
            another type.
    """

    gives_scores = True
    attn_mask_probs: torch.Tensor

    def __init__(self, embed_dims: int, *, num_classes: int, num_queries: int, num_blocks: int,
                 num_prefix: int, loss_decode: Optional[Dict[str, Any]] = None,
                 ignore_index: int = 255, init_cfg: Any = None, **kwargs: Any) -> None:
        super().__init__(
            embed_dims, embed_dims, num_classes=num_classes, out_channels=num_classes,
            dropout_ratio=0., ignore_index=ignore_index, init_cfg=None,
            loss_decode=loss_decode or dict(type='MaskClassLoss'), **kwargs)
        if not isinstance(self.loss_decode, MaskClassLoss):
            raise ValueError(f'loss_decode={loss_decode}, expected a MaskClassLoss: the outputs '
                             'are masks and classes of queries')
        self.loss_decode.bind(num_classes, num_queries, ignore_index)
        self.init_cfg = init_cfg
        del self.conv_seg
        self.num_queries, self.num_prefix = num_queries, num_prefix
        self.queries = nn.Embedding(num_queries, embed_dims)
        self.class_head = nn.Linear(embed_dims, num_classes + 1)
        self.mask_head = mask_mlp(embed_dims)
        self.upscale = upscaler(embed_dims)
        self.register_buffer('attn_mask_probs', torch.ones(num_blocks))
        self._masked: Optional[List[bool]] = None  # blocks that mask in evaluation, once known

    def decode(self, tokens: torch.Tensor, grid: Tuple[int, int], sine: torch.Tensor,
               cosine: torch.Tensor, blocks: Sequence[MaskedBlock],
               norm: Callable[[torch.Tensor], torch.Tensor]) -> List[QueryPrediction]:
        """Run blocks over queries and tokens, and return what the queries predict.

        Args:
            tokens: Class, register and patch tokens, float (N, tokens, embed_dims).
            grid: Rows and columns of patches.
            sine: Sine of the positions of the tokens, (tokens, head_dims).
            cosine: Cosine of them.
            blocks: Blocks, called with tokens, sine, cosine and what the queries may attend to.
            norm: Norm in front of every prediction.

        Returns:
            One prediction before each block that masks, and one at the end.
        """
        # Where a model is cut, the blocks of an EoMT may be on other devices than its head.
        queries = self.queries.weight.to(tokens).expand(tokens.shape[0], -1, -1)
        tokens = torch.cat((queries, tokens), dim=1)
        # Queries have no position: their tokens are not rotated.
        sine = functional.pad(sine, (0, 0, self.num_queries, 0))
        cosine = functional.pad(cosine, (0, 0, self.num_queries, 0), value=1.)
        predictions: List[QueryPrediction] = []
        for index, block in enumerate(blocks):
            allowed = None
            if self.training or self._masks_in_evaluation()[index]:
                predictions.append(self.predict_queries(norm(tokens), grid))
                allowed = self._allowed(predictions[-1].masks, grid, index)
            tokens = block(tokens, sine, cosine, allowed)
        predictions.append(self.predict_queries(norm(tokens), grid))
        return predictions

    def predict_queries(self, tokens: torch.Tensor, grid: Tuple[int, int]) -> QueryPrediction:
        """Return the prediction of normed tokens, (N, queries + prefix + patches, embed_dims)."""
        tokens = tokens.to(self.queries.weight.device)
        queries = tokens[:, :self.num_queries]
        patches = tokens[:, self.num_queries + self.num_prefix:].transpose(1, 2)
        pixels = self.upscale(patches.reshape(tokens.shape[0], -1, *grid))
        masks = self.mask_head(queries) @ pixels.flatten(2)
        masks = masks.view(tokens.shape[0], -1, *pixels.shape[2:])
        return QueryPrediction(masks, self.class_head(queries))

    def loss_by_feat(self, seg_logits: Any, batch_data_samples: Sequence[Any]
                     ) -> Dict[str, torch.Tensor]:
        """Return the losses of predictions, with those before the last."""
        labels = self._stack_batch_gt(batch_data_samples).squeeze(1)
        labels = labels.masked_fill(labels == self.ignore_index, -1)
        names = [str(sample.metainfo.get('img_path', '')) for sample in batch_data_samples]
        return self.loss_decode(seg_logits, labels, names)

    def predict_by_feat(self, seg_logits: Any, batch_img_metas: Sequence[Dict[str, Any]]
                        ) -> torch.Tensor:
        """Return scores, float32 (N, num_classes, H, W), of the last prediction.

        Masks are resized before the sigmoid, as in the published code.
        """
        meta = batch_img_metas[0]
        size = meta['img_shape']
        if not isinstance(size, torch.Size):  # MMSegmentation's sign of a sliding window
            size = meta.get('pad_shape', size)[:2]
        masks = resize(seg_logits[-1].masks.float(), size=tuple(size), mode='bilinear',
                       align_corners=self.align_corners)
        return class_scores(masks, seg_logits[-1].classes.float())

    def train(self, mode: bool = True) -> QueryHead:
        """Switch to training or evaluation, which looks at ``attn_mask_probs`` anew."""
        self._masked = None
        if not mode:
            self._masks_in_evaluation()  # here, where it interrupts no compiled graph
        return super().train(mode)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._masked = None
        super()._load_from_state_dict(*args, **kwargs)

    def _masks_in_evaluation(self) -> List[bool]:
        if self._masked is None:  # waits for the device, so it is done once
            self._masked = [value > .5 for value in self.attn_mask_probs.tolist()]
        return self._masked

    @torch.no_grad()
    def _allowed(self, masks: torch.Tensor, grid: Tuple[int, int], index: int) -> torch.Tensor:
        """Return what each query may attend to, bool (N, Q, Q + prefix + patches).

        All queries and the prefix are always allowed, so that no row is empty.
        """
        resized = functional.interpolate(masks.float(), size=grid, mode='bilinear',
                                         align_corners=False)
        patches = resized.flatten(2) > 0
        if self.training:
            drawn = torch.rand(patches.shape[:2], device=masks.device)
            patches = patches | (drawn > self.attn_mask_probs[index])[..., None]
        others = patches.new_ones(*patches.shape[:2], self.num_queries + self.num_prefix)
        return torch.cat((others, patches), dim=2)


def pretrained_of(module: Any) -> Optional[Dict[str, Any]]:
    """Return the config of the checkpoint to initialize a module from, or None."""
    cfgs = module.init_cfg if isinstance(module.init_cfg, (list, tuple)) else [module.init_cfg]
    found = [cfg for cfg in cfgs if cfg and getattr(cfg['type'], '__name__', cfg['type'])
             in ('Pretrained', 'PretrainedInit')]
    return found[-1] if found and not module.is_init else None


def class_scores(mask_logits: torch.Tensor, class_logits: torch.Tensor) -> torch.Tensor:
    """Return the scores of classes, float (N, C, H, W).

    Args:
        mask_logits: Float (N, Q, H, W).
        class_logits: Float (N, Q, C + 1), the last of them 'no object'.
    """
    classes = class_logits.softmax(-1)[..., :-1].transpose(1, 2)
    scores = classes @ mask_logits.sigmoid().flatten(2)
    return scores.view(scores.shape[0], -1, *mask_logits.shape[2:])
