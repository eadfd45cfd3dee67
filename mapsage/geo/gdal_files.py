"""Files that GDAL opens: opening one, the cause if that fails, and stamps of their content.

`open_file` is the only call of `rasterio.open` for scenes, maps and labels, because GDAL must not
start threads in a process that forks. Names that are no paths are explained in `gdal_names.py`.
"""

from __future__ import annotations

import hashlib
import os
import threading
import warnings
from contextlib import contextmanager
from typing import Any, Dict, Iterator, List, Optional

import rasterio
from rasterio.errors import NotGeoreferencedWarning
from rasterio.session import DummySession

from . import gdal_names, vsi
from .errors import GeoError, PathName

# GDAL caches decoded blocks, by default in up to 5 % of the machine's memory in every process. On a
# node with many ranks and workers the sum exceeds the memory. The limit here is in megabytes; a
# limit that the user has set takes precedence.
os.environ.setdefault('GDAL_CACHEMAX', '256')

# GDAL's pool of threads does not survive a fork: a worker would wait for ever for threads that only
# its parent has. Since GDAL 3.10, VRT mosaics use all cores by default.
_ONE_THREAD = dict(GDAL_NUM_THREADS=1, VRT_NUM_THREADS=1, GTI_NUM_THREADS=1)

# By default GDAL lists the whole folder of every file that it opens, to find companion files. With
# `TRUE` it looks for them by their names instead, as it always does in folders of more than 1,000
# files; that takes half the time to open one of 1,000 scenes. On a server every look is a request,
# so there are none.
_LISTING = 'GDAL_DISABLE_READDIR_ON_OPEN'

# `rasterio.open` without its search for credentials, which only files on servers need. The search
# enters an environment of its own, which takes a fifth of the time to open a file.
_open_local = getattr(rasterio.open, '__wrapped__', rasterio.open)

# Formats that users give in place of a raster or of polygons that are read, by suffix.
_OTHER_FORMATS = {
    '.kml': 'KML',
    '.kmz': 'KMZ',
    '.gdb': 'a FileGDB',
    '.gpx': 'GPX',
    '.csv': 'a table',
    '.dxf': 'DXF',
    '.gml': 'GML',
    '.tab': 'a MapInfo file',
    '.mif': 'a MapInfo file',
    '.zip': 'a zip archive',
    '.gpkg': 'a GeoPackage without a raster',
    '.geojson': 'GeoJSON',
    '.json': 'JSON',
    '.shp': 'a Shapefile',
    '.fgb': 'a FlatGeobuf',
}

# The value of `_LISTING` in the environment that this thread is in, if `gdal_environment` made it.
_thread_state = threading.local()


def open_file(path: PathName, mode: str = 'r', **profile: Any) -> Any:
    """Call ``rasterio.open``, without its warning about files that are not georeferenced.

    GDAL uses one thread for the file, whatever the value of ``GDAL_NUM_THREADS`` is.

    Raises:
        GeoError: If the name is not in UTF-8.
    """
    check_name(path)
    remote = gdal_names.is_remote(str(path))
    with gdal_environment(str(path), remote), warnings.catch_warnings():
        warnings.simplefilter('ignore', NotGeoreferencedWarning)
        opener = rasterio.open if remote else _open_local
        return opener(gdal_names.as_vsi(str(path)), mode, **profile)


def check_name(path: PathName) -> None:
    """Check that GDAL can open a file of this name.

    Raises:
        GeoError: If the name is not in UTF-8.
    """
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise GeoError(
            f'the name of {path} is not in UTF-8, the only encoding that GDAL takes. '
            f'Rename it, for example with convmv -f gbk -t utf-8 --notest.'
        ) from error


@contextmanager
def gdal_environment(path: str, remote: Optional[bool] = None) -> Iterator[None]:
    """Enter a context in which GDAL starts no threads, and does not list folders.

    Entering and leaving a context takes a quarter of the time to open a file. So a loop over many
    files enters it once: inside a context, another one with the same options does nothing.

    The dummy session keeps rasterio from looking for credentials. GDAL does that itself, in the
    environment and in the files of AWS and others, but only for file systems that need them.

    Args:
        path: Path of the file that is used in the context.
        remote: Whether the file is on a server; None to find out.
    """
    options: Dict[str, Any] = dict(_ONE_THREAD)
    listing = 'TRUE'
    if gdal_names.is_remote(path) if remote is None else remote:
        vsi.about_to_connect()
        listing = 'EMPTY_DIR'
    options[_LISTING] = listing = os.environ.get(_LISTING, listing)
    outer: Optional[str] = _thread_state.__dict__.get('listing')
    if outer == listing:
        yield
        return
    with rasterio.Env(session=DummySession(), **options):
        _thread_state.listing = listing
        try:
            yield
        finally:
            _thread_state.listing = outer


