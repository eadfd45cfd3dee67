"""GeoTIFF scenes with labels, and the dataset that reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, List, Tuple

import numpy as np
import pyogrio.raw
import shapely
from geo_scenes import CLASSES, PALETTE, UTM, draw_classes, paint, write_raster
from mmengine.registry import DATASETS, DefaultScope

from mapsage.datasets import GeoTiffDataset

METAINFO = dict(classes=CLASSES, palette=PALETTE)
PIPELINE = [dict(type=t) for t in ('LoadGeoTiffWindow', 'LoadGeoTiffLabels', 'PackSegInputs')]


def build_dataset(root: Path, **arguments: Any) -> GeoTiffDataset:
    """Return a ``GeoTiffDataset`` of the scenes and labels below ``root``."""
    arguments = dict(
        dict(
            type='GeoTiffDataset',
            data_root=str(root),
            scenes='scenes',
            window=128,
            labels='labels',
            metainfo=METAINFO,
            pipeline=PIPELINE,
        ),
        **arguments,
    )
    with DefaultScope.overwrite_default_scope('mmseg'):
        return DATASETS.build(arguments)


def write_scene(
    root: Path, name: str = 'a', place: dict = UTM, **profile: Any
) -> Tuple[np.ndarray, np.ndarray]:
    """Write a scene and its label raster below ``root``; return values and classes."""
    classes = draw_classes()
    values = paint(classes, profile.pop('bands', 3), profile.pop('values', 'uint8'))
    write_raster(root / f'scenes/{name}.tif', values, place, **profile)
    write_raster(root / f'labels/{name}.tif', classes, place)
    return values, classes


def load_window(dataset: GeoTiffDataset, index: int) -> Tuple[np.ndarray, np.ndarray]:
    """Return the image and the mask of a window."""
    sample = dataset[index]
    return sample['inputs'].numpy(), sample['data_samples'].gt_sem_seg.data[0].numpy()


def write_vector(
    path: Path,
    polygons: List[Any],
    classes: List[Any],
    crs: str,
    field: str = 'class_name',
    kind: str = 'Polygon',
    **options: Any,
) -> None:
    """Write polygons with a field of classes as GeoPackage, GeoJSON or Shapefile."""
    values = np.array(classes, object if isinstance(classes[0], str) else np.int32)
    pyogrio.raw.write(
        str(path),
        shapely.to_wkb(np.array(polygons)),
        [values],
        [field],
        geometry_type=kind,
        crs=crs,
        **options,
        driver={'.gpkg': 'GPKG', '.shp': 'ESRI Shapefile'}.get(path.suffix, 'GeoJSON'),
    )
