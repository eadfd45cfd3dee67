"""Images of samples without an image file, taken from the batch, in RGB for pictures.

A batch has normalized channel orders that depend on the loader: MMCV loads blue, green, red, and
``GeoTiffDataset`` loads the bands of the file. :func:`shown_channels` derives the order from the
config, so a picture does not show red as blue.

Shapes: B bands, H x W pixels.
"""

from __future__ import annotations

from typing import Any, Dict, Iterator, Mapping, Optional, Sequence, Tuple

import numpy as np
import torch
from mmengine.structures import BaseDataElement
from torch.utils.data import DataLoader

from mapsage.geo.stacks import StackLayout
from mapsage.host.dataset_parts import metainfo_of

_RGB = (0, 1, 2)
Channels = Optional[Tuple[int, ...]]
"""Channels that are red, green and blue. None is for images as MMCV's loader gives them: blue,
green, red if there are three bands, else the first three."""


class ShowsImages:
    """A hook that shows images of batches, and may know the order of their colors.

    Attributes:
        input_channel_order: 'bgr', 'rgb', or None to take it from the config.
    """

    input_channel_order: Optional[str] = None


def shown_channels(cfg: Mapping[str, Any], order: Optional[str] = None) -> Channels:
    """Return which channels of a model's input images a picture shows as red, green and blue.

    ``bands=dict(rgb=...)`` of the backbone names them. Without it, images of ``GeoTiffDataset``
    begin with red unless ``bgr_to_rgb`` of the data preprocessor says that they begin with blue,
    and all other images begin with blue, as MMCV's loader gives them.

    Args:
        cfg: Config of the run.
        order: Order of the colors, ``'bgr'`` or ``'rgb'``; None derives it as above.
    """
    if order is not None:
        return _RGB if order == 'rgb' else None
    model = _segmentor(cfg)
    bands = _sub_config(_sub_config(model, 'backbone'), 'bands')
    channels = tuple(bands.get('rgb') or ())
    if len(channels) == len(_RGB) and None not in channels:
        return channels
    preprocessor = _sub_config(model, 'data_preprocessor') or _sub_config(cfg, 'data_preprocessor')
    of_scenes = any(
        {'LoadGeoTiffWindow', 'LoadSceneStack'}
        & set(_types(_sub_config(cfg, f'{split}_dataloader').get('dataset')))
        for split in ('train', 'val', 'test')
    )
    return _RGB if of_scenes and not preprocessor.get('bgr_to_rgb') else None


def channels_of_dates(cfg: Mapping[str, Any]) -> Tuple[Channels, ...]:
    """Return the channels that a picture shows for each date of a model of two dates.

    The first three bands of the sensor are shown as red, green and blue, or its first band as gray.

    Args:
        cfg: Config of the run.

    Returns:
        Channels of the first and of the second date; empty if the model does not take stacks of one
        sensor with two dates.
    """
    preprocessor = _sub_config(_segmentor(cfg), 'data_preprocessor')
    if 'sensors' not in preprocessor:
        return ()
    sensors = StackLayout.of_config(preprocessor['sensors']).sensors
    if [sensor.max_dates for sensor in sensors] != [2]:
        return ()
    bands = len(sensors[0].bands)
    first = _RGB if bands >= len(_RGB) else (0, 0, 0)
    return first, tuple(bands + channel for channel in first)


def choose_channels(image: np.ndarray, channels: Channels) -> np.ndarray:
    """Return the bands of an image that :func:`shown_channels` names.

    If the image lacks one of them, its first three bands are shown, or its first band if it has
    fewer than three.

    Args:
        image: Image, (H, W, B).
        channels: Channels of :func:`shown_channels`.
    """
    bands = image.shape[2]
    if channels is None:
        channels = _RGB[::-1] if bands == len(_RGB) else _RGB
    if bands < len(_RGB) or max(channels) >= bands:
        channels = _RGB[:1] if bands < len(_RGB) else _RGB
    return np.ascontiguousarray(image[:, :, list(channels)])


