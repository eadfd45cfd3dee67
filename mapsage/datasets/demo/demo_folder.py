"""A folder of generated data that appears complete or not at all, and is reused once it is."""
from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Callable, Dict

from mapsage.json_text import parse_json

MARKER = 'demo.json'


def write_once(root: Path, marker: Dict[str, object], write: Callable[[Path], None]) -> bool:
    """Fill a folder by ``write``, unless it holds the same data already.

    Everything is written into a temporary folder beside it, the marker ``demo.json`` last, which
    is then renamed.

    Args:
        root: Folder to make. It must either not exist, or be empty, or hold this same data.
        marker: Parameters that the data follow from, as JSON holds them.
        write: Function that writes the files into a folder.

    Returns:
        Whether the folder was written.

    Raises:
        ValueError: If ``root`` holds anything else; it is then left unchanged.
    """
    if is_complete(root, marker):
        return False
    root.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f'.{root.name}.', dir=str(root.parent)))
    try:
        write(staging)
        (staging / MARKER).write_text(json.dumps(marker, indent=2) + '\n')
        staging.chmod(0o755)  # mkdtemp denies access to others
        try:
            staging.rename(root)
        except OSError:
            # Another process may have finished the same data meanwhile.
            if not is_complete(root, marker):
                raise
            return False
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return True


def is_complete(root: Path, marker: Dict[str, object]) -> bool:
    """Return whether ``root`` holds the data of a marker; False if it is empty or not there.

    Raises:
        ValueError: If it holds anything else.
    """
    if not root.exists() or root.is_dir() and not any(root.iterdir()):
        return False
    path = root / MARKER
    if not path.is_file():
        raise ValueError(f'{root} is in use and has no {MARKER}, so it is no demo dataset; '
                         'choose another folder or empty this one')
    try:
        found = parse_json(path.read_text())
    except ValueError:
        found = None
    found = found if isinstance(found, dict) else {}
    if found != marker:
        differing = ', '.join(f'{key}={found.get(key)!r} (asked for {value!r})'
                              for key, value in marker.items() if found.get(key) != value)
        raise ValueError(f'{root} holds a demo dataset with {differing or "other parameters"}; '
                         'remove the folder or choose another one')
    return True
