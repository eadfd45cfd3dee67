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

import json
import math
import os
import re
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np
from rasterio.crs import CRS

from mapsage.base.files import parse_json

from . import sensor_rules
from .errors import GeoError, PathName
from .raster import Conversion, Raster

STORED, REFLECTANCE, HARMONIZED = UNITS = ('stored', 'reflectance', 'harmonized')

# Shares of the valid pixels below the quantiles of a band.
QUANTILES = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.95, 0.99)
# Squares of a scene from which quantiles are taken, and their side in pixels.
_SQUARES, _SIDE = 16, 64
# Names that programs write for bands whose content they do not know.
_NO_NAME = re.compile(r'(?:band|layer|channel|gray|undefined|index)?[\s_#]*\d*', re.IGNORECASE)
_COLORS = ('red', 'green', 'blue')
# Meters of a degree at the equator, and the radius of Web Mercator's sphere.
_DEGREE, _RADIUS = 111_320.0, 6_378_137.0
_LONGEST_ITEM = 4 << 20


class Unit(NamedTuple):
    """Scale and offset that turn values into reflectance: values * scale + offset."""

    scale: float
    offset: float

    def __str__(self) -> str:
        return f'scale {self.scale:.6g} and offset {self.offset:.6g}'


@dataclass(frozen=True)
class SceneFacts:
    """Facts of a scene; None for what nothing says.

    Attributes:
        path: Path of the file.
        pixel: Side of a pixel in meters on the ground.
        names: Name of each band that is read; empty if a band has none, or two have one name.
        dtype: Data type in the file.
        units: Unit of each band's stored values; None if it is not stated.
        sensor, level, baseline: As in ``sensor_rules.Product``.
        day: Day as YYYYMMDD.
        doubts: Sentences on statements that contradict each other or cannot be used.
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

    def in_units(self, units: str) -> Optional[Tuple[Unit, ...]]:
        """Return the unit of each band's values after a conversion; None if it is not known."""
        if units == REFLECTANCE:
            return (Unit(1.0, 0.0),) * len(self.units or (None,))
        if units == STORED or self.units is None:
            return self.units
        return tuple(
            Unit(unit.scale, unit.offset + sensor_rules.shift_of(*unit) * unit.scale)
            for unit in self.units
        )

    def describe(self, unit: Unit) -> str:
        """Return a unit of the scene, and its baseline, as text."""
        return f'{unit}' + f' (baseline {self.baseline})' * bool(self.baseline)


