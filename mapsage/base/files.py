"""Files and their texts: written whole or not at all, read without trust.

Every file that another process may read, or that must survive a crash, is written by
:func:`atomic_write`. A text that anybody may have written is parsed by :func:`parse_json`.
"""

from __future__ import annotations

import errno
import json
import os
import re
import uuid
from pathlib import Path
from typing import Any, Union


def atomic_write(path: Union[str, Path], data: bytes, durable: bool = False) -> None:
    """Write a file under a hidden name and rename it to ``path`` once it is complete.

    The hidden name, ``.partial-*``, is in the same folder, because a rename is atomic only within
    one file system. After an error the hidden file is removed and ``path`` is unchanged. The
    permissions of the file follow the umask.

    Args:
        path: File to write; its folder must exist.
        data: Content of the file.
        durable: Whether to flush the data to the disk before the rename, so that even a power
            failure leaves no incomplete file under ``path``.

    Raises:
        OSError: If the folder cannot be written or is full.
    """
    path = Path(path)
    partial = path.with_name(f'.partial-{uuid.uuid4().hex}')
    try:
        with open(partial, 'wb') as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        if partial.exists():
            partial.unlink()


def describe_room(folder: Union[str, Path], error: BaseException, partial: int = 0) -> str:
    """Return what was lacking where a write failed: space, inodes or a quota.

    Args:
        folder: Folder of the file; if it could not be made, its parents count.
        error: Error of the write. Errors of GDAL have the system's text in theirs.
        partial: Size in bytes of the incomplete file, which is removed.
    """
    if getattr(error, 'errno', None) == errno.EDQUOT or os.strerror(errno.EDQUOT) in str(error):
        return f'the quota for {folder} is used up (quota -s shows it)'
    folder = Path(folder).absolute()
    folder = next(parent for parent in (folder, *folder.parents) if parent.is_dir())
    disk = os.statvfs(folder)
    # File systems that make inodes as they need them report 0 of 0.
    if disk.f_files and not disk.f_favail:
        return f'all {disk.f_files:,} inodes are in use in {folder}, so no further file fits'
    return f'{(disk.f_bavail * disk.f_frsize + partial) / 1e6:,.1f} MB are free in {folder}'


def parse_json(text: Union[str, bytes]) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: If the text is not JSON, or nested more deeply than Python can read.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError('it is nested too deeply') from error


# Characters that XML 1.0 cannot contain, not even escaped; and the carriage return, which readers
# turn into a line feed unless the writer escapes it (ElementTree does so from Python 3.9 on).
_NOT_XML = re.compile('[^\t\n\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]')


def xml_text(value: object) -> str:
    """Return a value as text, with U+FFFD for characters that XML cannot contain; not escaped."""
    return _NOT_XML.sub('\ufffd', str(value))
