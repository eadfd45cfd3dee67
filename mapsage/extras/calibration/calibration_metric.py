"""The metric `CalibrationError`: expected calibration error over the images of all ranks.

Ranks sum ``3 x C x bins`` integers at the end, so no scores
are gathered.

Expected calibration error (ECE): does a probability of 0.8 mean 80 % correct pixels?

Guo, Pleiss, Sun, Weinberger: On Calibration of Modern Neural Networks, ICML 2017,
https://arxiv.org/abs/1706.04599, equation 3. Pixels are sorted into M equal bins by the
probability of their predicted class, (0, 1/M], (1/M, 2/M], ... ECE is the mean over all pixels of
|share of correct pixels - mean probability| of their bin. Probabilities are summed as integers, so
the result does not depend on the order of images or ranks.

Shapes:
    confidence, prediction, truth  (H, W)     of one image
    counts                         (3, C, M)  pixels, correct pixels, sum of probabilities in UNIT
"""

from __future__ import annotations

import logging
from typing import Any, Dict, List, Optional, Sequence, Union

import numpy as np
import torch
from mmengine.dist import all_reduce, get_dist_info
from mmengine.evaluator import BaseMetric
from mmengine.logging import print_log
from mmengine.registry import METRICS
from prettytable import PrettyTable

from mapsage.evaluation.confusion_matrix import describe_outside
from mapsage.evaluation.confusion_matrix_metric import check_images, is_repeat

from .reliability_plot import plot_reliability

BINS = 15
# A probability is counted in this unit, the resolution of float32 (24 bits), so that sums are the
# same in any order. An int64 can sum the probabilities of 5e11 pixels.
UNIT = 2.0**-24


def count_confidence(
    confidence: torch.Tensor,
    prediction: torch.Tensor,
    truth: torch.Tensor,
    num_classes: int,
    ignore_index: int = 255,
    bins: int = BINS,
) -> torch.Tensor:
    """Count the pixels of an image by predicted class and confidence, on the host.

    The counts of images can be summed.

    Args:
        confidence: Probability of the predicted class, float ``(H, W)``.
        prediction: Labels 0..C-1, ``(H, W)``.
        truth: Labels 0..C-1 or ``ignore_index``, ``(H, W)``.
        num_classes: Number of classes, C.
        ignore_index: Label of ``truth`` that is not counted.
        bins: Number of bins, M.

    Returns:
        Pixels, correct pixels, and sum of the probabilities in units of ``UNIT``, int64
        ``(3, C, M)``.

    Raises:
        ValueError: If the shapes differ, a label is not a class, or a probability is not in 0..1.
    """
    if not prediction.shape == truth.shape == confidence.shape:
        raise ValueError(
            f'the confidence has shape {tuple(confidence.shape)}, the prediction '
            f'{tuple(prediction.shape)} and the truth {tuple(truth.shape)}, expected '
            'equal shapes; load annotations after Resize'
        )
    labels = truth.cpu().reshape(-1).long()
    labeled = labels != ignore_index
    labels = labels[labeled]
    predicted = prediction.cpu().reshape(-1)[labeled].long()
    values = confidence.cpu().reshape(-1)[labeled].double()
    outside = [
        int(((classes < 0) | (classes >= num_classes)).sum()) for classes in (labels, predicted)
    ]
    if any(outside):
        raise ValueError(describe_outside(outside, num_classes, ignore_index))
    # Written with "not", so that NaN counts as out of range.
    if not bool(((values >= 0) & (values <= 1)).all()):
        wrong = values[~((values >= 0) & (values <= 1))][0].item()
        raise ValueError(f'a pixel has the probability {wrong}, expected 0 to 1')
    edges = torch.linspace(0, 1, bins + 1, dtype=torch.float64)
    # Flat index of (predicted class, bin).
    cells = predicted * bins + torch.bucketize(values, edges[1:-1])
    sums = torch.zeros(num_classes * bins, dtype=torch.int64)
    sums.scatter_add_(0, cells, (values / UNIT).round().long())
    pixels = torch.bincount(cells, minlength=num_classes * bins)
    correct = torch.bincount(cells[predicted == labels], minlength=num_classes * bins)
    return torch.stack([pixels, correct, sums]).reshape(3, num_classes, bins)


def calibration_error(counts: Union[np.ndarray, torch.Tensor]) -> np.ndarray:
    """Return the expected calibration error (0..1) of counts ``(3, ..., M)``, float64 ``(...)``.

    ``counts.sum(1)`` gives the error over all pixels, ``counts`` the errors by predicted class.
    The error is NaN without pixels.
    """
    pixels, correct, sums = np.asarray(counts, np.float64)
    with np.errstate(invalid='ignore'):
        return np.abs(correct - sums * UNIT).sum(-1) / pixels.sum(-1)


