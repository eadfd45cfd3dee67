"""Which channel of a stack's tensor holds which band of which sensor and date.

Transforms, samplers, slide inference and exported graphs all handle images (C, H, W). So a stack is
one image, too: its pixels, and behind them planes that say which pixels are valid, when they were
taken and where. Only this module knows the order.

Channels of the model's input, for sensors s = 1..S with T_s dates of C_s bands:
    pixels  sum(T_s * C_s)  sensor by sensor, date by date, band by band
    valid   sum(T_s)        1 where a pixel of that sensor and date has data, else 0
    days    sum(T_s)        day number of the date (`dates.py`), equal at every pixel; 0: no date
    site    2               longitude + 360 and latitude + 180 of the window's center in degrees;
                            both 0 if unknown

The loading transforms write `pixels` and `valid` (the image); `StackDataPreProcessor` adds the
rest, which flips and crops do not change. Dates of a sensor are in order of time, missing dates at
the end.
"""

from __future__ import annotations

import math
import re
from typing import (
    TYPE_CHECKING,
    Any,
    Dict,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
)

import numpy as np

from mapsage.base.errors import UserError

if TYPE_CHECKING:
    import torch

_LONGITUDE_OFFSET, _LATITUDE_OFFSET = 360.0, 180.0


def canonical_band(band: str) -> str:
    """Return a band's name in capitals, without zeros before its number."""
    return re.sub(r'^B0+(?=\d)', 'B', band.upper())


class StackLayoutError(UserError, ValueError):
    """A description of sensors, or a tensor, that does not fit a stack."""


class SensorLayout(NamedTuple):
    """Bands and dates of a sensor.

    Attributes:
        name: Name of the sensor, as in the dataset's ``sensors``.
        bands: Names of the bands, in the order of the channels.
        max_dates: Number of dates that a sample holds; missing ones count.
    """

    name: str
    bands: Tuple[str, ...]
    max_dates: int


class SensorChannels(NamedTuple):
    """Channels of a sensor in the model's input.

    Attributes:
        pixels: Bands of all dates, date by date.
        valid: Valid pixels of the dates.
        days: Day numbers of the dates.
    """

    pixels: slice
    valid: slice
    days: slice


class SensorImages(NamedTuple):
    """Images of a sensor.

    Attributes:
        pixels: float (N, T, C, H, W).
        valid: bool (N, T, H, W), False where a pixel has no data.
        days: float32 (N, T), day numbers (`dates.py`); 0 for a missing date.
    """

    pixels: torch.Tensor
    valid: torch.Tensor
    days: torch.Tensor


class SceneStack(NamedTuple):
    """A batch of stacks.

    Attributes:
        sensors: Images by the name of their sensor.
        longitude: float32 (N,), degrees; NaN if unknown.
        latitude: float32 (N,), degrees; NaN if unknown.
    """

    sensors: Dict[str, SensorImages]
    longitude: torch.Tensor
    latitude: torch.Tensor


