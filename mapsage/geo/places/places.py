"""Places: which files show one place, by sensor and date.

The files are found by the patterns of the sensors (`find_places`) or named by a list
(`file_lists.py`). `Place.of_images` checks the images of a place and chooses the dates of a sample.
"""

from __future__ import annotations

import datetime
import glob
import os
import re
from dataclasses import dataclass, field
from typing import Dict, Iterable, List, Mapping, Optional, Tuple

from mapsage.base.console import shorten_list
from mapsage.geo import GeoError, acquisition_time, is_gdal_name
from mapsage.geo.sensor_rules import Product

from .dates import ImageDate, parse_date, spread_evenly
from .sensor_files import SensorFiles

# How several files of one day are joined, for messages.
FIRST_TILE_COUNTS = 'at each pixel the first of them by path that has data there counts'

# Largest number of names that a message lists.
_SHOWN = 4


@dataclass(frozen=True)
class DatedImage:
    """An image of a sensor at a date.

    Attributes:
        date: Date in UTC; None for an image without a date, such as a terrain model.
        paths: Path of the file, or of the file of each band.
        mask: Path of the mask of clouds, or None.
        may_be_next_year: As in ``ImageDate``.
        items: What a STAC item says of each file, as ``scene_facts.read_item`` returns it; empty
            without an item. They are no part of the text that identifies cached samples.
    """

    date: Optional[datetime.date]
    paths: Tuple[str, ...]
    mask: Optional[str] = None
    may_be_next_year: bool = False
    items: Tuple[Product, ...] = field(default=(), repr=False, compare=False)

    @property
    def tiles(self) -> Tuple[DatedImage, ...]:
        """The images of this date; several if a sensor has several files of one day."""
        return (self,)


@dataclass(frozen=True)
class TiledImage(DatedImage):
    """Several images of a sensor at one date, such as neighboring tiles that overlap.

    At each pixel the first image that has data there counts. The other attributes are those of the
    first image.

    Attributes:
        others: The images behind the first one, in the order of their paths.
    """

    others: Tuple[DatedImage, ...] = ()

    @property
    def tiles(self) -> Tuple[DatedImage, ...]:
        """The images of this date."""
        first = DatedImage(self.date, self.paths, self.mask, self.may_be_next_year, self.items)
        return (first, *self.others)


@dataclass(frozen=True)
class Place:
    """A place and its images.

    Attributes:
        name: Name of the place.
        images: Images of each sensor in the order of time, at most ``max_dates``; a sensor may
            have none.
        unused: Number of images of each sensor that are not used, because there are more than
            ``max_dates``.
        labels: Path of the labels that a list names, or None.
    """

    name: str
    images: Dict[str, List[DatedImage]]
    unused: Dict[str, int]
    labels: Optional[str] = None

    @classmethod
    def of_images(
        cls,
        name: str,
        images: Iterable[Tuple[str, DatedImage]],
        sensors: Mapping[str, SensorFiles],
        labels: Optional[str] = None,
    ) -> Place:
        """Return a place, with the dates that are used.

        If a sensor has more than ``max_dates`` dates, those are used that are evenly spread over
        the series, the first and the last date included. Several images of one date become one
        ``TiledImage``.

        Args:
            name: Name of the place.
            images: Pairs of the name of a sensor and an image.
            sensors: Settings of the sensors.
            labels: Path of the labels, or None.

        Raises:
            GeoError: If a file is named twice, two images of a sensor have no date, or the name is
                no file name.
        """
        if name in ('', '.', '..') or re.search(r'[/\\\0]', name):
            raise GeoError(
                f'place {name!r}, expected a name without slashes, because maps are '
                'named after places; rename it in the list.'
            )
        by_sensor: Dict[str, List[DatedImage]] = {sensor: [] for sensor in sensors}
        for sensor, image in images:
            by_sensor[sensor].append(image)
        chosen, unused = {}, {}
        for sensor, series in by_sensor.items():
            dated = _join_tiles(name, sensor, series)
            chosen[sensor] = spread_evenly(dated, sensors[sensor].max_dates)
            unused[sensor] = len(dated) - len(chosen[sensor])
        return cls(name, chosen, unused, labels)