def reliability(counts: Union[np.ndarray, torch.Tensor]) -> np.ndarray:
    """Return the mean probability and the share of correct pixels for counts ``(3, ...)``.

    Returns:
        Both, 0..1, float64 ``(2, ...)``; NaN without pixels.
    """
    pixels, correct, sums = np.asarray(counts, np.float64)
    with np.errstate(invalid='ignore'):
        return np.stack([sums * UNIT / pixels, correct / pixels])


SCORES = ('logits', 'probabilities')
# Probabilities in 16 bits may add up to 1 plus or minus this much.
_SUM_TOLERANCE = 1e-2


@METRICS.register_module()
class CalibrationError(BaseMetric):
    """Expected calibration error (ECE) of the probability of the predicted class, in percent.

    A calibrated model is correct in 80 % of the pixels to which it gives a probability of 0.8.
    Use it together with another metric: ``test_evaluator = [dict(type='ConfusionMatrixMetric'),
    dict(type='CalibrationError')]``, or call ``tools/test.py --calibration``.

    It reports ``ECE`` and ``overconfidence``, the mean probability minus the share of correct
    pixels, both in percent. The log has a table by predicted class. Sums are integers, so the
    scores do not depend on the number of ranks. Every image is counted once, as in
    ``ConfusionMatrixMetric``.

    Args:
        scores: Content of ``seg_logits`` of a model with several channels: ``'logits'``, to which
            softmax is applied, or ``'probabilities'``. With one channel, MMSegmentation returns
            the probability of class 1.
        bins: Number of bins of equal width.
        ignore_index: Label of the truth that is not counted.
        picture: Path of a PNG file of the reliability diagram, drawn at every evaluation; None for
            no picture.
        prefix: Text in front of the keys, followed by a slash.
        collect_device: Ignored; counts are exchanged as CPU tensors.

    Attributes:
        counts: Counts of the last evaluation over all ranks, see ``count_confidence``.

    Raises:
        ValueError: If ``scores`` is unknown, or ``bins`` is less than 1.
    """

    _total: Any
    _last: Any

    def __init__(
        self,
        scores: str = 'logits',
        bins: int = BINS,
        ignore_index: int = 255,
        picture: Optional[str] = None,
        prefix: Optional[str] = None,
        collect_device: str = 'cpu',
    ) -> None:
        super().__init__(collect_device=collect_device, prefix=prefix)
        if scores not in SCORES or bins < 1:
            raise ValueError(
                f'scores={scores!r}, bins={bins}: expected one of '
                f'{", ".join(SCORES)}, and at least 1'
            )
        self.scores, self.bins, self.ignore_index, self.picture = (
            scores,
            bins,
            ignore_index,
            picture,
        )
        self.counts: Optional[np.ndarray] = None
        self._clear()

    def process(self, data_batch: Any, data_samples: Sequence[dict]) -> None:
        """Count a batch.

        Args:
            data_batch: Not used.
            data_samples: Dicts with ``seg_logits`` ``(C, H, W)``, and ``(1, H, W)`` labels in
                ``pred_sem_seg`` and ``gt_sem_seg``.

        Raises:
            ValueError: If a prediction has no ``seg_logits``, or they do not agree with ``scores``;
                the message names the image.
        """
        for sample in data_samples:
            name = str(sample.get('img_path') or f'image {self._images} of this rank')
            if 'seg_logits' not in sample:
                raise ValueError(
                    f'{name}: the prediction has {", ".join(sorted(sample))} and no seg_logits, '
                    'which CalibrationError needs. EncoderDecoder of MMSegmentation gives them; '
                    'for a model that does not, take CalibrationError out of the evaluator.'
                )
            try:
                self._last = self._count(sample)
            except ValueError as error:
                raise ValueError(f'{name}: {error}') from error
            self._total = self._total + self._last
            self._images += 1

    def _count(self, sample: dict) -> torch.Tensor:
        logits = sample['seg_logits']['data'].float()
        prediction = sample['pred_sem_seg']['data'].reshape(logits.shape[1:])
        truth = sample['gt_sem_seg']['data']
        if len(logits) == 1:
            _check_range(logits)
            confidence = torch.where(prediction > 0, logits[0], 1 - logits[0])
        else:
            # All images come from the same model, so checking the first is enough.
            if not self._images:
                _check_sums(logits, self.scores)
            probabilities = logits.softmax(0) if self.scores == 'logits' else logits
            confidence = probabilities.gather(0, prediction[None].long())[0].clamp(max=1)
        return count_confidence(
            confidence,
            prediction,
            truth[0] if truth.dim() == 3 else truth,
            len(self._classes()),
            self.ignore_index,
            self.bins,
        )

    def evaluate(self, size: int) -> Dict[str, float]:
        """Return the scores over the images of all ranks, the same on every rank. Collective.

        Args:
            size: Number of images in the dataset; further images are repeats.

        Raises:
            ValueError: On every rank, if there is no image, or a rank has more than one repeat.
        """
        rank, world_size = get_dist_info()
        # The default group accepts CPU tensors on every accelerator.
        image_counts = torch.zeros(world_size, dtype=torch.int64)
        image_counts[rank] = self._images
        all_reduce(image_counts)
        images: List[int] = image_counts.tolist()
        total = torch.zeros(3, len(self._classes()), self.bins, dtype=torch.int64) + self._total
        if images[rank] and is_repeat(images, rank, images[rank] - 1, size):
            total -= self._last
        self._clear()
        check_images(images, size)
        all_reduce(total)
        figures = self.compute_metrics([total])
        return (
            {f'{self.prefix}/{key}': value for key, value in figures.items()}
            if self.prefix
            else figures
        )

    def compute_metrics(self, results: List[Any]) -> Dict[str, float]:
        """Return the scores of ``results``, a list of one count tensor, and log the table."""
        self.counts = results[0].numpy()
        pixels = self.counts[0].sum()
        confidence, correct = 100 * reliability(self.counts.sum((1, 2)))
        error = 100 * float(calibration_error(self.counts.sum(1)))
        if get_dist_info()[0] == 0:
            if pixels:
                self._log()
            else:
                print_log(
                    'calibration: no pixel has a label', logger='current', level=logging.WARNING
                )
            if self.picture and pixels:
                bins = self.counts.sum(1)
                bin_confidence, bin_correct = reliability(bins)
                plot_reliability(
                    self.picture,
                    bins[0],
                    bin_confidence,
                    bin_correct,
                    subtitle=(
                        f'ECE {error:.2f} %, mean probability {confidence:.2f} %, right '
                        f'{correct:.2f} % of {pixels:,} pixels'
                    ),
                )
        return dict(ECE=round(error, 2), overconfidence=round(float(confidence - correct), 2))

    def _log(self) -> None:
        assert self.counts is not None
        by_class = self.counts.sum(2)
        confidence, correct = 100 * reliability(by_class)
        table = PrettyTable()
        table.add_column('Predicted class', list(self._classes()))
        for name, values in (
            ('pixels, %', 100 * by_class[0] / max(1, by_class[0].sum())),
            ('probability', confidence),
            ('right', correct),
            ('ECE', 100 * calibration_error(self.counts)),
        ):
            table.add_column(name, list(np.round(values, 2)))
        print_log(
            'calibration by predicted class, in percent:\n' + table.get_string(), logger='current'
        )

    def _clear(self) -> None:
        self._images = 0
        self._total = self._last = 0

    def _classes(self) -> Sequence[str]:
        classes = (self.dataset_meta or {}).get('classes')
        if not classes:
            raise ValueError(
                f'dataset_meta is {self.dataset_meta!r}, expected class names under '
                "'classes'; set METAINFO of the dataset"
            )
        return classes


def _check_range(scores: torch.Tensor) -> None:
    low, high = float(scores.min()), float(scores.max())
    if not 0 <= low <= high <= 1:
        raise ValueError(
            f'seg_logits of one channel hold {low:.4g} to {high:.4g}, expected the '
            'probability of class 1, as EncoderDecoder gives it'
        )


def _check_sums(logits: torch.Tensor, scores: str) -> None:
    """Check that ``scores`` says correctly whether a model returns logits or probabilities.

    Raises:
        ValueError: If it does not.
    """
    sums = logits.sum(0)
    are_probabilities = float(logits.min()) >= 0 and float((sums - 1).abs().max()) < _SUM_TOLERANCE
    if are_probabilities != (scores == 'probabilities'):
        observation = (
            'are probabilities: none is below 0, and they add up to 1 in each pixel'
            if are_probabilities
            else f'hold {float(logits.min()):.4g} and add up to {float(sums.flatten()[0]):.4g}'
        )
        raise ValueError(
            f'seg_logits {observation}, and scores={scores!r} of CalibrationError '
            f'expects {scores}; set scores={SCORES[are_probabilities]!r}'
        )
