"""Files of suggested windows: a GeoPackage for a GIS, or a CSV table.

Both have the same fields, in the order of suggestion. A table of an earlier run can be read back,
to exclude its windows from the next one.
"""

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

from mapsage.base.files import atomic_write
from mapsage.geo import GeoError
from mapsage.geo.cog import disk_message, temporary_beside
from mapsage.geo.qgis_style import add_polygon_style

from .window_facts import FileWindow

LAYER = 'tiles'
CLASS_FIELD = 'doubtful_class'


@dataclass(frozen=True)
class Suggestion:
    """A window to label.

    Attributes:
        place: The window in pixels of its file.
        polygon: Outline in the CRS of the GeoPackage; None in a table.
        score: Score that the window was chosen by; higher is more useful to label.
        doubtful_class: Name of the class with the largest share in the score.
        reason: Text that tells the user why the window was chosen.
        margin: Mean over the pixels of ``1 - (p1 - p2)``, with the probabilities ``p1`` and ``p2``
            of the two most likely classes.
        disagreement: Mean share of mirror images with another predicted class; None without
            mirror images.
    """

    place: FileWindow
    polygon: Optional[shapely.Polygon]
    score: float
    doubtful_class: str
    reason: str
    margin: float
    disagreement: Optional[float]

    @property
    def title(self) -> str:
        """File name, column and row of the window."""
        box = self.place
        return f'{os.path.basename(box.path)} ({box.column}, {box.row})'


def write_suggestions(
    path: Path,
    suggestions: Sequence[Suggestion],
    crs: Optional[str],
    class_names: Sequence[str],
    palette: Sequence[Sequence[int]],
) -> None:
    """Write suggestions in their order as a GeoPackage (``.gpkg``) or a table (``.csv``).

    The GeoPackage has one layer, ``tiles``. QGIS draws each window as a broad outline in the color
    of its doubtful class.

    Args:
        path: File to write. It is replaced only when the new file is complete.
        suggestions: The suggestions; a GeoPackage needs their polygons in ``crs``.
        crs: CRS of the polygons as WKT; None for a table.
        class_names: Names of all classes.
        palette: RGB colors of the classes.

    Raises:
        GeoError: If the file cannot be written.
    """
    fields = _fields(suggestions)
    try:
        if path.suffix.lower() == '.csv':
            text = io.StringIO()
            writer = csv.writer(text, lineterminator='\n')
            writer.writerow(fields)
            writer.writerows(zip(*fields.values()))
            atomic_write(path, text.getvalue().encode())
            return
        with temporary_beside(path) as folder:
            temporary = folder / path.name
            columns = [
                np.array(values, object if isinstance(values[0], str) else None)
                for values in fields.values()
            ]
            polygons = np.array([suggestion.polygon for suggestion in suggestions], object)
            pyogrio.raw.write(
                str(temporary),
                shapely.to_wkb(polygons),
                columns,
                list(fields),
                geometry_type='Polygon',
                crs=crs,
                driver='GPKG',
                layer=LAYER,
            )
            shown = [
                number for number, name in enumerate(class_names) if name in fields[CLASS_FIELD]
            ]
            add_polygon_style(
                temporary,
                LAYER,
                CLASS_FIELD,
                [class_names[n] for n in shown],
                [palette[n] for n in shown],
                hollow=True,
            )
            os.replace(temporary, path)
    except (OSError, DataSourceError, DataLayerError) as error:
        raise GeoError(disk_message(path, error)) from error


def read_table(path: str) -> List[FileWindow]:
    """Return the windows of a table that :func:`write_suggestions` wrote.

    Raises:
        GeoError: If the file cannot be read, or has other columns.
    """
    try:
        with open(path, encoding='utf-8', newline='') as file:
            return [
                FileWindow(
                    os.path.realpath(line['path']),
                    *(int(line[key]) for key in ('column', 'row', 'width', 'height')),
                )
                for line in csv.DictReader(file)
            ]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise GeoError(
            f'{path} cannot be read as a table of windows ({error!r}): expected a table '
            f'that this command wrote, with the columns path, column, row, width and '
            f'height.'
        ) from error


def _fields(suggestions: Sequence[Suggestion]) -> Dict[str, List[Any]]:
    """Return the columns of the file: field -> its values, in the order of the suggestions."""
    fields: Dict[str, List[Any]] = dict(
        rank=list(range(1, len(suggestions) + 1)),
        score=[round(suggestion.score, 4) for suggestion in suggestions],
        reason=[suggestion.reason for suggestion in suggestions],
    )
    fields[CLASS_FIELD] = [suggestion.doubtful_class for suggestion in suggestions]
    fields['margin'] = [round(suggestion.margin, 4) for suggestion in suggestions]
    if any(suggestion.disagreement is not None for suggestion in suggestions):
        fields['disagreement'] = [
            round(suggestion.disagreement or 0, 4) for suggestion in suggestions
        ]
    boxes = [suggestion.place for suggestion in suggestions]
    fields['path'] = [box.path for box in boxes]
    fields['column'] = [box.column for box in boxes]
    fields['row'] = [box.row for box in boxes]
    fields['width'] = [box.width for box in boxes]
    fields['height'] = [box.height for box in boxes]
    return fields
