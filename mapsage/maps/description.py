"""Classes, bands and windows of a model: everything a map needs in addition to the weights.

For a checkpoint these come from the config (`model.py`). An exported file carries them as JSON in
its metadata, which `ExportedDescription` reads and verifies: the file may come from anybody.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from typing import Any, Dict, Mapping, Optional, Tuple

import numpy as np

from mapsage.base.files import parse_json
from mapsage.geo.scene_facts import STORED, UNITS
from mapsage_launcher.shipped import program

from .errors import PredictError

# Largest number of pixels of a side, scores of a pixel, and bands of a scene.
_MOST = 1 << 16
# Key of the description in the metadata of an ONNX file.
KEY = 'mapsage'


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
    """Bands of an image that the model takes, in the order of the test pipeline's loader.

    Attributes:
        count: Number of bands.
        like_opencv: Whether the loader is LoadImageFromFile, which returns three bands of 8 bits in
            the order blue, green, red, without alpha. A gray image has three equal bands.
        chosen: Bands of the file in the order of training, counted from 1; None for all but alpha.
        ignored: Steps of the test pipeline that are not applied to scenes, such as ``Pad``.
        backend: Decoder of LoadImageFromFile; None for OpenCV.
        color_type: Flag of LoadImageFromFile for the decoding of colors.
        resize: Arguments of the test pipeline's ``Resize``, or None.
        shown: Channels of red, green and blue in the order of training, counted from 0, which
            pictures show (``bands.rgb`` of the backbone); None for the first three.
        names: Names of the bands in the order of training, if scenes are read in this order.
        units: Unit in which scenes are read, one of ``scene_facts.UNITS``.
    """

    count: int
    like_opencv: bool
    chosen: Optional[Tuple[int, ...]] = None
    ignored: Tuple[str, ...] = ()
    backend: Optional[str] = None
    color_type: str = 'color'
    resize: Optional[Dict[str, Any]] = None
    shown: Optional[Tuple[int, ...]] = None
    names: Tuple[str, ...] = ()
    units: str = STORED


@dataclass(frozen=True)
class ExportedDescription:
    """Description of an exported model, stored as JSON under :data:`KEY` of the file's metadata.

    Attributes:
        classes: Class names in the order of their indices.
        palette: RGB colors of the classes, 0..255.
        bands: Bands that the model takes.
        window: Side in pixels of the windows that the file takes.
        overlap: Pixels that neighboring windows share by default.
        batch: Number of windows that the file takes at a time; None for any.
        scores: Number of scores of a pixel.
        threshold: Score above which a model with a single score means class 1.
        checkpoint: SHA-256 of the checkpoint.
        target: Target of the export, a key of ``mapsage.extras.export.targets.TARGETS``.
        version: Version of MapSage that wrote the file.
        places: Settings of the places that a model of several dates takes, as
            ``mapsage.maps.model.place_settings`` returns them, with ``training_days`` by sensor;
            None for single scenes.
        passport: Passport of the training (`mapsage/geo/passport.py`), None without one.
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
    places: Optional[Dict[str, Any]] = None
    passport: Optional[Dict[str, Any]] = None

    def to_text(self) -> str:
        """Return the description as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str], path: str) -> ExportedDescription:
        """Return the description in the metadata of an ONNX file.

        Args:
            metadata: Metadata of the file.
            path: Path of the file, for error messages.

        Raises:
            PredictError: If keys are missing or have invalid values.
        """
        if KEY not in metadata:
            raise PredictError(
                f'{path} has no key {KEY!r} in its metadata (found: '
                f'{", ".join(sorted(metadata)) or "none"}): classes, bands and window are unknown. '
                f'Write the file with `{program("export")} CONFIG CHECKPOINT --out {path}`.'
            )
        try:
            stored = parse_json(metadata[KEY])
        except ValueError:
            stored = None
        stored = stored if isinstance(stored, dict) else {}
        # Files that older versions wrote have no places and no passport.
        stored = dict(dict(places=None, passport=None), **stored)
        missing = [field.name for field in fields(cls) if field.name not in stored]
        bands = stored.get('bands')
        bands = bands if isinstance(bands, dict) else {}
        missing += [f'bands.{name}' for name in ('count', 'like_opencv') if name not in bands]
        if missing:
            raise PredictError(
                f'{path}: its description lacks {", ".join(missing)}. Write the '
                f'file again with `{program("export")}`.'
            )
        values = {field.name: stored[field.name] for field in fields(cls)}
        try:
            values.update(
                classes=tuple(map(str, stored['classes'])),
                bands=_read_bands(bands),
                palette=tuple(tuple(map(int, color)) for color in stored['palette']),
            )
            _check_numbers(values)
            _check_places(values['places'])
        except (TypeError, ValueError, OverflowError) as error:
            raise PredictError(
                f'{path}: its description cannot be read: {error}. Write the file '
                f'again with tools/export.py.'
            ) from error
        return cls(**values)

    def as_classes(self) -> Classes:
        """Return names and colors of the classes."""
        return Classes(self.classes, np.array(self.palette, np.uint8).reshape(-1, 3))


def _check_numbers(values: Mapping[str, Any]) -> None:
    """Raise ValueError if a number of a description is out of range or no number."""
    minima = dict(window=1, overlap=0, scores=1)
    for name, minimum in minima.items():
        if type(values[name]) is not int or not minimum <= values[name] <= _MOST:
            raise ValueError(f'{name} is {values[name]!r}, expected {minimum} to {_MOST}')
    if values['overlap'] >= values['window']:
        raise ValueError(f'overlap is {values["overlap"]}, the window {values["window"]}')
    batch, threshold = values['batch'], values['threshold']
    if batch is not None and (type(batch) is not int or batch < 1):
        raise ValueError(f'batch is {batch!r}')
    if not isinstance(threshold, (int, float)) or not math.isfinite(threshold):
        raise ValueError(f'threshold is {threshold!r}')
    colors = values['palette']
    if len(colors) != len(values['classes']) or not all(
        len(color) == 3 and all(0 <= value <= 255 for value in color) for color in colors
    ):
        raise ValueError(f'palette is not red, green and blue of {len(values["classes"])} classes')


def _check_places(places: Any) -> None:
    """Raise ValueError or TypeError if the settings of places have the wrong kind.

    What reads the places checks their sensors.
    """
    if places is None:
        return
    sensors, days = (
        places.get(key) if isinstance(places, dict) else None
        for key in ('sensors', 'training_days')
    )
    if (
        not isinstance(sensors, dict)
        or not isinstance(places.get('type'), str)
        or not all(isinstance(sensor, dict) for sensor in sensors.values())
    ):
        raise ValueError(f'places are {places!r}')
    if not isinstance(days, dict) or not all(
        isinstance(series, list) and all(type(day) is int for day in series)
        for series in days.values()
    ):
        raise ValueError(f'training_days are {days!r}')


def _read_bands(stored: Mapping[str, Any]) -> Bands:
    values = {field.name: stored[field.name] for field in fields(Bands) if field.name in stored}
    chosen = values.get('chosen')
    for numbers in ([values['count']], chosen or []):
        if not all(type(number) is int and 1 <= number <= _MOST for number in numbers):
            raise ValueError(f'bands are {numbers!r}, expected numbers from 1 on')
    values.update(
        chosen=tuple(chosen) if chosen else None,
        ignored=tuple(values.get('ignored') or ()),
        names=tuple(map(str, values.get('names') or ())),
        shown=tuple(values['shown']) if values.get('shown') else None,
    )
    if values.get('units', STORED) not in UNITS:
        raise ValueError(f'units are {values["units"]!r}, expected one of {", ".join(UNITS)}')
    return Bands(**values)
