"""Names that GDAL opens and that are no path of a file: in archives, on servers, parts of a file.

========================================  ==========================================================
``/vsizip/a.zip/b.tif``, ``/vsicurl/...``  GDAL's own file systems
``https://...``, ``s3://...``              what rasterio accepts too: http, https, ftp, s3, gs, az,
``zip://a.zip!b.tif``                      oss, zip, tar, gzip, file, and chains (``zip+https``)
``NETCDF:"a.nc":temperature``              subdatasets, which begin with the name of a driver
``vrt://a.tif?bands=3,2,1``                connections that a driver understands
========================================  ==========================================================
"""
from __future__ import annotations

import glob
import html
import os
import re
from pathlib import Path, PurePosixPath
from typing import List, Optional, Sequence, Set
from urllib.parse import unquote

import rasterio

from . import vsi

_FILE_SYSTEM = {'ftp': 'curl', 'http': 'curl', 'https': 'curl', 's3': 's3', 'gs': 'gs', 'az': 'az',
                'oss': 'oss', 'zip': 'zip', 'tar': 'tar', 'gzip': 'gzip'}
_REMOTE = ('curl', 's3', 'gs', 'az', 'adls', 'oss', 'swift', 'hdfs', 'webhdfs')
_ARCHIVES = ('.zip', '.tar', '.tgz', '.gz', '.kmz', '.7z', '.rar')

_SCHEME = re.compile(r'[A-Za-z][A-Za-z0-9+.]*://')
_DRIVER = re.compile(r'[A-Za-z][A-Za-z0-9_]+:')  # two letters at least: one is a disk of Windows
_VSI = re.compile(r'/vsi(\w+)(?=[/?])')
# A name on a server within a text: in a file system of GDAL's, or a URL.
_ON_SERVER = re.compile(r'(?:/vsi(?:%s)(?:_streaming)?[/?]|(?<![A-Za-z])(?:%s)://)[^\s<>"]*'
                        % ('|'.join(_REMOTE), '|'.join(
                            scheme for scheme, kind in _FILE_SYSTEM.items() if kind in _REMOTE)),
                        re.IGNORECASE)
# Coordinate systems name authorities, which nobody asks.
_SRS = re.compile(r'<SRS\b[^<>]*>[^<]*</SRS>')
_SOURCE = re.compile(
    r'<Source(?:Filename|Dataset)[^>]*>\s*(?:<!\[CDATA\[)?([^<\]]+)', re.IGNORECASE)
_COMMENT = re.compile(r'<!--.*?-->', re.DOTALL)
_ESCAPE = re.compile(r'\\u([0-9a-fA-F]{4})')  # of JSON
_MARKUP = (b'<', b'{', b'[')  # what a description begins with
_LARGEST_DESCRIPTION = 64 << 20  # bytes of one in an archive
_USER = re.compile(r'(?<=://)[^/@]*@')

# Of subdatasets and suffixes whose driver has another name than they have.
_DRIVERS_OF_PREFIX = {'netcdf': 'netCDF', 'hdf5': 'HDF5', 'bag': 'BAG', 'gtiff_dir': 'GTiff',
                      'zarr': 'Zarr', 'nitf_im': 'NITF', 'wms': 'WMS', 'wmts': 'WMTS', 'wcs': 'WCS'}
# What is taken from a folder of scenes. A file that is named is opened whatever its name ends in.
PICTURE_SUFFIXES = ('.png', '.jpg', '.jpeg', '.bmp')
SCENE_SUFFIXES = ('.tif', '.tiff', '.vrt', '.img', '.jp2') + PICTURE_SUFFIXES
_DRIVERS_OF_SUFFIX = {'.nc': 'netCDF', '.h5': 'HDF5', '.hdf5': 'HDF5', '.he5': 'HDF5',
                      '.hdf': 'HDF4', '.jp2': 'JP2OpenJPEG', '.j2k': 'JP2OpenJPEG', '.ecw': 'ECW',
                      '.sid': 'MrSID', '.grib': 'GRIB', '.grb': 'GRIB', '.grib2': 'GRIB',
                      '.grb2': 'GRIB', '.kea': 'KEA', '.webp': 'WEBP'}
_TIFF = ('', '.tif', '.tiff', '.vrt')


def is_gdal_name(name: str) -> bool:
    """Return whether a name is one for GDAL; the name of an existing file is not."""
    if os.path.exists(name):
        return False
    return bool(name.startswith('/vsi') or _SCHEME.match(name) or _DRIVER.match(name))


def locate(root: Optional[str], name: str) -> str:
    """Return ``name``, relative to a folder unless it is one for GDAL."""
    path = os.path.join(root or '', name)
    return name if not os.path.exists(path) and is_gdal_name(name) else path


