"""The maps of a folder, with what belongs to each: scene, confidence, truth, polygons."""
from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np

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
from mapsage.json_text import parse_json
from mapsage_launcher.shipped import program

from .errors import ViewError

NO_DATA = 255  # class of a pixel without a prediction, as tools/predict.py writes it
_ROWS = 1024  # rows of a map that are counted at a time


@dataclass
class MapEntry:
    """A map and the files that are shown with it.

    Attributes:
        name: Name of the map, its file's without the suffix.
        path: Path of the class map.
        classes: Value, name and color of each class, as ``read_classes`` returns them.
        pixels: Number of pixels of each value, by value.
        scenes: Paths or GDAL names of the scenes that the map was made from; more than one of a
            mosaic.
        confidence: Path of the confidence, or None.
        truth: Path of the labels, a raster or polygons, or None.
        polygons: Path of the GeoPackage, or None.
        windows: Height and width of the windows that the map was made with, and of the scene, both
            in pixels as the model saw them; empty where that is not known.
        notes: Sentences that the viewer shows: what is missing, and why.
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
    notes: List[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._grid = _grid_of(self.path)  # once: the map may go while it is shown

    def as_json(self) -> Dict[str, Any]:
        """Return what the page needs to know of the map beside its files."""
        total = max(1, sum(self.pixels.get(entry['value'], 0) for entry in self.classes))
        return dict(
            self._grid, name=self.name,
            classes=[dict(entry, share=self.pixels.get(entry['value'], 0) / total)
                     for entry in self.classes],
            notes=self.notes)


def _grid_of(path: Path) -> Dict[str, Any]:
    """Return size, CRS and size of pixels of a map."""
    with Raster(path) as raster:
        side = pixel_side(raster) if raster.is_georeferenced else float('nan')
        step = abs(raster.transform.determinant)**0.5
        crs = raster.crs
        return dict(
            width=raster.width, height=raster.height,
            crs=None if crs is None else crs.to_string() if crs.to_epsg() is None
            else f'EPSG:{crs.to_epsg()}',
            geographic=bool(crs is not None and crs.is_geographic),
            pixel_meters=side if np.isfinite(side) else None,
            meters_per_unit=side / step if np.isfinite(side) and step else None)


def find_maps(inputs: Sequence[Any], scenes: Optional[Any] = None, truth: Optional[Any] = None,
              allow_remote: bool = False) -> List[MapEntry]:
    """Return the maps of files and folders, in the order of their names.

    A map is a GeoTIFF with the class names that ``tools/predict.py`` writes into it. Its scene is
    the one that the report beside it names, unless ``scenes`` holds one of the same name.

    Args:
        inputs: Paths of maps and of folders of maps.
        scenes: Folder of scenes, or a scene; they belong to the map of their name.
        truth: Folder of labels, or a file; they belong to the map of their name.
        allow_remote: Whether servers may be asked that a file in place of a map names.

    Raises:
        ViewError: If there is no map, or an input or a folder does not exist, or a map needs a
            server that may not be asked.
    """
    files: List[Path] = []
    for given in map(Path, inputs):
        if not given.exists():
            raise ViewError(f'{given} does not exist; expected a folder of maps that '
                            f'`{program("predict")}` made, or a map.')
        files += sorted(given.glob('*.tif')) if given.is_dir() else [given]
    scenes_by_name, truth_by_name = _by_name(scenes, '--scenes'), _by_name(truth, '--truth')
    entries = []
    for path in files:
        if not allow_remote:
            check_servers([str(path)], path.name)
        classes = _classes_of(path)
        if classes:
            entries.append(_entry(path, classes, scenes_by_name, truth_by_name))
    if not entries:
        held = ', '.join(path.name for path in files[:5]) or 'no .tif file'
        raise ViewError(f'no map in {", ".join(map(str, inputs))}: found {held}. A map is a file '
                        f'that `{program("predict")} CONFIG CHECKPOINT SCENES --out DIR` writes.')
    if truth is not None and not any(entry.truth for entry in entries):
        raise ViewError(f'--truth {truth}: no file there has the name of a map '
                        f'({", ".join(entry.name for entry in entries[:5])}).')
    return entries


def check_servers(names: Sequence[str], described_in: str) -> None:
    """Check that no server is asked for files.

    Args:
        names: Paths, and names for GDAL.
        described_in: Name of the file that names them.

    Raises:
        ViewError: If one lies on a server, or is a mosaic (VRT) or another description of what
            lies there.
    """
    for name in names:
        file, server = ((described_in, remote_file(name)) if is_gdal_name(name)
                        else (Path(name).name, server_in(name)))
        if server:
            raise ViewError(f'{file} names {without_secrets(server)}, and no server is asked for '
                            'what a file names. Add --allow-remote if you trust it, or copy the '
                            'data here and name them with --scenes or --truth.')


def _classes_of(path: Path) -> List[Dict[str, Any]]:
    try:
        return read_classes(path)
    except GeoError:
        raise
    except Exception as error:  # rasterio's errors have no common public base
        raise ViewError(f'{path} cannot be read: {error}. Make the map again, or move the file '
                        'elsewhere.') from error


def _by_name(given: Optional[Any], option: str) -> Dict[str, Path]:
    """Return the files of a folder by their names without suffix; a single file has any name.

    Polygons count as labels alone, and after a raster of the same name.
    """
    if given is None:
        return {}
    path = Path(given)
    if path.is_dir():
        files = [each for each in sorted(path.iterdir()) if not each.name.startswith('.')]
        polygons = [each for each in files if each.suffix.lower() in VECTOR_SUFFIXES]
        rasters = [each for each in files if each.suffix.lower() in SCENE_SUFFIXES]
        return {each.stem: each for each in polygons * (option == '--truth') + rasters}
    if path.exists():
        return {'': path}
    raise ViewError(f'{option} {given} does not exist; expected a folder, or a file.')


def _entry(path: Path, classes: List[Dict[str, Any]], scenes: Dict[str, Path],
           truth: Dict[str, Path]) -> MapEntry:
    report = _report(path)
    named = {entry['name']: entry['value'] for entry in classes}
    counted = report.get('pixels')
    if isinstance(counted, dict) and set(counted) == set(named) \
            and all(type(count) is int for count in counted.values()):
        pixels = {named[name]: count for name, count in counted.items()}
    else:
        pixels = _count(path)
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
    return entry


def _report(path: Path) -> Dict[str, Any]:
    """Return what tools/predict.py has noted of a map, or nothing."""
    try:
        report = parse_json(path.with_suffix('.json').read_text(encoding='utf-8'))
    except (OSError, ValueError):
        return {}
    return report if isinstance(report, dict) else {}


def _scenes_of(report: Dict[str, Any]) -> List[str]:
    """Return the scenes that a report names and that are still there."""
    settings = _settings(report)
    stamps = settings.get('input')
    names = [stamp[0] for stamp in (stamps if isinstance(stamps, list) else [])
             if isinstance(stamp, list) and stamp and isinstance(stamp[0], str)]
    there = [name for name in names if '\0' not in name and (
        is_gdal_name(name) or name.lower().endswith(SCENE_SUFFIXES) and os.path.exists(name))]
    return there if settings.get('mosaic') else there[:1]


def _settings(report: Dict[str, Any]) -> Dict[str, Any]:
    settings = report.get('settings')
    return settings if isinstance(settings, dict) else {}


def _windows_of(report: Dict[str, Any]) -> Tuple[Tuple[int, int], ...]:
    settings = _settings(report)
    pairs = [settings.get('window'), settings.get('size')]
    if all(isinstance(pair, list) and len(pair) == 2
           and all(type(side) is int and side > 0 for side in pair) for pair in pairs):
        return tuple((height, width) for height, width in pairs)  # type: ignore[misc]
    return ()


def _count(path: Path) -> Dict[int, int]:
    counts = np.zeros(256, np.int64)
    with Raster(path) as raster:
        for row in range(0, raster.height, _ROWS):
            values, valid = raster.read(0, row, raster.width, min(_ROWS, raster.height - row))
            counts += np.bincount(values[0][valid].ravel(), minlength=256)
    return {value: int(count) for value, count in enumerate(counts) if count}
