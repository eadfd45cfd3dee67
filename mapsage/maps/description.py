"""What a map needs to know of a model beside its weights; an exported model carries it along."""
from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from typing import Any, Dict, Mapping, Optional, Tuple

import numpy as np

from mapsage.json_text import parse_json
from mapsage_launcher.shipped import program

from .errors import PredictError

_MOST = 1 << 16  # pixels of a side, scores of a pixel, bands of a scene
KEY = 'mapsage'  # of the description in the metadata of an ONNX file


@dataclass(frozen=True)
class Classes:
    """Names and colors of the values of a map.

    Attributes:
        names: Class names in the order of their indices.
        palette: RGB colors, ``(classes, 3)`` uint8.
    """

    names: Tuple[str, ...]
    palette: np.ndarray


@dataclass(frozen=True)
class Bands:
    """The bands of an image that the model gets, in the order of the test pipeline's loader.

    Attributes:
        count: Number of bands.
        like_opencv: Whether the loader is LoadImageFromFile, which gives three bands of 8 bits in
            the order blue, green, red, without alpha. A gray image gives three equal bands.
        chosen: Bands of the file in the order of training, counted from 1; None for all but alpha.
        ignored: Steps of the test pipeline that are not applied to scenes, such as ``Pad``.
        resize: Arguments of the test pipeline's ``Resize``, or None.
        backend: Decoder that LoadImageFromFile uses; None for OpenCV.
        color_type: Flag of LoadImageFromFile that says how colors are decoded.
    """

    count: int
    like_opencv: bool
    chosen: Optional[Tuple[int, ...]] = None
    ignored: Tuple[str, ...] = ()
    backend: Optional[str] = None
    color_type: str = 'color'
    resize: Optional[Dict[str, Any]] = None


@dataclass(frozen=True)
class ExportedDescription:
    """What an exported model says of itself, as JSON under :data:`KEY` of its metadata.

    Attributes:
        classes: Class names in the order of their indices.
        palette: Their RGB colors, 0..255.
        bands: Bands that the model takes, the attributes of :class:`Bands`.
        window: Side in pixels of the windows that the file takes.
        overlap: Pixels that neighboring windows share by default.
        batch: Number of windows that the file takes at a time; None for any.
        scores: Number of scores of a pixel.
        threshold: Score from which on a model with one score means class 1.
        checkpoint: SHA-256 of the checkpoint.
        target: Target that the file was exported for.
        version: Version of MapSage that wrote the file.
    """

    classes: Tuple[str, ...]
    palette: Tuple[Tuple[int, ...], ...]
    bands: Bands
    window: int
    overlap: int
    batch: Optional[int]
    scores: int
    threshold: float
    checkpoint: str
    target: str
    version: str

    def to_text(self) -> str:
        """Return it as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str], path: str) -> ExportedDescription:
        """Return the description in the metadata of an ONNX file.

        Args:
            metadata: Metadata of the file.
            path: Its name, for the error.

        Raises:
            PredictError: If keys are missing, or hold something else.
        """
        if KEY not in metadata:
            raise PredictError(
                f'{path} has no key {KEY!r} in its metadata (found: '
                f"{', '.join(sorted(metadata)) or 'none'}): classes, bands and window are unknown. "
                f'Write the file with `{program("export")} CONFIG CHECKPOINT --out {path}`.')
        try:
            found = parse_json(metadata[KEY])
        except ValueError:
            found = None
        found = found if isinstance(found, dict) else {}
        missing = [each.name for each in fields(cls) if each.name not in found]
        bands = found.get('bands')
        bands = bands if isinstance(bands, dict) else {}
        missing += [f'bands.{name}' for name in ('count', 'like_opencv') if name not in bands]
        if missing:
            raise PredictError(f"{path}: its description lacks {', '.join(missing)}. Write the "
                               f'file again with `{program("export")}`.')
        known = {each.name: found[each.name] for each in fields(cls)}
        try:
            known.update(classes=tuple(map(str, found['classes'])), bands=_read_bands(bands),
                         palette=tuple(tuple(map(int, color)) for color in found['palette']))
            _check_numbers(known)
        except (TypeError, ValueError, OverflowError) as error:
            raise PredictError(f'{path}: its description cannot be read: {error}. Write the file '
                               f'again with tools/export.py.') from error
        return cls(**known)

    def as_classes(self) -> Classes:
        """Return names and colors of the classes."""
        return Classes(self.classes, np.array(self.palette, np.uint8).reshape(-1, 3))


def _check_numbers(known: Dict[str, Any]) -> None:
    """Raise ValueError unless the numbers of a description are such as a file can have."""
    least = dict(window=1, overlap=0, scores=1)
    for name, low in least.items():
        if type(known[name]) is not int or not low <= known[name] <= _MOST:
            raise ValueError(f'{name} is {known[name]!r}, expected {low} to {_MOST}')
    if known['overlap'] >= known['window']:
        raise ValueError(f"overlap is {known['overlap']}, the window {known['window']}")
    if known['batch'] is not None and (type(known['batch']) is not int or known['batch'] < 1):
        raise ValueError(f"batch is {known['batch']!r}")
    if not isinstance(known['threshold'], (int, float)) or not math.isfinite(known['threshold']):
        raise ValueError(f"threshold is {known['threshold']!r}")
    colors = known['palette']
    if len(colors) != len(known['classes']) or not all(
            len(color) == 3 and all(0 <= value <= 255 for value in color) for color in colors):
        raise ValueError(f"palette is not red, green and blue of {len(known['classes'])} classes")


def _read_bands(found: Dict[str, Any]) -> Bands:
    known = {each.name: found[each.name] for each in fields(Bands) if each.name in found}
    chosen = known.get('chosen')
    for numbers in ([known['count']], chosen or []):
        if not all(type(number) is int and 1 <= number <= _MOST for number in numbers):
            raise ValueError(f'bands are {numbers!r}, expected numbers from 1 on')
    known.update(chosen=tuple(chosen) if chosen else None,
                 ignored=tuple(known.get('ignored') or ()))
    return Bands(**known)
