"""GDAL's file systems where rasterio does not reach: what a server says of a file, its bytes.

rasterio opens rasters only. The functions here are called in the GDAL library that rasterio has
loaded, so that credentials, proxies and caches are the same for both.
"""
from __future__ import annotations

import ctypes
import os
import re
import sys
from typing import Any, Dict, List, Optional

import rasterio
import rasterio.io
from rasterio.session import DummySession

# Seconds after which a server that does not answer is an error; without these GDAL waits for ever.
# Environment variables, because pyogrio brings another GDAL; one that the user has set is kept.
_PATIENCE = dict(
    GDAL_HTTP_CONNECTTIMEOUT='10',
    GDAL_HTTP_LOW_SPEED_TIME='20',  # at fewer bytes a second than the limit
    GDAL_HTTP_LOW_SPEED_LIMIT='100',
    GDAL_HTTP_TIMEOUT='300',  # of one request in all
    GDAL_HTTP_MAX_RETRY='2',  # servers that are busy (429, 503) ask to be tried again
    GDAL_HTTP_RETRY_DELAY='1')
for _name, _value in _PATIENCE.items():
    os.environ.setdefault(_name, _value)


def _load() -> Any:
    """Return the GDAL library that rasterio has loaded, or None if its functions are hidden."""
    # Symbols are looked up in what the extension module is linked to, wherever that lies.
    module = sys.modules[rasterio.io.DatasetReader.__mro__[1].__module__]
    try:
        library = ctypes.CDLL(str(module.__file__))
        library.VSIGetFileMetadata.restype = ctypes.POINTER(ctypes.c_char_p)
        library.VSIGetFileMetadata.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p]
        library.VSIReadDir.restype = ctypes.POINTER(ctypes.c_char_p)
        library.VSIReadDir.argtypes = [ctypes.c_char_p]
        library.VSIIngestFile.argtypes = [
            ctypes.c_void_p, ctypes.c_char_p, ctypes.POINTER(ctypes.c_void_p),
            ctypes.POINTER(ctypes.c_uint64), ctypes.c_int64]
        library.CSLDestroy.argtypes = [ctypes.POINTER(ctypes.c_char_p)]
        library.VSIFree.argtypes = [ctypes.c_void_p]
        library.VSICurlPartialClearCache.argtypes = [ctypes.c_char_p]
        library.VSICurlClearCache.argtypes = []
        library.GDALGetDriverByName.restype = ctypes.c_void_p
        library.GDALGetDriverByName.argtypes = [ctypes.c_char_p]
        library.GDALDeregisterDriver.argtypes = [ctypes.c_void_p]
    except (OSError, AttributeError):
        return None
    return library


_gdal = _load()
_was_used = False

# Drivers that ask a server by themselves, not through one of GDAL's file systems.
_SERVICES = ('DAAS', 'EEDA', 'EEDAI', 'HTTP', 'NGW', 'OGCAPI', 'PLMOSAIC', 'PLSCENES',
             'PostGISRaster', 'STACIT', 'STACTA', 'WCS', 'WMS', 'WMTS')


def forbid_servers() -> None:
    """Let GDAL ask no server in this process from now on, whatever a file makes it do.

    A name on a server is then no file. The pixels of a GeoTIFF may be asked for elsewhere too: what
    lies beside it (``.ovr``, ``.aux.xml``) can name any file.
    """
    # The only name that GDAL's file systems of servers open (cpl_vsil_curl.cpp); no file has it.
    os.environ['CPL_VSIL_CURL_ALLOWED_FILENAME'] = '/vsicurl/none: see --allow-remote'
    # rasterio 1.3 registers all drivers again now and then, and 1.4 does not ask again.
    os.environ['GDAL_SKIP'] = ','.join([*filter(None, [os.environ.get('GDAL_SKIP')]), *_SERVICES])
    with _environment():
        for name in _SERVICES if _gdal is not None else ():
            driver = _gdal.GDALGetDriverByName(name.encode())
            if driver:
                _gdal.GDALDeregisterDriver(driver)
    # Lists of folders, netCDF's own client (DAP) and the GDAL of pyogrio ask in other ways. All use
    # libcurl, which then asks a proxy at a port where nobody listens.
    for name in ('http_proxy', 'https_proxy', 'ftp_proxy', 'all_proxy'):
        os.environ[name] = os.environ[name.upper()] = 'http://127.0.0.1:9'
    os.environ['no_proxy'] = os.environ['NO_PROXY'] = ''


def about_to_connect() -> None:
    """Note that this process talks to servers from now on."""
    global _was_used
    _was_used = True


def _environment() -> Any:
    # rasterio's, for the certificates that it brings; credentials are GDAL's to find.
    return rasterio.Env(session=DummySession())


def _close_connections() -> None:
    # A child inherits open connections, and its requests would mix with those of its parent: wrong
    # pixels, and requests that wait for ever. The forking thread's are all that it inherits.
    if _was_used and _gdal is not None:
        _gdal.VSICurlClearCache()


os.register_at_fork(before=_close_connections)


def headers(path: str) -> Dict[str, str]:
    """Return what a server says of a file, such as its size, by names in lower case.

    Args:
        path: Name in one of GDAL's file systems that ask a server.

    Returns:
        The headers; none if the server does not answer or the file system has none.
    """
    if _gdal is None:
        return {}
    about_to_connect()
    with _environment():
        lines = _take(_gdal.VSIGetFileMetadata(os.fsencode(path), b'HEADERS', None))
    pairs = (line.partition('=') for line in lines)
    return {name.lower(): value for name, _, value in pairs}


def size_in(said: Dict[str, str]) -> Optional[int]:
    """Return the size of a file in bytes by its headers, or None if they do not say it."""
    # GDAL asks some stores for the first part of a file instead of its headers alone.
    text = said.get('content-range', '').rpartition('/')[2] or said.get('content-length', '')
    return int(text) if re.fullmatch('[0-9]{1,18}', text) else None


def read_bytes(path: str, limit: int = -1) -> bytes:
    """Return the content of a file in one of GDAL's file systems, of at most ``limit`` bytes.

    Raises:
        OSError: If it cannot be read.
    """
    data, size = ctypes.c_void_p(), ctypes.c_uint64()
    about_to_connect()
    with _environment():
        if _gdal is None or not _gdal.VSIIngestFile(
                None, os.fsencode(path), ctypes.byref(data), ctypes.byref(size), limit):
            raise OSError(f'{path} cannot be read')
    try:
        return ctypes.string_at(data, size.value)
    finally:
        _gdal.VSIFree(data)


def list_folder(path: str) -> List[str]:
    """Return the names of what lies in a folder of one of GDAL's file systems, none if it fails."""
    if _gdal is None:
        return []
    about_to_connect()
    with _environment():
        return _take(_gdal.VSIReadDir(os.fsencode(path.rstrip('/'))))


def forget(path: str) -> None:
    """Let GDAL ask the server again for a file that could not be opened."""
    if _gdal is not None:
        _gdal.VSICurlPartialClearCache(os.fsencode(path))


def _take(strings: Any) -> List[str]:
    """Return a list of strings of GDAL, which is freed."""
    found: List[str] = []
    value: Optional[bytes]
    while strings:
        value = strings[len(found)]
        if value is None:
            break
        found.append(os.fsdecode(value))
    if strings:
        _gdal.CSLDestroy(strings)
    return found
