"""Pictures of suggested windows, each beside its labels or what the model makes of it."""
from __future__ import annotations

from pathlib import Path
from typing import Callable, List, Sequence

import numpy as np

from mapsage.drawing import LabeledImage, render_contact_sheet
from mapsage.drawing.canvas import save_png

from .suggestions import Suggestion
from .window_source import WindowSource

_ON_A_SHEET = 24  # windows; a further sheet is begun then


def sheets(path: Path, count: int) -> List[Path]:
    """Return the paths of the pictures that stand beside the file of ``count`` suggestions."""
    pages = range(-(-count // _ON_A_SHEET))
    return [path.with_name(f'{path.stem}{f"_{page + 1}" if page else ""}.png') for page in pages]


def draw_suggestions(path: Path, found: Sequence[Suggestion], source: WindowSource,
                     labels: Callable[[Suggestion, np.ndarray, np.ndarray], np.ndarray],
                     names: Sequence[str], palette: Sequence[Sequence[int]], title: str,
                     beside: str) -> List[Path]:
    """Write the pictures of suggestions beside their file, and return the paths.

    Args:
        path: File of the suggestions.
        found: The suggestions, the first one first.
        source: Where their windows are read.
        labels: Function of a suggestion, its values ``(bands, height, width)`` and where they hold
            data ``(h, w)`` that returns the classes to show, uint8 ``(h, w)``.
        names: Names of the classes.
        palette: Red, green and blue of each.
        title: Title of the pictures.
        beside: Words on what stands beside each window.

    Raises:
        OSError: If a picture cannot be written.
    """
    pictures = sheets(path, len(found))
    for page, picture in enumerate(pictures):
        start = page * _ON_A_SHEET
        some = [_picture(number, each, source, labels) for number, each in enumerate(
            found[start:start + _ON_A_SHEET], start + 1)]
        save_png(str(picture), render_contact_sheet(some, names, palette, title, beside))
    return pictures


def _picture(number: int, found: Suggestion, source: WindowSource,
             labels: Callable[[Suggestion, np.ndarray, np.ndarray], np.ndarray]) -> LabeledImage:
    place, scene = found.place, source.scene(found.place.path)
    with scene.raster as raster:
        column = round(place.column * scene.size[1] / raster.width)
        row = round(place.row * scene.size[0] / raster.height)
        values, valid, _ = scene.read(column, row, source.window)
    image = values[:, :valid.shape[0], :valid.shape[1]].transpose(1, 2, 0)
    if source.bands.like_opencv:
        image = image[..., ::-1]
    return LabeledImage(image, labels(found, values, valid),
                        f'{number}  {found.title}  {found.reason}')
