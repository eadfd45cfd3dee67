"""Turn finished strips into the files that a user gets; each appears once it is complete."""
from __future__ import annotations

import json
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional

import affine
import numpy as np

from mapsage.atomic_write import atomic_write
from mapsage.drawing.map_preview import save_map_preview, shrink_labels
from mapsage.geo import (
    ClassMapWriter,
    MapInfo,
    ProbabilityWriter,
    Raster,
    SceneArea,
    confidence_path,
    probabilities_path,
    write_cog,
)
from mapsage.geo.polygons import write_polygons
from mapsage.geo.qgis_style import is_own_style, map_style
from mapsage.json_text import parse_json

from .blending import NO_DATA, PROBABILITY_STEPS
from .description import Classes
from .errors import PredictError
from .parts import Parts, key_of
from .windows import Grid

_PREVIEW_SIDE = 780  # pixels, about, that a map is shrunk to


@dataclass(frozen=True)
class Outputs:
    """The files of one input.

    Attributes:
        map: The class map, ``NAME.tif``.
        confidence: ``NAME_confidence.tif``, or None.
        polygons: ``NAME.gpkg``, or None.
        preview: ``NAME_preview.png``, or ``preview.png`` where there is one input, unless that is
            another map's; or None.
        report: ``NAME.json``: what the map was made from and what it shows. It is written last.
        probabilities: ``NAME_probabilities.tif``, or None.
    """

    map: Path
    confidence: Optional[Path]
    polygons: Optional[Path]
    preview: Optional[Path]
    report: Path
    probabilities: Optional[Path] = None

    @classmethod
    def of(cls, folder: Path, name: str, confidence: bool, polygons: bool,
           alone: bool, probabilities: bool = False, preview: bool = True) -> Outputs:
        """Return the files of the input ``name``."""
        made = folder / f'{name}.tif'
        outputs = cls(made, Path(confidence_path(made)) if confidence else None,
                      folder / f'{name}.gpkg' if polygons else None,
                      folder / f'{name}_preview.png' if preview else None,
                      folder / f'{name}.json',
                      Path(probabilities_path(made)) if probabilities else None)
        short = folder / 'preview.png'
        if preview and alone and (not short.exists() or short.name in outputs.made_before()):
            outputs = replace(outputs, preview=short)
        return outputs

    def files(self) -> List[Path]:
        """Return the files that are wanted, without the report."""
        return [path for path in (self.map, self.confidence, self.probabilities, self.polygons,
                                  self.preview) if path is not None]

    def parts(self, key: str) -> Path:
        """Return the hidden folder of the finished strips."""
        return self.map.with_name(f'.{self.map.stem}.{key}')

    def made_before(self) -> List[str]:
        """Return the names of the files that the report lists."""
        report = self.read_report()
        return [] if report is None else report['files']

    def read_report(self) -> Optional[Dict[str, Any]]:
        """Return the report, or None if there is none or it cannot be read."""
        try:
            report = parse_json(self.report.read_text(encoding='utf-8'))
        except (OSError, ValueError):
            return None
        # The files that it lists may be removed, so they are names in this folder and nothing else.
        is_report = (isinstance(report, dict) and isinstance(report.get('settings'), dict)
                     and isinstance(report.get('files'), list) and all(
                         isinstance(name, str) and Path(name).name == name != ''
                         and '\0' not in name for name in report['files']))
        return report if is_report else None


def is_done(outputs: Outputs, settings: Dict[str, Any]) -> bool:
    """Return whether the map exists and was made with these settings.

    Raises:
        PredictError: If another file is there under the name of one of its files.
    """
    report, key = outputs.read_report(), key_of(settings)
    if report is not None or not outputs.parts(key).exists():
        mine = set(outputs.made_before()) | ({outputs.report.name} if report is not None else set())
        others = [path for path in (*outputs.files(), outputs.report)
                  if path.exists() and path.name not in mine]
        if others:
            raise PredictError(f'{others[0]} exists, and was not made with this map. Choose '
                               f'another --out, or add --overwrite.')
    if report is None:
        return False
    if key_of(report['settings']) != key:
        before = report['settings']
        other = [name for name in {**settings, **before}
                 if settings.get(name) != before.get(name)]
        raise PredictError(f"{outputs.map} was made with another {', '.join(other)}. Choose "
                           f'another --out, or add --overwrite.')
    return all(path is None or path.exists()
               for path in (outputs.map, outputs.confidence, outputs.probabilities))


