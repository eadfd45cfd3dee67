"""GDAL's file systems beyond rasterio: headers and bytes of a file on a server, lists of folders.

rasterio opens rasters only. This module calls functions of the GDAL library that rasterio has
loaded, through `ctypes`, so that credentials, proxies and caches are shared with rasterio. If the
library hides its functions, the results are empty. Names are explained in `gdal_names.py`.
"""

from __future__ import annotations

import ctypes
import io
import os
import re
import sys
import time
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple, Union

import rasterio
import rasterio.io
from rasterio.session import DummySession

# Seconds after which a server that does not answer is an error; by default GDAL waits for ever.
# They are environment variables, because pyogrio has another copy of GDAL. Variables that the user
# has set take precedence.
_TIMEOUTS = dict(
    GDAL_HTTP_CONNECTTIMEOUT='10',
    # An error if the server sends fewer bytes per second than the limit for this time.
    GDAL_HTTP_LOW_SPEED_TIME='20',
    GDAL_HTTP_LOW_SPEED_LIMIT='100',
    # For a whole request.
    GDAL_HTTP_TIMEOUT='300',
    # Busy servers (429, 503) ask clients to try again.
    GDAL_HTTP_MAX_RETRY='2',
    GDAL_HTTP_RETRY_DELAY='1',
)
for _name, _value in _TIMEOUTS.items():
    os.environ.setdefault(_name, _value)


_TEXT, _POINTER, _SIZE = ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t
_TEXTS = ctypes.POINTER(_TEXT)
# Types of the result and the arguments of GDAL's functions.
_SIGNATURES: Dict[str, Tuple[Any, ...]] = dict(
    VSIGetFileMetadata=(_TEXTS, _TEXT, _TEXT, _POINTER),
    VSIReadDir=(_TEXTS, _TEXT),
    VSIIngestFile=(
        ctypes.c_int,
        _POINTER,
        _TEXT,
        ctypes.POINTER(_POINTER),
        ctypes.POINTER(ctypes.c_uint64),
        ctypes.c_int64,
    ),
    VSIFOpenL=(_POINTER, _TEXT, _TEXT),
    VSIFReadL=(_SIZE, _TEXT, _SIZE, _SIZE, _POINTER),
    VSIFWriteL=(_SIZE, _TEXT, _SIZE, _SIZE, _POINTER),
    VSIFCloseL=(ctypes.c_int, _POINTER),
    VSIUnlink=(ctypes.c_int, _TEXT),
    CSLDestroy=(None, _TEXTS),
    VSIFree=(None, _POINTER),
    VSICurlPartialClearCache=(None, _TEXT),
    VSICurlClearCache=(None,),
    GDALGetDriverByName=(_POINTER, _TEXT),
    GDALDeregisterDriver=(None, _POINTER),
)


def _load() -> Optional[ctypes.CDLL]:
    """Return the GDAL library that rasterio has loaded, or None if its functions are hidden."""
    # The symbols are found through rasterio's extension module, which is linked to the library.
    module = sys.modules[rasterio.io.DatasetReader.__mro__[1].__module__]
    try:
        library = ctypes.CDLL(str(module.__file__))
        for name, (result, *arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError):
        return None
    return library


_gdal = _load()
_was_used = False

# Length of the blocks in which files are written; GDAL collects them to parts of 50 MB.
_WRITE_BYTES = 8 << 20

# File systems of servers that can list a folder.
_LISTED_SERVERS = ('/vsis3/', '/vsigs/', '/vsiaz/', '/vsiadls/', '/vsioss/')

# Drivers that connect to servers directly, not through one of GDAL's file systems.
_SERVICES = (
    'DAAS',
    'EEDA',
    'EEDAI',
    'HTTP',
    'NGW',
    'OGCAPI',
    'PLMOSAIC',
    'PLSCENES',
    'PostGISRaster',
    'STACIT',
    'STACTA',
    'WCS',
    'WMS',
    'WMTS',
)


def forbid_servers() -> None:
    """Keep GDAL in this process from connecting to any server from now on.

    Names on servers then count as missing files. Checking the names that a user gives would not be
    enough: a companion file of a local GeoTIFF (``.ovr``, ``.aux.xml``) can refer to any file.
    """
    # GDAL's file systems for servers then open only this name (cpl_vsil_curl.cpp), which no file
    # has.
    os.environ['CPL_VSIL_CURL_ALLOWED_FILENAME'] = '/vsicurl/none: see --allow-remote'
    # For rasterio 1.3, which registers all drivers again from time to time. rasterio 1.4 does not
    # read the variable again, so the drivers are removed below, too.
    os.environ['GDAL_SKIP'] = ','.join([*filter(None, [os.environ.get('GDAL_SKIP')]), *_SERVICES])
    if _gdal is not None:
        with _environment():
            for name in _SERVICES:
                driver = _gdal.GDALGetDriverByName(name.encode())
                if driver:
                    _gdal.GDALDeregisterDriver(driver)
    # Lists of folders, netCDF's client (DAP) and the GDAL of pyogrio connect in other ways. All of
    # them use libcurl, which then connects to a proxy at a port where nothing listens.
    for name in ('http_proxy', 'https_proxy', 'ftp_proxy', 'all_proxy'):
        os.environ[name] = os.environ[name.upper()] = 'http://127.0.0.1:9'
    os.environ['no_proxy'] = os.environ['NO_PROXY'] = ''


def about_to_connect() -> None:
    """Note that this process connects to servers, so that connections are closed before a fork."""
    global _was_used
    _was_used = True


