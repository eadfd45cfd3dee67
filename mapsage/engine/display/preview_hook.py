"""A picture of samples and predictions, written after every evaluation.

The samples with the most classes are chosen while the evaluation runs, and only their reduced
images stay in memory, so it does not grow with the dataset. `mapsage/pictures` draws the picture.

Shapes: H x W pixels.
"""

from __future__ import annotations

import os
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

import cv2
import numpy as np
import torch
from mmengine.dist import is_main_process
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import BaseLoop
from mmengine.structures import BaseDataElement

from mapsage.distributed.wrappers.rank_batches import Batch
from mapsage.geo import GeoError, Raster, RasterBlockError
from mapsage.host.batch_images import (
    Channels,
    ShowsImages,
    channels_of_dates,
    dataset_metainfo,
    image_in_batch,
    sample_in_batch,
    shown_channels,
)
from mapsage.host.runner import HostRunner
from mapsage.pictures import PreviewSample, save_preview
from mapsage.pictures.tiles import display_rgb, is_class, shrink

# Longer side, in pixels, of the pictures that are kept in memory between iterations.
_KEPT_SIDE = 1024
# Labels are counted on a grid of at most this many points per side. Choosing an example does not
# need every pixel of a 1024 x 1024 map, on which np.unique would take longer than the metric.
_COUNTED_SIDE = 256
# Larger files are not read, because a whole scene would be decoded for a single window of it.
_MAX_FILE_BYTES = 256 << 20
_MAX_FAILURES = 3


class _PreviewCandidate(NamedTuple):
    """A sample for the picture, and the number of classes in its truth."""

    num_classes: int
    sample: PreviewSample


