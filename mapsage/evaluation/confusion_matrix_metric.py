"""The metric `ConfusionMatrixMetric`, a replacement for MMSeg's ``IoUMetric``.

It sums one confusion matrix over the images of all ranks instead of gathering results per image.
Every rank contributes the same fixed shapes to the collectives, also a rank without images.

Samplers pad the dataset so that every rank gets the same number of images. A metric that sums
counts must subtract the padding; :func:`is_repeat` finds it from the numbers of images only.
"""

from __future__ import annotations

import logging
import os
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

import numpy as np
import torch
from mmengine.dist import all_reduce, get_dist_info
from mmengine.evaluator import BaseMetric
from mmengine.logging import MMLogger, print_log
from mmengine.registry import METRICS
from prettytable import PrettyTable

from mapsage.pictures import plot_confusion

from .boundary import boundary_counts, boundary_iou
from .confusion_matrix import (
    count_pixels,
    describe_outside,
    mean_of_defined,
    scores,
)

# Scores that an option reports, by class and as a mean.
COLUMNS: Dict[str, Sequence[str]] = dict(
    mIoU=('IoU', 'Acc'),
    mDice=('Dice', 'Acc'),
    mFscore=('Fscore', 'Precision', 'Recall'),
    mFbeta=('Fbeta',),
    mBoundaryIoU=('BoundaryIoU',),
    kappa=(),
)
# Some devices have only 32-bit integers: before a sum could exceed them, it moves to the host.
_MAX_ON_DEVICE = 2**31 - 1


