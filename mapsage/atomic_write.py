"""Files that appear under their name whole, or not at all."""
from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Union


def atomic_write(path: Union[str, Path], data: bytes, durable: bool = False) -> None:
    """Write a file that takes the place of ``path`` once it is whole.

    Until then it has a hidden name in the same folder, ``.partial-*``, since a rename is
    atomic within one file system only. After an error it is removed and ``path`` is as it was. Its
    permissions are what the umask gives.

    Args:
        path: File to write; its folder must exist.
        data: Content of the file.
        durable: Whether the data is on the disk before it gets its name, so that not even a power
            failure leaves half a file there.

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
