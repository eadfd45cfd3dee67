"""A folder of generated data that appears complete or not at all.

The marker file `demo.json` holds the parameters of the data. A folder whose marker has the same
parameters is reused; a folder with other content is an error and is never overwritten.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Callable, Dict

from mapsage.base.files import parse_json

MARKER = 'demo.json'


def write_once(root: Path, marker: Dict[str, object], write: Callable[[Path], None]) -> bool:
    """Call ``write`` to fill a folder, unless the folder contains the same data already.

    The files are written into a temporary folder next to ``root``, with the marker last; then the
    temporary folder is renamed.

    Args:
        root: Folder to create. It must not exist, be empty, or contain this same data.
        marker: Parameters that determine the data, as values that JSON can represent.
        write: Function that writes the files into the folder it gets.

    Returns:
        Whether the folder was written.

    Raises:
        ValueError: If ``root`` contains anything else; it is then left unchanged.
    """
    if is_complete(root, marker):
        return False
    root.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f'.{root.name}.', dir=str(root.parent)))
    try:
        write(staging)
        (staging / MARKER).write_text(json.dumps(marker, indent=2) + '\n')
        # mkdtemp creates a folder that only its user can read.
        staging.chmod(0o755)
        try:
            staging.rename(root)
        except OSError:
            # Another process may have written the same data in the meantime.
            if not is_complete(root, marker):
                raise
            return False
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return True


def is_complete(root: Path, marker: Dict[str, object]) -> bool:
    """Return whether ``root`` contains the data of a marker; False if it is empty or missing.

    Raises:
        ValueError: If ``root`` contains anything else.
    """
    if not root.exists() or root.is_dir() and not any(root.iterdir()):
        return False
    path = root / MARKER
    if not path.is_file():
        raise ValueError(
            f'{root} is in use and has no {MARKER}, so it is no demo dataset; '
            'choose another folder or empty this one'
        )
    try:
        content = parse_json(path.read_text())
    except ValueError:
        content = None
    existing = content if isinstance(content, dict) else {}
    if existing != marker:
        differing = ', '.join(
            f'{key}={existing.get(key)!r} (asked for {value!r})'
            for key, value in marker.items()
            if existing.get(key) != value
        )
        raise ValueError(
            f'{root} holds a demo dataset with {differing or "other parameters"}; '
            'remove the folder or choose another one'
        )
    return True
