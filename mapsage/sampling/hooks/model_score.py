"""Score tiles by the loss or IoU of the model in training.

A score of the model goes stale as the weights change, and costs a forward pass. So the tile history
stores moving averages and has each tile scored again after ``recheck`` batches, at reduced
resolution.

Shapes: N tiles, B bands, C classes, H x W pixels after scaling.
"""

from __future__ import annotations

import copy
from contextlib import contextmanager
from typing import (
    Any,
    Callable,
    Dict,
    Iterator,
    List,
    Mapping,
    Optional,
    Sequence,
    Tuple,
    Union,
)

import torch
from mmengine.registry import TASK_UTILS
from torch import nn
from torch.nn import functional

from mapsage.accelerator import current_accelerator
from mapsage.evaluation import reward_variance
from mapsage.host.runner import unwrap
from mapsage.host.segmentors import batch_augments, class_logits, is_segmentor
from mapsage.sampling import Scorer

# One entry of a collated batch, such as inputs (N, C, H, W) or a list of N data samples.
Column = Union[torch.Tensor, Sequence[Any]]

METRICS = ('loss', 'one_minus_iou', 'reward_variance')
# Side lengths in pixels are multiples of this, as strides and windows of common backbones need.
_MULTIPLE = 32


@TASK_UTILS.register_module()
class ModelScore(Scorer):
    """Score tiles by the current model at reduced resolution, without gradient.

    The model is in evaluation mode meanwhile, so its state does not change. Recently scored tiles
    use a moving average of their scores, see :class:`mapsage.sampling.TileHistory`.

    Args:
        metric: Name of the score. ``'loss'`` is the mean cross-entropy over the labeled pixels, in
            nats; ``'one_minus_iou'`` is 1 - the mean IoU over the classes in the label map;
            ``'reward_variance'`` is the variance that this IoU would have over label maps drawn
            from the model, see :mod:`mapsage.evaluation.reward_variance`. A tile without a labeled
            pixel scores 0.
        scale: Factor for the side lengths, which are then rounded up to a multiple of 32 pixels.
        ignore_index: Label of pixels without a class.
        momentum: Weight of the old average, as for TileHistory.
        recheck: Number of batches after which a tile is scored again.

    Raises:
        ValueError: For an unknown metric, or a scale outside (0, 1].
    """

    uses_model = True

    def __init__(
        self,
        metric: str = 'loss',
        scale: float = 0.5,
        ignore_index: int = 255,
        momentum: float = 0.5,
        recheck: int = 200,
    ) -> None:
        if metric not in METRICS:
            raise ValueError(f'metric={metric!r}, expected one of {", ".join(METRICS)}.')
        if not 0 < scale <= 1:
            raise ValueError(f'scale={scale}, expected more than 0 and at most 1.')
        self.metric, self.scale, self.ignore_index = metric, scale, ignore_index
        self.history = dict(momentum=momentum, recheck=recheck)
        # A segmentor of MMSegmentation, whose classes carry no types.
        self._model: Any = None
        self._collate: Optional[Callable[[List[Any]], Any]] = None

    def bind(self, model: nn.Module, collate: Callable[[List[Any]], Any]) -> None:
        """Set the model to score with.

        Args:
            model: Segmentor in training, wrapped or not.
            collate: Function that makes a batch of samples.

        Raises:
            ValueError: If the model has no ``encode_decode`` as MMSegmentation's segmentors do.
        """
        segmentor = unwrap(model)
        if not is_segmentor(segmentor):
            raise ValueError(
                f'ModelScore: {type(segmentor).__name__} has no encode_decode, as '
                f"MMSegmentation's segmentors do. Register a scorer for your model "
                f'(docs/explanation/dynamic-sampling.md).'
            )
        self._model, self._collate = segmentor, collate

    @torch.no_grad()
    def __call__(self, samples: Sequence[Any]) -> torch.Tensor:
        """Return float32 scores of shape ``(len(samples),)`` in host memory."""
        model, collate = self._model, self._collate
        assert model is not None and collate is not None, 'bind() comes first'
        # The preprocessor pads in place, and copying is cheaper than scoring.
        batch = collate([copy.deepcopy(sample) for sample in samples])
        count = len(samples)
        if current_accelerator().lazy:
            # A lazy device compiles every new shape for minutes, so few batch sizes are used.
            batch = _repeat_last(batch, 1 << (count - 1).bit_length())
        with evaluating(model):
            data = model.data_preprocessor(batch, True)
            logits, labels = self._predict(data['inputs'], data['data_samples'])
        return self._rate(logits[:count], labels[:count])

    def _predict(
        self, inputs: torch.Tensor, data_samples: Sequence[Any]
    ) -> Tuple[torch.Tensor, torch.Tensor]:
        """Return logits (N, C, H, W) float32 and labels (N, H, W) int64, scaled, in host memory.

        Args:
            inputs: Preprocessed images, (N, B, height, width) before scaling.
            data_samples: Their data samples, with ``gt_sem_seg``.
        """
        model = self._model
        size = tuple(
            -(-round(side * self.scale) // _MULTIPLE) * _MULTIPLE for side in inputs.shape[-2:]
        )
        inputs = functional.interpolate(inputs, size, mode='bilinear', align_corners=False)
        metas = [dict(img_shape=size, pad_shape=size, ori_shape=size) for _ in inputs]
        output = model.encode_decode(inputs, metas).float().cpu()
        logits = class_logits(model.decode_head, output)
        labels = torch.stack([sample.gt_sem_seg.data for sample in data_samples])
        labels = functional.interpolate(labels.cpu().float(), logits.shape[-2:], mode='nearest')
        return logits, labels[:, 0].long()

    def _rate(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the score of each tile, (N,), from :meth:`_predict`'s logits and labels."""
        if self.metric == 'loss':
            known = (labels != self.ignore_index).flatten(1).sum(1)
            loss = functional.cross_entropy(
                logits, labels, ignore_index=self.ignore_index, reduction='none'
            )
            return loss.flatten(1).sum(1) / known.clamp(min=1)
        if self.metric == 'reward_variance':
            return torch.stack(
                [
                    reward_variance(tile.softmax(0), truth, self.ignore_index)
                    for tile, truth in zip(logits, labels)
                ]
            ).float()
        return torch.stack(
            [
                self._one_minus_iou(predicted, truth)
                for predicted, truth in zip(logits.argmax(1), labels)
            ]
        )

    def _one_minus_iou(self, predicted: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
        known = truth != self.ignore_index
        if not bool(known.any()):
            return torch.tensor(0.0)
        predicted, truth = predicted[known], truth[known]
        ious = [
            ((predicted == c) & (truth == c)).sum() / ((predicted == c) | (truth == c)).sum()
            for c in truth.unique()
        ]
        return 1 - torch.stack(ious).mean()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, and restore the mode of each of its modules.

    Meanwhile its preprocessor applies no augmentation of batches.
    """
    training = [module for module in model.modules() if module.training]
    preprocessor: Any = model.data_preprocessor
    augments = batch_augments(model)
    model.eval()
    if augments:
        preprocessor.batch_augments = None
    try:
        yield
    finally:
        if augments:
            preprocessor.batch_augments = augments
        for module in training:
            module.training = True


def _repeat_last(batch: Mapping[str, Column], count: int) -> Dict[str, Column]:
    """Return a collated batch of ``count`` samples, in which the last sample repeats."""

    def lengthen(column: Column) -> Column:
        if isinstance(column, torch.Tensor):
            return torch.cat([column] + [column[-1:]] * (count - len(column)))
        return list(column) + [copy.deepcopy(column[-1]) for _ in range(count - len(column))]

    return {key: lengthen(column) for key, column in batch.items()}
