"""Converts scenes and labels to files that a browser can read tile by tile, on the map's grid.

The page reads only the tiles that it shows. It cannot do so with striped files, JPEG 2000, VRT and
16-bit values, and a file on another grid does not fit the map. Such a file is converted once, into
the folder ``.view`` beside the map. The copy's name contains a hash of its sources' names, sizes
and times, so a changed source leads to a new copy.

Arrays: values ``(B, H, W)`` for bands, rows, columns; validity ``(H, W)``, bool.
"""

from __future__ import annotations

import hashlib
import json
import re
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from typing import Callable, List, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np
import rasterio
import rasterio.shutil
from affine import Affine
from rasterio.enums import ColorInterp, MaskFlags, Resampling
from rasterio.vrt import WarpedVRT
from rasterio.windows import Window

from mapsage.base.files import atomic_write, parse_json
from mapsage.geo import (
    HARMONIZED,
    VECTOR_SUFFIXES,
    ClassMapWriter,
    MapInfo,
    Mosaic,
    Raster,
    VectorLabels,
    same_crs,
    stamp,
    write_cog,
)
from mapsage.geo.cog import disk_errors, temporary_beside
from mapsage.geo.gdal_files import open_file

from .catalog import NO_DATA, MapEntry
from .errors import ViewError

Matrix = List[List[int]]
"""Numbers of pixels by their class in the labels (row) and in the map (column)."""

Progress = Callable[[float], None]
"""Function that is called with the share of a conversion that is done, 0 to 1."""

# Reads rows of a file on the map's grid: (first row, number of rows) -> values (B, H, W), validity.
_ReadRows = Callable[[int, int], Tuple[np.ndarray, np.ndarray]]
# More pixels than a map has; sums of several such numbers still fit int64.
_MAX_PIXELS = 2**48
# Number of rows that are converted at a time.
_ROWS = 512
# Longest side in pixels of the reduced scene that the stretch is computed from.
_SAMPLE = 1024
# Percentiles that become black and white if values are not 8-bit.
_STRETCH = 2, 98
# Largest side in pixels of a file that is shown without overviews.
_GOOD_SIZE = 1024


def scene_for_display(entry: MapEntry, progress: Progress) -> Path:
    """Return the path of a file with a map's scene that a browser can read: the scene, or a copy.

    The copy has the bands of ``entry.colors``, 8 bits each (values of other types are stretched from their
    2nd to their 98th percentile), a mask of the valid pixels, and the grid of the map.

    Raises:
        ViewError: If the scene cannot be placed on the map.
        GeoError: If the scene cannot be read, or the disk is full.
    """
    with Raster(entry.path) as target:
        if (
            entry.colors in ((), (1, 2, 3))
            and len(entry.scenes) == 1
            and _is_readable(entry.scenes[0], target)
        ):
            return Path(entry.scenes[0])
        bands = entry.colors or None
        copy = _copy_path(entry, 'scene', entry.scenes, *map(str, entry.colors))
        if not copy.exists():
            with ExitStack() as stack:
                scene: Raster = stack.enter_context(
                    Raster(entry.scenes[0], bands)
                    if len(entry.scenes) == 1
                    else Mosaic(entry.scenes, bands, units=HARMONIZED)
                )
                read = _raster_reader(entry.scenes[0], scene, target, stack, Resampling.bilinear)
                _write_scene(copy, read, target, _find_limits(scene), progress)
    return copy


class TruthSettings(NamedTuple):
    """Settings for reading labels, as in ``GeoTiffDataset`` for a training.

    Attributes:
        reduce_zero_label: Whether value 0 of a raster is unlabeled and 1 the first class.
        class_field: Name of the polygons' attribute that contains the class.
        default_class: Class of polygons without this attribute, as a name or an index.
        outside: Class index of pixels that no polygon covers; 255 for unlabeled.
    """

    reduce_zero_label: bool = False
    class_field: str = 'class_name'
    default_class: Union[None, int, str] = None
    outside: int = 0


