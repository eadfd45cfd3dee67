"""Images that do not fit the model: other channels than its mean or backbone, no size to pad to."""
from __future__ import annotations

from typing import Any, Mapping, Tuple

import torch
from mmengine.model import BaseDataPreprocessor
from mmseg.models import SegDataPreProcessor
from torch import nn

from mapsage_launcher.shipped import program

from .data_checks import DataError


def watch_inputs(model: nn.Module) -> nn.Module:
    """Have a model's data preprocessors and backbones look at their images first; return it.

    Where the mean, the size or the channels do not fit, a :class:`DataError` says so, and not a
    subtraction, an assertion or a convolution.
    """
    for module in model.modules():
        if isinstance(module, BaseDataPreprocessor) and _check not in \
                module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_check)
    for name, module in model.named_modules():
        if name.split('.')[-1] == 'backbone':
            first = next((part for part in module.modules() if isinstance(part, nn.Conv2d)), None)
            if first is not None and _check_channels not in first._forward_pre_hooks.values():
                first.register_forward_pre_hook(_check_channels)
    return model


def _check_channels(convolution: Any, arguments: Tuple[Any, ...]) -> None:
    """Check what the first convolution of a backbone gets, which would fail otherwise."""
    image = arguments[0] if arguments else None  # conv(input=image)
    if not isinstance(image, torch.Tensor):
        return
    if image.ndim == 4 and image.shape[1] != convolution.in_channels:
        raise DataError(
            f'model.backbone takes images of {convolution.in_channels} channels, and got '
            f'{image.shape[1]} (N, C, H, W = {tuple(image.shape)}): set '
            f'model.backbone.in_channels={image.shape[1]}, or choose {convolution.in_channels} '
            f'bands of the images (bands= of GeoTiffDataset).')


def _check(module: Any, arguments: Tuple[Any, ...]) -> None:
    data = arguments[0] if arguments else None
    images = data.get('inputs') if isinstance(data, Mapping) else None
    if not isinstance(images, (list, tuple, torch.Tensor)) or not len(images):
        return
    _check_mean(module, images)
    # A user's own forward pads in its way. MMEngine's DDP passes `training` by name, which a hook
    # does not get; the module has the same value.
    if isinstance(module, SegDataPreProcessor) \
            and type(module).forward.__module__.startswith(('mmseg.', 'mapsage.')):
        _check_size(module, images, bool(arguments[1]) if arguments[1:] else module.training)


def _check_mean(module: Any, images: Any) -> None:
    mean = getattr(module, 'mean', None)
    if not isinstance(mean, torch.Tensor):
        return
    for image in images:
        channels = image.shape[0] if getattr(image, 'ndim', 0) == 3 else 1
        if 1 not in (channels, mean.numel()) and mean.numel() != channels:
            values = [round(value, 2) for value in mean.flatten().tolist()]
            raise DataError(
                f'model.data_preprocessor ({type(module).__name__}) has the mean {values}, for '
                f'{mean.numel()} channels, and got an image of {channels} (C, H, W = '
                f'{tuple(image.shape)}). Give mean and std of each channel to '
                f'BandDataPreProcessor; `{program("geotiff_statistics")}` prints those of scenes.')


def _check_size(module: Any, images: Any, training: bool) -> None:
    """Check that images are padded to one size; MMSegmentation asserts it without a word more."""
    if not training and not module.test_cfg:
        return
    place = 'model.data_preprocessor' + '.test_cfg' * (not training)
    size, divisor = (module.size, module.size_divisor) if training else (
        module.test_cfg.get('size'), module.test_cfg.get('size_divisor'))
    if (size is None) != (divisor is None):
        return
    wrong = 'neither size nor size_divisor' if size is None else \
        f'size={size} and size_divisor={divisor}, of which one is enough'
    height, width = images[0].shape[-2:]
    raise DataError(
        f'{place} ({type(module).__name__}) has {wrong}: images of a batch are padded to one size. '
        + (f'Set size=({height}, {width}) there, the height and width of the crops that the '
           f'pipeline makes (of this image, if all are alike).' if training else
           'Set size_divisor=32 there, or leave test_cfg out.'))
