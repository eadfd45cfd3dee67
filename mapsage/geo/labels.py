"""Labels of a scene from a raster on the same grid, and which label file belongs to a scene.

Label values are returned as they are in the file, with the pixels that have a label.
`LoadGeoTiffLabels` turns them into class indices. Labels from polygons are in `vector_labels.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Tuple, Union

import numpy as np

from .coordinates import corner_offsets, short_crs
from .errors import GeoError, PathName
from .gdal_files import open_file, other_format
from .gdal_names import output_name
from .pool import close_raster, open_raster
from .raster import Raster
from .reference_systems import same_crs

VECTOR_SUFFIXES = ('.gpkg', '.geojson', '.json', '.shp', '.fgb')

RASTER_SUFFIXES = ('.tif', '.tiff', '.vrt', '.img', '.png')

# Number of rows that are read at a time to count pixels.
_ROWS = 512


class RasterLabels:
    """Labels of a scene from a raster on the same grid.

    Args:
        path: Path of a raster with one band of integers.
        scene: Scene that the labels belong to.
        nodata: Value of pixels without a label; None for no such value, and ``'file'`` for the
            no-data value that the file names.
        codes: Class index of each value of the file, None for no label; None if the values are
            class indices. Another value with a label is an error.

    Attributes:
        raster: The raster, closed. Its header is read once.
        nodata: Value of pixels without a label, or None. Pixels that a mask or alpha band hides
            have no label either.
        settings: What the labels depend on in addition to the file, as JSON values.

    Raises:
        GeoError: If CRS, transform or size differ; the message names both files. If one of them
            has no georeference, only the sizes must match.
    """

    def __init__(
        self,
        path: PathName,
        scene: Raster,
        nodata: Union[None, int, str] = 'file',
        codes: Optional[Mapping[int, Optional[int]]] = None,
    ) -> None:
        self.path = self._pixels = str(path)
        self.raster = labels = Raster(path)
        self.nodata: Optional[float] = labels.nodata if isinstance(nodata, str) else nodata
        if len(labels.bands) != 1 or labels.dtype.kind not in 'ui':
            raise GeoError(
                f'labels {path} have {len(labels.bands)} band(s) of '
                f'{labels.dtype}, expected one band of class indices (integers); '
                'convert them, for example with gdal_translate -b 1 -ot Byte.'
            )
        self.settings: Dict[str, Any] = dict(nodata=self.nodata)
        self._codes: Optional[Tuple[np.ndarray, np.ndarray]] = None
        if codes is not None:
            pairs = sorted(
                (value, -1 if index is None else index) for value, index in codes.items()
            )
            self.settings['codes'] = [list(pair) for pair in pairs]
            self._codes = np.array(pairs, np.int64)[:, 0], np.array(pairs, np.int64)[:, 1]
        # An integer, because NumPy converts a whole uint8 array to compare it with a float. A value
        # that is no integer hides no pixel.
        self._hidden = (
            int(self.nodata)
            if self.nodata is not None and float(self.nodata).is_integer()
            else None
        )
        _check_same_grid(labels, scene)

    def read_from(self, path: str) -> None:
        """Read the values from a copy of the raster from now on."""
        self._pixels = path

    def read(self, column: int, row: int, width: int, height: int) -> Tuple[np.ndarray, np.ndarray]:
        """Read a window in pixels, which may reach beyond the scene.

        Returns:
            The values as in the file, integers of its type (height, width), since a conversion
            could turn a value that is no class into one; and the pixels that have a label, bool
            (height, width). Values of other pixels have no meaning.
        """
        raster = open_raster(self._pixels, known=self.raster)
        (values,), labeled = raster.read_with_nodata(column, row, width, height)
        if self._hidden is not None:
            labeled &= values != self._hidden
        return (values, labeled) if self._codes is None else self._decode(values, labeled)

    def _decode(self, values: np.ndarray, labeled: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
        """Return class indices of a file's values, and the pixels that have a label."""
        assert self._codes is not None
        codes, classes = self._codes
        positions = np.searchsorted(codes, values.astype(np.int64)).clip(0, len(codes) - 1)
        unknown = (codes[positions] != values) & labeled
        if unknown.any():
            value = int(values[unknown][0])
            raise GeoError(
                f'labels {self.path} hold {value} ({int(unknown.sum())} pixel(s) of a window), which '
                f"label_map does not name; it has {codes.tolist()}. Add {value}: 'CLASS', or "
                f'{value}: None for no label.'
            )
        indices = classes[positions]
        labeled &= indices >= 0
        return np.where(labeled, indices, 0).astype(np.uint8), labeled

    def close(self) -> None:
        """Close the file in this thread; a later read opens it again."""
        close_raster(self._pixels)

    def colors(self) -> Dict[int, Tuple[int, int, int]]:
        """Return the color table of the file, RGB (0..255) by value; empty without a table."""
        with open_file(self.path) as source:
            try:
                table = source.colormap(1)
            # The way in which rasterio reports that there is no color table.
            except ValueError:
                return {}
        return {int(value): (color[0], color[1], color[2]) for value, color in table.items()}

    def count_unlabeled(self) -> int:
        """Return how many pixels of the raster have no label."""
        width, height = self.raster.width, self.raster.height
        return sum(
            int((~self.read(0, row, width, min(_ROWS, height - row))[1]).sum())
            for row in range(0, height, _ROWS)
        )

    def __deepcopy__(self, memo: object) -> RasterLabels:
        # A copy of a sample needs no other header and file.
        return self


