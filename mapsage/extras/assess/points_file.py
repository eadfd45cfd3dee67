"""The GeoPackage of a plan: points to label in QGIS, and how they were drawn.

The layer `points` has what an interpreter needs and not the class of the map, which would influence
the label. The table `mapsage_design` has stratum, map class and inclusion probability of each
point, the table `mapsage_plan` the record of the plan. QGIS keeps both when it saves labels.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, List, Optional, Sequence, Tuple

import numpy as np
import pyogrio.raw
import shapely
from pyogrio.errors import DataLayerError, DataSourceError

from mapsage.geo.cog import disk_message, temporary_beside
from mapsage.geo.qgis_style import add_point_form

from .errors import AssessError
from .plan_record import PlanRecord

LAYER, REFERENCE, POINT = 'points', 'reference', 'point'
_DESIGN, _PLAN = 'mapsage_design', 'mapsage_plan'
_COLUMNS = (
    'point',
    'stratum',
    'map_class',
    'inclusion_probability',
    'pixel_column',
    'pixel_row',
    'x',
    'y',
    'probabilities',
    'pixel_area',
)
_TABLES = f"""
CREATE TABLE {_DESIGN} (point INTEGER PRIMARY KEY NOT NULL, stratum TEXT, map_class TEXT,
    inclusion_probability DOUBLE, pixel_column INTEGER, pixel_row INTEGER, x DOUBLE, y DOUBLE,
    probabilities TEXT, pixel_area DOUBLE);
