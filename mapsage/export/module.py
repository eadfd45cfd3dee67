"""The module that is exported: a segmentor as a function from an image to class scores.

It does everything that `tools/predict.py` does with a window (band order, normalization, padding,
model, probabilities), so that a runtime needs no preprocessing. Values of 0..1 stand for 0..255,
because QGIS' Deepness divides every image by 255, including 16-bit images.

Shapes:
    image   (N, bands, S, S)   float32 in 0..1, bands as red, green, blue
    scores  (N, scores, S, S)  float32, one score for a binary model with one output
"""
from __future__ import annotations

from typing import Any, Dict, List

import torch
from torch import nn
from torch.nn import functional

from mapsage.maps.description import Bands

from .errors import ExportError

# The value that 1 in the input stands for.
_WHITE = 255.


class ImageToScores(nn.Module):
    """Preprocessing, model and probabilities of one window in a single module.

    The scores of a head with ``gives_scores`` are returned without a softmax or sigmoid, as in
    :class:`mapsage.maps.predictor.WindowPredictor`.

    Args:
        model: Segmentor of MMSegmentation in evaluation mode, on the CPU.
        bands: Bands that the model takes.
        window: Side of the image in pixels.

    Raises:
        ExportError: If the model's data preprocessor does more than reorder channels, normalize
            and pad.
    """

    _order: torch.Tensor
    _mean: torch.Tensor
    _std: torch.Tensor

    def __init__(self, model: Any, bands: Bands, window: int) -> None:
        super().__init__()
        self.model = model
        self.channels, self.window = bands.count, window
        preprocessor = model.data_preprocessor
        # A preprocessor of another class may lack them; _check_against then compares the results.
        settings = vars(preprocessor)
        # MMSegmentation 1.2 uses the first name, the maintained fork the second.
        converts = bands.count == 3 and any(settings.get(name) for name in (
            'channel_conversion', '_channel_conversion'))
        # The exported input is RGB. The preprocessor expects BGR if OpenCV loads the images, and
        # swaps the channels itself if it converts.
        self._turned = bands.like_opencv != converts
        self.register_buffer('_order', torch.arange(bands.count - 1, -1, -1))
        self._normalizes = bool(settings.get('_enable_normalize'))
        if self._normalizes:
            self.register_buffer('_mean', preprocessor.mean.detach().clone().view(1, -1, 1, 1))
            self.register_buffer('_std', preprocessor.std.detach().clone().view(1, -1, 1, 1))
        self._pad_value = float(settings.get('pad_val', 0))
        self._padded = (window, window)
        head: Any = model.decode_head
        # A cascade has a list of heads, and the last one decides.
        head = head[-1] if isinstance(head, nn.ModuleList) else head
        self._gives_scores = bool(getattr(head, 'gives_scores', False))
        self._check_against(preprocessor, bands)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Return the scores of images, ``(N, bands, S, S)`` -> ``(N, scores, S, S)``."""
        logits = self.model.encode_decode(self.prepare(image), self._metas(image))
        logits = logits[:, :, :self.window, :self.window]
        if self._gives_scores:
            return logits
        return logits.softmax(1) if logits.shape[1] > 1 else logits.sigmoid()

    def prepare(self, image: torch.Tensor) -> torch.Tensor:
        """Return images in 0..1 as the data preprocessor would return them."""
        image = image * _WHITE
        if self._turned:
            image = image.index_select(1, self._order)
        if self._normalizes:
            image = (image - self._mean) / self._std
        height, width = self._padded
        if (height, width) != (self.window, self.window):
            image = functional.pad(image, (0, width - self.window, 0, height - self.window),
                                   value=self._pad_value)
        return image

    def _metas(self, image: torch.Tensor) -> List[Dict[str, Any]]:
        size = self.window, self.window
        return [dict(ori_shape=size, img_shape=self._padded, pad_shape=self._padded,
                     padding_size=[0, 0, 0, 0]) for _ in range(int(image.shape[0]))]

    def _check_against(self, preprocessor: nn.Module, bands: Bands) -> None:
        """Compare `prepare` with the data preprocessor, and take over the size that it pads to."""
        from mmseg.structures import SegDataSample
        size = self.window, self.window
        image = torch.rand(bands.count, *size, generator=torch.Generator().manual_seed(0))
        loaded = (image.flip(0) if bands.like_opencv else image) * _WHITE
        sample = SegDataSample(metainfo=dict(ori_shape=size, img_shape=size, pad_shape=size,
                                             padding_size=[0, 0, 0, 0]))
        with torch.no_grad():
            expected = preprocessor(dict(inputs=[loaded], data_samples=[sample]), False)['inputs']
            self._padded = tuple(expected.shape[2:])
            prepared = self.prepare(image[None])
        if prepared.shape != expected.shape or not torch.allclose(
                prepared, expected, rtol=1e-4, atol=1e-4):
            raise ExportError(
                f'{type(preprocessor).__name__} does more with an image than change the order of '
                f'its channels, normalize and pad: an export would leave that out. Use '
                f'SegDataPreProcessor or BandDataPreProcessor.')