def assemble(outputs: Outputs, settings: Dict[str, Any], raster: Raster, grid: Grid, parts: Parts,
             classes: Classes, outlines: Dict[str, Any], area: Optional[SceneArea] = None) -> None:
    """Write the outputs of a scene whose strips are finished, and remove the strips.

    They have the pixels of the scene, also where the model saw it in another size.

    Args:
        outputs: Files to write.
        settings: Settings that the map was made with, for the report.
        raster: The scene.
        grid: Windows of the scene, in the size that the model sees it in.
        parts: The finished strips.
        classes: Names and colors of the values.
        outlines: Options of ``mapsage.geo.write_polygons``, as JSON holds them.
        area: Area of interest; the map has no data beside it.

    Raises:
        GeoError, PredictError: If a strip is damaged or a file cannot be written.
    """
    # A transform alone, as of a world file, still lays the map over its scene; a CRS alone says
    # nothing about where it lies.
    info = MapInfo(class_names=classes.names, palette=classes.palette.tolist(),
                   crs=raster.crs if raster.is_georeferenced else None,
                   transform=raster.transform if has_transform(raster) else None)
    width, height = raster.width, raster.height
    columns = _sources(width, grid.width)
    rows = _sources(height, grid.height)
    factor = -(-max(height, width) // _PREVIEW_SIDE)
    counts, beside = np.zeros(256, np.int64), 0
    damage: List[str] = []
    small: List[np.ndarray] = []
    working = parts.folder / 'map.tif'
    with ExitStack() as stack:
        writer = stack.enter_context(
            ClassMapWriter(working, width, height, info, outputs.confidence is not None))
        scores = None if outputs.probabilities is None else stack.enter_context(
            ProbabilityWriter(probabilities_path(working), width, height, classes.names,
                              PROBABILITY_STEPS, info.crs, info.transform))
        for number in range(len(grid.rows)):
            strip, (start, stop) = parts.read(number), grid.strip(number)
            damage += strip.damage
            first, last = np.searchsorted(rows, (start, stop))
            if first == last:
                continue  # no row of the scene is nearest to a row of the strip
            place = np.ix_(rows[first:last] - start, columns)
            classes_here = strip.classes[place]
            confidence = None if strip.confidence is None else strip.confidence[place]
            probabilities = None if scores is None or strip.probabilities is None else np.stack(
                [plane[place] for plane in strip.probabilities])
            if area is not None:
                outside = ~area.mask(0, int(first), width, int(last - first))
                beside += int(outside.sum())
                for planes in (classes_here, confidence, probabilities):
                    if planes is not None:
                        planes[..., outside] = NO_DATA
            writer.write(int(first), classes_here, confidence)
            if scores is not None and probabilities is not None:
                scores.write(int(first), probabilities)
            counts += np.bincount(classes_here.ravel(), minlength=256)
            small.append(shrink_labels(classes_here, int(first), factor))
    _retire(outputs)
    write_cog(working, outputs.map)
    _write_style(outputs.map.with_suffix('.qml'), classes)
    if outputs.confidence is not None:
        write_cog(confidence_path(working), outputs.confidence)
    if outputs.probabilities is not None:
        write_cog(probabilities_path(working), outputs.probabilities)
    polygons = None
    if outputs.polygons is not None:
        polygons = write_polygons(outputs.map, outputs.polygons, classes.names,
                                  palette=classes.palette.tolist(), **outlines)
    pixels = counts[:len(classes.names)]
    shares = pixels / max(1, pixels.sum())
    if outputs.preview is not None:
        with _writing(outputs.preview):
            save_map_preview(str(outputs.preview), raster, np.concatenate(small), factor,
                             outputs.map.stem, classes.names, classes.palette, shares.tolist(),
                             NO_DATA, None if area is None else area.meets)
    _write_report(outputs.report, dict(
        settings=settings, width=width, height=height,
        pixels=dict(zip(classes.names, pixels.tolist())),
        no_data=int(counts.sum() - pixels.sum()) - beside,
        beside_aoi=None if area is None else beside,
        polygons=polygons, outlines=outlines, damage=damage,
        files=[path.name for path in outputs.files()]))
    parts.remove()


def _write_style(path: Path, classes: Classes) -> None:
    """Write what QGIS shows a map in, unless the user has saved a style of their own there."""
    if is_own_style(path):
        try:
            atomic_write(path, map_style(classes.names, classes.palette.tolist()))
        except OSError as error:
            raise PredictError(f'cannot write {path}: {error}. Free space there, or write '
                               f'elsewhere with --out.') from error


def _sources(there: int, here: int) -> np.ndarray:
    """Return, for each of a scene's pixels along a side, the one of the predicted side it is in."""
    return ((np.arange(there) + 0.5) * here / there).astype(np.int64)


def has_transform(raster: Raster) -> bool:
    """Return whether a scene has coordinates, with or without a CRS."""
    return raster.transform != affine.identity


def add_polygons(outputs: Outputs, classes: Classes, outlines: Dict[str, Any]) -> None:
    """Write the polygons of a finished map, unless they are there with the same options."""
    report, path = outputs.read_report(), outputs.polygons
    if report is None or path is None or (
            path.exists() and path.name in report['files'] and report.get('outlines') == outlines):
        return
    report['polygons'] = write_polygons(outputs.map, path, classes.names,
                                        palette=classes.palette.tolist(), **outlines)
    report['outlines'] = outlines
    report['files'] = [each.name for each in outputs.files()]
    _write_report(outputs.report, report)


def _retire(outputs: Outputs) -> None:
    """Remove the report of an earlier map, and its files that the new map will not replace."""
    report = outputs.read_report()
    if report is not None:
        outputs.report.unlink()
        for name in set(report['files']) - {path.name for path in outputs.files()}:
            path = outputs.map.with_name(name)
            if path.exists():
                path.unlink()


def _write_report(path: Path, report: Dict[str, Any]) -> None:
    with _writing(path):
        atomic_write(path, (json.dumps(report, indent=1) + '\n').encode())


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise PredictError(f'cannot write {path}: {error}. Free space there, or write elsewhere '
                           f'with --out. What is finished stays: the same command '
                           f'continues.') from error