def byte_labels(values: np.ndarray, path: PathName) -> np.ndarray:
    """Return the labels of a mask as uint8, of the same shape.

    A number whose bits are all 1 (-1, or 65535 in a mask of 16 bits) becomes 255, as in NumPy's
    conversion: so masks mark ignored pixels.

    Args:
        values: The labels, numbers of any type.
        path: Path of the mask, for the message.

    Raises:
        GeoError: If another value is none of 0 to 255, such as 256, 1.5 or NaN.
    """
    if values.dtype == np.uint8:
        return values
    is_ignored = values == (np.iinfo(values.dtype).max if values.dtype.kind == 'u' else -1)
    with np.errstate(invalid='ignore'):
        labels = values.astype(np.uint8)
    wrong = (labels != values) & ~is_ignored
    labels[is_ignored] = 255
    if wrong.any():
        raise GeoError(
            f'mask {path} holds the value {values[wrong][0]} ({int(wrong.sum())} '
            f'pixel(s), {values.dtype}), expected class indices from 0 to 254, and 255 '
            'for ignored pixels. Correct the mask.'
        )
    return labels


class LabelFiles:
    """Label files by scene.

    A folder is listed once: listing it for each of its thousands of scenes takes minutes.

    Args:
        labels: Path of a label file, which belongs to every scene, or of a folder with label files.
    """

    def __init__(self, labels: str) -> None:
        self._labels = labels
        self._by_stem: Optional[Dict[str, List[Path]]] = None
        if Path(labels).is_dir():
            self._by_stem = {}
            for path in sorted(Path(labels).iterdir()):
                if path.suffix.lower() in RASTER_SUFFIXES + VECTOR_SUFFIXES:
                    self._by_stem.setdefault(path.stem, []).append(path)

    def find(self, scene: str) -> str:
        """Return the path of the label file of a scene.

        Args:
            scene: Path of the scene, or a name for GDAL. In a folder, the label file is chosen
                whose stem equals ``output_name(scene)``.

        Raises:
            GeoError: If the folder contains no such file, or more than one, or the file has a format
                that is not read, such as KML.
        """
        labels = self._labels
        # A list of places is no label file, and none is looked for in it.
        if other_format(labels) and not labels.lower().endswith(VECTOR_SUFFIXES):
            raise GeoError(f'labels {labels} cannot be read: {other_format(labels)}')
        if self._by_stem is None:
            return labels
        stem = output_name(scene)
        matches = self._by_stem.get(stem, [])
        if len(matches) != 1:
            # A file in a format that is not read is named, too.
            matches = matches or [
                path for path in sorted(Path(self._labels).iterdir()) if path.stem == stem
            ]
            names = ', '.join(path.name for path in matches) or 'none'
            raise GeoError(
                f'scene {scene} needs one label file {stem}.* in {self._labels}, found '
                f'{names}; expected one of '
                f'{", ".join(RASTER_SUFFIXES + VECTOR_SUFFIXES)}.'
            )
        return str(matches[0])


def _check_same_grid(labels: Raster, scene: Raster) -> None:
    """Raise an error if two rasters differ in size, CRS or transform."""
    subject = f'labels {labels.path}'
    if (labels.width, labels.height) != (scene.width, scene.height):
        raise GeoError(
            f'{subject} are {labels.width} x {labels.height} pixels, their scene '
            f'{scene.path} is {scene.width} x {scene.height}; expected the same grid, '
            'cut and resample them to it (rio warp --like).'
        )
    if not (labels.is_georeferenced and scene.is_georeferenced):
        return
    if not same_crs(labels.crs, scene.crs):
        raise GeoError(
            f'{subject} are in {short_crs(labels.crs)}, their scene {scene.path} is in '
            f'{short_crs(scene.crs)}; reproject them to its grid (rio warp --like, '
            'resampling nearest).'
        )
    if labels.transform == scene.transform:
        return
    corners = np.array([(0, 0), (scene.width, 0), (0, scene.height)])
    offset = np.abs(corner_offsets(labels, scene, corners))
    if offset.max() > 0.1:
        raise GeoError(
            f'{subject} lie up to {offset.max():.4g} pixels off their scene '
            f'{scene.path} (transforms {tuple(labels.transform)[:6]} and '
            f'{tuple(scene.transform)[:6]}); resample them to its grid '
            '(rio warp --like, resampling nearest).'
        )