def files_of(name: str, suffixes: Sequence[str]) -> List[str]:
    """Return the files that a name means: those in a folder with one of ``suffixes``, or itself.

    Folders of GDAL's file systems end with a slash: ``/vsizip/a.zip/``, ``s3://bucket/scenes/``.
    """
    if os.path.isdir(name):
        return sorted(str(path) for path in Path(name).iterdir()
                      if path.suffix.lower() in suffixes and path.is_file())
    if is_gdal_name(name) and name.endswith('/'):
        folder = as_vsi(name)
        return sorted(folder + each for each in vsi.list_folder(folder)
                      if PurePosixPath(each).suffix.lower() in suffixes)
    return [name]


def match(pattern: str, suffixes: Sequence[str] = SCENE_SUFFIXES) -> List[str]:
    """Return the files that a path, a folder, a pattern of paths or a name for GDAL means."""
    if not is_gdal_name(pattern) and glob.has_magic(pattern) and not os.path.exists(pattern):
        return sorted(glob.glob(pattern))
    return files_of(pattern, suffixes)


def content_of(name: str, limit: int = -1) -> bytes:
    """Return the bytes of a file, also of one in an archive or on a server.

    Args:
        name: Path, or name in one of GDAL's file systems.
        limit: Largest number of bytes that a file in one of these may have; -1 for any.

    Raises:
        OSError: If it cannot be read, or is larger.
    """
    return vsi.read_bytes(as_vsi(name), limit) if is_gdal_name(name) else Path(name).read_bytes()


def as_vsi(name: str) -> str:
    """Return the name in GDAL's own file systems: ``https://a/b`` is ``/vsicurl/https://a/b``.

    Other names, those of subdatasets among them, are returned as they are.
    """
    found = _SCHEME.match(name)
    if not found or os.path.exists(name):
        return name
    schemes = found.group()[:-3].lower().split('+')
    if not all(scheme in _FILE_SYSTEM or scheme == 'file' for scheme in schemes):
        return name
    rest = name[found.end():]
    if schemes[0] in ('zip', 'tar', 'gzip'):
        archive, mark, inner = rest.partition('!')
        rest = f'{archive}/{inner.lstrip("/")}' if mark else archive
    if _FILE_SYSTEM.get(schemes[-1]) == 'curl':
        rest = f'{schemes[-1]}://{rest}'
    prefix = '/'.join(f'vsi{_FILE_SYSTEM[scheme]}' for scheme in schemes if scheme != 'file')
    return f'/{prefix}/{rest}' if prefix else rest


def is_remote(name: str) -> bool:
    """Return whether GDAL asks a server for a file, or for the sources of a mosaic (VRT)."""
    if os.path.exists(name):
        return name.lower().endswith('.vrt') and _has_remote_source(name)
    return any(kind in _REMOTE for kind in _VSI.findall(as_vsi(_container(name))))


def server_in(path: str) -> str:
    """Return a name on a server that a file would make GDAL ask for, or ''.

    Such files are descriptions: mosaics (VRT) and those in them, services (WMS), items of catalogs
    (STAC). GDAL knows them by their content, whatever their name ends in. A name counts wherever it
    stands, except in a coordinate system: GDAL follows sources, overviews, elevation models and
    arrays of coordinates alike.

    Args:
        path: Path of a local file.
    """
    seen: Set[str] = set()
    waiting = [path]
    while waiting:
        path = waiting.pop()
        if path in seen or not (os.path.isfile(path) or is_gdal_name(path)):
            continue
        seen.add(path)
        server = '' if os.path.isfile(path) else remote_file(path)
        if server:
            return server
        try:
            text = _description(path)
        except OSError:
            # The name leads nowhere.
            continue
        name = _ON_SERVER.search(text)
        if name:
            return name.group()
        for source in _SOURCE.findall(_COMMENT.sub('', text)):
            source = source.strip()
            source = _container(source) if is_gdal_name(source) else source
            waiting += [source, os.path.join(os.path.dirname(path), source)]
    return ''


def remote_file(name: str) -> str:
    """Return what a server is asked for, in GDAL's file systems; '' for a name on no server.

    That is the archive for a file in an archive, and the file for a subdataset.
    """
    rest = as_vsi(_container(name))
    while True:
        found = _VSI.match(rest)
        if found is None:
            return ''
        if found.group(1) in _REMOTE:
            return _until_archive(rest) if is_packed(name) else rest
        rest = rest[found.end():]  # begins with a slash, two in some names
        rest = rest[1:] if rest.startswith('//') else rest


def local_file(name: str) -> str:
    """Return the local file that a name for GDAL leads to, such as an archive; '' if there is none.
    """
    rest = as_vsi(_container(name))
    found = _VSI.match(rest)
    rest = rest[found.end() + 1:] if found else rest
    rest = rest.lstrip('{').replace('}', '')
    for path in (Path(rest), *Path(rest).parents):
        if path.is_file():
            return str(path)
    return ''


