"""What the pixels of a scene are: size, bands, unit, sensor, day; and scenes read in one unit.

:func:`open_scene` is how training and maps open a scene: bands in the order of their names, values in
the unit that a user chose. Facts come from the file, its STAC item and its
name; `sensor_rules.py` has what only single sensors need, `passport.py` compares scenes.

Units:
    stored       values as they are in the file
    reflectance  stored * scale + offset, float32
    harmonized   stored values without the 1,000 that newer baselines of Sentinel-2 add
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import (
    Any,
    Dict,
    Iterable,
    Iterator,
    List,
    Mapping,
    Optional,
    Sequence,
    Tuple,
)

import numpy as np

from mapsage.base.console import shorten_list
from mapsage.base.files import parse_json

from . import sensor_rules
from .ellipsoid import pixel_side
from .errors import GeoError, PathName
from .raster import Conversion, Raster, Unit
from .sensor_rules import Product
from .statistics import spread_square

STORED, REFLECTANCE, HARMONIZED = UNITS = ('stored', 'reflectance', 'harmonized')

# Shares of the valid pixels below the quantiles of a band.
QUANTILES = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.95, 0.99)
# Squares of a scene from which quantiles are taken, and their side in pixels.
_SQUARES, _SIDE = 16, 64
# Names that programs write for bands whose content they do not know.
_NO_NAME = re.compile(r'(?:band|layer|channel|gray|undefined|index)?[\s_#]*\d*', re.IGNORECASE)
_COLORS = {'red', 'green', 'blue'}
# Largest number of characters of an item that are read, and of files that a text names.
_LONGEST_ITEM, _SHOWN = 4 << 20, 3


@dataclass(frozen=True)
class SceneFacts:
    """Facts of a scene; None for what nothing says.

    Attributes:
        path: Path of the file.
        pixel: Side of a pixel in meters on the ground.
        names: Name of each band that is read; empty if a band has none, or two have one name.
        dtype: Data type in the file.
        units: Unit of each band's values as they are read; None if it is not known.
        sensor, level, baseline: As in ``sensor_rules.Product``.
        day: Day as YYYYMMDD.
        doubts: Sentences on statements that contradict each other or cannot be used.
        read_as: The one of :data:`UNITS` in which values are read.
        reordered: Whether the bands are read in the order of their names, which is not the file's.
    """

    path: str
    pixel: Optional[float]
    names: Tuple[str, ...]
    dtype: str
    units: Optional[Tuple[Unit, ...]]
    sensor: Optional[str]
    level: Optional[str]
    baseline: Optional[str]
    day: Optional[str]
    doubts: Tuple[str, ...] = ()
    read_as: str = STORED
    reordered: bool = False

    @property
    def unit_text(self) -> str:
        """The unit of the first band, and the baseline."""
        baseline = f' (baseline {self.baseline})' * bool(self.baseline)
        return f'{self.units[0] if self.units else "no unit"}{baseline}'


# Facts of a scene, and quantiles of its values as the model sees them (`sample_quantiles`).
Sampled = Tuple[SceneFacts, np.ndarray]


def open_scene(
    path: PathName,
    bands: Optional[Sequence[int]] = None,
    names: Sequence[str] = (),
    units: str = STORED,
    keep_open: bool = False,
    item: Optional[Product] = None,
    strict: bool = False,
) -> Raster:
    """Open a scene with its bands in a given order of names, and its values in a unit.

    Args:
        path: Path of a file that GDAL reads.
        bands: Band numbers, as in ``Raster``.
        names: Names of the bands in the order in which they are read; empty for the order of
            ``bands``. A file that does not name its bands is read in that order, too.
        units: One of :data:`UNITS`.
        keep_open: As in ``Raster``.
        item: What a STAC item says (:func:`read_item`); default: the JSON file of the same name.
        strict: Whether a band that the file lacks by its names is an error.

    Returns:
        The raster; its ``scene`` has the facts.

    Raises:
        GeoError: If the file cannot be opened, lacks a band, or its unit is not known.
    """
    if units not in UNITS:
        raise GeoError(f'units={units!r}, expected one of {", ".join(UNITS)}.')
    raster = Raster(path, bands, keep_open=True)
    try:
        facts, numbers = _facts(raster, item, raster.bands), raster.bands
        if names and facts.names != tuple(names):
            numbers = _find_bands(raster, facts, names, strict) or numbers
            facts = _facts(raster, item, numbers)
        facts, conversion = convert(replace(facts, reordered=numbers != raster.bands), units)
    finally:
        if not keep_open:
            raster.close()
    if facts.reordered or conversion is not None:
        raster = Raster(path, numbers, keep_open, conversion)
    raster.scene = facts
    return raster


def open_scenes(
    paths: Iterable[PathName],
    bands: Optional[Sequence[int]],
    names: Sequence[str],
    units: str,
    **arguments: Any,
) -> Iterator[Raster]:
    """Open scenes as :func:`open_scene` does; the default of ``names`` are the first scene's."""
    for path in paths:
        scene = open_scene(path, bands, names, units, **arguments)
        names = names or facts_of(scene).names
        yield scene