@HOOKS.register_module()
class PreviewHook(ShowsImages, Hook):
    """Hook that writes ``preview.png`` (image, truth, prediction, disagreement) after evaluations.

    Pairs of two dates have two images, before and after, as the model sees them.

    It shows the samples of rank 0 whose truth has the most classes, and among equals the earliest,
    so that the picture shows the same ground every time. The hook takes part in no collective. If a
    picture cannot be made, it logs a warning and the run continues. It does nothing for a model
    whose outputs are not lists of data samples with ``pred_sem_seg``.

    Args:
        max_images: Number of rows in the picture.
        filename: Name of the file inside the runner's ``work_dir``.
        input_channel_order: Order of the colors in a batch's three-channel ``inputs``, 'bgr' (as
            from MMCV's loader) or 'rgb'; None derives it, see ``shown_channels``. It is used only
            for images that cannot be read from their ``img_path``, such as windows of scenes and
            images in an LMDB or in remote storage.

    Raises:
        ValueError: If an argument is out of its range.
    """

    priority = 'LOW'

    def __init__(
        self,
        max_images: int = 4,
        filename: str = 'preview.png',
        input_channel_order: Optional[str] = None,
    ) -> None:
        if max_images < 1:
            raise ValueError(
                f'max_images={max_images}, expected 1 or more; '
                'default_hooks=dict(preview=None) switches the preview off'
            )
        if input_channel_order not in (None, 'bgr', 'rgb'):
            raise ValueError(
                f'input_channel_order={input_channel_order!r}, expected "bgr", "rgb" or None'
            )
        self.max_images = max_images
        self.filename = filename
        self.input_channel_order = input_channel_order
        # Samples of the picture so far, the most classes first.
        self._chosen: List[_PreviewCandidate] = []
        # Image files that are not the samples themselves, such as whole scenes.
        self._not_the_sample: Set[str] = set()
        self._failures = 0
        self._channels = shown_channels({}, input_channel_order)
        # Channels of both dates of a pair; empty for samples of one date.
        self._date_channels: Tuple[Channels, ...] = ()

    def before_val_epoch(self, runner: HostRunner) -> None:
        """Discard the samples of the previous evaluation."""
        self._chosen, self._failures = [], 0
        self._channels = shown_channels(runner.cfg, self.input_channel_order)
        self._date_channels = channels_of_dates(runner.cfg)

    before_test_epoch = before_val_epoch

    def after_val_iter(
        self,
        runner: HostRunner,
        batch_idx: int,
        data_batch: Optional[Batch] = None,
        outputs: Optional[Sequence[Any]] = None,
    ) -> None:
        """Keep the samples of this batch that should be in the picture."""
        self._examine(runner, dataset_metainfo(runner.val_dataloader), data_batch, outputs)

    def after_test_iter(
        self,
        runner: HostRunner,
        batch_idx: int,
        data_batch: Optional[Batch] = None,
        outputs: Optional[Sequence[Any]] = None,
    ) -> None:
        """Keep the samples of this batch that should be in the picture."""
        self._examine(runner, dataset_metainfo(runner.test_dataloader), data_batch, outputs)

    def after_val_epoch(
        self, runner: HostRunner, metrics: Optional[Dict[str, float]] = None
    ) -> None:
        """Write the picture of a validation."""
        self._write(runner, dataset_metainfo(runner.val_dataloader), metrics, 'validation')

    def after_test_epoch(
        self, runner: HostRunner, metrics: Optional[Dict[str, float]] = None
    ) -> None:
        """Write the picture of a test."""
        self._write(runner, dataset_metainfo(runner.test_dataloader), metrics, 'test')

    def _examine(
        self,
        runner: HostRunner,
        metainfo: Dict[str, Any],
        data_batch: Any,
        outputs: Optional[Sequence[Any]],
    ) -> None:
        if not is_main_process() or not isinstance(outputs, (list, tuple)):
            return
        for index, output in enumerate(outputs):
            if self._failures >= _MAX_FAILURES:
                return
            if not isinstance(output, BaseDataElement) or 'pred_sem_seg' not in output:
                continue
            try:
                self._consider(metainfo, data_batch, index, output)
            except (OSError, ValueError, cv2.error) as error:
                self._failures += 1
                runner.logger.warning(
                    f'preview: left out {_image_path(output)}: {type(error).__name__}: {error}'
                )

    def _consider(
        self, metainfo: Dict[str, Any], data_batch: Any, index: int, output: BaseDataElement
    ) -> None:
        # The truth in the batch is still in host memory and need not be copied from the device.
        truth = _labels(sample_in_batch(data_batch, index) or output, 'gt_sem_seg')
        num_classes = _distinct_classes(truth, len(metainfo.get('classes') or ()))
        if len(self._chosen) == self.max_images and num_classes <= self._chosen[-1].num_classes:
            return
        prediction = _labels(output, 'pred_sem_seg')
        assert prediction is not None
        path = _image_path(output)
        images = [image_in_batch(data_batch, index, channels) for channels in self._date_channels]
        if not images:
            image = self._read(path, output.metainfo.get('ori_shape'))
            images = [image_in_batch(data_batch, index, self._channels) if image is None else image]
        pictures = [
            display_rgb(shrink(image, _KEPT_SIDE, nearest=False))
            for image in images
            if image is not None
        ]
        if len(pictures) < len(images):
            raise ValueError(
                'the image can be read neither from img_path nor from inputs of '
                'the batch, expected there a (bands, H, W) tensor; add img_path to '
                'meta_keys of PackSegInputs'
            )
        sample = PreviewSample(
            image=pictures[0],
            after=(*pictures, None)[1],
            prediction=shrink(prediction, _KEPT_SIDE, nearest=True),
            truth=None if truth is None else shrink(truth, _KEPT_SIDE, nearest=True),
            name=os.path.basename(path),
        )
        self._chosen.append(_PreviewCandidate(num_classes, sample))
        # The sort is stable, so among equals the earliest sample stays first.
        self._chosen.sort(key=lambda candidate: -candidate.num_classes)
        del self._chosen[self.max_images :]

    def _read(self, path: str, original_shape: Optional[Tuple[int, ...]]) -> Optional[np.ndarray]:
        """Return the image file as RGB ``(H, W, 3)``, or None if it is not this sample.

        Args:
            path: Path of the file.
            original_shape: Height and width of the sample's image; None if unknown.
        """
        if (
            path in self._not_the_sample
            or not os.path.isfile(path)
            or os.path.getsize(path) > _MAX_FILE_BYTES
        ):
            return None
        image = (
            _read_geotiff(path, original_shape)
            if path.lower().endswith(('.tif', '.tiff'))
            else _read_rgb(path)
        )
        if image is None or (
            original_shape is not None and tuple(image.shape[:2]) != tuple(original_shape[:2])
        ):
            # A window of a scene, or a format that cannot be read. Do not try it again.
            self._not_the_sample.add(path)
            return None
        return image

    def _write(
        self,
        runner: HostRunner,
        metainfo: Dict[str, Any],
        metrics: Optional[Dict[str, float]],
        phase: str,
    ) -> None:
        if not is_main_process() or not self._chosen:
            return
        samples = [candidate.sample for candidate in self._chosen]
        self._chosen = []
        path = os.path.join(runner.work_dir, self.filename)
        try:
            save_preview(
                path,
                samples,
                _class_names(metainfo, samples),
                metainfo.get('palette'),
                _title(runner),
                _subtitle(runner, metrics, phase),
            )
        except (OSError, ValueError, cv2.error) as error:
            runner.logger.warning(
                f'preview: {path} was not written: {type(error).__name__}: {error}'
            )
        else:
            runner.logger.info(f'preview: {path}')