CREATE TABLE {_PLAN} (id INTEGER PRIMARY KEY NOT NULL, record TEXT);
"""


@dataclass(frozen=True)
class DesignPoints:
    """Points of a plan; arrays ``(n,)``.

    Attributes:
        stratum: Index of the stratum.
        mapped: Index of the class of the plan's map.
        inclusion: Probability with which the pixel entered the sample.
        column: Column of the pixel.
        row: Row of the pixel.
        x: First coordinate of the pixel's center in the CRS of the map.
        y: Second coordinate.
        probability: Probability of each class ``(n, K)``; ``(n, 0)`` without probabilities.
        area: Area of the pixel in the unit of the plan.
    """

    stratum: np.ndarray
    mapped: np.ndarray
    inclusion: np.ndarray
    column: np.ndarray
    row: np.ndarray
    x: np.ndarray
    y: np.ndarray
    probability: np.ndarray
    area: np.ndarray


@dataclass(frozen=True)
class LabeledPlan:
    """A plan with the labels of its points.

    Attributes:
        path: Path of the file.
        record: Record of the plan.
        points: Its points.
        reference: Label of each point, or None for a point without a label.
    """

    path: str
    record: PlanRecord
    points: DesignPoints
    reference: List[Optional[str]]


def write_plan(path: str, record: PlanRecord, points: DesignPoints, crs: Optional[str]) -> None:
    """Write a plan; the file appears complete or not at all.

    Args:
        path: Path of the GeoPackage, which must not exist: it may hold labels.
        record: Record of the plan.
        points: Its points, in the order in which they are to be labeled.
        crs: CRS of the map as WKT, or None.

    Raises:
        AssessError: If the file exists or cannot be written.
    """
    if Path(path).exists():
        raise AssessError(
            f'{path} exists and may hold labels, so it is not replaced; name another '
            'file with --out, or move this one away.'
        )
    count = len(points.stratum)
    fields = {
        POINT: np.arange(1, count + 1, dtype=np.int32),
        REFERENCE: np.array([None] * count, object),
        'note': np.array([None] * count, object),
    }
    try:
        with temporary_beside(Path(path)) as folder, warnings.catch_warnings():
            # A map in pixels has no CRS.
            warnings.filterwarnings('ignore', "'crs' was not provided")
            temporary = str(folder / Path(path).name)
            pyogrio.raw.write(
                temporary,
                shapely.to_wkb(shapely.points(points.x, points.y)),
                list(fields.values()),
                list(fields),
                layer=LAYER,
                driver='GPKG',
                geometry_type='Point',
                crs=crs,
                VERSION='1.2',
            )
            _write_tables(temporary, record, points)
            add_point_form(temporary, LAYER, REFERENCE, record.class_names, record.palette)
            os.replace(temporary, path)
    except (OSError, DataSourceError, DataLayerError, sqlite3.Error) as error:
        raise AssessError(disk_message(path, error)) from error


def _write_tables(path: str, record: PlanRecord, points: DesignPoints) -> None:
    rows = zip(
        range(1, len(points.stratum) + 1),
        [record.strata[i] for i in points.stratum],
        [record.class_names[i] for i in points.mapped],
        points.inclusion.tolist(),
        points.column.tolist(),
        points.row.tolist(),
        points.x.tolist(),
        points.y.tolist(),
        [
            json.dumps([round(value, 4) for value in values])
            for values in points.probability.tolist()
        ],
        points.area.tolist(),
    )
    with contextlib.closing(sqlite3.connect(path)) as file, file:
        file.executescript(_TABLES)
        file.executemany(
            f'INSERT INTO {_DESIGN} ({", ".join(_COLUMNS)}) VALUES '
            f'({", ".join("?" * len(_COLUMNS))})',
            rows,
        )
        file.execute(f'INSERT INTO {_PLAN} (id, record) VALUES (1, ?)', (record.to_text(),))
        file.executemany(
            'INSERT INTO gpkg_contents (table_name, data_type, identifier, description, srs_id) '
            "VALUES (?, 'attributes', ?, '', 0)",
            [(name, name) for name in (_DESIGN, _PLAN)],
        )


def read_labeled_plan(path: str) -> LabeledPlan:
    """Read a plan and the labels that were given since.

    Raises:
        AssessError: If the file is no plan, or a point was moved, copied, deleted or added.
    """
    record, points = _read_design(path)
    try:
        _, _, geometry, (numbers, reference) = pyogrio.raw.read(
            path, layer=LAYER, columns=[POINT, REFERENCE]
        )
    except (DataSourceError, DataLayerError, ValueError) as error:
        raise AssessError(
            f'{path}: the layer {LAYER!r} with the fields {POINT!r} and {REFERENCE!r} cannot be '
            f'read ({error}). Label the points in the file that mapsage assess plan wrote, and '
            'keep its fields.'
        ) from error
    shapes = shapely.from_wkb(geometry)
    labels = [
        None if label is None or not str(label).strip() else str(label).strip()
        for label in reference
    ]
    _check_numbers(path, numbers, labels, len(points.stratum))
    order = np.argsort(np.asarray(numbers, float), kind='stable')
    _check_positions(path, record, points, shapes[order])
    return LabeledPlan(path, record, points, [labels[index] for index in order])


def _read_design(path: str) -> Tuple[PlanRecord, DesignPoints]:
    if not Path(path).is_file():
        raise AssessError(f'{path}: no such file; expected the GeoPackage of mapsage assess plan.')
    try:
        with contextlib.closing(
            sqlite3.connect(f'{Path(path).resolve().as_uri()}?mode=ro', uri=True)
        ) as file:
            text = file.execute(f'SELECT record FROM {_PLAN}').fetchone()[0]
            present = {row[1] for row in file.execute(f'PRAGMA table_info({_DESIGN})')}
            columns = _COLUMNS if _COLUMNS[-1] in present else _COLUMNS[:-1]
            rows = file.execute(
                f'SELECT {", ".join(columns)} FROM {_DESIGN} ORDER BY point'
            ).fetchall()
    except (sqlite3.Error, TypeError, IndexError) as error:
        raise AssessError(_no_plan(path)) from error
    record = PlanRecord.from_text(text, path)
    strata = {name: number for number, name in enumerate(record.strata)}
    classes = {name: number for number, name in enumerate(record.class_names)}
    try:
        numbers, stratum, mapped, inclusion, column, row, x, y, probability, *area = zip(*rows)
        owner, chance = np.array([strata[name] for name in stratum]), np.array(inclusion, float)
        points = DesignPoints(
            owner,
            np.array([classes[name] for name in mapped]),
            chance,
            np.array(column, np.int64),
            np.array(row, np.int64),
            np.array(x, float),
            np.array(y, float),
            np.array([json.loads(values) for values in probability], float),
            # Earlier versions stored the expected number of points of a pixel instead, at most 1.
            np.array(area[0], float)
            if area
            else chance * (np.array(record.area) / np.maximum(record.points, 1))[owner],
        )
        if not (np.isfinite(points.area).all() and (points.area > 0).all()):
            raise ValueError('pixel_area holds numbers that are not above 0')
        drawn = np.bincount(points.stratum, minlength=len(strata)).tolist()
        if drawn != record.points or list(numbers) != list(range(1, len(rows) + 1)):
            raise ValueError(f'{drawn} points in the strata, the plan has {record.points}')
    except (KeyError, TypeError, ValueError) as error:
        raise AssessError(
            f'{path}: its table {_DESIGN} does not fit the plan ({error}). Take the '
            'file that mapsage assess plan wrote, or make the plan again.'
        ) from error
    return record, points


def _no_plan(path: str) -> str:
    """Return the message for a file without a plan, which says more of suggested windows."""
    try:
        layers = {
            str(name): set(map(str, pyogrio.read_info(path, layer=name)['fields']))
            for name, _ in pyogrio.list_layers(path)
        }
    except (DataSourceError, DataLayerError):
        layers = {}
    if any({'rank', 'score', 'reason'} <= fields for fields in layers.values()):
        return (
            f'{path} holds windows of mapsage suggest, chosen because the model doubts there. '
            'They have no inclusion probabilities, and accuracies from them would be far too '
            'low, so they are refused. Draw points with mapsage assess plan.'
        )
    return (
        f'{path} has no table {_PLAN}, so it is unknown with which probability its points were '
        'drawn, and no estimate from them would be unbiased. Draw points with mapsage assess '
        'plan and label them in its file; an export of the layer lacks the table.'
    )


def _check_numbers(
    path: str, numbers: np.ndarray, labels: Sequence[Optional[str]], count: int
) -> None:
    """Raise an error unless the layer has every point of the plan once."""
    counts: Dict[float, int] = Counter(np.asarray(numbers, float).tolist())
    twice = sorted(number for number, times in counts.items() if times > 1)
    if twice:
        values = [labels[index] for index, number in enumerate(numbers) if number == twice[0]]
        raise AssessError(
            f'{path}: point {twice[0]:.0f} occurs {counts[twice[0]]} times, with the labels '
            f'{", ".join(map(repr, values))}{_more(twice)}; expected every point once. Delete the '
            'copies.'
        )
    added = sorted(number for number in counts if not 1 <= number <= count)
    added += [number for number in counts if number != number]
    if added:
        raise AssessError(
            f'{path}: a point {added[0]:.0f} is not of the plan, which has points 1 to {count}'
            f'{_more(added)}; points added by hand have no inclusion probability. Delete them.'
        )
    missing = sorted(set(range(1, count + 1)) - set(counts))
    if missing:
        raise AssessError(
            f'{path}: point {missing[0]} of the plan was deleted{_more(missing)}. A survey without '
            'its difficult points is biased: restore it from a copy, and leave the label empty '
            'where you cannot tell.'
        )


def _check_positions(
    path: str, record: PlanRecord, points: DesignPoints, shapes: np.ndarray
) -> None:
    """Raise an error if a point was moved by more than a millionth of its coordinates."""
    x, y = shapely.get_x(shapes), shapely.get_y(shapes)
    limit = 1e-6 * np.maximum(np.abs([points.x, points.y]).max(0), 1)
    distance = np.maximum(np.abs(x - points.x), np.abs(y - points.y))
    moved = np.flatnonzero(~(distance <= limit))
    if len(moved):
        first = moved[0]
        raise AssessError(
            f'{path}: point {first + 1} lies at ({x[first]:.10g}, {y[first]:.10g}), the plan of '
            f'{record.map} drew it at ({points.x[first]:.10g}, {points.y[first]:.10g})'
            f'{_more(moved.tolist())}. A point that was moved is no longer random: move it back, '
            'or restore the file from a copy.'
        )


def _more(items: Sequence) -> str:
    """Return text on further items, such as ' (and 3 more)'."""
    return f' (and {len(items) - 1} more)' if len(items) > 1 else ''