class StackLayout:
    """Order of the channels of a stack.

    Args:
        sensors: Sensors in the order of their channels.

    Raises:
        StackLayoutError: If there is no sensor, two have one name, or one has no band or no date.
    """

    def __init__(self, sensors: Sequence[SensorLayout]) -> None:
        self.sensors = tuple(sensors)
        names = [sensor.name for sensor in self.sensors]
        if not names or len(set(names)) < len(names):
            raise StackLayoutError(f'sensors {names}, expected at least one, with different names.')
        for sensor in self.sensors:
            if not sensor.bands or sensor.max_dates < 1:
                raise StackLayoutError(
                    f'sensor {sensor.name!r} with bands={list(sensor.bands)} and max_dates='
                    f'{sensor.max_dates}, expected at least one band and one date.'
                )

    @classmethod
    def of_config(cls, sensors: Mapping[str, Mapping[str, Any]]) -> StackLayout:
        """Return the layout of a config's ``sensors``, in the order of their names.

        The order in the config does not count, because MMEngine sorts the keys of a config that it
        writes into a work dir.

        Args:
            sensors: ``bands`` (a list of names or numbers) and ``max_dates`` (default 1) of each
                sensor by its name; other keys are the dataset's.

        Raises:
            StackLayoutError: If a sensor has no ``bands``, or as for the constructor.
        """
        layouts = []
        if not isinstance(sensors, Mapping):
            raise StackLayoutError(
                f"sensors={sensors!r}, expected settings by the sensor's name, "
                'such as sensors=dict(s2=dict(bands=[1, 2, 3])).'
            )
        for name, sensor in sorted(sensors.items()):
            if not isinstance(sensor, Mapping):
                raise StackLayoutError(
                    f'sensor {name!r} is {sensor!r}, expected its settings, '
                    'such as dict(bands=[1, 2, 3]).'
                )
            if 'bands' not in sensor:
                raise StackLayoutError(
                    f'sensor {name!r} has the keys {sorted(sensor)}, expected '
                    "bands, such as bands=['B02', 'B03', 'B04']."
                )
            bands, max_dates = sensor['bands'], sensor.get('max_dates', 1)
            if not isinstance(bands, (list, tuple)) or not isinstance(max_dates, int):
                raise StackLayoutError(
                    f'sensor {name!r} has bands={bands!r} and max_dates={max_dates!r}, expected a '
                    'list of bands and a whole number.'
                )
            layouts.append(SensorLayout(name, tuple(map(str, bands)), max_dates))
        return cls(layouts)

    @property
    def dates(self) -> int:
        """Number of dates of all sensors."""
        return sum(sensor.max_dates for sensor in self.sensors)

    @property
    def pixel_channels(self) -> int:
        """Number of channels that hold pixels."""
        return sum(sensor.max_dates * len(sensor.bands) for sensor in self.sensors)

    @property
    def image_channels(self) -> int:
        """Number of channels of the image that the loading transforms make: pixels and valid."""
        return self.pixel_channels + self.dates

    @property
    def input_channels(self) -> int:
        """Number of channels of the model's input."""
        return self.image_channels + self.dates + 2

    @property
    def channels(self) -> Dict[str, SensorChannels]:
        """Channels of the model's input by the name of the sensor; the last two are the site."""
        channels: Dict[str, SensorChannels] = {}
        pixel, date = 0, self.pixel_channels
        for sensor in self.sensors:
            dates, pixels = sensor.max_dates, sensor.max_dates * len(sensor.bands)
            channels[sensor.name] = SensorChannels(
                slice(pixel, pixel + pixels),
                slice(date, date + dates),
                slice(date + self.dates, date + self.dates + dates),
            )
            pixel, date = pixel + pixels, date + dates
        return channels

    def per_channel(self, values: Mapping[str, Sequence[float]]) -> List[float]:
        """Return a value for every channel of pixels, from a value for each band of each sensor.

        Raises:
            StackLayoutError: If a sensor lacks values, or has another number of them than bands.
        """
        if set(values) != {sensor.name for sensor in self.sensors}:
            raise StackLayoutError(
                f'values of the sensors {sorted(values)}, expected those of '
                f'{[sensor.name for sensor in self.sensors]}.'
            )
        channels: List[float] = []
        for sensor in self.sensors:
            numbers = list(values[sensor.name])
            if len(numbers) != len(sensor.bands):
                raise StackLayoutError(
                    f'{len(numbers)} values of sensor {sensor.name!r}, expected '
                    f'{len(sensor.bands)}, one for each of {sensor.bands}.'
                )
            channels += numbers * sensor.max_dates
        return channels

    def append_planes(
        self, image: np.ndarray, days: Sequence[int], site: Tuple[float, float]
    ) -> np.ndarray:
        """Return the model's input of one stack: its image with planes of days and site behind it.

        Args:
            image: (image_channels, H, W).
            days: Day numbers of all sensors' dates; 0 for a missing date.
            site: Longitude and latitude in degrees; NaN if unknown.

        Returns:
            (input_channels, H, W), float32.
        """
        known = not any(math.isnan(angle) for angle in site)
        angles = site[0] + _LONGITUDE_OFFSET, site[1] + _LATITUDE_OFFSET
        facts = [*days, *(angles if known else (0.0, 0.0))]
        planes = np.array(facts, np.float32)[:, None, None]
        return np.concatenate(
            [
                image.astype(np.float32, copy=False),
                np.broadcast_to(planes, (len(planes), *image.shape[1:])),
            ]
        )

    def site_of(self, inputs: np.ndarray) -> np.ndarray:
        """Return longitude and latitude in degrees of stacks, float32 (N, 2); NaN if unknown.

        Args:
            inputs: (N, input_channels, H, W).
        """
        planes = inputs[:, -2:].max((2, 3))
        offsets = np.array([_LONGITUDE_OFFSET, _LATITUDE_OFFSET], np.float32)
        return np.where(planes > 0, planes - offsets, np.float32('nan'))

    def add_planes(
        self, images: torch.Tensor, days: torch.Tensor, site: Optional[torch.Tensor] = None
    ) -> torch.Tensor:
        """Return the model's input: images with planes of days and site behind them.

        Args:
            images: (N, image_channels, H, W).
            days: Day numbers of all sensors' dates, (N, dates); 0 for a missing date.
            site: Longitude and latitude in degrees, (N, 2); NaN, or None, if unknown.

        Returns:
            (N, input_channels, H, W), float32.
        """
        import torch

        count, channels, height, width = images.shape
        if channels != self.image_channels or tuple(days.shape) != (count, self.dates):
            raise StackLayoutError(
                f'images {tuple(images.shape)} and days {tuple(days.shape)}, expected (N, '
                f'{self.image_channels}, H, W) and (N, {self.dates}).'
            )
        # 16 bits would round days and degrees.
        images = images.float()
        offsets = images.new_tensor([_LONGITUDE_OFFSET, _LATITUDE_OFFSET])
        if site is None:
            planes = images.new_zeros(count, 2)
        else:
            site = site.to(images)
            planes = torch.where(torch.isnan(site), torch.zeros_like(site), site + offsets)
        facts = torch.cat([days.to(images), planes], 1)
        return torch.cat([images, facts[:, :, None, None].expand(-1, -1, height, width)], 1)

    def split(self, inputs: torch.Tensor) -> SceneStack:
        """Return the stacks that the model's input holds.

        Day and site are read as the largest value of their plane, so that padding with 0 changes
        nothing.

        Args:
            inputs: (N, input_channels, H, W).

        Raises:
            StackLayoutError: If the number of channels differs.
        """
        import torch

        if inputs.dim() != 4 or inputs.shape[1] != self.input_channels:
            raise StackLayoutError(
                f'inputs {tuple(inputs.shape)}, expected (N, {self.input_channels}, H, W) for '
                f'{self}. data_preprocessor and backbone need the same sensors.'
            )
        count, _, height, width = inputs.shape
        sensors: Dict[str, SensorImages] = {}
        for sensor, channels in zip(self.sensors, self.channels.values()):
            sensors[sensor.name] = SensorImages(
                inputs[:, channels.pixels].reshape(
                    count, sensor.max_dates, len(sensor.bands), height, width
                ),
                # Interpolation mixes valid with other pixels, which then count as missing.
                inputs[:, channels.valid] > 0.999,
                # Planes are constant but for padding, which is 0.
                inputs[:, channels.days].amax((2, 3)),
            )
        site = inputs[:, -2:].amax((2, 3))
        unknown = torch.full_like(site[:, 0], float('nan'))
        return SceneStack(
            sensors,
            torch.where(site[:, 0] > 0, site[:, 0] - _LONGITUDE_OFFSET, unknown),
            torch.where(site[:, 1] > 0, site[:, 1] - _LATITUDE_OFFSET, unknown),
        )

    def __repr__(self) -> str:
        return (
            'StackLayout('
            + ', '.join(
                f'{sensor.name}: {sensor.max_dates} dates of {len(sensor.bands)} bands'
                for sensor in self.sensors
            )
            + ')'
        )
