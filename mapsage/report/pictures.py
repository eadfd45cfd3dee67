"""Pictures of a run's folder, made small and put into the page."""
from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional

import numpy as np

_MAX_WIDTH = 1500  # pixels
_MAX_FILE_BYTES = 64 << 20
_MAX_REPORT_BYTES = 4 << 20
MAX_MAPS = 4


class MapPicture(NamedTuple):
    """A map that ``predict`` made in the folder of the run.

    Attributes:
        name: Name of the map file.
        preview: Path of its picture, which may be gone.
        made: When it was made, seconds since 1970.
    """

    name: str
    preview: Path
    made: float


def picture_url(path: Path) -> Optional[str]:
    """Return a picture as a data URL of JPEG, at most 1500 pixels wide; None if it cannot be read.
    """
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            return None
        return pixels_url(_decoded(path.read_bytes()))
    except (OSError, ValueError):
        return None


def pixels_url(pixels: np.ndarray) -> str:
    """Return a picture, BGR uint8 ``(H, W, 3)``, as a data URL of JPEG.

    Raises:
        ValueError: If it cannot be encoded.
    """
    import cv2
    height, width = pixels.shape[:2]
    if width > _MAX_WIDTH:
        pixels = cv2.resize(pixels, (_MAX_WIDTH, max(1, round(height * _MAX_WIDTH / width))),
                            interpolation=cv2.INTER_AREA)
    encoded, data = cv2.imencode('.jpg', pixels, [cv2.IMWRITE_JPEG_QUALITY, 85])
    if not encoded:
        raise ValueError(f'OpenCV could not encode a picture of shape {pixels.shape} as JPEG')
    return f'data:image/jpeg;base64,{base64.b64encode(data.tobytes()).decode("ascii")}'


def find_maps(work_dir: Path) -> List[MapPicture]:
    """Return the newest maps in the folders of a work dir, at most :data:`MAX_MAPS`."""
    found = []
    for path in work_dir.glob('*/*.json'):
        report = _report(path)
        previews = [name for name in report.get('files', []) if name.endswith('preview.png')]
        maps = [name for name in report.get('files', []) if name.endswith('.tif')]
        if previews and maps:
            found.append(MapPicture(f'{path.parent.name}/{maps[0]}', path.parent / previews[0],
                                    path.stat().st_mtime))
    return sorted(found, key=lambda each: -each.made)[:MAX_MAPS]


def _report(path: Path) -> Dict[str, Any]:
    try:
        if path.stat().st_size > _MAX_REPORT_BYTES:
            return {}
        report = json.loads(path.read_text(encoding='utf-8'))
    except (OSError, ValueError):
        return {}
    ours = isinstance(report, dict) and 'settings' in report \
        and isinstance(report.get('files'), list)
    return report if ours else {}


def _decoded(data: bytes) -> np.ndarray:
    import cv2
    pixels = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR) if data else None
    if pixels is None:
        raise ValueError('no picture that OpenCV can read')
    return pixels
