"""Masks of what a model is sure of, made from its finished maps and their confidence."""
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Sequence, Tuple

import cv2
import numpy as np
from rasterio.windows import Window

from mapsage.atomic_write import atomic_write
from mapsage.geo import ClassMapWriter, MapInfo, write_cog
from mapsage.geo.cog import temporary_beside
from mapsage.geo.qgis_style import is_own_style, map_style
from mapsage.geo.raster import open_file

from .known_labels import UNKNOWN, KnownLabels
from .thresholds import PERCENT, class_thresholds

_ROWS = 512  # rows of a map that are in memory at a time


class MapPair(NamedTuple):
    """A finished map, and what it is of.

    Attributes:
        name: Name of its mask, without suffix.
        path: The image or scene.
        map: Class map of the image's size, 255 where there is no data.
        confidence: Confidence of each of its pixels in per cent.
        is_picture: Whether the mask is a PNG, else a GeoTIFF on the grid of the map.
    """

    name: str
    path: str
    map: Path
    confidence: Path
    is_picture: bool

    def mask(self, folder: Path) -> Path:
        """Return the path of its mask."""
        return folder / (self.name + ('.png' if self.is_picture else '.tif'))


@dataclass(frozen=True)
class Kept:
    """What was kept as labels.

    Attributes:
        thresholds: Least confidence of each class, per cent, ``(classes,)`` int64.
        predicted: Pixels that the model gives each class, ``(classes,)`` int64.
        kept: Those among them that are labels now, ``(classes,)`` int64.
        pairs: The maps whose masks hold a label.
        empty: The maps whose masks hold none.
    """

    thresholds: np.ndarray
    predicted: np.ndarray
    kept: np.ndarray
    pairs: List[MapPair]
    empty: List[MapPair]

    def lost(self, names: Sequence[str]) -> List[str]:
        """Return a line for each reason why classes have no label, which names these classes."""
        nowhere = [name for name, count in zip(names, self.predicted) if not count]
        unsure = [f'{name} ({threshold / 100:g})' for name, count, kept, threshold in zip(
            names, self.predicted, self.kept, self.thresholds) if count and not kept]
        return [f'no pseudo-label teaches {", ".join(some)}: {why}' for some, why in (
            (nowhere, 'the model predicts it nowhere that is not labeled already. Label some of '
                      'it.'),
            (unsure, 'no pixel of it has this confidence. Lower --min-confidence, or raise '
                     '--min-share, which keeps the most confident pixels of each class.'))
            if some]

    def as_json(self, names: Sequence[str]) -> Dict[str, Any]:
        """Return pixels, share and threshold of each class by its name."""
        return {name: dict(predicted=int(predicted), kept=int(kept),
                           share_kept=round(int(kept) / max(1, int(predicted)), 4),
                           threshold=int(threshold) / 100)
                for name, predicted, kept, threshold in zip(
                    names, self.predicted, self.kept, self.thresholds)}


def write_masks(pairs: Sequence[MapPair], folder: Path, names: Sequence[str], palette: Any,
                least: float, share: float, known: KnownLabels) -> Kept:
    """Write a mask for each map: class indices, 255 where the model is unsure.

    The maps are read twice, the first time to count; a few hundred rows are in memory at a time.
    Pixels that have a label already are 255: the label teaches them.

    Args:
        pairs: The maps.
        folder: Existing folder of the masks.
        names: Names of the classes.
        palette: Red, green and blue of each, ``(classes, 3)``.
        least: Confidence from which on every pixel is kept, 0 to 1.
        share: Share of each class that is kept at least; see ``class_thresholds``.
        known: Labels that are there already.

    Raises:
        GeoError: If a map cannot be read, or a mask cannot be written.
        OSError: If a PNG cannot be written.
    """
    counts = np.zeros((len(names), PERCENT), np.int64)
    for pair in pairs:
        for _, classes, confidence in _strips(pair, known):
            known_class = classes < len(names)
            places = classes[known_class].astype(np.int64) * PERCENT
            places += np.minimum(confidence[known_class], PERCENT - 1)
            counts += np.bincount(places, minlength=counts.size).reshape(counts.shape)
    thresholds = class_thresholds(counts, least, share)
    wanted = np.full(256, 256, np.int16)  # more than any confidence: no data is no label
    wanted[:len(names)] = thresholds
    kept = np.zeros(len(names), np.int64)
    full: List[MapPair] = []
    empty: List[MapPair] = []
    for pair in pairs:
        found = _write_mask(pair, pair.mask(folder), wanted, names, palette, known)
        kept += found[:len(names)]
        (full if found[:len(names)].any() else empty).append(pair)
    return Kept(thresholds, counts.sum(1), kept, full, empty)


def _strips(pair: MapPair,
            known: KnownLabels) -> Iterator[Tuple[int, np.ndarray, np.ndarray]]:
    """Yield first row, classes and confidence of rows of a map; 255 where a label is known."""
    with open_file(pair.map) as map_file, open_file(pair.confidence) as confidence_file:
        for row in range(0, map_file.height, _ROWS):
            window = Window(0, row, map_file.width, min(_ROWS, map_file.height - row))
            classes = map_file.read(1, window=window)
            if pair.path in known:
                labels = known.read(pair.path, 0, row, window.width, window.height)
                classes[labels != UNKNOWN] = UNKNOWN
            yield row, classes, confidence_file.read(1, window=window)


def _write_mask(pair: MapPair, path: Path, wanted: np.ndarray, names: Sequence[str], palette: Any,
                known: KnownLabels) -> np.ndarray:
    """Write the mask of a map and return its number of pixels by value, ``(256,)``."""
    counts = np.zeros(256, np.int64)

    def masks() -> Iterator[Tuple[int, np.ndarray]]:
        for row, classes, confidence in _strips(pair, known):
            classes[confidence < wanted[classes]] = UNKNOWN
            counts[:] += np.bincount(classes.ravel(), minlength=256)
            yield row, classes

    if pair.is_picture:
        _, data = cv2.imencode('.png', np.concatenate([mask for _, mask in masks()]))
        atomic_write(path, data.tobytes())
        return counts
    with open_file(pair.map) as source:
        height, width = source.shape
        placed = source.crs is not None or not source.transform.is_identity
        info = MapInfo(class_names=names, palette=np.asarray(palette).tolist(), crs=source.crs,
                       transform=source.transform if placed else None)
    with temporary_beside(path) as folder:
        working = folder / 'mask.tif'
        with ClassMapWriter(working, width, height, info) as writer:
            for row, classes in masks():
                writer.write(row, classes)
        write_cog(working, path)
    style = path.with_suffix('.qml')
    if is_own_style(style):
        atomic_write(style, map_style(names, info.palette))
    return counts


def table(kept: Kept, names: Sequence[str]) -> List[str]:
    """Return the lines of a table of what was kept of each class."""
    width = max([5, *map(len, names)])
    lines = [f'{"class":{width}}  {"threshold":>9}  {"predicted":>12}  {"kept":>12}  {"share":>7}']
    lines += [f'{name:{width}}  {threshold / 100:9.2f}  {predicted:12,}  {count:12,}  '
              f'{_percent(count, predicted):>7}'
              for name, threshold, predicted, count in zip(
                  names, kept.thresholds, kept.predicted, kept.kept)]
    total, predicted = int(kept.kept.sum()), int(kept.predicted.sum())
    return lines + [f'{"all":{width}}  {"":9}  {predicted:12,}  {total:12,}  '
                    f'{_percent(total, predicted):>7}']


def _percent(count: int, of: int) -> str:
    return f'{100 * count / of:.1f} %' if of else '-'