def _join_tiles(place: str, sensor: str, images: List[DatedImage]) -> List[DatedImage]:
    """Return the images of a sensor in the order of time, one for each date.

    Raises:
        GeoError: If a file is named twice, or two images have no date, so that they may be of
            different dates.
    """
    by_date: Dict[Optional[datetime.date], List[DatedImage]] = {}
    for image in sorted(images, key=lambda image: (image.date or datetime.date.min, image.paths)):
        by_date.setdefault(image.date, []).append(image)
    for date, tiles in by_date.items():
        for first, second in zip(tiles, tiles[1:]):
            if date is None or first.paths == second.paths:
                raise GeoError(
                    f'place {place!r} has two images of sensor {sensor!r} '
                    f'{"without a date" if date is None else f"at {date}"}: '
                    f'{first.paths[0]} and {second.paths[0]}. Join them (gdalbuildvrt), '
                    'remove one, or make them two sensors.'
                )
    return [
        tiles[0]
        if len(tiles) == 1
        else TiledImage(
            date,
            tiles[0].paths,
            tiles[0].mask,
            any(tile.may_be_next_year for tile in tiles),
            tiles[0].items,
            tuple(tiles[1:]),
        )
        for date, tiles in by_date.items()
    ]


def find_places(root: Optional[str], sensors: Mapping[str, SensorFiles]) -> List[Place]:
    """Return the places that the patterns of the sensors find, in the order of their names.

    Args:
        root: Folder that the patterns are relative to.
        sensors: Settings of the sensors, each with ``scenes``.

    Raises:
        GeoError: If no file is found, a name has an invalid date, a band or mask is missing, or a
            place has two images of a sensor without a date.
    """
    by_place: Dict[str, List[Tuple[str, DatedImage]]] = {}
    for sensor in sensors.values():
        if sensor.scenes is None:
            raise GeoError(
                f'sensor {sensor.name!r} has no scenes, expected a pattern such as '
                f"'{sensor.name}/{{place}}_{{date}}.tif', or places='LIST.csv' of the "
                'dataset.'
            )
        for name, image in _images_of(root, sensor):
            by_place.setdefault(name, []).append((sensor.name, image))
    if not by_place:
        patterns = [sensor.scenes for sensor in sensors.values()]
        raise GeoError(
            f'no file matches {patterns} (data_root={root!r}); expected names such as '
            f'{str(patterns[0]).format(place="field1", date="20240131", band="B02")}.'
        )
    return [Place.of_images(name, images, sensors) for name, images in sorted(by_place.items())]


def _images_of(root: Optional[str], sensor: SensorFiles) -> List[Tuple[str, DatedImage]]:
    """Return the name of the place, and the image, of the files that match a sensor's pattern."""
    pattern = _Pattern(root, str(sensor.scenes))
    images: Dict[Tuple[str, Optional[str]], Dict[str, str]] = {}
    for path, fields in pattern.find():
        files = images.setdefault((fields['place'], fields.get('date')), {})
        band = fields.get('band', '')
        if sensor.has_band_files and band not in map(str, sensor.bands):
            continue
        files[band] = path
    masks: Dict[Tuple[str, Optional[str]], str] = {}
    clouds = sensor.clouds
    if clouds is not None and clouds.mask is not None:
        masks = {
            (fields['place'], fields.get('date')): path
            for path, fields in _Pattern(root, clouds.mask).find()
        }
        if not sensor.has_band_files:
            # The pattern of the images may match the masks, too.
            taken = set(masks.values())
            images = {key: files for key, files in images.items() if files[''] not in taken}
    return [
        (name, _image(sensor, name, text, files, masks))
        for (name, text), files in images.items()
        if files
    ]


