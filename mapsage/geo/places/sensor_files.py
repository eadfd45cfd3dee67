"""Settings of a sensor: where its files are, which bands are read, which pixels are clouded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, Mapping, Optional, Tuple, Union

from mapsage.geo import GeoError
from mapsage.geo.scene_facts import STORED, UNITS
from mapsage.geo.stacks import StackLayout

Band = Union[int, str]

_KEYS = ('scenes', 'bands', 'max_dates', 'clouds', 'units')
_CLOUD_KEYS = ('mask', 'band', 'clear')


@dataclass(frozen=True)
class Clouds:
    """Which pixels of an image are clouded, by a raster of classes such as Sentinel-2's SCL.

    Attributes:
        mask: Pattern of the names of mask files, or the name of an asset in a STAC item; None if
            ``band`` is set, or a list of files names the masks.
        band: Number, or description, of the band of classes in the image's file, or None.
        clear: Values of pixels without clouds. Pixels with other values, and those where the mask
            has no data, are invalid.
    """

    mask: Optional[str]
    band: Optional[Band]
    clear: Tuple[int, ...]


@dataclass(frozen=True)
class SensorFiles:
    """Settings of a sensor.

    Attributes:
        name: Name of the sensor.
        scenes: Pattern of the names of its files, such as ``'s2/{place}_{date}.tif'``; None if a
            list names them.
        bands: Numbers, counted from 1, or descriptions of the bands that are read.
        max_dates: Largest number of dates in a sample.
        clouds: Pixels that are clouded, or None.
        units: Unit of the values, one of ``scene_facts.UNITS``.
    """

    name: str
    scenes: Optional[str]
    bands: Tuple[Band, ...]
    max_dates: int
    clouds: Optional[Clouds]
    units: str = STORED

    @property
    def has_band_files(self) -> bool:
        """Whether every band is a separate file."""
        return self.scenes is not None and '{band}' in self.scenes


def read_sensors(
    sensors: Mapping[str, Mapping[str, Any]], units: str = STORED
) -> Dict[str, SensorFiles]:
    """Return the settings of the sensors of a config, by name and in the order of their names.

    Args:
        sensors: ``sensors`` of ``SceneStackDataset``.
        units: Unit of the sensors that have no ``units``.

    Raises:
        GeoError: If a setting is unknown, missing or of the wrong kind.
        StackLayoutError: If there is no sensor, or one has no band or no date.
    """
    StackLayout.of_config(sensors)
    return {name: _read_sensor(name, sensor, units) for name, sensor in sorted(sensors.items())}


def _read_sensor(name: str, sensor: Mapping[str, Any], units: str) -> SensorFiles:
    _check_keys(f'sensor {name!r}', sensor, _KEYS)
    scenes = sensor.get('scenes')
    if scenes is not None and (not isinstance(scenes, str) or '{place}' not in scenes):
        raise GeoError(
            f'sensor {name!r} has scenes={scenes!r}, expected a pattern with {{place}} '
            f"and {{date}}, such as '{name}/{{place}}_{{date}}.tif'."
        )
    bands = tuple(_band(name, band) for band in sensor['bands'])
    units = sensor.get('units', units)
    if units not in UNITS:
        raise GeoError(f'sensor {name!r} has units={units!r}, expected one of {", ".join(UNITS)}.')
    files = SensorFiles(
        name,
        scenes,
        bands,
        sensor.get('max_dates', 1),
        _read_clouds(name, sensor.get('clouds')),
        units,
    )
    if files.has_band_files and files.clouds is not None and files.clouds.band is not None:
        raise GeoError(
            f'sensor {name!r} has a file for each band and clouds=dict(band=...); name '
            'the file of the classes as clouds=dict(mask=PATTERN, clear=[...]).'
        )
    return files


def _read_clouds(name: str, clouds: Optional[Mapping[str, Any]]) -> Optional[Clouds]:
    if clouds is None:
        return None
    _check_keys(f'clouds of sensor {name!r}', clouds, _CLOUD_KEYS)
    mask, band, clear = clouds.get('mask'), clouds.get('band'), clouds.get('clear')
    if (
        (mask is not None and band is not None)
        or not isinstance(clear, (list, tuple))
        or not all(isinstance(value, int) for value in clear)
        or not clear
    ):
        raise GeoError(
            f'sensor {name!r} has clouds={dict(clouds)!r}, expected dict(mask=PATTERN, '
            'clear=[VALUES]) for files of classes, or dict(band=NUMBER, '
            "clear=[VALUES]) for a band of classes in the image's file."
        )
    return Clouds(mask, None if band is None else _band(name, band), tuple(clear))


def _band(name: str, band: object) -> Band:
    if isinstance(band, str) or (isinstance(band, int) and band >= 1):
        return band
    raise GeoError(
        f'sensor {name!r} has the band {band!r}, expected a number from 1 on or the '
        "description of a band, such as 'B02'."
    )


def _check_keys(subject: str, config: Mapping[str, Any], known: Tuple[str, ...]) -> None:
    unknown = sorted(set(config) - set(known))
    if unknown:
        raise GeoError(f'{subject} has no setting {", ".join(unknown)}; it has {", ".join(known)}.')