def _environment() -> rasterio.Env:
    # rasterio's environment brings its certificates. The dummy session leaves credentials to GDAL.
    return rasterio.Env(session=DummySession())


def _close_connections() -> None:
    # A child process inherits open connections, and its requests would mix with its parent's
    # requests: wrong pixels, and requests that wait for ever. Only the connections of the thread
    # that forks are inherited, and those are closed here.
    if _was_used and _gdal is not None:
        _gdal.VSICurlClearCache()


os.register_at_fork(before=_close_connections)


def headers(path: str) -> Dict[str, str]:
    """Return the HTTP headers that a server sends for a file, by names in lower case.

    Args:
        path: Name in one of GDAL's file systems for servers.

    Returns:
        The headers; empty if the server does not answer or the file system has no headers.
    """
    if _gdal is None:
        return {}
    about_to_connect()
    with _environment():
        lines = _take(_gdal.VSIGetFileMetadata(os.fsencode(path), b'HEADERS', None))
    pairs = (line.partition('=') for line in lines)
    return {name.lower(): value for name, _, value in pairs}


def size_in(headers: Dict[str, str]) -> Optional[int]:
    """Return the size of a file in bytes from its headers, or None if they do not contain it."""
    # For some stores GDAL requests the first bytes of a file; then `content-length` is their number
    # and `content-range` ends with the size of the file.
    text = headers.get('content-range', '').rpartition('/')[2] or headers.get('content-length', '')
    return int(text) if re.fullmatch('[0-9]{1,18}', text) else None


def read_bytes(path: str, limit: int = -1) -> bytes:
    """Return the content of a file in one of GDAL's file systems.

    Args:
        path: Name of the file.
        limit: Largest size in bytes; -1 for any size.

    Raises:
        OSError: If the file cannot be read, or is larger.
    """
    data, size = ctypes.c_void_p(), ctypes.c_uint64()
    about_to_connect()
    with _environment():
        if _gdal is None or not _gdal.VSIIngestFile(
            None, os.fsencode(path), ctypes.byref(data), ctypes.byref(size), limit
        ):
            raise OSError(f'{path} cannot be read')
    try:
        return ctypes.string_at(data, size.value)
    finally:
        _gdal.VSIFree(data)


def read_head(path: str, size: int) -> bytes:
    """Return the first bytes of a file in one of GDAL's file systems; empty on failure."""
    if _gdal is None:
        return b''
    about_to_connect()
    with _environment():
        file = _gdal.VSIFOpenL(os.fsencode(path), b'rb')
        if not file:
            return b''
        buffer = ctypes.create_string_buffer(size)
        count = _gdal.VSIFReadL(buffer, 1, size, file)
        _gdal.VSIFCloseL(file)
    return buffer.raw[:count]


def write_file(source: Union[bytes, Path], path: str) -> None:
    """Write bytes, or a copy of a local file, to one of GDAL's file systems.

    Args:
        source: Content, or path of the local file.
        path: Name of the new file.

    Raises:
        OSError: If the server refuses the file, or has not as many bytes as were sent.
    """
    if _gdal is None:
        raise OSError('this GDAL library hides its functions for files on servers')
    about_to_connect()
    size = len(source) if isinstance(source, bytes) else source.stat().st_size
    stream = io.BytesIO(source) if isinstance(source, bytes) else source.open('rb')
    with stream, _environment():
        file = _gdal.VSIFOpenL(os.fsencode(path), b'wb')
        if not file:
            raise OSError(f'{path} cannot be opened for writing')
        is_written = all(
            _gdal.VSIFWriteL(block, 1, len(block), file) == len(block)
            for block in iter(lambda: stream.read(_WRITE_BYTES), b'')
        )
        # The last part is sent here, so an error may come as late as this.
        is_written = _gdal.VSIFCloseL(file) == 0 and is_written
    forget(path)
    arrived = size_in(headers(path)) if is_written and size else size
    if not is_written or arrived != size:
        raise OSError(
            f'{path} was refused'
            if not is_written
            else f'{path} has {arrived} bytes there and {size} here'
        )


def remove_file(path: str) -> None:
    """Remove a file of one of GDAL's file systems.

    Raises:
        OSError: If the server refuses it.
    """
    with _environment():
        if _gdal is None or _gdal.VSIUnlink(os.fsencode(path)) != 0:
            raise OSError(f'{path} cannot be removed')


def list_folder(path: str) -> List[str]:
    """Return the names of the files in a folder of one of GDAL's file systems; empty on failure.

    GDAL tries lists of servers once, unlike other requests, so a busy server is asked again here.
    """
    if _gdal is None:
        return []
    about_to_connect()
    folder = path.rstrip('/')
    for _ in range(int(os.environ['GDAL_HTTP_MAX_RETRY']) + 1):
        with _environment():
            names = _take(_gdal.VSIReadDir(os.fsencode(folder)))
        if names or not folder.startswith(_LISTED_SERVERS):
            break
        forget(folder)
        time.sleep(float(os.environ['GDAL_HTTP_RETRY_DELAY']))
    return names


def forget(path: str) -> None:
    """Drop what GDAL has cached about a file, so that it asks the server again."""
    if _gdal is not None:
        _gdal.VSICurlPartialClearCache(os.fsencode(path))


def _take(strings: Any) -> List[str]:
    """Return a list of strings that GDAL allocated (``char **``), and free it."""
    texts: List[str] = []
    value: Optional[bytes]
    while strings:
        value = strings[len(texts)]
        if value is None:
            break
        texts.append(os.fsdecode(value))
    if strings and _gdal is not None:
        _gdal.CSLDestroy(strings)
    return texts
