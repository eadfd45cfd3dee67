"""Stamps of files, which change when the content changes, for local files and files on servers.

Caches use stamps as keys. A stamp of one value only means that nothing but the name is known, so a
change of the content would not be noticed; such a file must not be cached.
"""
from __future__ import annotations

import hashlib
import os
from typing import Any, List

from . import gdal_names, vsi


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
