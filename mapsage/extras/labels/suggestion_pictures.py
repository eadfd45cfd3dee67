"""Contact sheets of suggested windows: image on the left, labels or prediction on the right.

One sheet shows up to 24 windows. The sheets are PNG files next to the file of the suggestions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Callable, List, Sequence

import numpy as np

from mapsage.pictures import LabeledImage, render_contact_sheet
from mapsage.pictures.canvas import save_png

from .suggestions import Suggestion
from .window_source import WindowSource

_WINDOWS_PER_SHEET = 24


def sheets(path: Path, count: int) -> List[Path]:
    """Return the paths of the contact sheets for a file of ``count`` suggestions."""
    pages = range(-(-count // _WINDOWS_PER_SHEET))
    return [path.with_name(f'{path.stem}{f"_{page + 1}" if page else ""}.png') for page in pages]


def draw_suggestions(
    path: Path,
    suggestions: Sequence[Suggestion],
    source: WindowSource,
    labels: Callable[[Suggestion, np.ndarray, np.ndarray], np.ndarray],
    names: Sequence[str],
    palette: Sequence[Sequence[int]],
    title: str,
    caption: str,
) -> List[Path]:
    """Write the contact sheets of suggestions and return their paths.

    Args:
        path: File of the suggestions.
        suggestions: The suggestions in order.
        source: Source of their windows.
        labels: Function that takes a suggestion, its values ``(bands, height, width)`` and its
            valid pixels ``(h, w)``, and returns the classes to draw, uint8 ``(h, w)``.
        names: Names of the classes.
        palette: RGB colors of the classes.
        title: Title of the sheets.
        caption: Text that says what the right half of each pair shows.

    Raises:
        OSError: If a sheet cannot be written.
    """
    paths = sheets(path, len(suggestions))
    for page, sheet_path in enumerate(paths):
        start = page * _WINDOWS_PER_SHEET
        images = [
            _read_image(number, suggestion, source, labels)
            for number, suggestion in enumerate(
                suggestions[start : start + _WINDOWS_PER_SHEET], start + 1
            )
        ]
        save_png(str(sheet_path), render_contact_sheet(images, names, palette, title, caption))
    return paths


def _read_image(
    number: int,
    suggestion: Suggestion,
    source: WindowSource,
    labels: Callable[[Suggestion, np.ndarray, np.ndarray], np.ndarray],
) -> LabeledImage:
    box, scene = suggestion.place, source.scene(suggestion.place.path)
    with scene.raster as raster:
        # From pixels of the file to pixels in the size that the model sees.
        column = round(box.column * scene.size[1] / raster.width)
        row = round(box.row * scene.size[0] / raster.height)
        values, valid, _ = scene.read(column, row, source.window)
        # Of a place, the first image of the sensor with its grid.
        image = (
            values[:, : valid.shape[0], : valid.shape[1]]
            if source.places is None
            else (raster.for_preview().read(*box[1:])[0])
        )
    image = image.transpose(1, 2, 0)
    if source.bands.like_opencv:
        image = image[..., ::-1]
    elif source.places is None and source.bands.shown:
        image = image[..., list(source.bands.shown)]
    return LabeledImage(
        image,
        labels(suggestion, values, valid),
        f'{number}  {suggestion.title}  {suggestion.reason}',
    )