def facts_of(raster: Raster) -> SceneFacts:
    """Return the facts of an opened raster."""
    return raster.scene or _facts(raster, None, raster.bands)


def images_by_sensor(rasters: Iterable[Raster]) -> Dict[str, List[Raster]]:
    """Return the images of which rasters consist by the names of their sensors, as ``images``."""
    images: Dict[str, List[Raster]] = {}
    for raster in rasters:
        for sensor, image in raster.images():
            images.setdefault(sensor, []).append(image)
    return images


def _facts(raster: Raster, item: Optional[Product], bands: Tuple[int, ...]) -> SceneFacts:
    header = raster.header
    # The first that says something counts.
    sources = (
        item or _item_beside(raster.path),
        Product(baseline=header.tags.get('PROCESSING_BASELINE')),
        sensor_rules.read_name(os.path.abspath(raster.path)),
    )
    product = Product._make(next(filter(None, said), said[0]) for said in zip(*sources))
    sensor, level, baseline = product[:3]
    rule = None if product.applied else sensor_rules.physical_units(sensor, level, baseline)
    doubts: List[str] = []
    origin = ''
    units: Tuple[Unit, ...] = ()
    for source, stated in (
        ('its tags', [*zip(header.scales, header.offsets)]),
        ('its STAC item', product.units),
        (f'{sensor} {baseline or level}', [rule] * len(header.scales) if rule else ()),
    ):
        others = _units(stated, raster, bands, doubts)
        if not are_close(others, units):
            doubts.append(
                f'{raster.path}: {origin} state {units[0]}, and {source} {others[0]}; '
                f'the first counts'
            )
        if not units:
            origin, units = source, others
    side = pixel_side(raster)
    return SceneFacts(
        raster.path,
        side if side > 0 else None,
        _names(raster, bands, product.names),
        str(raster.dtype),
        units or None,
        *product[:4],
        tuple(doubts),
    )


def _names(
    raster: Raster, numbers: Sequence[int], otherwise: Sequence[Optional[str]] = ()
) -> Tuple[str, ...]:
    names: Sequence[Optional[str]] = raster.header.descriptions
    if not any(names):
        colors = raster.header.colors
        if set(colors) - {'alpha'} == _COLORS:
            names = colors
        elif len(otherwise) == len(names):
            names = otherwise
    chosen = [str(names[number - 1] or '').strip() for number in numbers]
    is_named = len({name.lower() for name in chosen}) == len(chosen)
    return tuple(chosen) if is_named and not any(map(_NO_NAME.fullmatch, chosen)) else ()


