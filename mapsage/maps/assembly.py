"""Assemble finished strips into the files of a map.

`assemble` runs on one rank once all strips of a scene exist. It writes plain rasters into the
folder of the strips, converts them to Cloud Optimized GeoTIFFs under their final names, and removes
the strips at the end: a failure before that loses nothing. Strips have the size in which the model
saw the scene; the files have the scene's own size.

Shapes: H and W are rows and columns of the scene, C is the number of classes.
"""

from __future__ import annotations

import uuid
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, List, Mapping, Optional, Sequence, Tuple

import affine
import numpy as np

from mapsage.base.files import atomic_write
from mapsage.geo import (
    ClassMapWriter,
    GeoError,
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
from mapsage.pictures.map_preview import save_map_preview, shrink_labels, thumbnail

from .blending import NO_DATA, PROBABILITY_STEPS
from .description import Classes
from .errors import BrokenInputError, PredictError
from .outputs import Outputs, change_fields, remove_outdated, write_report, writing
from .strips import Strip, StripStore
from .windows import Grid

# Longest side of a preview in pixels, about.
_PREVIEW_SIDE = 780


def assemble(
    outputs: Outputs,
    settings: Mapping[str, object],
    raster: Raster,
    grid: Grid,
    strips: StripStore,
    classes: Classes,
    outlines: Mapping[str, Any],
    area: Optional[SceneArea] = None,
    dates: Sequence[str] = (),
    shown: Optional[Sequence[int]] = None,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Write the files of a map whose strips are finished, and remove the strips.

    Args:
        outputs: Paths of the files.
        settings: Settings that the map depends on, for the report.
        raster: The scene.
        grid: Windows of the scene, in the size in which the model saw it.
        strips: The finished strips.
        classes: Names and colors of the classes.
        outlines: Options of :func:`mapsage.geo.polygons.write_polygons`.
        area: Area of interest; the map has no data outside it.
        dates: Dates of the images of a stack, as ISO text.
        shown: Channels of the scene that the preview shows as red, green and blue; None for the
            first three.
        check: Function that raises an error if nothing may be written any more.

    Raises:
        BrokenInputError: If the scene cannot be read for the preview.
        GeoError, PredictError: If a strip is damaged or a file cannot be written.
    """
    # A worker that lost its claim while it slept may still write its own working files.
    working = strips.folder / f'map-{uuid.uuid4().hex[:8]}.tif'
    shrink_factor = -(-max(raster.height, raster.width) // _PREVIEW_SIDE)
    content = _merge_strips(working, outputs, raster, grid, strips, classes, area, shrink_factor)
    # Read before anything is published: a scene that is gone costs no file of an earlier map.
    preview = (
        None
        if outputs.preview is None
        else _read_preview(raster, shrink_factor, None if area is None else area.meets, shown)
    )
    check()
    remove_outdated(outputs)
    _publish_rasters(working, outputs, classes)
    polygons = None
    if outputs.polygons is not None:
        polygons = write_polygons(
            outputs.map,
            outputs.polygons,
            classes.names,
            palette=classes.palette.tolist(),
            further=change_fields(outputs, classes, dates),
            **outlines,
        )
    pixels = content.counts[: len(classes.names)]
    if outputs.preview is not None and preview is not None:
        shares = pixels / max(1, pixels.sum())
        with writing(outputs.preview):
            save_map_preview(
                str(outputs.preview),
                *preview,
                np.concatenate(content.shrunk_rows),
                outputs.map.stem,
                classes.names,
                classes.palette,
                shares.tolist(),
                NO_DATA,
            )
    check()
    write_report(
        outputs.report,
        dict(
            settings=settings,
            width=raster.width,
            height=raster.height,
            pixels=dict(zip(classes.names, pixels.tolist())),
            no_data=int(content.counts.sum() - pixels.sum()) - content.outside_area,
            beside_aoi=None if area is None else content.outside_area,
            polygons=polygons,
            outlines=outlines,
            damage=content.damage,
            files=[path.name for path in outputs.files()],
            colors=_shown_bands(raster, shown),
        ),
    )
    strips.remove()


def _read_preview(
    raster: Raster,
    factor: int,
    meets: Optional[Callable[..., bool]],
    channels: Optional[Sequence[int]],
) -> Tuple[Raster, np.ndarray]:
    """Return the raster that the preview shows, and its pixels reduced by ``factor``."""
    try:
        shown = raster.for_preview()
        with shown:
            scene = thumbnail(shown, factor, meets)
            return shown, scene if channels is None else scene[..., list(channels)]
    except GeoError as error:
        raise BrokenInputError(str(error)) from error


def _shown_bands(raster: Raster, channels: Optional[Sequence[int]]) -> List[int]:
    """Return the bands of the file, from 1, that pictures show as red, green and blue."""
    with raster.for_preview() as shown:
        bands = shown.bands
    return [bands[channel] for channel in channels or range(3 if len(bands) >= 3 else 1)]


def has_transform(raster: Raster) -> bool:
    """Return whether a scene has coordinates, with or without a CRS."""
    return raster.transform != affine.identity


@dataclass
class _MapContent:
    """Content of a map, collected while its rasters are written.

    Attributes:
        counts: Number of pixels of each value, ``(256,)`` int64.
        outside_area: Number of pixels outside the area of interest.
        damage: Lines about blocks of the scene that could not be read.
        shrunk_rows: Classes of the preview, an array of rows for each strip.
    """

    counts: np.ndarray = field(default_factory=lambda: np.zeros(256, np.int64))
    outside_area: int = 0
    damage: List[str] = field(default_factory=list)
    shrunk_rows: List[np.ndarray] = field(default_factory=list)


def _merge_strips(
    working: Path,
    outputs: Outputs,
    raster: Raster,
    grid: Grid,
    strips: StripStore,
    classes: Classes,
    area: Optional[SceneArea],
    shrink_factor: int,
) -> _MapContent:
    """Write the rasters of all strips next to ``working``, in the size of the scene."""
    width, height = raster.width, raster.height
    # A transform without a CRS, as from a world file, still places the map over its scene. A CRS
    # without a transform does not place anything.
    info = MapInfo(
        class_names=classes.names,
        palette=classes.palette.tolist(),
        crs=raster.crs if raster.is_georeferenced else None,
        transform=raster.transform if has_transform(raster) else None,
    )
    columns = _nearest_pixels(width, grid.width)
    rows = _nearest_pixels(height, grid.height)
    content = _MapContent()
    with ExitStack() as stack:
        map_writer = stack.enter_context(
            ClassMapWriter(working, width, height, info, outputs.confidence is not None)
        )
        probability_writer = (
            None
            if outputs.probabilities is None
            else stack.enter_context(
                ProbabilityWriter(
                    probabilities_path(working),
                    width,
                    height,
                    classes.names,
                    PROBABILITY_STEPS,
                    info.crs,
                    info.transform,
                )
            )
        )
        for number in range(len(grid.rows)):
            strip, (start, stop) = _read_row(strips, grid, number), grid.strip(number)
            content.damage += strip.damage
            first, last = map(int, np.searchsorted(rows, (start, stop)))
            # In a scene smaller than the model's view, a strip may have no row of the scene.
            if first == last:
                continue
            resized = _resize_strip(strip, rows[first:last] - start, columns)
            if area is not None:
                content.outside_area += _mask_outside(resized, area, first, width)
            map_writer.write(first, resized.classes, resized.confidence)
            if probability_writer is not None and resized.probabilities is not None:
                probability_writer.write(first, resized.probabilities)
            # Row by row, because numpy widens what it counts to 8 bytes a pixel.
            for pixels in resized.classes:
                content.counts += np.bincount(pixels, minlength=256)
            content.shrunk_rows.append(shrink_labels(resized.classes, first, shrink_factor))
    return content


def _read_row(strips: StripStore, grid: Grid, row: int) -> Strip:
    """Return the strips of all blocks of columns in a row as one."""
    parts = [strips.read(number) for number in range(row, grid.strip_count, len(grid.rows))]
    if len(parts) == 1:
        return parts[0]
    # A window at the edge of two blocks is read for both.
    damage = dict.fromkeys(line for part in parts for line in part.damage)
    classes, confidence, probabilities = (
        None if planes[0] is None else np.concatenate(planes, -1)
        for planes in zip(*((part.classes, part.confidence, part.probabilities) for part in parts))
    )
    assert classes is not None
    return Strip(row, classes, confidence, list(damage), probabilities)


def _nearest_pixels(length: int, model_length: int) -> np.ndarray:
    """Return the nearest pixel of the model's view for each pixel along an axis of the scene."""
    return ((np.arange(length) + 0.5) * model_length / length).astype(np.int64)


def _resize_strip(strip: Strip, rows: np.ndarray, columns: np.ndarray) -> Strip:
    """Return a strip with the nearest pixels in ``rows`` and ``columns``, as copies."""
    pixels = np.ix_(rows, columns)
    return Strip(
        strip.number,
        strip.classes[pixels],
        None if strip.confidence is None else strip.confidence[pixels],
        strip.damage,
        None
        if strip.probabilities is None
        else np.stack([plane[pixels] for plane in strip.probabilities]),
    )


def _mask_outside(strip: Strip, area: SceneArea, first_row: int, width: int) -> int:
    """Set pixels outside the area of interest to NO_DATA, in place; return their number."""
    outside = ~area.mask(0, first_row, width, len(strip.classes))
    for planes in (strip.classes, strip.confidence, strip.probabilities):
        if planes is not None:
            planes[..., outside] = NO_DATA
    return int(outside.sum())


def _publish_rasters(working: Path, outputs: Outputs, classes: Classes) -> None:
    """Convert the working rasters to Cloud Optimized GeoTIFFs under their final names."""
    write_cog(working, outputs.map)
    _write_style(outputs.map.with_suffix('.qml'), classes)
    if outputs.confidence is not None:
        write_cog(confidence_path(working), outputs.confidence)
    if outputs.probabilities is not None:
        write_cog(probabilities_path(working), outputs.probabilities)


def _write_style(path: Path, classes: Classes) -> None:
    """Write the colors of a map for QGIS, unless the user has saved another style there."""
    if is_own_style(path):
        try:
            atomic_write(path, map_style(classes.names, classes.palette.tolist()))
        except OSError as error:
            raise PredictError(
                f'cannot write {path}: {error}. Free space there, or write elsewhere with --out.'
            ) from error
