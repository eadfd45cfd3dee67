"""Checks images before the model sees them, to explain a mismatch instead of a crash in a layer.

Three mismatches are checked: other channels than the data preprocessor's mean, other channels than
the backbone's first convolution, and a preprocessor without a size to pad images to. The checks are
forward pre-hooks; they cost a comparison of shapes per batch.

The sensors of a model are compared with those of its dataset of scene stacks: a stack is one image,
so a model that expects other bands, or the same bands in another order, would train on the wrong
ones, or fail in its first layer without naming a sensor.
"""

from __future__ import annotations

from typing import Any, Dict, Iterator, Mapping, Optional, Sequence, Tuple, Union

import torch
from mmengine.model import BaseDataPreprocessor
from mmseg.models import SegDataPreProcessor
from torch import nn

from mapsage.datasets import StackDataPreProcessor
from mapsage.geo.stacks import SensorLayout, StackLayout, canonical_band
from mapsage.host.dataset_parts import parts
from mapsage.host.segmentors import channel_means
from mapsage_launcher.shipped import program

from .data_checks import DataError

Images = Union[Sequence[torch.Tensor], torch.Tensor]


def watch_inputs(model: nn.Module) -> nn.Module:
    """Let a model's data preprocessors and backbones check their images first; return the model.

    If the mean, the size or the channels do not fit, a :class:`DataError` says so. Otherwise a
    subtraction, an assertion or a convolution would fail without naming the setting.
    """
    for module in model.modules():
        if (
            isinstance(module, BaseDataPreprocessor)
            and _check_inputs not in module._forward_pre_hooks.values()
        ):
            module.register_forward_pre_hook(_check_inputs)
    for name, module in model.named_modules():
        if name.split('.')[-1] == 'backbone':
            first = next(
                (layer for layer in module.modules() if isinstance(layer, nn.Conv2d)), None
            )
            if first is not None and _check_channels not in first._forward_pre_hooks.values():
                first.register_forward_pre_hook(_check_channels)
    return model


def _check_channels(convolution: nn.Conv2d, arguments: Tuple[Any, ...]) -> None:
    """Check the input of a backbone's first convolution, which fails on other channels."""
    # A call conv(input=image) has no positional arguments, and hooks do not see the others.
    image = arguments[0] if arguments else None
    if not isinstance(image, torch.Tensor):
        return
    if image.ndim == 4 and image.shape[1] != convolution.in_channels:
        raise DataError(
            f'model.backbone takes images of {convolution.in_channels} channels, and got '
            f'{image.shape[1]} (N, C, H, W = {tuple(image.shape)}): set '
            f'model.backbone.in_channels={image.shape[1]}, or choose {convolution.in_channels} '
            f'bands of the images (bands= of GeoTiffDataset).'
        )


def _check_inputs(preprocessor: BaseDataPreprocessor, arguments: Tuple[Any, ...]) -> None:
    data = arguments[0] if arguments else None
    images = data.get('inputs') if isinstance(data, Mapping) else None
    if not isinstance(images, (list, tuple, torch.Tensor)) or not len(images):
        return
    # A stack gets planes of days behind its channels; its preprocessor checks them itself.
    if not isinstance(preprocessor, StackDataPreProcessor):
        _check_mean(preprocessor, images)
    # A user's own forward may pad in another way. MMEngine's DDP passes `training` by name, which a
    # hook does not get; the module has the same value.
    if isinstance(preprocessor, SegDataPreProcessor) and type(
        preprocessor
    ).forward.__module__.startswith(('mmseg.', 'mapsage.')):
        _check_size(
            preprocessor, images, bool(arguments[1]) if arguments[1:] else preprocessor.training
        )


