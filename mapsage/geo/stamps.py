"""What tells the content of a file from an earlier one, also of a file on a server."""
from __future__ import annotations

import hashlib
import os
from typing import Any, List

from . import gdal_names, vsi


def stamp(name: str) -> List[Any]:
    """Return a path or another name that GDAL opens, and what changes with its content.

    Size and time of a local file or of the archive that it lies in; of a file on a server its size
    and ETag, or the time that the server gives. Passwords and signatures of a URL are left out.
    """
    if os.path.exists(name):
        stat = os.stat(name)
        return [os.path.abspath(name), stat.st_size, stat.st_mtime_ns]
    remote, local = gdal_names.remote_file(name), gdal_names.local_file(name)
    if remote:
        said = vsi.headers(remote)
        version = said.get('etag') or said.get('last-modified')
        if version is None:  # the query may say which file it is
            version = hashlib.sha256(remote.encode('utf-8', 'surrogateescape')).hexdigest()[:16]
        return [gdal_names.without_secrets(name), vsi.size_in(said), version]
    if local:
        stat = os.stat(local)
        return [name.replace(local, os.path.abspath(local), 1), stat.st_size, stat.st_mtime_ns]
    return [name]