def describe_open_failure(path: str, error: Exception) -> str:
    """Return the message for a file that cannot be opened, with the most likely cause."""
    driver = gdal_names.missing_driver(path)
    if driver:
        return (
            f'cannot open {path}: the GDAL of this rasterio ({rasterio.__gdal_version__}) has '
            f'no driver {driver} ({error}). Install rasterio where GDAL has it, for example '
            f'from conda-forge with libgdal-{driver.lower()}, or convert the file to GeoTIFF.'
        )
    if gdal_names.is_remote(path):
        # The next attempt must ask the server again, because the file may exist then.
        vsi.forget(gdal_names.remote_file(path))
        hint = (
            'Copy the file here, or to a server that answers requests for parts of a file'
            if 'Range downloading not supported' in str(error)
            else 'Check the address and your right to read it'
        )
        return (
            f'cannot open {path}: the server does not deliver it ({error}). {hint}; '
            f'docs/reference/datasets.md lists the names that work and the settings of '
            f'timeouts and access.'
        )
    if other_format(path):
        return f'cannot open {path}: {other_format(path)}'
    state = 'no raster that GDAL reads' if os.path.exists(path) else 'no such file'
    if gdal_names.local_file(path):
        state = 'no raster that GDAL reads in it'
    return (
        f'cannot open {path}: {state} ({error}); expected a GeoTIFF or another raster. Check '
        'the path, or copy the file again.'
    )


def vector_open_error(path: str, error: Exception) -> GeoError:
    """Return the error to raise for a vector file that cannot be opened."""
    state = 'no vector file that GDAL reads' if os.path.exists(path) else 'no such file'
    return GeoError(
        f'cannot open {path}: {state} ({error}); expected polygons as GeoPackage '
        'or GeoJSON. Check the path, or copy the file again.'
    )


def other_format(path: PathName) -> str:
    """Return a sentence on a vector file or archive in place of a raster or labels, or ''.

    Args:
        path: Path of a file or folder that exists; for others the result is ''.
    """
    name = _OTHER_FORMATS.get(os.path.splitext(str(path).rstrip('/'))[1].lower())
    if name is None or not os.path.exists(path):
        return ''
    source = f'/vsizip/{path}' if name.startswith('a zip') else path
    packed = f' A raster in it is named {source}/NAME.tif.' if source != path else ''
    if name == 'a table':
        source = f'{path} -oo X_POSSIBLE_NAMES=lon -oo Y_POSSIBLE_NAMES=lat -a_srs EPSG:4326'
        packed = ' docs/tutorials/scenes.md does it in Python.'
    return (
        f'it is {name}, no raster. Polygons and points are read from GeoPackage, GeoJSON, Shapefile '
        f'and FlatGeobuf: convert them with ogr2ogr -f GPKG labels.gpkg {source}.{packed}'
    )


def check_sources(source: rasterio.DatasetReader, path: str) -> List[str]:
    """Check that the local files of a mosaic, and of the mosaics in it, exist.

    Returns:
        Their paths, with the paths of archives.

    Raises:
        GeoError: If a file is missing.
    """
    missing, seen, waiting = [], {path}, list(source.files)
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        if gdal_names.is_gdal_name(name):
            if not gdal_names.is_remote(name) and not gdal_names.local_file(name):
                missing.append(name)
        elif not os.path.exists(name):
            missing.append(name)
        elif name.lower().endswith('.vrt'):
            with open_file(name) as inner:
                waiting += inner.files
    if missing:
        shown = ', '.join(sorted(missing)[:4]) + (' ...' if len(missing) > 4 else '')
        raise GeoError(
            f'{path} is a mosaic of {len(seen) - 1} file(s), and {len(missing)} of them cannot be '
            f'found: {shown}. Copy them there, or rebuild the mosaic from the files that exist '
            f'(gdalbuildvrt): ground that no file shows is no data in MapSage, and in other '
            f'programs with -vrtnodata VALUE.'
        )
    local = (
        name if os.path.exists(name) else gdal_names.local_file(name)
        for name in sorted(seen - {path})
    )
    return [name for name in local if name]


def stamp(name: str) -> List[Any]:
    """Return the name of a file, followed by values that change with its content.

    The values are the size and time of change of a local file, or of the archive that contains it.
    For a file on a server they are its size and ETag, or the time that the server gives. Passwords
    and signatures of a URL are left out.

    Args:
        name: Path of a file, or a name that GDAL opens.

    Returns:
        JSON values; only the name if nothing else is known.
    """
    if os.path.exists(name):
        stat = os.stat(name)
        return [os.path.abspath(name), stat.st_size, stat.st_mtime_ns]
    remote, local = gdal_names.remote_file(name), gdal_names.local_file(name)
    if remote:
        headers = vsi.headers(remote)
        version = headers.get('etag') or headers.get('last-modified')
        if version is None:
            # The query, which `without_secrets` removes, may say which file it is.
            version = hashlib.sha256(remote.encode('utf-8', 'surrogateescape')).hexdigest()[:16]
        return [gdal_names.without_secrets(name), vsi.size_in(headers), version]
    if local:
        stat = os.stat(local)
        return [name.replace(local, os.path.abspath(local), 1), stat.st_size, stat.st_mtime_ns]
    return [name]
