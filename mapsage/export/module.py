"""A segmentor as a function from an image in 0..1 to the scores of classes, for an exporter."""
from __future__ import annotations

from typing import Any, Dict, List

import torch
from torch import nn
from torch.nn import functional

from mapsage.inference.description import Bands

from .errors import ExportError

_WHITE = 255.  # the value that 1 stands for; also of 16 bits, as Deepness divides by it always


class ImageToScores(nn.Module):
    """What predict does with a window, in one module: normalization, model, resize, probabilities.

    A head with ``gives_scores`` gives its scores as they are, as in
    :class:`mapsage.inference.predictor.WindowPredictor`.

    Args:
        model: Segmentor of MMSegmentation in evaluation mode, on the CPU.
        bands: Bands that it takes.
        window: Side of the image in pixels.

    Raises:
        ExportError: If the model's data preprocessor does more than normalize and pad.
    """

    _order: torch.Tensor
    _mean: torch.Tensor
    _std: torch.Tensor

    def __init__(self, model: Any, bands: Bands, window: int) -> None:
        super().__init__()
        self.model = model
        self.channels, self.window = bands.count, window
        preprocessor = model.data_preprocessor
        # The first is MMSegmentation 1.2's name, the second that of the maintained fork.
        converts = bands.count == 3 and any(getattr(preprocessor, name, False) for name in (
            'channel_conversion', '_channel_conversion'))
        # The image comes as red, green, blue; what OpenCV loads as blue, green, red.
        self._turned = bands.like_opencv != converts
        self.register_buffer('_order', torch.arange(bands.count - 1, -1, -1))
        self._normalizes = bool(getattr(preprocessor, '_enable_normalize', False))
        if self._normalizes:
            self.register_buffer('_mean', preprocessor.mean.detach().clone().view(1, -1, 1, 1))
            self.register_buffer('_std', preprocessor.std.detach().clone().view(1, -1, 1, 1))
        self._pad_value = float(getattr(preprocessor, 'pad_val', 0))
        self._padded = (window, window)
        head: Any = model.decode_head
        head = head[-1] if isinstance(head, nn.ModuleList) else head  # a cascade
        self._gives_scores = bool(getattr(head, 'gives_scores', False))
        self._compare_with(preprocessor, bands)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Return scores, float (N, scores, S, S), for images in 0..1, (N, bands, S, S)."""
        logits = self.model.encode_decode(self.prepare(image), self._metas(image))
        logits = logits[:, :, :self.window, :self.window]
        if self._gives_scores:
            return logits
        return logits.softmax(1) if logits.shape[1] > 1 else logits.sigmoid()

    def prepare(self, image: torch.Tensor) -> torch.Tensor:
        """Return what the data preprocessor makes of images, here in 0..1."""
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

    def _compare_with(self, preprocessor: Any, bands: Bands) -> None:
        """Compare with the preprocessor, which also tells the size that it pads to."""
        from mmseg.structures import SegDataSample
        size = self.window, self.window
        shown = torch.rand(bands.count, *size, generator=torch.Generator().manual_seed(0))
        loaded = (shown.flip(0) if bands.like_opencv else shown) * _WHITE
        sample = SegDataSample(metainfo=dict(ori_shape=size, img_shape=size, pad_shape=size,
                                             padding_size=[0, 0, 0, 0]))
        with torch.no_grad():
            wanted = preprocessor(dict(inputs=[loaded], data_samples=[sample]), False)['inputs']
            self._padded = tuple(wanted.shape[2:])
            found = self.prepare(shown[None])
        if found.shape != wanted.shape or not torch.allclose(found, wanted, rtol=1e-4, atol=1e-4):
            raise ExportError(
                f'{type(preprocessor).__name__} does more with an image than change the order of '
                f'its channels, normalize and pad: an export would leave that out. Use '
                f'SegDataPreProcessor or BandDataPreProcessor.')
