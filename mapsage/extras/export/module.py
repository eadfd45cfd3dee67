"""The module that is exported: a segmentor as a function from the inputs of a file to class scores.

It does everything that `tools/predict.py` does with a window (band order, normalization, padding,
model, probabilities), so that a runtime needs no preprocessing. `mapsage/maps/file_inputs.py` names
the inputs and makes them from windows.

Shapes: N windows, B bands of a window, S pixels of a side, T dates and C bands of a sensor.
    image   (N, B, S, S)       float32 in 0..1, bands as red, green, blue
    scores  (N, scores, S, S)  float32, one score for a binary model with one output
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Dict, List, Tuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from mapsage.geo.stacks import NO_DAY, StackLayout
from mapsage.maps.description import Bands, ExportedDescription
from mapsage.maps.file_inputs import FileInputs, ImageInputs, StackInputs, layout_of

from .errors import ExportError

# The value that 1 in the input stands for, because QGIS' Deepness divides every image by 255,
# including 16-bit images.
_WHITE = 255.0


class WindowToScores(nn.Module):
    """Preprocessing, model and probabilities of one window in a single module.

    The scores of a head with ``gives_scores`` are returned without a softmax or sigmoid, as in
    :class:`mapsage.maps.predictor.WindowPredictor`.

    Args:
        model: Segmentor of MMSegmentation in evaluation mode, on the CPU.
        inputs: Inputs of the file.
        window: Side of a window in pixels.
    """

    _mean: torch.Tensor
    _std: torch.Tensor

    def __init__(self, model: Any, inputs: FileInputs, window: int) -> None:
        super().__init__()
        self.model, self.inputs, self.window = model, inputs, window
        preprocessor = model.data_preprocessor
        # A preprocessor of another class may lack them; _check_against then compares the results.
        settings = vars(preprocessor)
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

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Return the scores of windows, (N, scores, S, S).

        Args:
            *inputs: Inputs of the file, in the order of ``inputs.shapes``.
        """
        logits = self.model.encode_decode(self.prepare(*inputs), self._metas(inputs[0]))
        logits = logits[:, :, : self.window, : self.window]
        if self._gives_scores:
            return logits
        return logits.softmax(1) if logits.shape[1] > 1 else logits.sigmoid()

    def prepare(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Return the inputs of the file as the data preprocessor would return their windows."""
        batch = self.join(*inputs)
        height, width = self._padded
        if (height, width) != (self.window, self.window):
            batch = functional.pad(
                batch, (0, width - self.window, 0, height - self.window), value=self._pad_value
            )
        return batch

    @abstractmethod
    def join(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Return the inputs of the file as one normalized batch, (N, B, S, S)."""

    @abstractmethod
    def example(self, count: int) -> Tuple[torch.Tensor, ...]:
        """Return inputs of so many windows to trace the module with."""

    def of_windows(self, windows: np.ndarray) -> Tuple[torch.Tensor, ...]:
        """Return the inputs for windows as the test pipeline returns them, (N, B, S, S)."""
        return tuple(map(torch.from_numpy, self.inputs.of_windows(windows).values()))

    def _metas(self, batch: torch.Tensor) -> List[Dict[str, Any]]:
        size = self.window, self.window
        return [
            dict(
                ori_shape=size,
                img_shape=self._padded,
                pad_shape=self._padded,
                padding_size=[0, 0, 0, 0],
            )
            for _ in range(int(batch.shape[0]))
        ]

    def check_preprocessor(self, sample: np.ndarray) -> None:
        """Compare :meth:`prepare` with the data preprocessor, and take over the size it pads to.

        Args:
            sample: A window as the test pipeline returns it, float32 (B, S, S).

        Raises:
            ExportError: If the model's data preprocessor does more than :meth:`prepare`.
        """
        from mmseg.structures import SegDataSample

        preprocessor = self.model.data_preprocessor
        size = self.window, self.window
        meta = SegDataSample(
            metainfo=dict(ori_shape=size, img_shape=size, pad_shape=size, padding_size=[0, 0, 0, 0])
        )
        with torch.no_grad():
            expected = preprocessor(
                dict(inputs=[torch.from_numpy(sample)], data_samples=[meta]), False
            )['inputs']
            self._padded = tuple(expected.shape[2:])
            prepared = self.prepare(*self.of_windows(sample[None]))
        if prepared.shape != expected.shape or not torch.allclose(
            prepared, expected, rtol=1e-4, atol=1e-4
        ):
            raise ExportError(
                f'{type(preprocessor).__name__} does more with an image than change the order of '
                f'its channels, normalize and pad: an export would leave that out. Use '
                f'SegDataPreProcessor, BandDataPreProcessor or StackDataPreProcessor.'
            )


class ImageToScores(WindowToScores):
    """The module of a model of single scenes, which takes ``image``.

    Args:
        model: Segmentor of MMSegmentation in evaluation mode, on the CPU.
        bands: Bands that the model takes.
        window: Side of the image in pixels.

    Raises:
        ExportError: If the data preprocessor does more than reorder channels, normalize and pad.
    """

    _order: torch.Tensor

    def __init__(self, model: Any, bands: Bands, window: int) -> None:
        super().__init__(model, ImageInputs(bands, window), window)
        self._bands = bands.count
        settings = vars(model.data_preprocessor)
        # MMSegmentation 1.2 uses the first name, the maintained fork the second.
        converts = bands.count == 3 and any(
            settings.get(name) for name in ('channel_conversion', '_channel_conversion')
        )
        # The exported input is RGB. The preprocessor expects BGR if OpenCV loads the images, and
        # swaps the channels itself if it converts.
        self._turned = bands.like_opencv != converts
        self.register_buffer('_order', torch.arange(bands.count - 1, -1, -1))
        sample = torch.rand(bands.count, window, window, generator=torch.Generator().manual_seed(0))
        self.check_preprocessor((sample * _WHITE).numpy())

    def join(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Return images in 0..1 normalized, (N, B, S, S)."""
        image = inputs[0] * _WHITE
        if self._turned:
            image = image.index_select(1, self._order)
        if self._normalizes:
            image = (image - self._mean) / self._std
        return image

    def example(self, count: int) -> Tuple[torch.Tensor, ...]:
        """Return random images, (count, B, S, S)."""
        return (
            torch.rand(
                count,
                self._bands,
                self.window,
                self.window,
                generator=torch.Generator().manual_seed(1),
            ),
        )


class StackToScores(WindowToScores):
    """The module of a model of scene stacks, which takes the inputs of ``StackInputs``.

    Args:
        model: Segmentor of MMSegmentation in evaluation mode, on the CPU.
        layout: Order of the channels of the model's input.
        window: Side of a window in pixels.
        samples: Windows as a prediction reads them, float32 (B, S, S), with B =
            ``layout.input_channels``: encoders check the units of their values.
    """

    def __init__(
        self, model: Any, layout: StackLayout, window: int, samples: List[np.ndarray]
    ) -> None:
        super().__init__(model, StackInputs(layout, window), window)
        self.layout, self._samples = layout, samples
        self.check_preprocessor(samples[0])

    def join(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Return stacks normalized and with planes of days and site, (N, B, S, S)."""
        *of_sensors, site = inputs
        pixels, valid, days = of_sensors[::3], of_sensors[1::3], of_sensors[2::3]
        parts = []
        for sensor, values, has_data in zip(self.layout.sensors, pixels, valid):
            channels = self.layout.channels[sensor.name].pixels
            if self._normalizes:
                shape = 1, sensor.max_dates, len(sensor.bands), 1, 1
                mean, std = (
                    statistic[:, channels].view(shape) for statistic in (self._mean, self._std)
                )
                values = (values - mean) / std
            # Not a product, so that NaN may stand where nothing is valid.
            parts.append(
                torch.where(has_data[:, :, None] > 0.999, values, torch.zeros_like(values)).flatten(
                    1, 2
                )
            )
        return self.layout.add_planes(torch.cat([*parts, *valid], 1), torch.cat(days, 1), site)

    def example(self, count: int) -> Tuple[torch.Tensor, ...]:
        """Return inputs of samples, of which every second one has gaps."""
        windows = [self._samples[number % len(self._samples)] for number in range(count)]
        return self.of_windows(
            np.stack(
                [
                    with_gaps(self.layout, window) if number % 2 else window
                    for number, window in enumerate(windows)
                ]
            )
        )


def with_gaps(layout: StackLayout, window: np.ndarray) -> np.ndarray:
    """Return a window of a stack without the last date, and with a cloud in the first one.

    Args:
        layout: Order of the channels.
        window: Window as a prediction reads it, float32 (``layout.input_channels``, S, S).
    """
    window, side = window.copy(), window.shape[1]
    for sensor in layout.sensors:
        channels = layout.channels[sensor.name]
        pixels = window[channels.pixels].reshape(sensor.max_dates, len(sensor.bands), side, side)
        valid, cloud = window[channels.valid], np.s_[..., : side // 2, : side // 2]
        pixels[0][cloud] = valid[0][cloud] = 0
        if sensor.max_dates > 1:
            pixels[-1] = valid[-1] = window[channels.days][-1] = NO_DAY
    return window


def module_of(
    model: Any, description: ExportedDescription, samples: List[np.ndarray]
) -> WindowToScores:
    """Return the module of a model that is exported.

    Args:
        model: Segmentor of MMSegmentation in evaluation mode, on the CPU.
        description: Description of the file.
        samples: Windows as a prediction reads them, (B, S, S).
    """
    layout = layout_of(description.places)
    if layout is None:
        return ImageToScores(model, description.bands, description.window)
    return StackToScores(model, layout, description.window, samples)
