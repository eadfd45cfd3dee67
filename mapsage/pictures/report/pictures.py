"""Pictures from a work dir, scaled down and embedded into the page as data URLs.

Embedding keeps the report a single file. Files that are too large or cannot be decoded are skipped.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional

import numpy as np

from mapsage.base.files import parse_json

# In pixels.
_MAX_WIDTH = 1500
_MAX_FILE_BYTES = 64 << 20
_MAX_REPORT_BYTES = 4 << 20
MAX_MAPS = 4


class MapPicture(NamedTuple):
    """A map that ``tools/predict.py`` wrote into the work dir.

    Attributes:
        name: Folder and name of the map file.
        preview: Path of its preview, which may have been deleted.
        made: Time when the map was finished, seconds since 1970.
    """

    name: str
    preview: Path
    made: float


def picture_url(path: Path) -> Optional[str]:
    """Return a picture file as a JPEG data URL, at most 1500 pixels wide; None if unreadable."""
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            return None
        return pixels_url(_decode(path.read_bytes()))
    except (OSError, ValueError):
        return None


def pixels_url(pixels: np.ndarray) -> str:
    """Return a picture, BGR uint8 ``(H, W, 3)``, as a JPEG data URL.

    Raises:
        ValueError: If OpenCV cannot encode the picture.
    """
    import cv2

    height, width = pixels.shape[:2]
    if width > _MAX_WIDTH:
        pixels = cv2.resize(
            pixels,
            (_MAX_WIDTH, max(1, round(height * _MAX_WIDTH / width))),
            interpolation=cv2.INTER_AREA,
        )
    encoded, data = cv2.imencode('.jpg', pixels, [cv2.IMWRITE_JPEG_QUALITY, 85])
    if not encoded:
        raise ValueError(f'OpenCV could not encode a picture of shape {pixels.shape} as JPEG')
    return f'data:image/jpeg;base64,{base64.b64encode(data.tobytes()).decode("ascii")}'


def find_maps(work_dir: Path) -> List[MapPicture]:
    """Return the newest maps in the folders of a work dir, at most :data:`MAX_MAPS`."""
    pictures = []
    for path in work_dir.glob('*/*.json'):
        report = _read_map_report(path)
        previews = [name for name in report.get('files', []) if name.endswith('preview.png')]
        maps = [name for name in report.get('files', []) if name.endswith('.tif')]
        if previews and maps:
            pictures.append(
                MapPicture(
                    f'{path.parent.name}/{maps[0]}', path.parent / previews[0], path.stat().st_mtime
                )
            )
    return sorted(pictures, key=lambda picture: -picture.made)[:MAX_MAPS]


def _read_map_report(path: Path) -> Dict[str, Any]:
    """Return the JSON file that ``tools/predict.py`` writes next to a map; {} for other files."""
    try:
        if path.stat().st_size > _MAX_REPORT_BYTES:
            return {}
        report = parse_json(path.read_text(encoding='utf-8'))
    except (OSError, ValueError):
        return {}
    is_map_report = (
        isinstance(report, dict)
        and 'settings' in report
        and isinstance(report.get('files'), list)
        and all(isinstance(name, str) and Path(name).name == name for name in report['files'])
    )
    return report if is_map_report else {}


def _decode(data: bytes) -> np.ndarray:
    import cv2

    pixels = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR) if data else None
    if pixels is None:
        raise ValueError('OpenCV cannot read this picture')
    return pixels