def _find_bands(
    raster: Raster, facts: SceneFacts, names: Sequence[str], strict: bool
) -> Optional[Tuple[int, ...]]:
    """Return the bands of a file with the given names; None to read them in their order."""
    numbers = [number + 1 for number, kind in enumerate(raster.header.colors) if kind != 'alpha']
    existing = _names(raster, numbers)
    by_name = dict(zip(sensor_rules.common_names(facts.sensor, existing), numbers))
    keys = sensor_rules.common_names(facts.sensor, names)
    missing = [name for name, key in zip(names, keys) if key not in by_name]
    if not missing:
        return tuple(by_name[key] for key in keys)
    if strict and len(missing) < len(names):
        raise GeoError(
            f'{raster.path} has no band {", ".join(missing)}, and the model takes '
            f'{", ".join(names)}; its bands are {", ".join(existing)}. Give a scene with these '
            f'bands, or name its bands by number if they are the same (--bands).'
        )
    return None


def convert(facts: SceneFacts, units: str) -> Tuple[SceneFacts, Optional[Conversion]]:
    """Return the facts of a scene that is read in a unit, and the conversion of its stored values.

    Raises:
        GeoError: If the unit of the stored values is needed and not known.
    """
    read, conversion = facts.units or (), None
    if units == HARMONIZED:
        shifts = [sensor_rules.shift_of(*unit) for unit in read]
        if any(shifts):
            conversion = Conversion(tuple(Unit(1.0, -shift) for shift in shifts), True)
        read = tuple(
            unit._replace(offset=0.0) if shift else unit for unit, shift in zip(read, shifts)
        )
    elif units == REFLECTANCE:
        if not (read or facts.dtype.startswith('float')):
            raise GeoError(
                f"units='reflectance' needs scale and offset, and nothing states those of "
                f'{facts.path} ({facts.dtype}): neither its tags, a STAC item beside it, nor its '
                f"name. Set them (gdal_edit.py -scale 0.0001 -offset 0), or use units='stored'."
            )
        # Values with a fraction and no scale are physical already.
        physical = (Unit(1.0, 0.0),) * max(1, len(read))
        if read or facts.dtype != 'float32':
            conversion = Conversion(read or physical)
        read = physical
    return replace(facts, read_as=units, units=read or None), conversion


def check_one_unit(scenes: Iterable[SceneFacts]) -> None:
    """Check that the values of scenes have one unit, as far as it is known.

    Raises:
        GeoError: If scale or offset differ.
    """
    known = [(facts, facts.units) for facts in scenes if facts.units]
    for facts, units in known:
        if not are_close(units, known[0][1]):
            raise GeoError(
                f'{known[0][0].path} has {known[0][0].unit_text}, and {facts.path} {facts.unit_text}, so '
                f"the same ground has other values in them. Set units='reflectance' to apply scale "
                f"and offset, or units='harmonized' to take the offset off that newer baselines of "
                f'Sentinel-2 add (now units={facts.read_as!r}).'
            )


def describe_reading(rasters: Sequence[Raster]) -> Iterator[str]:
    """Yield what was applied to how many files, and which are read in another order of bands."""
    units = facts_of(rasters[0]).read_as
    if units != STORED:
        counts = Counter(str(raster.conversion) for raster in rasters if raster.conversion)
        applied = ', '.join(f'{text} in {count}' for text, count in counts.items()) or 'nothing'
        yield f'units={units!r}: {applied} of {len(rasters)} file(s)'
    scenes = [*map(facts_of, rasters)]
    unnamed = [facts.path for facts in scenes if not facts.names]
    if 0 < len(unnamed) < len(scenes):
        yield f'{shorten_list(unnamed, _SHOWN)}: bands without names are read in their order'
    moved = [facts for facts in scenes if facts.reordered]
    if moved:
        paths = shorten_list([facts.path for facts in moved], _SHOWN)
        yield f'{paths}: bands are read in the order {", ".join(moved[0].names)}, by their names'


def are_close(first: Sequence[Unit], second: Sequence[Unit]) -> bool:
    """Return whether units are equal, as far as both know the bands."""
    return all(
        math.isclose(*numbers, rel_tol=1e-5, abs_tol=1e-9)
        for pair in zip(first, second)
        for numbers in zip(*pair)
    )


