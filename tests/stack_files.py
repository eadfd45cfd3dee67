"""Small places with images of two sensors at several dates, written as GeoTIFF."""
from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List, Sequence

import numpy as np
from geo_scenes import write_raster
from mmengine.registry import DATASETS, DefaultScope
from rasterio.crs import CRS
from rasterio.transform import from_origin

from mapsage.datasets import SceneStackDataset

SENSORS: Dict[str, Dict[str, Any]] = dict(
    s2=dict(scenes='s2/{place}_{date}.tif', bands=[1, 2, 3], max_dates=3),
    s1=dict(scenes='s1/{place}_{date}.tif', bands=[1, 2], max_dates=2))
METAINFO = dict(classes=('low', 'high'), palette=[[10, 10, 10], [200, 200, 0]])
PIPELINE = [dict(type=name) for name in (
    'LoadSceneStack', 'LoadGeoTiffLabels', 'PackStackInputs')]
DATES = ('20240115', '20240420', '20240720')
SIZE = 64


def grid(place: int = 0, side: float = 10., epsg: int = 32633) -> Dict[str, Any]:
    """Return CRS and transform of a place; places lie 10 km apart."""
    return dict(crs=CRS.from_epsg(epsg),
                transform=from_origin(500000. + 10000 * place, 5400000., side, side))


def write_place(root: Path, name: str = 'a', place: int = 0, dates: Sequence[str] = DATES,
                radar_dates: Sequence[str] = DATES[:2]) -> Dict[str, np.ndarray]:
    """Write the images and the labels of a place; return the values by 'sensor date' and 'labels'.

    Radar has pixels of 20 m, the other sensor and the labels 10 m.
    """
    random = np.random.RandomState(place)
    values: Dict[str, np.ndarray] = {}
    for date in dates:
        values[f's2 {date}'] = random.randint(1, 4000, (3, SIZE, SIZE)).astype('uint16')
        write_raster(root / f's2/{name}_{date}.tif', values[f's2 {date}'], grid(place))
    for date in radar_dates:
        values[f's1 {date}'] = random.normal(-12, 3, (2, SIZE // 2, SIZE // 2)).astype('float32')
        write_raster(root / f's1/{name}_{date}.tif', values[f's1 {date}'], grid(place, 20.))
    values['labels'] = random.randint(0, 2, (SIZE, SIZE)).astype('uint8')
    write_raster(root / f'labels/{name}.tif', values['labels'], grid(place))
    return values


def build_stacks(root: Path, **arguments: Any) -> SceneStackDataset:
    """Return a ``SceneStackDataset`` of the places below ``root``."""
    config = dict(dict(type='SceneStackDataset', data_root=str(root), sensors=SENSORS, window=32,
                       labels='labels', metainfo=METAINFO, pipeline=PIPELINE), **arguments)
    with DefaultScope.overwrite_default_scope('mmseg'):
        return DATASETS.build(config)


def one_sensor(**settings: Any) -> Dict[str, Dict[str, Any]]:
    """Return the settings of the optical sensor only, with changes."""
    return dict(s2=dict(SENSORS['s2'], **settings))


def write_list(path: Path, rows: List[Sequence[str]], columns: str = 'place,sensor,date,path'
               ) -> str:
    """Write a CSV file; return its name."""
    path.write_text('\n'.join([columns, *(','.join(row) for row in rows)]) + '\n',
                    encoding='utf-8')
    return path.name
