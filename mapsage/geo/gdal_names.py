"""Names that GDAL opens apart from paths: files in archives and on servers, rasters in a file.

The functions only look at names and at descriptions such as VRT files; they open no raster. An
existing file is always taken as a path, even if its name looks like one of these:

========================================  ==========================================================
``/vsizip/a.zip/b.tif``, ``/vsicurl/...``  GDAL's own file systems
``https://...``, ``s3://...``              rasterio's schemes: http, https, ftp, s3, gs, az, oss,
``zip://a.zip!b.tif``                      zip, tar, gzip, file, and chains (``zip+https``)
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

_FILE_SYSTEM = {
    'ftp': 'curl',
    'http': 'curl',
    'https': 'curl',
    's3': 's3',
    'gs': 'gs',
    'az': 'az',
    'oss': 'oss',
    'zip': 'zip',
    'tar': 'tar',
    'gzip': 'gzip',
}
_REMOTE = ('curl', 's3', 'gs', 'az', 'adls', 'oss', 'swift', 'hdfs', 'webhdfs')
_ARCHIVES = ('.zip', '.tar', '.tgz', '.gz', '.kmz', '.7z', '.rar')

_SCHEME = re.compile(r'[A-Za-z][A-Za-z0-9+.]*://')
# At least two letters, because one letter is a disk of Windows.
_DRIVER = re.compile(r'[A-Za-z][A-Za-z0-9_]+:')
_VSI = re.compile(r'/vsi(\w+)(?=[/?])')
# A name on a server within a text: a path in one of GDAL's file systems, or a URL.
_ON_SERVER = re.compile(
    r'(?:/vsi(?:%s)(?:_streaming)?[/?]|(?<![A-Za-z])(?:%s)://)[^\s<>"]*'
    % (
        '|'.join(_REMOTE),
        '|'.join(scheme for scheme, kind in _FILE_SYSTEM.items() if kind in _REMOTE),
    ),
    re.IGNORECASE,
)
# Definitions of coordinate systems may contain URLs of authorities, which GDAL does not open.
_SRS = re.compile(r'<SRS\b[^<>]*>[^<]*</SRS>')
_SOURCE = re.compile(
    r'<Source(?:Filename|Dataset)[^>]*>\s*(?:<!\[CDATA\[)?([^<\]]+)', re.IGNORECASE
)
_COMMENT = re.compile(r'<!--.*?-->', re.DOTALL)
# An escaped character in JSON.
_ESCAPE = re.compile(r'\\u([0-9a-fA-F]{4})')
# First characters of XML and JSON, the formats of descriptions.
_MARKUP = (b'<', b'{', b'[')
# Largest size in bytes of a description in an archive.
_LARGEST_DESCRIPTION = 64 << 20
_USER = re.compile(r'(?<=://)[^/@]*@')

# Drivers whose name differs from the prefix of their subdatasets or the suffix of their files.
_DRIVERS_OF_PREFIX = {
    'netcdf': 'netCDF',
    'hdf5': 'HDF5',
    'bag': 'BAG',
    'gtiff_dir': 'GTiff',
    'zarr': 'Zarr',
    'nitf_im': 'NITF',
    'wms': 'WMS',
    'wmts': 'WMTS',
    'wcs': 'WCS',
}
# Suffixes of the files that are taken from a folder of scenes. A file that is named explicitly may
# have any suffix.
PICTURE_SUFFIXES = ('.png', '.jpg', '.jpeg', '.bmp')
SCENE_SUFFIXES = ('.tif', '.tiff', '.vrt', '.img', '.jp2') + PICTURE_SUFFIXES
_DRIVERS_OF_SUFFIX = {
    '.nc': 'netCDF',
    '.h5': 'HDF5',
    '.hdf5': 'HDF5',
    '.he5': 'HDF5',
    '.hdf': 'HDF4',
    '.jp2': 'JP2OpenJPEG',
    '.j2k': 'JP2OpenJPEG',
    '.ecw': 'ECW',
    '.sid': 'MrSID',
    '.grib': 'GRIB',
    '.grb': 'GRIB',
    '.grib2': 'GRIB',
    '.grb2': 'GRIB',
    '.kea': 'KEA',
    '.webp': 'WEBP',
}


def is_gdal_name(name: str) -> bool:
    """Return whether a name is not a path but one that only GDAL opens.

    The name of an existing file is a path.
    """
    if os.path.exists(name):
        return False
    return bool(name.startswith('/vsi') or _SCHEME.match(name) or _DRIVER.match(name))


def locate(root: Optional[str], name: str) -> str:
    """Return the path of a file below ``root``, or ``name`` itself if only GDAL opens it."""
    path = os.path.join(root or '', name)
    return name if not os.path.exists(path) and is_gdal_name(name) else path


def files_of(name: str, suffixes: Sequence[str]) -> List[str]:
    """Return the files of a folder that have one of ``suffixes``, or the name itself.

    A name in one of GDAL's file systems is a folder if it ends with a slash: ``/vsizip/a.zip/``,
    ``s3://bucket/scenes/``.
    """
    if os.path.isdir(name):
        return sorted(
            str(path)
            for path in Path(name).iterdir()
            if path.suffix.lower() in suffixes and path.is_file()
        )
    if is_gdal_name(name) and name.endswith('/'):
        folder = as_vsi(name)
        return sorted(
            folder + file
            for file in vsi.list_folder(folder)
            if PurePosixPath(file).suffix.lower() in suffixes
        )
    return [name]


def match(pattern: str, suffixes: Sequence[str] = SCENE_SUFFIXES) -> List[str]:
    """Return the files of a path, a folder, a pattern of paths, or a name that GDAL opens."""
    if not is_gdal_name(pattern) and glob.has_magic(pattern) and not os.path.exists(pattern):
        return sorted(glob.glob(pattern))
    return files_of(pattern, suffixes)


def content_of(name: str, limit: int = -1) -> bytes:
    """Return the bytes of a file, which may be in an archive or on a server.

    Args:
        name: Path, or name in one of GDAL's file systems.
        limit: Largest size in bytes of a file in one of GDAL's file systems; -1 for any size.

    Raises:
        OSError: If the file cannot be read, or is larger.
    """
    return vsi.read_bytes(as_vsi(name), limit) if is_gdal_name(name) else Path(name).read_bytes()


def as_vsi(name: str) -> str:
    """Return the name in GDAL's own file systems: ``https://a/b`` is ``/vsicurl/https://a/b``.

    Other names, such as names of subdatasets, are returned unchanged.

    Example:
        >>> as_vsi('zip:///data/z.zip!in/a.tif')
        '/vsizip//data/z.zip/in/a.tif'
        >>> as_vsi('s3://bucket/a.tif')
        '/vsis3/bucket/a.tif'
    """
    prefix_match = _SCHEME.match(name)
    if not prefix_match or os.path.exists(name):
        return name
    schemes = prefix_match.group()[:-3].lower().split('+')
    if not all(scheme in _FILE_SYSTEM or scheme == 'file' for scheme in schemes):
        return name
    rest = name[prefix_match.end() :]
    if schemes[0] in ('zip', 'tar', 'gzip'):
        archive, mark, inner = rest.partition('!')
        rest = f'{archive}/{inner.lstrip("/")}' if mark else archive
    if _FILE_SYSTEM.get(schemes[-1]) == 'curl':
        rest = f'{schemes[-1]}://{rest}'
    prefix = '/'.join(f'vsi{_FILE_SYSTEM[scheme]}' for scheme in schemes if scheme != 'file')
    return f'/{prefix}/{rest}' if prefix else rest


def is_remote(name: str) -> bool:
    """Return whether a file, or a source of a mosaic (VRT), is on a server."""
    if os.path.exists(name):
        if not name.lower().endswith('.vrt'):
            return False
        text = Path(name).read_text(encoding='utf-8', errors='replace')
        return any(is_remote(source) for source in _SOURCE.findall(text))
    return any(kind in _REMOTE for kind in _VSI.findall(as_vsi(_container(name))))


def server_in(path: str, folder: str = '') -> str:
    """Return a name on a server that GDAL would request when it opens a file, or ''.

    Such files are descriptions: mosaics (VRT) and mosaics in them, services (WMS), items of
    catalogs (STAC). GDAL recognizes them by their content, whatever their suffix is. A name counts
    wherever it occurs, except in a coordinate system, because GDAL follows names of sources,
    overviews, elevation models and arrays of coordinates alike.

    Args:
        path: Path of a file.
        folder: Folder in one of GDAL's file systems that the user named; what lies below it does
            not count.
    """

    def counts(name: str) -> bool:
        return not folder or not as_vsi(name).startswith(folder)

    seen: Set[str] = set()
    waiting = [path]
    while waiting:
        path = waiting.pop()
        if path in seen or not (os.path.isfile(path) or is_gdal_name(path)):
            continue
        seen.add(path)
        server = '' if os.path.isfile(path) else remote_file(path)
        if server and counts(path):
            return server
        try:
            text = _description(path)
        except OSError:
            # There is no such file.
            continue
        for name in _ON_SERVER.findall(text):
            if counts(name):
                return name
        for source in _SOURCE.findall(_COMMENT.sub('', text)):
            source = source.strip()
            source = _container(source) if is_gdal_name(source) else source
            waiting += [source, os.path.join(os.path.dirname(path), source)]
    return ''


def remote_file(name: str) -> str:
    """Return the file that GDAL requests from a server, as a name in GDAL's file systems.

    It is the archive if the name is a file in an archive, and the file if the name is a subdataset.
    Returns '' for a name that is not on a server.
    """
    rest = as_vsi(_container(name))
    while True:
        file_system = _VSI.match(rest)
        if file_system is None:
            return ''
        if file_system.group(1) in _REMOTE:
            return _until_archive(rest) if is_packed(name) else rest
        # The rest begins with a slash, or with two in some names.
        rest = rest[file_system.end() :]
        rest = rest[1:] if rest.startswith('//') else rest


def local_file(name: str) -> str:
    """Return the local file that contains what a name stands for, such as an archive, or ''."""
    rest = as_vsi(_container(name))
    file_system = _VSI.match(rest)
    rest = rest[file_system.end() + 1 :] if file_system else rest
    rest = rest.lstrip('{').replace('}', '')
    for path in (Path(rest), *Path(rest).parents):
        if path.is_file():
            return str(path)
    return ''


def is_packed(name: str) -> bool:
    """Return whether a file lies in an archive."""
    return any(
        kind in ('zip', 'tar', 'gzip', '7z', 'rar')
        for kind in _VSI.findall(as_vsi(_container(name)))
    )


def output_name(name: str) -> str:
    """Return a name for outputs computed from a file: no folder, no suffix, safe characters only.

    For a subdataset its name is appended: ``NETCDF:"a.nc":sst`` becomes ``a_sst``. Every Sentinel
    product has a file of the same name, so the name of the product's folder is used.

    Example:
        >>> output_name('NETCDF:"/data/a.nc":sst')
        'a_sst'
        >>> output_name('scenes/a1.tif')
        'a1'
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
    pieces = [stem] + re.split(r'[:/\\"]+', inner)
    return re.sub(r'[\x00-\x1f<>:"/\\|?*]+', '_', '_'.join(filter(None, pieces))) or 'unnamed'


