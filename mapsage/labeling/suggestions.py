"""The windows to label next as a file: a GeoPackage for a GIS, or a table."""
from __future__ import annotations

import csv
import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

import numpy as np
import pyogrio.raw
import shapely
from pyogrio.errors import DataLayerError, DataSourceError

from mapsage.atomic_write import atomic_write
from mapsage.geo import GeoError
from mapsage.geo.cog import disk_message, temporary_beside
from mapsage.geo.qgis_style import add_polygon_style

from .window_facts import Place

LAYER = 'tiles'
CLASS_FIELD = 'doubtful_class'


@dataclass(frozen=True)
class Suggestion:
    """A window to label.

    Attributes:
        place: The window in pixels of its file.
        polygon: Its outline in the CRS of the file, or None where the file has none.
        score: What it was chosen by; larger is more.
        doubtful_class: Name of the class that its score is mostly from.
        reason: Why it was chosen, in words.
        margin: Mean of 1 less the margin between the two most likely classes.
        disagreement: Mean share of mirror images of another class, or None without them.
    """

    place: Place
    polygon: Optional[Any]
    score: float
    doubtful_class: str
    reason: str
    margin: float
    disagreement: Optional[float]

    @property
    def title(self) -> str:
        """Name of its file, and its first pixel there."""
        place = self.place
        return f'{os.path.basename(place.path)} ({place.column}, {place.row})'


def write_suggestions(path: Path, found: Sequence[Suggestion], crs: Optional[str],
                      class_names: Sequence[str], palette: Sequence[Sequence[int]]) -> None:
    """Write suggestions, the first one first, as a GeoPackage (``.gpkg``) or a table (``.csv``).

    The GeoPackage has one layer, ``tiles``, in which QGIS shows a broad outline in the color of the
    class. The fields are the same in both.

    Args:
        path: File that is replaced once the new one is complete.
        found: The suggestions; for a GeoPackage with polygons in ``crs``.
        crs: CRS of the polygons as WKT; None for a table.
        class_names: Names of all classes.
        palette: Red, green and blue of each.

    Raises:
        GeoError: If the file cannot be written.
    """
    fields = _fields(found)
    try:
        if path.suffix.lower() == '.csv':
            text = io.StringIO()
            writer = csv.writer(text, lineterminator='\n')
            writer.writerow(fields)
            writer.writerows(zip(*fields.values()))
            atomic_write(path, text.getvalue().encode())
            return
        with temporary_beside(path) as folder:
            made = folder / path.name
            columns = [np.array(values, object if isinstance(values[0], str) else None)
                       for values in fields.values()]
            pyogrio.raw.write(
                str(made), shapely.to_wkb(np.array([each.polygon for each in found], object)),
                columns, list(fields), geometry_type='Polygon', crs=crs, driver='GPKG',
                layer=LAYER)
            shown = [number for number, name in enumerate(class_names)
                     if name in fields[CLASS_FIELD]]
            add_polygon_style(made, LAYER, CLASS_FIELD, [class_names[n] for n in shown],
                              [palette[n] for n in shown], hollow=True)
            os.replace(made, path)
    except (OSError, DataSourceError, DataLayerError) as error:
        raise GeoError(disk_message(path, error)) from error


def read_table(path: str) -> List[Place]:
    """Return the windows of a table that was written before.

    Raises:
        GeoError: If it cannot be read, or is another table.
    """
    try:
        with open(path, encoding='utf-8', newline='') as file:
            return [Place(os.path.realpath(line['path']), *(int(line[key]) for key in (
                'column', 'row', 'width', 'height'))) for line in csv.DictReader(file)]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise GeoError(f'{path} cannot be read as a table of windows ({error!r}): expected one '
                       f'that this command wrote, with the columns path, column, row, width and '
                       f'height.') from error


def _fields(found: Sequence[Suggestion]) -> Dict[str, List[Any]]:
    places = [each.place for each in found]
    fields: Dict[str, List[Any]] = dict(
        rank=list(range(1, len(found) + 1)), score=[round(each.score, 4) for each in found],
        reason=[each.reason for each in found])
    fields[CLASS_FIELD] = [each.doubtful_class for each in found]
    fields['margin'] = [round(each.margin, 4) for each in found]
    if any(each.disagreement is not None for each in found):
        fields['disagreement'] = [round(each.disagreement or 0, 4) for each in found]
    fields['path'] = [place.path for place in places]
    for key in ('column', 'row', 'width', 'height'):
        fields[key] = [getattr(place, key) for place in places]
    return fields
