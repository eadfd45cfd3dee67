"""Sensors that an encoder was trained with: their bands in published order, units and statistics.

A config names sensors and bands as its dataset does. :func:`match_sensors` finds the encoder's
sensor for each of them, and the position of each published band among the config's bands.
"""

from __future__ import annotations

from typing import Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import torch

from mapsage.base.errors import UserError
from mapsage.geo.stacks import SensorLayout, StackLayout, canonical_band
from mapsage.models.backbones.pixels import BackboneInputError

# Units of pixel values.
REFLECTANCE = 'reflectance x 10000, or digital numbers of this size'
DECIBEL = 'backscatter in decibel'
BYTES = '8-bit values in 0..255'
OTHER = 'values in the unit of the given statistics'

# Corrections of the atmosphere give dark pixels reflectances a little below 0.
_SMALLEST_REFLECTANCE = -0.5

# Other names of Sentinel-2's bands, as TerraTorch has them.
SENTINEL2_ALIASES = {
    'COASTAL_AEROSOL': 'B1',
    'COASTAL': 'B1',
    'BLUE': 'B2',
    'GREEN': 'B3',
    'RED': 'B4',
    'RED_EDGE_1': 'B5',
    'RED_EDGE_2': 'B6',
    'RED_EDGE_3': 'B7',
    'NIR_BROAD': 'B8',
    'NIR': 'B8',
    'NIR_NARROW': 'B8A',
    'WATER_VAPOR': 'B9',
    'CIRRUS': 'B10',
    'SWIR_1': 'B11',
    'SWIR_2': 'B12',
}


class EarthSensorError(UserError, ValueError):
    """Sensors or bands of a config that an encoder does not know."""

    on_every_rank = True


class PublishedSensor(NamedTuple):
    """A sensor as an encoder's authors describe it.

    Attributes:
        bands: Names of the bands in the order of the weights.
        mean: Mean of each band, in ``unit``.
        std: Standard deviation of each band, in ``unit``.
        unit: Unit of the pixel values, one of this module's constants.
        aliases: Other names of bands, in capitals, and the names that they stand for.
        wavelengths: Wavelength of each band in micrometers; empty if the encoder needs none.
    """

    bands: Tuple[str, ...]
    mean: Tuple[float, ...]
    std: Tuple[float, ...]
    unit: str
    aliases: Mapping[str, str] = {}
    wavelengths: Tuple[float, ...] = ()


class MatchedSensor(NamedTuple):
    """A sensor of a config and the published sensor that it is.

    Attributes:
        layout: Bands and dates of the config.
        published_name: Name of the encoder's sensor.
        published: Description of the encoder's sensor.
        positions: Position of each published band among the config's bands; None if it is missing.
    """

    layout: SensorLayout
    published_name: str
    published: PublishedSensor
    positions: Tuple[Optional[int], ...]


def match_sensors(
    layout: StackLayout,
    published: Mapping[str, PublishedSensor],
    aliases: Mapping[str, str],
    modalities: Optional[Mapping[str, str]],
    encoder: str,
) -> List[MatchedSensor]:
    """Return the published sensor of each sensor of a config.

    Args:
        layout: Sensors of the config.
        published: Sensors of the encoder by name.
        aliases: Usual names of sensors in configs and the published names that they stand for.
        modalities: Published name by the config's name, for sensors with other names; None for no
            such sensor.
        encoder: Name of the encoder, for messages.

    Raises:
        EarthSensorError: If a sensor or a band is unknown to the encoder, or two sensors of the
            config are the same one.
    """
    named = dict(modalities or {})
    names = [sensor.name for sensor in layout.sensors]
    if not set(named) <= set(names):
        raise EarthSensorError(
            f"modalities={named} names sensors that are not among the config's {names}."
        )
    matched: Dict[str, MatchedSensor] = {}
    for sensor in layout.sensors:
        name = named.get(sensor.name, aliases.get(plain_name(sensor.name), sensor.name))
        if name not in published:
            raise EarthSensorError(
                f'sensor {sensor.name!r}: {encoder} knows {sorted(published)}. Say which of them '
                f'it is: modalities=dict({sensor.name}={sorted(published)[0]!r}).'
            )
        if name in matched:
            raise EarthSensorError(
                f'sensors {matched[name].layout.name!r} and {sensor.name!r} are '
                f'both {name} of {encoder}, expected one. Give them as dates of '
                'one sensor.'
            )
        positions = find_bands(sensor, published[name], name, encoder)
        matched[name] = MatchedSensor(sensor, name, published[name], positions)
    return list(matched.values())