@METRICS.register_module()
class ConfusionMatrixMetric(BaseMetric):
    """Scores label maps over the whole dataset, as a replacement for ``IoUMetric``.

    Use it as ``val_evaluator = dict(type='ConfusionMatrixMetric')``. Keys, table, options and
    undefined scores are the same as in MMSeg's ``IoUMetric``. All scores, including kappa, are in
    percent, rounded to two digits. They are computed in float64. IoUMetric computes in float32: a
    score within 1e-5 of half a digit may round to the other side, and pixels get lost once a class
    has more than 2**24.

    Every image is counted once. Samplers that give every rank the same number of images repeat
    some at the end. If images are assigned round-robin, as by MMEngine's ``DefaultSampler``, the
    repeats are at positions beyond the size of the dataset: at most the last image of a rank. Ranks
    exchange two small integer tensors and no pickles. Counts stay on the device until
    :meth:`evaluate`.

    Args:
        ignore_index: Label of the truth that is not counted.
        iou_metrics: Names of the scores to report in addition to aAcc, one or more of ``mIoU``
            (with mAcc), ``mDice`` (with mAcc), ``mFscore`` (with mPrecision and mRecall),
            ``mFbeta``, ``mBoundaryIoU``, ``kappa``. Like IoUMetric, ``mFscore`` leaves out classes
            without a correct pixel, and logs it. ``mFbeta`` counts them as 0; with ``beta=1`` it is
            scikit-learn's macro F1.
        nan_to_num: Value that replaces undefined scores; None leaves them out of means.
        beta: Weight of recall in the F-scores.
        output_dir: Folder for predicted masks: PNG files of uint8 labels (plus 1 with
            ``reduce_zero_label``), named after the images.
        format_only: Whether to write masks only, without scores, for a test set without truth.
        picture: Path of a PNG file of the confusion matrix, drawn at every evaluation; None for
            no picture.
        prefix: Text in front of the keys, followed by a slash.
        collect_device: Ignored; accepted so that a config of IoUMetric works. Counts are
            exchanged as CPU tensors.

    Attributes:
        matrix: Confusion matrix of the last evaluation over all ranks, int64 ``(C, C)``; rows are
            the truth.

    Raises:
        ValueError: If ``iou_metrics`` has an unknown name, or ``format_only`` is set without
            ``output_dir``.
    """

    def __init__(
        self,
        ignore_index: int = 255,
        iou_metrics: Union[str, Sequence[str]] = ('mIoU',),
        nan_to_num: Optional[float] = None,
        beta: float = 1,
        output_dir: Optional[str] = None,
        format_only: bool = False,
        picture: Optional[str] = None,
        prefix: Optional[str] = None,
        collect_device: str = 'cpu',
    ) -> None:
        super().__init__(collect_device=collect_device, prefix=prefix)
        self.metrics = [iou_metrics] if isinstance(iou_metrics, str) else list(iou_metrics)
        unknown = [name for name in self.metrics if name not in COLUMNS]
        if unknown:
            raise ValueError(
                f'iou_metrics has {", ".join(map(repr, unknown))}, expected some of '
                f'{", ".join(COLUMNS)}'
            )
        if format_only and not output_dir:
            raise ValueError(
                f'format_only=True with output_dir={output_dir!r} would do nothing; '
                'set output_dir to the folder for the masks'
            )
        self.ignore_index, self.nan_to_num, self.beta = ignore_index, nan_to_num, beta
        self.output_dir, self.format_only, self.picture = output_dir, format_only, picture
        if output_dir:
            os.makedirs(output_dir, exist_ok=True)
        self.matrix: Optional[np.ndarray] = None
        self._tally = _PixelTally()

    def process(self, data_batch: Any, data_samples: Sequence[dict]) -> None:
        """Count a batch.

        Args:
            data_batch: Not used.
            data_samples: Dicts with ``(1, H, W)`` labels in ``pred_sem_seg`` and ``gt_sem_seg``.

        Raises:
            ValueError: If the sizes of prediction and truth differ; the message names the image.
        """
        for sample in data_samples:
            prediction = _plane(sample['pred_sem_seg']['data'])
            if not self.format_only:
                self._count(prediction, sample)
            if self.output_dir:
                self._write_mask(prediction, sample)

    def _count(self, prediction: torch.Tensor, sample: dict) -> None:
        name = str(sample.get('img_path') or f'image {len(self._tally.names)} of this rank')
        truth = _plane(sample['gt_sem_seg']['data']).to(prediction.device)
        if prediction.shape != truth.shape:
            raise ValueError(
                f'{name}: the prediction has {_size(prediction)} pixels and the truth '
                f'{_size(truth)}, expected equal sizes; the truth must not be resized in the test '
                'pipeline: load annotations after Resize'
            )
        classes = len(self._classes())
        counts = count_pixels(prediction, truth, classes, self.ignore_index)
        # One vector per image, so that a sum over images and ranks is a single addition.
        vectors = [counts.outside, counts.matrix.reshape(-1)]
        if 'mBoundaryIoU' in self.metrics:
            vectors.append(
                boundary_counts(prediction, truth, classes, self.ignore_index).reshape(-1)
            )
        self._tally.add(torch.cat(vectors), truth.numel(), name)

    def _write_mask(self, prediction: torch.Tensor, sample: dict) -> None:
        from PIL import Image

        name = os.path.splitext(os.path.basename(sample['img_path']))[0]
        mask = prediction.cpu().numpy()
        # With reduce_zero_label, labels on disk start at 1; see MMSeg's LoadAnnotations.
        if sample.get('reduce_zero_label', False):
            mask = mask + 1
        Image.fromarray(mask.astype(np.uint8)).save(
            os.path.join(str(self.output_dir), f'{name}.png')
        )

    def evaluate(self, size: int) -> Dict[str, float]:
        """Return the scores over the images of all ranks, the same on every rank. Collective.

        Args:
            size: Number of images in the dataset; further images are repeats.

        Raises:
            ValueError: On every rank, if a label of any image is outside the classes (the rank
                with the image names it), there is no image, or a rank has more than one repeat.
        """
        tally, self._tally = self._tally, _PixelTally()
        if self.format_only:
            print_log(f'predicted masks are in {self.output_dir}', logger='current')
            return {}
        figures = self.compute_metrics([self._sum_over_ranks(tally, size)])
        return (
            {f'{self.prefix}/{key}': value for key, value in figures.items()}
            if self.prefix
            else figures
        )

    def _sum_over_ranks(self, tally: _PixelTally, size: int) -> torch.Tensor:
        """Return the summed counts, int64 ``(K,)``: outside, matrix, and boundary if requested."""
        rank, world_size = get_dist_info()
        classes = len(self._classes())
        boundary = 3 * classes if 'mBoundaryIoU' in self.metrics else 0
        counts, last = tally.read(2 + classes**2 + boundary)
        # Each rank fills its row: number of images, and the two counts of labels outside the
        # classes. The default group accepts CPU tensors on every accelerator.
        facts = torch.zeros((world_size, 3), dtype=torch.int64)
        facts[rank] = torch.tensor([len(tally.names), *counts[:2].tolist()])
        all_reduce(facts)
        images: List[int] = facts[:, 0].tolist()
        self._check(facts, size, rank, tally)
        if images[rank] and is_repeat(images, rank, images[rank] - 1, size):
            counts = counts - last
        all_reduce(counts)
        return counts

    def _check(self, facts: torch.Tensor, size: int, rank: int, tally: _PixelTally) -> None:
        """Raise either on all ranks or on none, because every rank has the same ``facts``."""
        images: List[int] = facts[:, 0].tolist()
        outside = facts[:, 1:].sum(0).tolist()
        if any(outside):
            ranks = [index for index, row in enumerate(facts[:, 1:].tolist()) if any(row)]
            where = (
                tally.first_outside()
                if rank in ranks
                else f'images of rank(s) {", ".join(map(str, ranks))}, whose message names the first'
            )
            raise ValueError(
                f'{where}: ' + describe_outside(outside, len(self._classes()), self.ignore_index)
            )
        check_images(images, size)

    def compute_metrics(self, results: List[Any]) -> Dict[str, float]:
        """Return the scores of ``results``, a list of one count vector, and log the table."""
        names = self._classes()
        cells = len(names) ** 2
        vector = results[0].numpy()
        self.matrix = vector[2 : 2 + cells].reshape(len(names), len(names))
        result = scores(self.matrix, self.beta, self.nan_to_num)
        if 'mBoundaryIoU' in self.metrics:
            values = boundary_iou(vector[2 + cells :].reshape(3, len(names)))
            if self.nan_to_num is not None:
                values = np.nan_to_num(values, nan=self.nan_to_num)
            result.update(BoundaryIoU=values, mBoundaryIoU=mean_of_defined(values))
        columns = self._columns()
        if get_dist_info()[0] == 0:
            if 'mFscore' in self.metrics:
                self._warn_of_omitted_classes(result)
            self._log({name: result[name] for name in columns})
            if self.picture:
                self.plot(self.picture)
        return {key: float(np.round(result[key] * 100, 2)) for key in self.score_names()}

    def score_names(self) -> List[str]:
        """Return the keys of the scores, without the prefix."""
        means = [f'm{name}' for name in self._columns()]
        return [] if self.format_only else ['aAcc', *means] + ['kappa'] * ('kappa' in self.metrics)

    def _columns(self) -> List[str]:
        return list(dict.fromkeys(name for metric in self.metrics for name in COLUMNS[metric]))

    def _warn_of_omitted_classes(self, result: Dict[str, Any]) -> None:
        omitted = np.isnan(result['Fscore']) & ~np.isnan(result['Fbeta'])
        if omitted.any():
            names = ', '.join(np.asarray(self._classes())[omitted])
            print_log(
                f'mFscore {100 * result["mFscore"]:.2f} leaves out {names}: without a correct '
                f'pixel. mFbeta, which counts them as 0, is {100 * result["mFbeta"]:.2f}; '
                "iou_metrics=['mFbeta'] reports it",
                logger='current',
                level=logging.WARNING,
            )

    def _log(self, columns: Dict[str, Any]) -> None:
        table = PrettyTable()
        table.add_column('Class', list(self._classes()))
        for name, values in columns.items():
            table.add_column(name, list(np.round(values * 100, 2)))
        logger = MMLogger.get_current_instance()
        print_log('per class results:', logger)
        print_log('\n' + table.get_string(), logger=logger)

    def plot(self, path: str) -> None:
        """Draw the confusion matrix of the last evaluation into a PNG file.

        Raises:
            ValueError: If there was no evaluation.
            OSError: If the folder cannot be written.
        """
        if self.matrix is None:
            raise ValueError(
                f'there is no confusion matrix to draw into {path} yet; evaluate first'
            )
        result = scores(self.matrix)
        line = ', '.join(f'{name} {100 * result[name]:.2f}' for name in ('mIoU', 'aAcc', 'kappa'))
        plot_confusion(path, self.matrix, self._classes(), subtitle=line)

    def _classes(self) -> Sequence[str]:
        classes = (self.dataset_meta or {}).get('classes')
        if not classes:
            raise ValueError(
                f'dataset_meta is {self.dataset_meta!r}, expected class names under '
                "'classes'; set METAINFO of the dataset"
            )
        return classes


