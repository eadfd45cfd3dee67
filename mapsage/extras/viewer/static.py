"""Writes a folder with the page and the files of the maps, for any web server with byte ranges.

There is no review, and polygons are loaded at once instead of by box; `server.py` has both.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Dict, Optional, Union

from mapsage.base.files import atomic_write

from .errors import ViewError
from .polygons import MOST, polygons_in
from .server import PAGE, WEB
from .session import ViewSession


def write_static(session: ViewSession, out: Union[str, Path]) -> Path:
    """Write the page, the maps and their files into a folder; return the path of the page.

    If a map has more than ``MOST`` polygons, they are left out and a note says so, because a page
    without a viewer's server has to load all of them.

    Raises:
        ViewError: If the folder cannot be written or is full.
    """
    out = Path(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name in set(PAGE.values()):
            shutil.copyfile(WEB / name, out / name)
        catalog = session.as_json(lambda number, kind: f'maps/{number}/{kind}.tif')
        for number, facts in enumerate(catalog['maps']):
            folder = out / 'maps' / str(number)
            folder.mkdir(parents=True, exist_ok=True)
            for kind in facts['files']:
                shutil.copyfile(str(session.file(number, kind)), folder / f'{kind}.tif')
            facts['polygons'] = _write_polygons(session, number, facts, folder)
        atomic_write(out / 'catalog.json', json.dumps(catalog).encode())
    except OSError as error:
        raise ViewError(
            f'cannot write into {out}: {error}. Free space there, or choose another folder.'
        ) from error
    return out / 'index.html'


def _write_polygons(
    session: ViewSession, number: int, facts: Dict[str, Any], folder: Path
) -> Optional[str]:
    """Write the polygons of a map and return their URL; None without polygons, or if left out."""
    path = session.entries[number].polygons
    if path is None:
        return None
    everything = polygons_in(path, [-1e300, -1e300, 1e300, 1e300])
    if 'too_many' in everything:
        facts['notes'] = [
            *facts['notes'],
            f'The polygons are left out: there are more than {MOST:,}. {path.name} opens in QGIS.',
        ]
        return None
    atomic_write(folder / 'polygons.json', json.dumps(everything).encode())
    return f'maps/{number}/polygons.json'