def image_in_batch(batch: object, index: int, channels: Channels) -> Optional[np.ndarray]:
    """Return the image of a sample as the pipeline gave it, without its padding and not mirrored.

    Of the views of test-time augmentation, it is the one nearest to the image in the file.

    Args:
        batch: Batch with ``inputs``, (B, H, W) tensors, as the loader gave it.
        index: Number of the sample in the batch.
        channels: Channels of :func:`shown_channels`.

    Returns:
        Image, (H, W, 3) or (H, W, 1), uint8 or float32; None if the batch has no such inputs.
    """
    inputs, sample = next(iter(sorted(_views(batch, index), key=_distance)), (None, None))
    if not isinstance(inputs, torch.Tensor) or inputs.ndim != 3:
        return None
    metainfo = _metainfo(sample)
    height, width = tuple(metainfo.get('img_shape', inputs.shape[1:]))[:2]
    image = inputs[:, :height, :width].detach().cpu()
    values = (image if image.dtype == torch.uint8 else image.float()).numpy().transpose(1, 2, 0)
    # MMSegmentation mirrors a prediction back, and knows two directions only.
    if metainfo.get('flip'):
        values = np.flip(values, 1 if metainfo.get('flip_direction') == 'horizontal' else 0)
    return choose_channels(values, channels)


def sample_in_batch(batch: object, index: int) -> Optional[BaseDataElement]:
    """Return a data sample of a batch, or None if the batch has none with this number.

    With test-time augmentation it is the sample of the first view.
    """
    samples = [sample for _, sample in _views(batch, index)]
    return samples[0] if samples and isinstance(samples[0], BaseDataElement) else None


def packed_mask(sample: object) -> Optional[torch.Tensor]:
    """Return the mask of a sample as its pipeline packed it, (1, H, W) or (H, W).

    None for a sample without one, or that MMSegmentation's ``PackSegInputs`` has not packed.
    """
    data_sample = sample.get('data_samples') if isinstance(sample, dict) else None
    mask = data_sample.get('gt_sem_seg') if isinstance(data_sample, BaseDataElement) else None
    data = mask.get('data') if isinstance(mask, BaseDataElement) else None
    return data if isinstance(data, torch.Tensor) else None


def _views(batch: object, index: int) -> Iterator[Tuple[object, object]]:
    """Yield inputs and data sample of each view; a single one without test-time augmentation."""
    if not isinstance(batch, dict):
        return
    inputs, samples = batch.get('inputs'), batch.get('data_samples')
    if isinstance(inputs, Sequence) and inputs and isinstance(inputs[0], Sequence):
        for number, views in enumerate(inputs):
            yield _entry(views, index), _entry(_entry(samples, number), index)
    else:
        yield _entry(inputs, index), _entry(samples, index)


def _distance(view: Tuple[object, object]) -> Tuple[bool, float]:
    """Return a key by which the view nearest to the image in the file comes first."""
    metainfo = _metainfo(view[1])
    height, original = (tuple(metainfo.get(key) or (1,))[0] for key in ('img_shape', 'ori_shape'))
    return bool(metainfo.get('flip')), abs(np.log(height / original))


def _metainfo(sample: object) -> Dict[str, Any]:
    return sample.metainfo if isinstance(sample, BaseDataElement) else {}


def _entry(entries: object, index: int) -> object:
    if not isinstance(entries, (list, tuple, torch.Tensor)) or index >= len(entries):
        return None
    return entries[index]


def _segmentor(cfg: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config of the segmentor, which test-time augmentation wraps."""
    model = cfg.get('model')
    while isinstance(model, Mapping) and 'backbone' not in model and 'module' in model:
        model = model['module']
    return model if isinstance(model, Mapping) else {}


def _sub_config(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = config.get(key)
    return value if isinstance(value, Mapping) else {}


def _types(config: object) -> Iterator[object]:
    """Yield the types that a config names, at any depth."""
    if isinstance(config, Mapping):
        yield config.get('type')
    if isinstance(config, (Mapping, list, tuple)):
        for value in config.values() if isinstance(config, Mapping) else config:
            yield from _types(value)


def dataset_metainfo(dataloader: DataLoader) -> Dict[str, Any]:
    """Return the metainfo of a loader's dataset, such as names of classes; {} without any."""
    return metainfo_of(dataloader.dataset)