def _image_path(sample: BaseDataElement) -> str:
    return str(sample.metainfo.get('img_path') or '')


def _labels(sample: BaseDataElement, field: str) -> Optional[np.ndarray]:
    """Return the label map of a sample, int32 ``(H, W)``, or None if the field is missing."""
    if field not in sample:
        return None
    value = sample.get(field)
    data = value.get('data') if isinstance(value, BaseDataElement) else None
    if not isinstance(data, (torch.Tensor, np.ndarray)):
        raise ValueError(f'{field} holds {type(value).__name__}, expected PixelData of a tensor')
    array = data.detach().cpu().numpy() if isinstance(data, torch.Tensor) else np.asarray(data)
    if array.ndim == 3 and array.shape[0] == 1:
        array = array[0]
    if array.ndim != 2:
        raise ValueError(f'{field} has shape {array.shape}, expected (1, H, W) or (H, W)')
    return array.astype(np.int32)


def _distinct_classes(truth: Optional[np.ndarray], num_classes: int) -> int:
    if truth is None:
        return 0
    step = max(1, -(-max(truth.shape) // _COUNTED_SIDE))
    labels = np.unique(truth[::step, ::step])
    # Without metainfo the ignore index is unknown; all datasets of MMSegmentation use 255.
    return int(is_class(labels, num_classes or 255).sum())


def _class_names(metainfo: Dict[str, Any], samples: Sequence[PreviewSample]) -> Sequence[str]:
    if metainfo.get('classes'):
        return metainfo['classes']
    highest = max(int(sample.prediction.max()) for sample in samples)
    return [f'class {index}' for index in range(highest + 1)]


def _read_rgb(path: str) -> Optional[np.ndarray]:
    try:
        # The flags MMCV loads with, plus the full depth of 16-bit images.
        image = cv2.imread(path, cv2.IMREAD_COLOR | cv2.IMREAD_ANYDEPTH)
    except cv2.error:
        # Raised above OpenCV's pixel limit; for other unreadable pictures imread returns None.
        return None
    return None if image is None else np.ascontiguousarray(image[:, :, ::-1])


def _read_geotiff(path: str, shape: Optional[Tuple[int, ...]]) -> Optional[np.ndarray]:
    """Return the first three bands of a GeoTIFF, or its first band, ``(H, W, bands)``.

    None if it cannot be read or has another shape: a scene is not decoded for a window of it.
    OpenCV would print a warning for every tag that it does not know.
    """
    try:
        with Raster(path) as raster:
            if shape is not None and (raster.height, raster.width) != tuple(shape[:2]):
                return None
            image = raster.read(0, 0, raster.width, raster.height)[0]
    except (GeoError, RasterBlockError):
        return None
    return np.ascontiguousarray(image[: 3 if len(image) >= 3 else 1].transpose(1, 2, 0))


def _title(runner: HostRunner) -> str:
    filename = runner.cfg.filename
    if filename:
        return os.path.splitext(os.path.basename(filename))[0]
    return runner.experiment_name


def _subtitle(runner: HostRunner, metrics: Optional[Dict[str, float]], phase: str) -> str:
    columns = [phase]
    # runner.iter would build the training loop with its dataset in a test.
    loop = runner._train_loop
    if isinstance(loop, BaseLoop) and loop.iter:
        columns.append(f'iteration {loop.iter}')
    for key, value in (metrics or {}).items():
        if key == 'mIoU' or key.endswith('/mIoU'):
            columns.append(f'mIoU {float(value):.2f}')
    return '   '.join(columns)
