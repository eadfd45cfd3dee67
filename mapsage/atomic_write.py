"""Files that appear under their name complete, or not at all.

Every file that another process may read, or that must survive a crash, is written this way.
"""
from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Union


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