AS_BY_DEFAULT = TruthSettings()


def truth_for_display(
    entry: MapEntry, progress: Progress, settings: TruthSettings = AS_BY_DEFAULT
) -> Tuple[Path, Matrix]:
    """Return the path of a copy of the labels on the map's grid, and a confusion matrix.

    The copy has the same tiles and overviews as the map, because the page shows both as bands of
    one source.

    Args:
        entry: Map with ``truth``.
        progress: Function that is called with the progress.
        settings: Settings for reading the labels.

    Returns:
        Path of the copy, and the confusion matrix.

    Raises:
        ViewError: If the labels cannot be placed on the map.
        GeoError: If the labels cannot be read, or the disk is full.
    """
    assert entry.truth is not None
    copy = _copy_path(entry, 'truth', [str(entry.truth)], 'matrix', *map(str, settings))
    matrix_path = copy.with_suffix('.json')
    matrix = _read_matrix(matrix_path, len(entry.classes))
    if matrix is None or not copy.exists():
        with ExitStack() as stack:
            target = stack.enter_context(Raster(entry.path))
            if Path(str(entry.truth)).suffix.lower() in VECTOR_SUFFIXES:
                read = _polygon_reader(entry, settings, target)
            else:
                truth = stack.enter_context(Raster(entry.truth, bands=[1]))
                read = _raster_reader(str(entry.truth), truth, target, stack, Resampling.nearest)
            matrix = _write_truth(copy, entry, read, target, settings, progress)
        atomic_write(matrix_path, json.dumps(matrix).encode())
    return copy, matrix


def _read_matrix(path: Path, classes: int) -> Optional[Matrix]:
    """Return a stored confusion matrix; None if the file is missing or invalid."""
    try:
        matrix = parse_json(path.read_text(encoding='utf-8'))
    except (OSError, ValueError):
        return None
    rows = matrix if isinstance(matrix, list) else []
    is_square = len(rows) == classes and all(
        isinstance(row, list)
        and len(row) == classes
        and all(type(count) is int and 0 <= count < _MAX_PIXELS for count in row)
        for row in rows
    )
    return matrix if is_square else None


def _polygon_reader(entry: MapEntry, settings: TruthSettings, target: Raster) -> _ReadRows:
    """Return a function that burns polygons into rows of the map, as the training did."""
    classes = tuple(str(class_['name']) for class_ in entry.classes)
    vector = _open_polygons(
        str(entry.truth), json.dumps(stamp(str(entry.truth))), classes, settings
    )
    labels = vector.for_scene(target, settings.outside)
    vector.check_met()

    def read(row: int, rows: int) -> Tuple[np.ndarray, np.ndarray]:
        values, labeled = labels.read(0, row, target.width, rows)
        return values[None], labeled

    return read


# The maps of a folder often share one file of polygons.
@lru_cache(maxsize=1)
def _open_polygons(
    path: str, stamp_text: str, classes: Tuple[str, ...], settings: TruthSettings
) -> VectorLabels:
    """Return the labels of a file. ``stamp_text`` changes with the file, for the cache."""
    return VectorLabels(
        path, settings.class_field, classes, NO_DATA, default_class=settings.default_class
    )


def _is_readable(path: str, target: Raster) -> bool:
    """Return whether a browser can read a scene tile by tile, and it is on the grid of the map."""
    if not Path(path).exists() or Path(path).suffix.lower() not in ('.tif', '.tiff'):
        return False
    with open_file(path) as source:
        small = max(source.width, source.height) <= _GOOD_SIZE
        return (
            source.profile.get('tiled', False)
            and (small or bool(source.overviews(1)))
            and source.count in (3, 4)
            and set(source.dtypes) == {'uint8'}
            and (source.count == 3 or source.colorinterp[3] == ColorInterp.alpha)
            and MaskFlags.nodata not in source.mask_flag_enums[0]
            and _same_grid(Raster(path), target)
        )


