"""A folder that any web server with byte ranges shows: the page and the files of the maps."""
from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from mapsage.atomic_write import atomic_write

from .errors import ViewError
from .polygons import MOST, polygons_in
from .server import PAGE, WEB
from .session import ViewSession


def write_static(session: ViewSession, out: Any) -> Path:
    """Write the page, the maps and what belongs to them into a folder; return the page's path.

    Polygons of a map with more than ``MOST`` are left out, since a page without a server would have
    to load them all; a note says so.

    Raises:
        ViewError: If the folder cannot be written or is full.
    """
    out = Path(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name in set(PAGE.values()):
            shutil.copyfile(WEB / name, out / name)
        catalog = session.as_json(lambda number, kind: f'maps/{number}/{kind}.tif')
        for number, shown in enumerate(catalog['maps']):
            folder = out / 'maps' / str(number)
            folder.mkdir(parents=True, exist_ok=True)
            for kind in shown['files']:
                shutil.copyfile(str(session.file(number, kind)), folder / f'{kind}.tif')
            shown['polygons'] = _polygons(session, number, shown, folder)
        atomic_write(out / 'catalog.json', json.dumps(catalog).encode())
    except OSError as error:
        raise ViewError(f'cannot write into {out}: {error}. Free space there, or choose another '
                        'folder.') from error
    return out / 'index.html'


def _polygons(session: ViewSession, number: int, shown: Any, folder: Path) -> Any:
    path = session.entries[number].polygons
    if path is None:
        return None
    everything = polygons_in(path, [-1e300, -1e300, 1e300, 1e300])
    if 'too_many' in everything:
        shown['notes'] = [*shown['notes'], f'The polygons are left out: there are more than '
                          f'{MOST:,}. {path.name} opens in QGIS.']
        return None
    atomic_write(folder / 'polygons.json', json.dumps(everything).encode())
    return f'maps/{number}/polygons.json'
