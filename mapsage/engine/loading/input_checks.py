"""Images with another number of channels than the data preprocessor has means for."""
from __future__ import annotations

from typing import Any, Mapping, Tuple

import torch
from mmengine.model import BaseDataPreprocessor
from torch import nn

from mapsage.shipped import program

from .data_checks import DataError


def watch_bands(model: nn.Module) -> nn.Module:
    """Have the data preprocessors of a model look at the channels of their images; return it.

    Where their mean does not fit, a :class:`DataError` says so, and not a subtraction.
    """
    for module in model.modules():
        if isinstance(module, BaseDataPreprocessor) and _check not in \
                module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_check)
    return model


def _check(module: Any, arguments: Tuple[Any, ...]) -> None:
    mean = getattr(module, 'mean', None)
    data = arguments[0] if arguments else None
    images = data.get('inputs') if isinstance(data, Mapping) else None
    if not isinstance(mean, torch.Tensor) or not isinstance(images, (list, tuple, torch.Tensor)):
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