def _same_grid(first: Raster, second: Raster) -> bool:
    return (
        (first.width, first.height) == (second.width, second.height)
        and same_crs(first.crs, second.crs)
        and first.transform.almost_equals(second.transform, 1e-6)
    )


def _transform(target: Raster) -> Optional[Affine]:
    """Return the transform of a map; None for a map without coordinates, whose copy has none."""
    return None if target.transform == Affine.identity() else target.transform


def _copy_path(entry: MapEntry, kind: str, sources: Sequence[str], *settings: str) -> Path:
    """Return the path of the copy for a map; its name changes with the sources and settings."""
    stamps = [stamp(source) for source in [*sources, str(entry.path)]]
    key = hashlib.sha256(json.dumps([stamps, settings]).encode()).hexdigest()[:12]
    folder = entry.path.parent / '.view'
    if folder.is_symlink():
        raise ViewError(
            f'{folder} is a link, and copies for the browser are written and removed '
            'there; remove the link, or copy the maps elsewhere.'
        )
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise ViewError(
            f'cannot make {folder} ({error}), where the copies for the browser go; '
            'give write permission, or copy the maps elsewhere.'
        ) from error
    # Remove copies of earlier states of the same map.
    copy_name = re.compile(f'{re.escape(entry.name)}_{kind}_([0-9a-f]{{12}})\\.(tif|json)')
    for old in folder.iterdir():
        match = copy_name.fullmatch(old.name)
        if match and match.group(1) != key:
            old.unlink()
    return folder / f'{entry.name}_{kind}_{key}.tif'


def _raster_reader(
    path: str, source: Raster, target: Raster, stack: ExitStack, resampling: Resampling
) -> _ReadRows:
    """Return a function that reads rows of a raster on the map's grid."""
    same_size = (source.width, source.height) == (target.width, target.height)
    have_crs = source.crs is not None and target.crs is not None
    if isinstance(source, Mosaic) or _same_grid(source, target) or (same_size and not have_crs):
        if not same_size:
            raise ViewError(
                f'the scenes of {target.path} have changed since the map was made: '
                f'together {source.width} x {source.height} pixels, the map '
                f'{target.width} x {target.height}. Predict them again.'
            )
        return lambda row, rows: source.read(0, row, target.width, rows)
    if not have_crs:
        raise ViewError(
            f'{path} has {source.width} x {source.height} pixels and no coordinates to '
            f'place it by, the map {target.width} x {target.height}: not shown.'
        )
    handle = stack.enter_context(open_file(path))
    warped = stack.enter_context(
        WarpedVRT(
            handle,
            crs=target.crs,
            transform=target.transform,
            width=target.width,
            height=target.height,
            resampling=resampling,
            add_alpha=handle.nodata is None and ColorInterp.alpha not in handle.colorinterp,
        )
    )

    def read(row: int, rows: int) -> Tuple[np.ndarray, np.ndarray]:
        window = Window(0, row, target.width, rows)
        return (
            warped.read(list(source.bands), window=window),
            warped.dataset_mask(window=window) > 0,
        )

    return read