class _PixelTally:
    """Counts of the images of this rank, summed on their device.

    Attributes:
        names: Names of the images, in the order in which they were counted.
    """

    def __init__(self) -> None:
        self.names: List[str] = []
        self._host: Any = 0
        self._device: Any = None
        self._last: Any = None
        self._pixels = 0
        # Two scalars on the device: the number of images so far, and the index of the first image
        # with a label outside the classes, or -1.
        self._seen: Any = None
        self._first: Any = None

    def add(self, counts: torch.Tensor, pixels: int, name: str) -> None:
        """Add the counts of an image, ``(K,)``, which start with labels outside the classes."""
        if self._device is not None and self._pixels + pixels > _MAX_ON_DEVICE:
            self._drain()
        self._pixels += pixels
        self._device = counts if self._device is None else self._device + counts
        self._last = counts
        if self._seen is None:
            self._seen = torch.zeros_like(counts[0])
            self._first = self._seen - 1
        new = (counts[:2].sum() > 0) & (self._first < 0)
        self._first = torch.where(new, self._seen, self._first)
        # A counter on the host would be a constant in the graph of a lazy device, and the graph
        # would be compiled again for every image.
        self._seen = self._seen + 1
        self.names.append(name)

    def _drain(self) -> None:
        self._host = self._host + self._device.cpu()
        self._device, self._pixels = None, 0

    def read(self, length: int) -> Tuple[torch.Tensor, torch.Tensor]:
        """Return the sum and the last image's counts, int64 CPU ``(K,)``; zeros if empty."""
        if self._device is None:
            empty = torch.zeros(length, dtype=torch.int64)
            return empty, empty
        self._drain()
        return self._host, self._last.cpu()

    def first_outside(self) -> str:
        """Return the name of the first image with a label outside the classes."""
        return self.names[int(self._first)]