def suffix_of(name: str) -> str:
    """Return the suffix of the file's name, in lower case: '.tif'."""
    return PurePosixPath(_without_query(_container(name))).suffix.lower()


def without_secrets(name: str) -> str:
    """Return a URL without user, password and query; a query may contain a signature."""
    return _without_query(_USER.sub('', name))


def missing_driver(name: str) -> str:
    """Return the GDAL driver that a name needs and this GDAL lacks, or ''."""
    prefix = (
        ''
        if _SCHEME.match(name) or os.path.exists(name)
        else (name.partition(':')[0] if _DRIVER.match(name) else '')
    )
    driver = _DRIVERS_OF_PREFIX.get(prefix.lower())
    if driver is None and prefix:
        driver = next(
            (
                kind
                for kind in ('HDF4', 'SENTINEL2', 'GRIB', 'ECW', 'MrSID')
                if prefix.upper().startswith(kind.upper())
            ),
            None,
        )
    driver = driver or _DRIVERS_OF_SUFFIX.get(suffix_of(name))
    with rasterio.Env() as environment:
        return '' if driver is None or driver in environment.drivers() else driver


def _container(name: str) -> str:
    """Return the file in the name of a subdataset or connection; any other name is returned."""
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
    """Return the name of a subdataset without its driver and file, or ''."""
    file = _container(name)
    if file == name or name.startswith('vrt://'):
        return ''
    head, _, tail = name.partition(':')[2].partition(file)
    # In some names the file comes last: GTIFF_DIR:2:file.tif.
    return tail.strip('"') or head.strip('":')