def find_bands(
    sensor: SensorLayout, published: PublishedSensor, name: str, encoder: str
) -> Tuple[Optional[int], ...]:
    """Return the position of each published band among a sensor's bands; None for a missing one.

    'B2', 'B02' and 'b2' are the same band.

    Args:
        sensor: Sensor of the config.
        published: Sensor of the encoder.
        name: Name of the encoder's sensor, for messages.
        encoder: Name of the encoder, for messages.

    Raises:
        EarthSensorError: If the sensor has a band that is not published, or has one twice.
    """
    known = [canonical_band(band) for band in published.bands]
    present = [published.aliases.get(band, band) for band in map(canonical_band, sensor.bands)]
    unknown = [band for band, canonical in zip(sensor.bands, present) if canonical not in known]
    if unknown or len(set(present)) < len(present):
        raise EarthSensorError(
            f'sensor {sensor.name!r} has the bands {list(sensor.bands)}, '
            + (f'of which {encoder} does not know {unknown}' if unknown else 'two of them the same')
            + f'; expected some of the bands of {name}, {list(published.bands)}, in any order.'
        )
    return tuple(present.index(canonical) if canonical in present else None for canonical in known)


def plain_name(name: str) -> str:
    """Return a sensor's name in small letters, without separators."""
    return name.lower().replace('-', '').replace('_', '').replace(' ', '')


class UnitCheck:
    """Checks the unit of the pixels in the first batch that has some.

    Reading values waits for the device, so later batches are not checked.

    Args:
        name: Name of the encoder, for messages.
        sensors: Sensors of the config.
    """

    def __init__(self, name: str, sensors: Sequence[MatchedSensor]) -> None:
        self.name = name
        self._units = {
            sensor.layout.name: sensor.published.unit
            for sensor in sensors
            if sensor.published.unit != OTHER
        }

    def __call__(self, images: Mapping[str, Tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Check sensors that were not checked before and have valid pixels in this batch.

        Args:
            images: Pixels, float (N, T, C, H, W), and their validity, bool (N, T, H, W), by the
                name of the sensor.

        Raises:
            BackboneInputError: If the values cannot have the sensor's unit.
        """
        for name, unit in list(self._units.items()):
            pixels, valid = images[name]
            used = torch.where(valid[:, :, None], pixels.detach(), torch.zeros_like(pixels))
            low, high = torch.stack([used.min(), used.max()]).tolist()
            if low or high:
                self._check(name, unit, low, high)
                del self._units[name]

    def _check(self, name: str, unit: str, low: float, high: float) -> None:
        values = f'sensor {name!r}: values from {low:.4g} to {high:.4g}, but {self.name} expects '
        if unit == REFLECTANCE and high <= 100:
            is_reflectance = low >= _SMALLEST_REFLECTANCE and high <= 2
            looks = (
                'They look like reflectance in 0..1: multiply them by 10000'
                if is_reflectance
                else 'If they are normalized, take mean and std out of the data preprocessor'
            )
            raise BackboneInputError(f'{values}{unit}. {looks}; {self.name} normalizes them.')
        if unit == DECIBEL and low >= 0:
            raise BackboneInputError(
                f'{values}{unit}, which is mostly negative. If they are linear, convert them: '
                '10 * log10(value).'
            )
        if unit == BYTES and (low < 0 or high > 255 or high <= 1):
            raise BackboneInputError(
                f'{values}{unit}. Scale them, or give mean and std of each band in the unit of '
                'the images: mean=dict(...), std=dict(...).'
            )