def _check_mean(preprocessor: BaseDataPreprocessor, images: Images) -> None:
    mean = channel_means(preprocessor)
    if mean is None:
        return
    for image in images:
        channels = image.shape[0] if getattr(image, 'ndim', 0) == 3 else 1
        if 1 not in (channels, mean.numel()) and mean.numel() != channels:
            values = [round(value, 2) for value in mean.flatten().tolist()]
            raise DataError(
                f'model.data_preprocessor ({type(preprocessor).__name__}) has the mean {values}, '
                f'for {mean.numel()} channels, and got an image of {channels} (C, H, W = '
                f'{tuple(image.shape)}). Give mean and std of each channel to '
                f'BandDataPreProcessor; `{program("geotiff_statistics")}` prints those of scenes.'
            )


def _check_size(preprocessor: SegDataPreProcessor, images: Images, training: bool) -> None:
    """Check that images are padded to one size; MMSegmentation's assertion gives no reason."""
    if not training and not preprocessor.test_cfg:
        return
    setting = 'model.data_preprocessor' + '.test_cfg' * (not training)
    size, divisor = (
        (preprocessor.size, preprocessor.size_divisor)
        if training
        else (preprocessor.test_cfg.get('size'), preprocessor.test_cfg.get('size_divisor'))
    )
    if (size is None) != (divisor is None):
        return
    mistake = (
        'neither size nor size_divisor'
        if size is None
        else f'size={size} and size_divisor={divisor}, of which one is enough'
    )
    height, width = images[0].shape[-2:]
    raise DataError(
        f'{setting} ({type(preprocessor).__name__}) has {mistake}: images of a batch are padded '
        f'to one size. '
        + (
            f'Set size=({height}, {width}) there, the height and width of the crops that the '
            f'pipeline makes (of this image, if all are alike).'
            if training
            else 'Set size_divisor=32 there, or leave test_cfg out.'
        )
    )


def compare_sensors(model: nn.Module, dataset: object) -> None:
    """Compare the sensors of each part of a model with those of its training data.

    Bands that one side names and the other numbers are compared by their count only, and so are
    bands with different names, because a band may have several.

    Args:
        model: Model, wrapped or not.
        dataset: Dataset of a loader; other datasets than those of stacks are not compared.

    Raises:
        DataError: If a sensor, its number of dates or bands, or the order of its bands differs.
    """
    for inner in parts(dataset):
        of_dataset = _layout_of(inner)
        if of_dataset is None:
            continue
        for name, layout in _layouts_in(model):
            difference = _difference(of_dataset, layout)
            if difference:
                raise DataError(
                    f'model.{name} and {type(inner).__name__} have different sensors: '
                    f'{difference}. Give both the same sensors, with the bands in '
                    'the same order.'
                )


def _layout_of(part: object) -> Optional[StackLayout]:
    layout = getattr(part, 'layout', None)
    return layout if isinstance(layout, StackLayout) else None


def _layouts_in(model: nn.Module) -> Iterator[Tuple[str, StackLayout]]:
    for name, module in model.named_modules():
        layout = _layout_of(module)
        if layout is not None:
            yield (name[len('module.') :] if name.startswith('module.') else name), layout


def _difference(of_dataset: StackLayout, of_model: StackLayout) -> str:
    """Return how the sensors of a model differ from the dataset's, '' if they do not."""
    expected: Dict[str, SensorLayout] = {sensor.name: sensor for sensor in of_dataset.sensors}
    names = [sensor.name for sensor in of_model.sensors]
    if sorted(expected) != names:
        return f'the model has {names}, and the dataset {sorted(expected)}'
    for sensor in of_model.sensors:
        other = expected[sensor.name]
        if sensor.max_dates != other.max_dates or len(sensor.bands) != len(other.bands):
            return (
                f'{sensor.name!r} has {len(sensor.bands)} band(s) and max_dates='
                f'{sensor.max_dates} in the model, and {len(other.bands)} and '
                f'{other.max_dates} in the dataset'
            )
        bands, others = (list(map(canonical_band, side.bands)) for side in (sensor, other))
        if bands != others and sorted(bands) == sorted(others):
            return (
                f'{sensor.name!r} has the bands {list(sensor.bands)} in the model, and '
                f'{list(other.bands)} in the dataset'
            )
    return ''