def sample_quantiles(raster: Raster) -> np.ndarray:
    """Return quantiles of the values of valid pixels, from 16 squares of 64 pixels.

    Args:
        raster: Opened scene, whose ``read`` returns the bands in the model's unit.

    Returns:
        float64 (bands, quantiles); NaN if no sampled pixel has data.
    """
    shape = raster.height, raster.width
    # Squares of a small scene coincide.
    boxes = {spread_square(number, shape, _SIDE) for number in range(_SQUARES)}
    pixels = [values[:, valid] for values, valid in (raster.read(*box) for box in boxes)]
    joined = np.concatenate(pixels, 1).astype(np.float64)
    finite = joined[:, np.isfinite(joined).all(0)]
    if not finite.size:
        return np.full((len(joined), len(QUANTILES)), np.nan)
    return np.quantile(finite, QUANTILES, axis=1).T


def read_item(
    properties: Mapping[str, Any], assets: Iterable[object], collection: object = None
) -> Product:
    """Return what a STAC item says about the pixels of some assets."""
    bands: List[Dict[str, Any]] = []
    for asset in map(_mapping, assets):
        tables = [asset.get(key) for key in ('bands', 'eo:bands', 'raster:bands')]
        for rows in zip_longest(*(table for table in tables if isinstance(table, list))):
            # What an asset says counts for all of its bands.
            band = [pair for row in (asset, *rows) for pair in _mapping(row).items()]
            bands.append({key.replace('raster:', ''): value for key, value in band})
    baseline = properties.get('s2:processing_baseline')
    mission = str(properties.get('constellation') or collection).lower()
    is_sentinel2 = baseline or mission.startswith('sentinel-2')
    baseline = baseline or properties.get('processing:version')
    level = re.match('L[12]', str(properties.get('processing:level')))
    day = re.match(r'(\d{4})-(\d\d)-(\d\d)', str(properties.get('datetime')))
    # An item may still state the offset that is no longer in the pixels (earth-search #66).
    applied = properties.get('earthsearch:boa_offset_applied') is True
    return Product(
        sensor_rules.SENTINEL2 if is_sentinel2 and baseline else None,
        level and level.group(),
        str(baseline) if baseline else None,
        day and ''.join(day.groups()),
        tuple(str(band.get('name') or '') for band in bands),
        tuple(
            (band.get('scale', 1.0), 0.0 if applied else band.get('offset', 0.0)) for band in bands
        ),
        applied,
    )


def _item_beside(path: str) -> Product:
    """Return the content of the STAC item beside a scene, such as ``a.json`` beside ``a.tif``."""
    try:
        with open(os.path.splitext(path)[0] + '.json', encoding='utf-8') as file:
            item = _mapping(parse_json(file.read(_LONGEST_ITEM)))
    except (OSError, ValueError):
        return Product()
    assets = _mapping(item.get('assets')).values()
    return read_item(_mapping(item.get('properties')), assets, item.get('collection'))


def _mapping(value: object) -> Mapping[str, Any]:
    """Return a JSON value if it is an object, else an empty one."""
    return value if isinstance(value, dict) else {}


def _units(
    stated: Sequence[Tuple[Any, Any]], raster: Raster, bands: Sequence[int], doubts: List[str]
) -> Tuple[Unit, ...]:
    """Return the units of the bands that are read; none if no scale or offset is stated."""
    units = []
    for number in bands if len(stated) == len(raster.header.scales) else ():
        scale, offset = stated[number - 1]
        try:
            unit = Unit(float(scale), float(offset))
        except (OverflowError, TypeError, ValueError):
            unit = Unit(math.nan, math.nan)
        if not (np.isfinite(unit).all() and unit.scale):
            doubts.append(
                f'{raster.path} states the scale {scale} and the offset {offset} of band {number}, '
                f'which are no unit; its unit counts as unknown'
            )
            return ()
        units.append(unit)
    return () if set(units) <= {Unit(1.0, 0.0)} else tuple(units)