def _find_limits(scene: Raster) -> Optional[np.ndarray]:
    """Return the values that become black and white, float64 (bands, 2); None for 8-bit values."""
    if scene.dtype == np.uint8:
        return None
    factor = -(-max(scene.width, scene.height) // _SAMPLE)
    reduced, valid = scene.read_reduced(factor)
    values = reduced[:3, valid]
    values = values[:, np.isfinite(values).all(0)]
    if not values.size:
        return np.tile([0.0, 1.0], (min(3, len(scene.bands)), 1))
    low, high = np.percentile(values, _STRETCH, axis=1)
    return np.stack([low, np.maximum(high, low + 1e-12)], 1)


def _write_scene(
    copy: Path, read: _ReadRows, target: Raster, limits: Optional[np.ndarray], progress: Progress
) -> None:
    with temporary_beside(copy) as folder, disk_errors(copy):
        working, finished = folder / 'working.tif', folder / copy.name
        profile = dict(
            driver='GTiff',
            width=target.width,
            height=target.height,
            count=4,
            dtype='uint8',
            tiled=True,
            blockxsize=512,
            blockysize=512,
            crs=target.crs,
            transform=_transform(target),
            bigtiff='IF_SAFER',
            photometric='RGB',
            compress='deflate',
            zlevel=1,
            alpha='yes',
        )
        with open_file(working, 'w', **profile) as out:
            for row in range(0, target.height, _ROWS):
                rows = min(_ROWS, target.height - row)
                values, valid = read(row, rows)
                colors = _as_colors(values[:3], limits)
                window = Window(0, row, target.width, rows)
                out.write(colors, [1, 2, 3], window=window)
                out.write(np.where(valid, 255, 0).astype(np.uint8), 4, window=window)
                progress(0.6 * (row + rows) / target.height)
        # JPEG with the alpha band as a mask: a fifth of the size, and its losses are invisible.
        rasterio.shutil.copy(
            str(working),
            str(finished),
            driver='COG',
            compress='JPEG',
            quality=90,
            blocksize=512,
            overview_resampling='AVERAGE',
            num_threads='ALL_CPUS',
            bigtiff='IF_SAFER',
        )
        progress(1)
        finished.replace(copy)


def _as_colors(values: np.ndarray, limits: Optional[np.ndarray]) -> np.ndarray:
    """Return red, green and blue, uint8 (3, H, W), of one to three bands."""
    if limits is not None:
        low, high = (limits[:, side, None, None] for side in (0, 1))
        share = np.nan_to_num((values - low) / (high - low), nan=0, posinf=1, neginf=0)
        values = (share.clip(0, 1) * 255).astype(np.uint8)
    return values if len(values) == 3 else np.repeat(values[:1], 3, axis=0)


def _write_truth(
    copy: Path,
    entry: MapEntry,
    read: _ReadRows,
    target: Raster,
    settings: TruthSettings,
    progress: Progress,
) -> Matrix:
    """Write the labels as a map; return the confusion matrix."""
    info = MapInfo(
        class_names=[class_['name'] for class_ in entry.classes],
        palette=[class_['color'] for class_ in entry.classes],
        crs=target.crs,
        transform=_transform(target),
    )
    count = len(entry.classes)
    matrix = np.zeros((count, count), np.int64)
    is_vector = Path(str(entry.truth)).suffix.lower() in VECTOR_SUFFIXES
    with temporary_beside(copy) as folder:
        working = folder / 'working.tif'
        with ClassMapWriter(working, target.width, target.height, info) as writer:
            for row in range(0, target.height, _ROWS):
                rows = min(_ROWS, target.height - row)
                values, valid = read(row, rows)
                # Polygons name their classes, so their labels need no shift.
                shift = int(settings.reduce_zero_label and not is_vector)
                # Compared before the conversion, which would turn 1.5 into class 1.
                known = valid & np.isin(values[0], np.arange(shift, shift + count))
                labels = np.full(known.shape, NO_DATA, np.int64)
                labels[known] = values[0][known] - shift
                writer.write(row, labels.astype(np.uint8))
                predicted, mapped = target.read(0, row, target.width, rows)
                known = (labels != NO_DATA) & mapped & (predicted[0] < count)
                pairs = labels[known] * count + predicted[0][known]
                matrix += np.bincount(pairs, minlength=count * count).reshape(count, count)
                progress((row + rows) / target.height)
        write_cog(working, copy)
    if not matrix.any():
        raise ViewError(
            f'{entry.truth}: no labeled pixel lies on the map. Its values must be the '
            'class indices of the map; with 0 for unlabeled, add --reduce-zero-label.'
        )
    return matrix.tolist()
