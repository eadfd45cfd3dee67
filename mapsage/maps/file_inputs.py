"""The inputs of an exported file, made from the windows that a prediction reads.

A window is one array in the order of the model's test pipeline. A file of single scenes has one
input, `image`; a file of scene stacks has an input for pixels, valid pixels and days of every
sensor, and `site`. `mapsage/extras/export/module.py` has the reverse, the beginning of the graph.

Shapes: N windows of a batch, B bands, S pixels of a side, T dates and C bands of a sensor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Dict, List, Mapping, Optional, Tuple

import numpy as np

from mapsage.geo.stacks import StackLayout

from .description import Bands, ExportedDescription

IMAGE, SITE = 'image', 'site'
BATCH = 'batch'


class FileInputs(ABC):
    """Inputs of an exported file, all float32.

    Attributes:
        shapes: Shape of one window in each input, without the batch, by the name of the input.
        axes: Names of the axes of each input, the batch first, as STAC's Machine Learning Model
            extension names them.
    """

    shapes: Dict[str, Tuple[int, ...]]
    axes: Dict[str, List[str]]

    @abstractmethod
    def of_windows(self, windows: np.ndarray) -> Dict[str, np.ndarray]:
        """Return the inputs for a batch of windows, (N, B, S, S) uint8 or float32."""


class ImageInputs(FileInputs):
    """The input of a model of single scenes: ``image`` (N, B, S, S), red first, values of 0..1.

    Args:
        bands: Bands that the model takes.
        side: Side of a window in pixels.
    """

    def __init__(self, bands: Bands, side: int) -> None:
        self._bands = bands
        self.shapes = {IMAGE: (bands.count, side, side)}
        self.axes = {IMAGE: [BATCH, 'bands', 'height', 'width']}

    def of_windows(self, windows: np.ndarray) -> Dict[str, np.ndarray]:
        """Return the image of a batch of windows, (N, B, S, S) uint8 or float32."""
        images = windows[:, ::-1] if self._bands.like_opencv else windows
        return {IMAGE: np.ascontiguousarray(images, np.float32) / np.float32(255)}


class StackInputs(FileInputs):
    """The inputs of a model of scene stacks, for each sensor and for the whole stack.

    * ``SENSOR_pixels`` (N, T, C, S, S): values in the units of the files.
    * ``SENSOR_valid`` (N, T, S, S): 1 where a pixel of a date has data, else 0.
    * ``SENSOR_days`` (N, T): days since 1899-12-31 of each date, in order of time; 0 for a missing
      date, which is at the end.
    * ``site`` (N, 2): longitude and latitude in degrees; NaN if unknown.

    Args:
        layout: Order of the channels of a window.
        side: Side of a window in pixels.
    """

    def __init__(self, layout: StackLayout, side: int) -> None:
        self.layout = layout
        self.shapes, self.axes = {}, {}
        for sensor in layout.sensors:
            dates, time = sensor.max_dates, [BATCH, 'time']
            for name, shape, axes in (
                (
                    f'{sensor.name}_pixels',
                    (dates, len(sensor.bands), side, side),
                    [*time, 'bands', 'height', 'width'],
                ),
                (f'{sensor.name}_valid', (dates, side, side), [*time, 'height', 'width']),
                (f'{sensor.name}_days', (dates,), time),
            ):
                self.shapes[name], self.axes[name] = shape, axes
        self.shapes[SITE], self.axes[SITE] = (2,), [BATCH, 'coordinates']

    def of_windows(self, windows: np.ndarray) -> Dict[str, np.ndarray]:
        """Return the inputs for a batch of windows, (N, ``layout.input_channels``, S, S)."""
        inputs: Dict[str, np.ndarray] = {}
        for name, channels in self.layout.channels.items():
            inputs[f'{name}_pixels'] = windows[:, channels.pixels]
            inputs[f'{name}_valid'] = windows[:, channels.valid]
            inputs[f'{name}_days'] = windows[:, channels.days].max((2, 3))
        inputs[SITE] = self.layout.site_of(windows)
        return {
            name: np.ascontiguousarray(inputs[name], np.float32).reshape(-1, *shape)
            for name, shape in self.shapes.items()
        }


def inputs_of(description: ExportedDescription) -> FileInputs:
    """Return the inputs of an exported file."""
    layout = layout_of(description.places)
    if layout is None:
        return ImageInputs(description.bands, description.window)
    return StackInputs(layout, description.window)


def layout_of(places: Optional[Mapping[str, Any]]) -> Optional[StackLayout]:
    """Return the order of the channels of a stack, or None for a model of single scenes.

    Args:
        places: As in ``ExportedDescription``.

    Raises:
        StackLayoutError: If its sensors cannot be read.
    """
    return None if places is None else StackLayout.of_config(places['sensors'])