def _plane(labels: torch.Tensor) -> torch.Tensor:
    """Return labels ``(1, H, W)`` or ``(H, W)`` as ``(H, W)``."""
    return labels[0] if labels.dim() == 3 and len(labels) == 1 else labels


def _size(labels: torch.Tensor) -> str:
    return ' x '.join(map(str, labels.shape))


def check_images(images: Sequence[int], size: int) -> None:
    """Check that the ranks together evaluated the dataset; either all ranks raise or none.

    Args:
        images: Number of images by rank.
        size: Number of images in the dataset. Fewer evaluated images cause a warning.

    Raises:
        ValueError: If there was no image, or a rank repeats more than its last image.
    """
    if not sum(images):
        raise ValueError(f'no image was evaluated, expected {size}; check the dataloader')
    if any(
        count > 1 and is_repeat(images, rank, count - 2, size) for rank, count in enumerate(images)
    ):
        raise ValueError(
            f'the ranks have {list(images)} images of a dataset of {size}: a rank repeats more '
            'than one, expected at most its last. Use a sampler that assigns images to ranks '
            'round-robin, such as DefaultSampler(shuffle=False)'
        )
    if sum(images) < size:
        print_log(
            f'{sum(images)} of {size} images were evaluated',
            logger='current',
            level=logging.WARNING,
        )


def is_repeat(images: Sequence[int], rank: int, number: int, size: int) -> bool:
    """Return whether the sampler repeats an image. Pure.

    Images are assigned round-robin, starting with rank 0; a rank without further images is skipped.
    This is the order of mmengine.dist.collect_results before it cuts at ``size``.

    Args:
        images: Number of images by rank.
        rank: Rank of the image.
        number: Index of the image within its rank, from 0.
        size: Number of images in the dataset.
    """
    # Position of the image in the global order.
    position = sum(min(count, number + (peer < rank)) for peer, count in enumerate(images))
    return position >= size