def open_scene(
    path: PathName,
    bands: Optional[Sequence[int]] = None,
    names: Sequence[str] = (),
    units: str = STORED,
    keep_open: bool = False,
    item: Optional[str] = None,
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
        item: STAC item as ``item_text`` returns it; default: the JSON file of the same name.
        strict: Whether a band that the file lacks by its names is an error.

    Returns:
        The raster; its ``scene`` has the facts, its ``reordered`` tells whether its bands are not
        read in the order of ``bands``.

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
        conversion = _conversion(facts, units)
    finally:
        if not keep_open:
            raster.close()
    reordered = numbers != raster.bands
    if reordered or conversion is not None:
        raster = Raster(path, numbers, keep_open, conversion)
    raster.scene, raster.reordered = facts, reordered
    return raster


def facts_of(raster: Raster) -> SceneFacts:
    """Return the facts of an opened raster."""
    return _facts(raster, None, raster.bands) if raster.scene is None else raster.scene


def _facts(raster: Raster, item: Optional[str], bands: Tuple[int, ...]) -> SceneFacts:
    tags = raster.header.tags
    doubts: List[str] = []
    product = sensor_rules.read_name(os.path.abspath(raster.path))
    stac = _read_item(item or _item_beside(raster), len(raster.header.scales))
    baseline = stac.get('baseline') or tags.get('PROCESSING_BASELINE') or product.baseline
    sensor = stac.get('sensor') or product.sensor
    level = stac.get('level') or product.level
    in_file = _units(raster.header.scales, raster.header.offsets, raster.path, bands, doubts)
    in_item = _units(stac.get('scales'), stac.get('offsets'), raster.path, bands, doubts)
    if in_item is not None and stac.get('applied'):
        # The item still states the offset, which is no longer in the pixels (earth-search #66).
        in_item = tuple(Unit(unit.scale, 0.0) for unit in in_item)
    by_rule = None
    if not stac.get('applied'):
        by_rule = sensor_rules.physical_units(sensor, level, baseline)
    statements = [
        (units, source)
        for units, source in (
            (in_file, 'its tags'),
            (in_item, 'its STAC item'),
            (by_rule and (Unit(*by_rule),) * len(bands), f'{sensor} {baseline or level}'),
        )
        if units is not None
    ]
    others = [row for row in statements if not _are_close(row[0], statements[0][0])]
    if others:
        (first, first_source), (units, source) = statements[0], others[0]
        doubts.append(
            f'{raster.path}: {first_source} state {first[0]}, and {source} {units[0]}; the first counts'
        )
    return SceneFacts(
        raster.path,
        _pixel(raster),
        _names(raster, bands, stac.get('names'), product.band),
        str(raster.header.dtype),
        statements[0][0] if statements else None,
        sensor,
        level,
        baseline,
        stac.get('day') or product.day,
        tuple(doubts),
    )


def _names(
    raster: Raster,
    numbers: Sequence[int],
    item_names: Optional[Sequence[str]] = None,
    band: Optional[str] = None,
) -> Tuple[str, ...]:
    names: Sequence[Optional[str]] = raster.header.descriptions
    if not any(names):
        colors = [kind for kind in raster.header.colors if kind != 'alpha']
        if set(colors) == set(_COLORS):
            names = raster.header.colors
        elif item_names:
            names = item_names
        elif band and len(names) == 1:
            names = [band]
    chosen = [str(names[number - 1] or '').strip() for number in numbers]
    is_named = len({name.lower() for name in chosen}) == len(chosen)
    return tuple(chosen) if is_named and not any(map(_NO_NAME.fullmatch, chosen)) else ()


def _find_bands(
    raster: Raster, facts: SceneFacts, names: Sequence[str], strict: bool
) -> Optional[Tuple[int, ...]]:
    """Return the bands of a file with the given names; None to read them in their order."""
    existing_bands = [
        number + 1 for number, kind in enumerate(raster.header.colors) if kind != 'alpha'
    ]
    existing = _names(raster, existing_bands)
    for sensor in (None, facts.sensor):
        by_name = dict(zip(sensor_rules.common_names(sensor, existing), existing_bands))
        keys = sensor_rules.common_names(sensor, names)
        if all(name in by_name for name in keys):
            return tuple(by_name[name] for name in keys)
    missing = [name for name, key in zip(names, keys) if key not in by_name]
    if strict and 0 < len(missing) < len(names):
        raise GeoError(
            f'{raster.path} has no band {", ".join(missing)}, and the model takes '
            f'{", ".join(names)}; its bands are {", ".join(existing)}. Give a scene with these '
            f'bands, or name its bands by number if they are the same (--bands).'
        )
    return None


def _conversion(facts: SceneFacts, units: str) -> Optional[Conversion]:
    if units == STORED or (units == HARMONIZED and facts.units is None):
        return None
    if units == HARMONIZED:
        shifts = [sensor_rules.shift_of(*unit) for unit in facts.units or ()]
        return Conversion(None, tuple(map(float, shifts))) if any(shifts) else None
    if facts.units is None:
        if facts.dtype.startswith('float'):
            # Values with a fraction and no scale are physical already.
            return Conversion((1.0,), (0.0,)) if facts.dtype != 'float32' else None
        raise GeoError(
            f"units='reflectance' needs scale and offset, and nothing states those of {facts.path} "
            f'({facts.dtype}): neither its tags, a STAC item beside it, nor its name. Set them '
            f"(gdal_edit.py -scale 0.0001 -offset 0), or use units='stored'."
        )
    return Conversion(*map(tuple, zip(*facts.units)))


def check_one_unit(scenes: Iterable[SceneFacts], units: str) -> None:
    """Check that the values of scenes have one unit, as far as it is known.

    Raises:
        GeoError: If scale or offset differ.
    """
    first: Optional[SceneFacts] = None
    for facts in scenes:
        known = facts.in_units(units)
        first = first or (facts if known else None)
        expected = (first and first.in_units(units)) or ()
        if first and known and not _are_close(known, expected):
            raise GeoError(
                f'{first.path} has {first.describe(expected[0])}, and {facts.path} '
                f'{facts.describe(known[0])}, so the same ground has other values in them. Set '
                f"units='reflectance' to apply scale and offset, or units='harmonized' to take the "
                f'offset off that newer baselines of Sentinel-2 add (now units={units!r}).'
            )


def describe_conversion(rasters: Sequence[Raster], units: str) -> str:
    """Return one line on what was applied to how many files; '' if values are as stored."""
    counts: Dict[str, int] = {}
    for raster in rasters:
        if raster.conversion is not None:
            text = str(raster.conversion)
            counts[text] = counts.get(text, 0) + 1
    applied = ', '.join(f'{text} in {count}' for text, count in counts.items()) or 'nothing'
    return '' if units == STORED else f'units={units!r}: {applied} of {len(rasters)} file(s)'


def _are_close(first: Sequence[Unit], second: Sequence[Unit]) -> bool:
    return np.allclose(first, np.broadcast_to(second, np.shape(first)), rtol=1e-5, atol=1e-9)


def sample_quantiles(raster: Raster) -> np.ndarray:
    """Return quantiles of the values of valid pixels, from 16 squares of 64 pixels.

    Args:
        raster: Opened scene, whose ``read`` returns the bands in the model's unit.

    Returns:
        float64 (bands, quantiles); NaN if no sampled pixel has data.
    """
    pixels: List[np.ndarray] = []
    width, height = min(_SIDE, raster.width), min(_SIDE, raster.height)
    columns, rows = raster.width - width, raster.height - height
    for square in range(_SQUARES if columns or rows else 1):
        # Roberts' R2 sequence, whose points are evenly spread.
        column = int(square * 0.7548776662466927 % 1 * columns)
        row = int(square * 0.5698402909980532 % 1 * rows)
        values, valid = raster.read(column, row, width, height)
        pixels.append(values[:, valid])
    joined = np.concatenate(pixels, 1).astype(np.float64)
    finite = joined[:, np.isfinite(joined).all(0)]
    if not finite.size:
        return np.full((len(joined), len(QUANTILES)), np.nan)
    return np.quantile(finite, QUANTILES, axis=1).T


def item_text(
    properties: Mapping[str, Any], assets: Sequence[Any], collection: object = None
) -> str:
    """Return what a STAC item says about the pixels of some assets, as JSON for ``open_scene``."""
    return json.dumps(
        dict(
            properties={
                key: properties.get(key)
                for key in (
                    's2:processing_baseline', 'processing:version', 'constellation', 'datetime',
                    'earthsearch:boa_offset_applied', 'processing:level',
                )
            },
            assets=dict(enumerate(assets)),
            collection=collection,
        ),
        # A table has dates as such.
        default=str,
    )  # fmt: skip


def _item_beside(raster: Raster) -> Optional[str]:
    path = os.path.splitext(raster.path)[0] + '.json'
    try:
        if raster.is_remote or os.path.getsize(path) > _LONGEST_ITEM:
            return None
        with open(path, encoding='utf-8') as file:
            return file.read()
    except (OSError, UnicodeDecodeError):
        return None


def _read_item(text: Optional[str], count: int) -> Dict[str, Any]:
    """Return the facts in a STAC item: baseline, applied, scales, offsets, names, sensor, day."""
    try:
        item = parse_json(text) if text else None
    except ValueError:
        item = None
    assets = item.get('assets') if isinstance(item, dict) else None
    properties = item.get('properties') if isinstance(item, dict) else None
    if item is None or not isinstance(assets, dict) or not isinstance(properties, dict):
        return {}
    bands: List[Mapping[str, Any]] = []
    for asset in assets.values():
        asset = asset if isinstance(asset, dict) else {}
        tables = [asset.get(key) for key in ('bands', 'eo:bands', 'raster:bands')]
        of_asset = {
            key: asset[f'raster:{key}'] for key in ('scale', 'offset') if f'raster:{key}' in asset
        }
        for rows in zip_longest(*(table for table in tables if isinstance(table, list))):
            band = dict(of_asset)
            for row in rows:
                if isinstance(row, dict):
                    band.update({key.replace('raster:', ''): row[key] for key in row})
            bands.append(band)
    facts: Dict[str, Any] = dict(applied=properties.get('earthsearch:boa_offset_applied') is True)
    for key in ('s2:processing_baseline', 'processing:version'):
        if isinstance(properties.get(key), (str, int, float)):
            facts.setdefault('baseline', str(properties[key]))
    constellation = str(properties.get('constellation') or item.get('collection') or '').lower()
    if constellation.startswith('sentinel-2') or 's2:processing_baseline' in properties:
        facts['sensor'] = sensor_rules.SENTINEL2 if 'baseline' in facts else None
    level = re.match('L[12]', str(properties.get('processing:level')))
    facts['level'] = level and level.group()
    day = re.match(r'\d{4}-\d\d-\d\d', str(properties.get('datetime')))
    facts['day'] = day and day.group().replace('-', '')
    if len(bands) == count:
        facts['names'] = [str(band.get('name') or '') for band in bands]
        if any('scale' in band or 'offset' in band for band in bands):
            facts['scales'] = [band.get('scale', 1.0) for band in bands]
            facts['offsets'] = [band.get('offset', 0.0) for band in bands]
    return facts


def _units(
    scales: Optional[Sequence[Any]],
    offsets: Optional[Sequence[Any]],
    path: str,
    bands: Sequence[int],
    doubts: List[str],
) -> Optional[Tuple[Unit, ...]]:
    """Return the units of the bands that are read; None if no scale or offset is stated."""
    if scales is None or offsets is None:
        return None
    units = []
    for number in bands:
        scale, offset = scales[number - 1], offsets[number - 1]
        try:
            unit = Unit(float(scale), float(offset))
        except (TypeError, ValueError):
            unit = Unit(math.nan, math.nan)
        if not (np.isfinite(unit).all() and unit.scale):
            doubts.append(
                f'{path} states the scale {scale} and the offset {offset} of band {number}, '
                f'which are no unit; its unit counts as unknown'
            )
            return None
        units.append(unit)
    return None if set(units) == {Unit(1.0, 0.0)} else tuple(units)


def _pixel(raster: Raster) -> Optional[float]:
    """Return the side of a pixel in meters on the ground, None without a georeference."""
    if raster.crs is None or not raster.is_georeferenced:
        return None
    kind, factor = _crs_kind(raster.crs)
    transform = raster.transform
    side = math.sqrt(abs(transform.determinant)) * factor
    y = (transform * (raster.width / 2, raster.height / 2))[1]
    if kind == 'degrees':
        return side * _DEGREE * math.sqrt(max(0.0, math.cos(math.radians(y * factor))))
    if kind == 'mercator':
        return side / math.cosh(y * factor / _RADIUS)
    return side if kind == 'meters' else None


@lru_cache(maxsize=256)
def _crs_kind(crs: CRS) -> Tuple[str, float]:
    """Return whether coordinates are degrees, meters or meters of Mercator, and their factor."""
    if crs.is_geographic:
        return 'degrees', math.degrees(crs.units_factor[1])
    if not crs.is_projected:
        return 'unknown', 1.0
    is_mercator = 'PROJECTION["Mercator' in crs.to_wkt()
    return 'mercator' if is_mercator else 'meters', crs.linear_units_factor[1]
