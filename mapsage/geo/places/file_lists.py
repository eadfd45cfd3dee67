"""Lists of the files of places: tables (CSV, Parquet) and STAC items.

A table has the columns place, sensor, date and path, and may have mask, band and labels. STAC items
are read from JSON, without any request to a server. Paths are relative to the folder of the list.
"""

from __future__ import annotations

import csv
import io
import json
import os
from pathlib import Path
from typing import Any, Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Tuple

from mapsage.base.files import parse_json
from mapsage.geo import GeoError, acquisition_time, locate
from mapsage.geo.scene_facts import read_item

from .places import DatedImage, Place, check_files, read_date
from .sensor_files import SensorFiles

_REQUIRED = ('place', 'sensor', 'date', 'path')
_OPTIONAL = ('mask', 'band', 'labels')
# Properties of a STAC item that may name its place, the first that it has counts.
_PLACE_PROPERTIES = ('place', 'grid:code', 's2:mgrs_tile')

Row = Dict[str, Any]


def read_list(path: str, sensors: Mapping[str, SensorFiles]) -> List[Place]:
    """Return the places that a list names, in the order of their names.

    Args:
        path: Path of a CSV, Parquet or JSON file.
        sensors: Settings of the sensors.

    Raises:
        GeoError: If the list cannot be read, lacks a column, names a sensor that the config does
            not have, an invalid date, or files that do not exist, or names a file twice.
    """
    suffix = Path(path).suffix.lower()
    try:
        if suffix in ('.json', '.geojson'):
            rows = list(_read_items(path, sensors))
        elif suffix in ('.parquet', '.geoparquet'):
            rows = _read_parquet(path, sensors)
        else:
            rows = _read_csv(path)
    except UnicodeDecodeError as error:
        raise GeoError(
            f'the list {path} is not in UTF-8 ({error}). Save it as UTF-8, or convert '
            'it (iconv -f GBK -t UTF-8).'
        ) from error
    except OSError as error:
        raise GeoError(
            f'the list {path} cannot be read: {error}. Check the path, which is '
            'relative to data_root.'
        ) from error
    if not rows:
        raise GeoError(f'the list {path} has no rows, expected one for each image.')
    missing = [column for column in _REQUIRED if column not in rows[0]]
    if missing:
        raise GeoError(
            f'the list {path} has no column {", ".join(missing)}; it has '
            f'{", ".join(rows[0])}, expected {", ".join(_REQUIRED)}, and perhaps '
            f'{", ".join(_OPTIONAL)}, separated by commas.'
        )
    folder = os.path.dirname(path)
    for number, row in enumerate(rows, 1):
        empty = [column for column in ('place', 'sensor', 'path') if not row[column]]
        if empty:
            raise GeoError(
                f'the list {path} has no {", ".join(empty)} in its entry {number}: '
                f'{row}. Fill the columns place, sensor and path, or remove the entry.'
            )
        for column in ('path', 'mask', 'labels'):
            if row.get(column):
                row[column] = locate(folder, row[column])
    check_files(
        dict.fromkeys(
            row[column] for row in rows for column in ('path', 'mask', 'labels') if row.get(column)
        ),
        f'the list {path}',
    )
    return _places(path, rows, sensors)