def _looks_like_a_file(word: str) -> int:
    """Return a score for how much a section of a name looks like the name of a file."""
    return 2 * bool(PurePosixPath(word).suffix) + ('/' in word) + os.path.exists(word)


def _without_query(name: str) -> str:
    return name.partition('?')[0] if _SCHEME.search(name) else name


def _until_archive(path: str) -> str:
    """Return a path up to the first archive in it, or the whole path if there is no archive."""
    for parent in reversed((PurePosixPath(path), *PurePosixPath(path).parents)):
        if parent.suffix.lower() in _ARCHIVES:
            # PurePosixPath turns the two slashes of a URL into one.
            return path[: len(str(parent)) + path.count('://')]
    return path


def _is_markup(content: bytes) -> bool:
    return content.lstrip(b'\xef\xbb\xbf \t\r\n')[:1] in _MARKUP


def _description(path: str) -> str:
    """Return the text of a description (XML or JSON), without coordinate systems.

    Returns '' for a file of any other format.
    """
    if os.path.isfile(path):
        with open(path, 'rb') as file:
            content = file.read(1024)
            content += file.read() if _is_markup(content) else b''
    else:
        # Without the rest of a large scene on a server.
        content = vsi.read_head(as_vsi(path), 1024)
        if _is_markup(content):
            content = content_of(path, _LARGEST_DESCRIPTION)
    if not _is_markup(content):
        return ''
    text = html.unescape(_SRS.sub('', content.decode('utf-8', 'replace')))
    return _ESCAPE.sub(lambda match: chr(int(match.group(1), 16)), text).replace('\\/', '/')