def is_packed(name: str) -> bool:
    """Return whether a file lies in an archive."""
    return any(kind in ('zip', 'tar', 'gzip', '7z', 'rar')
               for kind in _VSI.findall(as_vsi(_container(name))))


def output_name(name: str) -> str:
    """Return a name for what is made of a file, without folders and suffix, of safe characters.

    A subdataset adds its own name to that of its file: ``NETCDF:"a.nc":sst`` becomes ``a_sst``. The
    file of a Sentinel product has the same name in each, so the name of its folder is taken.
    """
    if not is_gdal_name(name):
        return Path(name).stem
    file, inner = _container(name), _inner(name)
    path = PurePosixPath(_without_query(file.split('!')[-1].rstrip('/')))
    stem = PurePosixPath(path.stem).stem if path.suffix == '.gz' else path.stem
    if path.name.upper().startswith(('MTD_MSI', 'MTD.XML')) and path.parent.name:
        stem = PurePosixPath(path.parent.name).stem
    if _SCHEME.match(file) or _VSI.match(file):
        stem = unquote(stem)
    words = [stem] + re.split(r'[:/\\"]+', inner)
    return re.sub(r'[\x00-\x1f<>:"/\\|?*]+', '_', '_'.join(filter(None, words))) or 'unnamed'


def suffix_of(name: str) -> str:
    """Return the suffix of the file's name, in lower case: '.tif'."""
    return PurePosixPath(_without_query(_container(name))).suffix.lower()


def without_secrets(name: str) -> str:
    """Return a URL without user, password and query, in which signatures are written."""
    return _without_query(_USER.sub('', name))


def missing_driver(name: str) -> str:
    """Return the GDAL driver that a name asks for and this GDAL lacks, or ''."""
    prefix = '' if _SCHEME.match(name) or os.path.exists(name) else (
        name.partition(':')[0] if _DRIVER.match(name) else '')
    wanted = _DRIVERS_OF_PREFIX.get(prefix.lower())
    if wanted is None and prefix:
        wanted = next((kind for kind in ('HDF4', 'SENTINEL2', 'GRIB', 'ECW', 'MrSID')
                       if prefix.upper().startswith(kind.upper())), None)
    wanted = wanted or _DRIVERS_OF_SUFFIX.get(suffix_of(name))
    with rasterio.Env() as environment:
        return '' if wanted is None or wanted in environment.drivers() else wanted


def _container(name: str) -> str:
    """Return the file in the name of a subdataset or connection; of another name, itself."""
    if os.path.exists(name) or name.startswith('/vsi'):
        return name
    if name.startswith('vrt://'):
        return name[6:].partition('?')[0]
    if _SCHEME.match(name) or not _DRIVER.match(name):
        return name
    rest = name.partition(':')[2]
    quoted = re.search(r'"([^"]+)"', rest)
    return quoted.group(1) if quoted else max(re.split(r':(?!//)', rest), key=_looks_like_a_file)


def _inner(name: str) -> str:
    """Return what follows the file in the name of a subdataset."""
    file = _container(name)
    if file == name or name.startswith('vrt://'):
        return ''
    before, _, behind = name.partition(':')[2].partition(file)
    return behind.strip('"') or before.strip('":')  # GTIFF_DIR:2:file.tif


def _looks_like_a_file(word: str) -> int:
    return 2 * bool(PurePosixPath(word).suffix) + ('/' in word) + os.path.exists(word)


def _without_query(name: str) -> str:
    return name.partition('?')[0] if _SCHEME.search(name) else name


def _until_archive(path: str) -> str:
    for parent in reversed((PurePosixPath(path), *PurePosixPath(path).parents)):
        if parent.suffix.lower() in _ARCHIVES:
            return path[:len(str(parent)) + path.count('://')]  # PurePosixPath joins the slashes
    return path


def _has_remote_source(path: str) -> bool:
    """Return whether a mosaic names a source on a server."""
    with open(path, encoding='utf-8', errors='replace') as file:
        text = file.read()
    return any(is_remote(source) for source in _SOURCE.findall(text))


def _description(path: str) -> str:
    """Return the text of a file that describes others, without coordinate systems; '' of others."""
    if os.path.isfile(path):
        with open(path, 'rb') as file:
            content = file.read(1024)
            if content.lstrip(b'\xef\xbb\xbf \t\r\n')[:1] in _MARKUP:
                content += file.read()
    else:
        content = content_of(path, _LARGEST_DESCRIPTION)
    if content.lstrip(b'\xef\xbb\xbf \t\r\n')[:1] not in _MARKUP:
        return ''
    text = html.unescape(_SRS.sub('', content.decode('utf-8', 'replace')))
    return _ESCAPE.sub(lambda match: chr(int(match.group(1), 16)), text).replace('\\/', '/')