def list_text(labeled: Sequence[Tuple[Place, str]], sensors: Mapping[str, SensorFiles]) -> str:
    """Return a list, CSV as :func:`read_list` takes it, of the images of places and their labels.

    Args:
        labeled: Places, each with the path of its labels.
        sensors: Settings of the sensors.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator='\n')
    writer.writerow([*_REQUIRED, *_OPTIONAL])
    for files, labels in labeled:
        for name, images in files.images.items():
            for image in (tile for tiled in images for tile in tiled.tiles):
                date = '' if image.date is None else image.date.isoformat()
                bands = (
                    [str(band) for band in sensors[name].bands]
                    if len(image.paths) > 1 or sensors[name].has_band_files
                    else ['']
                )
                for path, band in zip(image.paths, bands):
                    writer.writerow(
                        [
                            files.name,
                            name,
                            date,
                            _absolute(path),
                            _absolute(image.mask) if image.mask else '',
                            band,
                            _absolute(labels),
                        ]
                    )
    return text.getvalue()


def _absolute(path: str) -> str:
    """Return the absolute path of a file; other names that GDAL opens stay."""
    return os.path.abspath(path) if os.path.exists(path) else path


def _places(path: str, rows: List[Row], sensors: Mapping[str, SensorFiles]) -> List[Place]:
    unknown = sorted({row['sensor'] for row in rows} - set(sensors))
    if unknown:
        raise GeoError(
            f'the list {path} names the sensor(s) {", ".join(unknown)}, and the config '
            f'has {", ".join(sensors)}; correct one of them.'
        )
    images: Dict[str, List[Tuple[str, DatedImage]]] = {}
    labels: Dict[str, str] = {}
    for name, sensor, text, files in _images(rows, sensors):
        subject = f'the list {path}, place {name!r} and sensor {sensor!r}'
        paths = _paths(files, sensors[sensor], subject)
        items = {row['path']: row['item'] for row in files if row.get('item')}
        date = read_date(text or acquisition_time(paths[0]), subject)
        image = DatedImage(
            date.date if date else None,
            paths,
            next((row['mask'] for row in files if row.get('mask')), None),
            date.may_be_next_year if date else False,
            tuple(items[path] for path in paths) if items else (),
        )
        clouds = sensors[sensor].clouds
        if clouds is not None and clouds.band is None and image.mask is None:
            raise GeoError(
                f'{subject}: {image.paths[0]} has no mask, which clouds= of the sensor '
                'needs; fill the column mask, or leave clouds= out.'
            )
        images.setdefault(name, []).append((sensor, image))
        for row in files:
            if row.get('labels'):
                if labels.setdefault(name, row['labels']) != row['labels']:
                    raise GeoError(
                        f'{subject}: labels {row["labels"]} and {labels[name]}, '
                        'expected one file for a place.'
                    )
    return [
        Place.of_images(name, pairs, sensors, labels.get(name))
        for name, pairs in sorted(images.items())
    ]


def _images(
    rows: Iterable[Row], sensors: Mapping[str, SensorFiles]
) -> Iterator[Tuple[str, str, str, List[Row]]]:
    """Yield place, sensor, date and rows of each image; files of bands belong to one image.

    If several files have a band of one date, the first of each band, by path, belong together, and
    so do the second ones: tiles have names that differ in the same way for all bands.
    """
    by_band: Dict[Tuple[str, str, str], List[Row]] = {}
    for row in rows:
        if row.get('band'):
            by_band.setdefault((row['place'], row['sensor'], row['date']), []).append(row)
        else:
            yield row['place'], row['sensor'], row['date'], [row]
    for key, files in by_band.items():
        counts: Dict[str, int] = {}
        tiles: Dict[int, List[Row]] = {}
        for row in sorted(files, key=lambda row: row['path']):
            number = counts[row['band']] = counts.get(row['band'], 0) + 1
            tiles.setdefault(number, []).append(row)
        for tile in tiles.values():
            yield (*key, tile)


def _paths(files: List[Row], sensor: SensorFiles, subject: str) -> Tuple[str, ...]:
    if not files[0].get('band'):
        return (files[0]['path'],)
    by_band = {row['band']: row['path'] for row in files}
    missing = [str(band) for band in sensor.bands if str(band) not in by_band]
    if missing:
        raise GeoError(
            f'{subject}: files of the bands {[row["band"] for row in files]}, expected '
            f'one of each of {[str(band) for band in sensor.bands]}.'
        )
    return tuple(by_band[str(band)] for band in sensor.bands)


def _read_csv(path: str) -> List[Row]:
    with open(path, encoding='utf-8-sig', newline='') as file:
        return [
            {
                str(key).strip(): (value or '').strip()
                for key, value in row.items()
                if key is not None
            }
            for row in csv.DictReader(file)
        ]


def _read_parquet(path: str, sensors: Mapping[str, SensorFiles]) -> List[Row]:
    try:
        from pyarrow import ArrowInvalid, parquet
    except ImportError as error:
        raise GeoError(
            f'reading {path} needs pyarrow: pip install pyarrow; or convert the list '
            f'to CSV (ogr2ogr {Path(path).stem}.csv {path}).'
        ) from error
    try:
        # Without threads, which processes that are forked later would wait for.
        table = parquet.ParquetFile(path).read(use_threads=False)
    except ArrowInvalid as error:
        raise GeoError(f'the list {path} cannot be read: {error}.') from error
    if 'assets' in table.column_names:
        # STAC items: a column for every property, and a structure of assets with gaps.
        rows = table.drop_columns(
            [name for name in ('geometry', 'bbox') if name in table.column_names]
        ).to_pylist()
        return list(
            _rows_of_items(
                path,
                [
                    dict(
                        row,
                        properties=row,
                        assets={
                            name: asset
                            for name, asset in row['assets'].items()
                            if asset is not None
                        },
                    )
                    for row in rows
                ],
                sensors,
            )
        )
    columns = {
        name: table.column(name).to_pylist()
        for name in table.column_names
        if name in _REQUIRED + _OPTIONAL
    }
    return [
        {name: '' if value is None else str(value) for name, value in zip(columns, values)}
        for values in zip(*columns.values())
    ]


def _read_items(path: str, sensors: Mapping[str, SensorFiles]) -> Iterator[Row]:
    text = Path(path).read_text(encoding='utf-8')
    try:
        content = parse_json(text)
    except ValueError as error:
        raise GeoError(
            f'the list {path} is not JSON ({error}); expected STAC items. Write it '
            'again, or list the files in a CSV.'
        ) from error
    items = content.get('features', [content]) if isinstance(content, dict) else content
    return _rows_of_items(path, items if isinstance(items, list) else [], sensors)


def _rows_of_items(
    path: str, items: Iterable[Mapping[str, Any]], sensors: Mapping[str, SensorFiles]
) -> Iterator[Row]:
    """Yield the rows of STAC items: one for each image, or for each band that is an asset."""
    for number, item in enumerate(items, 1):
        if not isinstance(item, dict) or not all(
            isinstance(item.get(key, {}), dict) for key in ('properties', 'assets')
        ):
            raise GeoError(
                f'{path}, entry {number}, is no STAC item: {str(item)[:80]}; expected '
                'an object with the objects properties and assets.'
            )
        properties, assets = item.get('properties') or {}, item.get('assets') or {}
        subject = f'{path}, item {item.get("id")!r}'
        sensor = _sensor_of(item, properties, sensors, subject)
        name = next(
            (str(properties[key]) for key in _PLACE_PROPERTIES if properties.get(key)), None
        )
        if name is None:
            raise GeoError(
                f'{subject} names no place, expected one of the properties '
                f'{", ".join(_PLACE_PROPERTIES)}.'
            )
        common = dict(place=name, sensor=sensor.name, date=_date_of(properties, subject))
        clouds = sensor.clouds
        if clouds is not None and clouds.band is None:
            common['mask'] = _href(assets, clouds.mask or 'mask', subject)
        bands = [str(band) for band in sensor.bands]
        if any(band not in assets for band in bands):
            bands = []
        for name in bands or [_data_asset(assets, sensor, subject)]:
            path = _href(assets, name, subject)
            product = read_item(properties, [assets[name]], item.get('collection'))
            yield dict(common, band=name if bands else '', path=path, item=product)


def _date_of(properties: Mapping[str, Any], subject: str) -> str:
    """Return the date of a STAC item as text: ``datetime``, or the day in the middle of a range.

    Raises:
        GeoError: If the range has no dates, or ends before it starts.
    """
    start, end = properties.get('start_datetime'), properties.get('end_datetime')
    if properties.get('datetime') or not (start and end):
        return str(properties.get('datetime') or start or '')
    first, last = read_date(str(start), subject), read_date(str(end), subject)
    assert first is not None and last is not None, 'neither text is empty'
    if last.date < first.date:
        raise GeoError(
            f'{subject} has start_datetime {start} and end_datetime {end}, expected an '
            'end that is not before the start.'
        )
    return (first.date + (last.date - first.date) / 2).isoformat()


def _sensor_of(
    item: Mapping[str, Any],
    properties: Mapping[str, Any],
    sensors: Mapping[str, SensorFiles],
    subject: str,
) -> SensorFiles:
    names = [properties.get('sensor'), item.get('collection'), properties.get('constellation')]
    for name in names:
        if name in sensors:
            return sensors[str(name)]
    raise GeoError(
        f'{subject} belongs to no sensor of the config: its property sensor, its '
        f'collection and its constellation are {json.dumps(names)}, expected one of '
        f'{", ".join(sensors)}.'
    )


def _data_asset(assets: Mapping[str, Any], sensor: SensorFiles, subject: str) -> str:
    names = [
        name
        for name, asset in assets.items()
        if isinstance(asset, dict) and 'data' in (asset.get('roles') or [])
    ] or list(assets)
    if len(names) != 1:
        raise GeoError(
            f'{subject} has the assets {list(assets)}, expected one for each of the '
            f'bands {list(sensor.bands)}, or one with the role data.'
        )
    return str(names[0])


def _href(assets: Mapping[str, Any], name: Optional[str], subject: str) -> str:
    asset = assets.get(name or '')
    if not isinstance(asset, dict) or not asset.get('href'):
        raise GeoError(f'{subject} has no asset {name!r} with a href; it has {list(assets)}.')
    return str(asset['href'])
