"""Finds maps and the files that belong to each: scene, confidence, labels, polygons.

A map's report (the ``.json`` beside it) may have been written by a stranger: nothing in it is
trusted, and no server is asked for a file that it names unless the user allows it. `session.py`
prepares the files for a browser.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import numpy as np

from mapsage.base.files import parse_json
from mapsage.geo import (
    SCENE_SUFFIXES,
    VECTOR_SUFFIXES,
    GeoError,
    Raster,
    confidence_path,
    is_gdal_name,
    pixel_side,
    read_classes,
    remote_file,
    server_in,
    without_secrets,
)
from mapsage_launcher.shipped import program

from .errors import ViewError

# Class of a pixel without a prediction, as tools/predict.py writes it.
NO_DATA = 255
# Number of a map's rows that are counted at a time.
_ROWS = 1024


@dataclass
class MapEntry:
    """A map and the files that are shown with it.

    Attributes:
        name: Name of the map: the name of its file without the suffix.
        path: Path of the class map.
        classes: Value, name and color of each class, as ``read_classes`` returns them.
        pixels: Number of pixels of each value, by value.
        scenes: Paths or GDAL names of the scenes that the map was made from; several for a mosaic.
        confidence: Path of the confidence, or None.
        truth: Path of the labels, a raster or polygons, or None.
        polygons: Path of the GeoPackage, or None.
        windows: (height, width) of the prediction windows, and of the scene, both in the pixels
            that the model saw; empty if unknown.
        colors: Bands of the scene that are shown as red, green and blue, or one band as gray,
            counted from 1; empty for the first ones.
        notes: Sentences that the viewer shows about missing files, with the reason.
    """

    name: str
    path: Path
    classes: List[Dict[str, Any]]
    pixels: Dict[int, int]
    scenes: List[str] = field(default_factory=list)
    confidence: Optional[Path] = None
    truth: Optional[Path] = None
    polygons: Optional[Path] = None
    windows: Tuple[Tuple[int, int], ...] = ()
    colors: Tuple[int, ...] = ()
    notes: List[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Read once, because the file may be removed while the map is shown.
        self._grid = read_grid(self.path)

    def as_json(self) -> Dict[str, Any]:
        """Return the facts about the map that the page shows, without its files."""
        total = max(1, sum(self.pixels.get(entry['value'], 0) for entry in self.classes))
        return dict(
            self._grid,
            name=self.name,
            classes=[
                dict(entry, share=self.pixels.get(entry['value'], 0) / total)
                for entry in self.classes
            ],
            notes=self.notes,
        )


def read_grid(path: Path) -> Dict[str, Any]:
    """Return size, CRS and pixel size of a map."""
    with Raster(path) as raster:
        side = pixel_side(raster) if raster.is_georeferenced else float('nan')
        step = abs(raster.transform.determinant) ** 0.5
        crs = raster.crs
        return dict(
            width=raster.width,
            height=raster.height,
            crs=None
            if crs is None
            else crs.to_string()
            if crs.to_epsg() is None
            else f'EPSG:{crs.to_epsg()}',
            geographic=bool(crs is not None and crs.is_geographic),
            pixel_meters=side if np.isfinite(side) else None,
            meters_per_unit=side / step if np.isfinite(side) and step else None,
        )


def find_maps(
    inputs: Sequence[Union[str, Path]],
    scenes: Union[None, str, Path] = None,
    truth: Union[None, str, Path] = None,
    allow_remote: bool = False,
    bands: Sequence[int] = (),
) -> List[MapEntry]:
    """Return the maps of files and folders, in the order of their names.

    A map is a GeoTIFF with the class names that ``tools/predict.py`` writes into it. The map's
    report names the scene, unless ``scenes`` has a file of the map's name.

    Args:
        inputs: Paths of maps and of folders of maps.
        scenes: Folder of scenes, each for the map of its name, or a scene for all maps.
        truth: Folder of labels, each for the map of its name, or a file for all maps.
        allow_remote: Whether a file among ``inputs`` may make this process ask a server for data,
            as a VRT does.
        bands: Bands that are shown as red, green and blue, or one as gray, counted from 1; empty
            for those that the prediction showed, ``bands.rgb`` of the model.

    Raises:
        ViewError: If there is no map, an input or a folder does not exist, or a map needs a server
            and ``allow_remote`` is False.
    """
    files: List[Path] = []
    for path in map(Path, inputs):
        if not path.exists():
            raise ViewError(
                f'{path} does not exist; expected a folder of maps that '
                f'`{program("predict")}` made, or a map.'
            )
        files += sorted(path.glob('*.tif')) if path.is_dir() else [path]
    scenes_by_name = _files_by_name(scenes, '--scenes')
    truth_by_name = _files_by_name(truth, '--truth')
    entries = []
    for path in files:
        if not allow_remote:
            check_servers([str(path)], path.name)
        classes = _read_classes(path)
        if classes:
            entries.append(_make_entry(path, classes, scenes_by_name, truth_by_name, bands))
    if not entries:
        names = ', '.join(path.name for path in files[:5]) or 'no .tif file'
        raise ViewError(
            f'no map in {", ".join(map(str, inputs))}: found {names}. A map is a file '
            f'that `{program("predict")} CONFIG CHECKPOINT SCENES --out DIR` writes.'
        )
    if truth is not None and not any(entry.truth for entry in entries):
        raise ViewError(
            f'--truth {truth}: no file there has the name of a map '
            f'({", ".join(entry.name for entry in entries[:5])}).'
        )
    return entries


def check_servers(names: Sequence[str], described_in: str) -> None:
    """Check that files can be opened without asking a server.

    Args:
        names: Paths, and names for GDAL.
        described_in: Name of the file that contains ``names``, for the error.

    Raises:
        ViewError: If a file lies on a server, or describes data on a server, as a VRT may.
    """
    for name in names:
        file, server = (
            (described_in, remote_file(name))
            if is_gdal_name(name)
            else (Path(name).name, server_in(name))
        )
        if server:
            raise ViewError(
                f'{file} names {without_secrets(server)}, and servers are only asked '
                'with --allow-remote. Add it if you trust the file, or copy the data '
                'here and name them with --scenes or --truth.'
            )


def _read_classes(path: Path) -> List[Dict[str, Any]]:
    try:
        return read_classes(path)
    except GeoError:
        raise
    # All errors, because rasterio's have no common public base.
    except Exception as error:
        raise ViewError(
            f'{path} cannot be read: {error}. Make the map again, or move the file elsewhere.'
        ) from error


def _files_by_name(path: Union[None, str, Path], option: str) -> Dict[str, Path]:
    """Return the files of a folder by their names without suffix; a single file for ``''``.

    Polygons count only as labels. A raster of the same name has precedence.

    Args:
        path: Folder or file; None for no files.
        option: Option of the command line that names ``path``.
    """
    if path is None:
        return {}
    path = Path(path)
    if path.is_dir():
        files = [file for file in sorted(path.iterdir()) if not file.name.startswith('.')]
        polygons = [file for file in files if file.suffix.lower() in VECTOR_SUFFIXES]
        rasters = [file for file in files if file.suffix.lower() in SCENE_SUFFIXES]
        # Rasters last, so that they replace polygons of the same name.
        labels_or_scenes = [*polygons, *rasters] if option == '--truth' else rasters
        return {file.stem: file for file in labels_or_scenes}
    if path.exists():
        return {'': path}
    raise ViewError(f'{option} {path} does not exist; expected a folder, or a file.')


def _make_entry(
    path: Path,
    classes: List[Dict[str, Any]],
    scenes: Mapping[str, Path],
    truth: Mapping[str, Path],
    bands: Sequence[int],
) -> MapEntry:
    report = _report(path)
    values = {entry['name']: entry['value'] for entry in classes}
    counts = report.get('pixels')
    if (
        isinstance(counts, dict)
        and set(counts) == set(values)
        and all(type(count) is int for count in counts.values())
    ):
        pixels = {values[name]: count for name, count in counts.items()}
    else:
        pixels = _count_pixels(path)
    entry = MapEntry(path.stem, path, classes, pixels)
    chosen = scenes.get(path.stem, scenes.get(''))
    entry.scenes = [str(chosen)] if chosen is not None else _scenes_of(report)
    if not entry.scenes:
        entry.notes.append('The scene of this map is not known; name its folder with --scenes.')
    confidence = Path(confidence_path(path))
    entry.confidence = confidence if confidence.exists() else None
    entry.truth = truth.get(path.stem, truth.get(''))
    polygons = path.with_suffix('.gpkg')
    entry.polygons = polygons if polygons.exists() else None
    entry.windows = _windows_of(report)
    entry.colors = tuple(bands) or _colors_of(report)
    return entry


def _report(path: Path) -> Dict[str, Any]:
    """Return the report of tools/predict.py on a map; empty without a valid report."""
    try:
        report = parse_json(path.with_suffix('.json').read_text(encoding='utf-8'))
    except (OSError, ValueError):
        return {}
    return report if isinstance(report, dict) else {}


def _scenes_of(report: Dict[str, Any]) -> List[str]:
    """Return the scenes that a report names and that still exist."""
    settings = _settings(report)
    stamps = settings.get('input')
    names = [
        stamp[0]
        for stamp in (stamps if isinstance(stamps, list) else [])
        if isinstance(stamp, list) and stamp and isinstance(stamp[0], str)
    ]
    scenes = [
        name
        for name in names
        if '\0' not in name
        and (is_gdal_name(name) or name.lower().endswith(SCENE_SUFFIXES) and os.path.exists(name))
    ]
    return scenes if settings.get('mosaic') else scenes[:1]


def _settings(report: Dict[str, Any]) -> Dict[str, Any]:
    settings = report.get('settings')
    return settings if isinstance(settings, dict) else {}


def _colors_of(report: Dict[str, Any]) -> Tuple[int, ...]:
    bands = report.get('colors')
    # Also empty for a report of an earlier version.
    is_valid = isinstance(bands, list) and all(type(band) is int and band > 0 for band in bands)
    return tuple(bands) if is_valid and len(bands) in (1, 3) else ()  # type: ignore[arg-type]


def _windows_of(report: Dict[str, Any]) -> Tuple[Tuple[int, int], ...]:
    settings = _settings(report)
    pairs = [settings.get('window'), settings.get('size')]
    if all(
        isinstance(pair, list)
        and len(pair) == 2
        and all(type(side) is int and side > 0 for side in pair)
        for pair in pairs
    ):
        return tuple((height, width) for height, width in pairs)  # type: ignore[misc]
    return ()


def _count_pixels(path: Path) -> Dict[int, int]:
    counts = np.zeros(256, np.int64)
    with Raster(path) as raster:
        for row in range(0, raster.height, _ROWS):
            values, valid = raster.read(0, row, raster.width, min(_ROWS, raster.height - row))
            counts += np.bincount(values[0][valid].ravel(), minlength=256)
    return {value: int(count) for value, count in enumerate(counts) if count}