def _image(
    sensor: SensorFiles,
    name: str,
    text: Optional[str],
    files: Mapping[str, str],
    masks: Mapping[Tuple[str, Optional[str]], str],
) -> DatedImage:
    path = next(iter(files.values()))
    date = read_date(text or acquisition_time(path), f'{path} of sensor {sensor.name!r}')
    if sensor.has_band_files:
        missing = [str(band) for band in sensor.bands if str(band) not in files]
        if missing:
            raise GeoError(
                f'place {name!r} has {path}, and no file of band(s) '
                f'{", ".join(missing)} of sensor {sensor.name!r} for {text}.'
            )
        paths = tuple(files[str(band)] for band in sensor.bands)
    else:
        paths = (path,)
    mask = masks.get((name, text))
    if sensor.clouds is not None and sensor.clouds.mask is not None and mask is None:
        raise GeoError(
            f'{path} has no mask of clouds: no file matches {sensor.clouds.mask} for '
            f'place {name!r} and {text}. Add it, or leave clouds= out.'
        )
    return DatedImage(
        date.date if date else None, paths, mask, date.may_be_next_year if date else False
    )


def read_date(text: Optional[str], subject: str) -> Optional[ImageDate]:
    """Return the date that a text names, or None for None or an empty text.

    Raises:
        GeoError: If it names none; the message begins with ``subject``.
    """
    if not text:
        return None
    try:
        return parse_date(text)
    except ValueError as error:
        raise GeoError(f'{subject}: {error}') from error


def check_files(paths: Iterable[str], source: str) -> None:
    """Check that the local files of a list exist.

    Raises:
        GeoError: If some are missing.
    """
    missing = [path for path in paths if not os.path.exists(path) and not is_gdal_name(path)]
    if missing:
        raise GeoError(
            f'{source} names {len(missing)} file(s) that do not exist: '
            f'{shorten_list(missing, _SHOWN)}. Paths are relative to the folder of '
            'the list.'
        )


# How a field of a file name is matched exactly, and loosely for an error message.
_FIELDS = dict(
    place=('[^/]+', '[^/]+'),
    date=(
        r'\d{8}(?:T\d{4,6}(?:Z|[+-]\d{4})?)?|\d{4}-\d{2}-\d{2}(?:T[\d:]+(?:Z|[+-]\d{2}:?'
        r'\d{2})?)?',
        '[^/]+?',
    ),
    band=('[A-Za-z0-9]+', '[^/_]+'),
)


class _Pattern:
    """A pattern of file names with ``{place}``, ``{date}`` and ``{band}``.

    Args:
        root: Folder that the pattern is relative to.
        pattern: The pattern; a field may occur several times.

    Raises:
        GeoError: If it has another field.
    """

    def __init__(self, root: Optional[str], pattern: str) -> None:
        self._pattern = os.path.join(root or '', pattern)
        unknown = sorted({*re.findall(r'\{(\w*)\}', pattern)} - set(_FIELDS))
        if unknown:
            raise GeoError(
                f'pattern {pattern!r} has the field(s) {unknown}, expected '
                '{place}, {date} and {band}.'
            )

    def find(self) -> List[Tuple[str, Dict[str, str]]]:
        """Return the files that match, each with the text of its fields, sorted by path."""
        # Brackets in a folder's name are no pattern.
        name = glob.escape(self._pattern.replace('{', '\0').replace('}', '\1'))
        name = re.sub('\0\\w+\1', '*', name)
        strict, loose = self._expression(0), self._expression(1)
        matches = []
        for path in sorted(glob.glob(name)):
            match = strict.fullmatch(path) or loose.fullmatch(path)
            if match is not None:
                matches.append((path, match.groupdict()))
        return matches

    def _expression(self, kind: int) -> re.Pattern[str]:
        pieces = re.split(r'\{(\w*)\}', self._pattern)
        text, seen = '', set()
        for number, piece in enumerate(pieces):
            if number % 2 == 0:
                text += re.escape(piece)
            elif piece in seen:
                text += f'(?P={piece})'
            else:
                seen.add(piece)
                text += f'(?P<{piece}>{_FIELDS[piece][kind]})'
        return re.compile(text)
