"""Loaders of training samples: MapSage's, TorchGeo's, MMSegmentation's and a user's own.

Each makes batches of four windows of 512 pixels with labels, mirrored at random, as tensors, in one
process. `against_peers.py` times them.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import warnings
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, Optional, Sequence, Tuple

import cv2
import fast_copy
import numpy as np
import pyogrio.raw
import rasterio
import scene_loader
import shapely
import torch
from mmengine.registry import DATASETS, DefaultScope
from rasterio.windows import Window
from torch.utils.data import DataLoader, Dataset

from mapsage.engine.loading.build import build_keyed_loader
from mapsage.geo import write_fast_copy

SIDE, BATCH = 512, 4
CLASSES = scene_loader.CLASSES
SCENES = ('a', 'b')
# Layouts of the scenes: bands, data type and how the file stores them.
KINDS: Dict[str, Any] = {
    'uint8, deflate, tiles of 512': (
        3,
        'uint8',
        dict(compress='deflate', tiled=True, blockxsize=512, blockysize=512),
    ),
    'uint8, LZW, strips': (3, 'uint8', dict(compress='lzw', tiled=False, blockysize=1)),
    'uint8, uncompressed strips': (3, 'uint8', dict(tiled=False, blockysize=1)),
    'uint16 x 4, deflate, tiles of 512': (
        4,
        'uint16',
        dict(compress='deflate', tiled=True, blockxsize=512, blockysize=512),
    ),
}
POLYGONS = 'uint8 with 36,000 polygons as labels'
_METAINFO = dict(classes=CLASSES, palette=[[8 * n] * 3 for n in range(len(CLASSES))])


def write_data(root: Path, side: int) -> None:
    """Write two scenes of each kind with labels, fast copies, polygons, and PNG tiles."""
    for number, (bands, dtype, layout) in enumerate(KINDS.values()):
        values = fast_copy.make_scene(bands, dtype, side)
        labels = (values[0] // (values[0].max() // len(CLASSES) + 1)).astype(np.uint8)
        for column, scene in enumerate(SCENES):
            # The scenes lie side by side, with a gap between them.
            place = dict(
                crs='EPSG:32650',
                transform=rasterio.transform.from_origin(5e5 + column * side, 4e6, 0.5, 0.5),
            )
            for folder, bands_of_file in (('scenes', values), ('labels', labels[None])):
                path = root / str(number) / folder / f'{scene}.tif'
                path.parent.mkdir(parents=True, exist_ok=True)
                with rasterio.open(
                    path,
                    'w',
                    driver='GTiff',
                    width=side,
                    height=side,
                    count=len(bands_of_file),
                    dtype=bands_of_file.dtype,
                    interleave='pixel',
                    **layout,
                    **place,
                ) as file:
                    file.write(bands_of_file)
                copy = path.parent.with_name(f'fast_{folder}') / path.name
                copy.parent.mkdir(exist_ok=True)
                write_fast_copy(str(path), copy)
        if number == 0:
            _write_tiles(root / 'tiles', values, labels)
    _write_polygons(root / 'polygons', side)


def _write_tiles(root: Path, values: np.ndarray, labels: np.ndarray) -> None:
    """Write PNG tiles of a scene and its labels."""
    (root / 'images').mkdir(parents=True)
    (root / 'labels').mkdir()
    for row in range(0, len(labels), SIDE):
        for column in range(0, len(labels), SIDE):
            tile = np.s_[row : row + SIDE, column : column + SIDE]
            cv2.imwrite(
                str(root / f'images/{row}_{column}.png'),
                np.ascontiguousarray(values[(slice(None), *tile)].transpose(1, 2, 0)),
            )
            cv2.imwrite(str(root / f'labels/{row}_{column}.png'), labels[tile])


def _write_polygons(root: Path, side: int, count: int = 36_000) -> None:
    root.mkdir()
    random = np.random.RandomState(0)
    places = np.column_stack(
        (random.uniform(5e5, 5e5 + side * 1.5, count), random.uniform(4e6 - side / 2, 4e6, count))
    )
    shapes = shapely.buffer(shapely.points(places), random.uniform(1, 8, count), quad_segs=4)
    pyogrio.raw.write(
        str(root / 'labels.gpkg'),
        shapely.to_wkb(shapes),
        [random.randint(1, len(CLASSES), count).astype(np.int32)],
        ['class'],
        geometry_type='Polygon',
        crs='EPSG:32650',
        driver='GPKG',
    )


def mapsage_loader(root: Path, kind: str, **arguments: Any) -> Iterator[Any]:
    """Return MapSage's batches; ``arguments`` are arguments of ``GeoTiffDataset``."""
    folder = root / str(_number(kind))
    labels = root / 'polygons/labels.gpkg' if kind == POLYGONS else folder / 'labels'
    if arguments.pop('fast', False):
        # Made by the benchmark, so that a user's script reads the same files.
        folder, labels = folder / 'fast_scenes', folder / 'fast_labels'
    else:
        folder /= 'scenes'
    pipeline = [
        dict(type='LoadGeoTiffWindow'),
        dict(type='LoadGeoTiffLabels'),
        dict(type='RandomFlip', prob=0.5),
        dict(type='PackSegInputs'),
    ]
    return _keyed(
        dict(
            type='GeoTiffDataset',
            scenes=str(folder),
            labels=str(labels),
            window=SIDE,
            class_field='class',
            metainfo=_METAINFO,
            pipeline=pipeline,
            **arguments,
        )
    )


def mmseg_tiles(root: Path) -> Iterator[Any]:
    """Return batches of PNG tiles, as MMSegmentation reads them."""
    pipeline = [
        dict(type='LoadImageFromFile'),
        dict(type='LoadAnnotations'),
        dict(type='RandomFlip', prob=0.5),
        dict(type='PackSegInputs'),
    ]
    return _keyed(
        dict(
            type='BaseSegDataset',
            data_root=str(root / 'tiles'),
            img_suffix='.png',
            seg_map_suffix='.png',
            metainfo=_METAINFO,
            pipeline=pipeline,
            data_prefix=dict(img_path='images', seg_map_path='labels'),
        )
    )


def _keyed(dataset: Dict[str, Any]) -> Iterator[Any]:
    with DefaultScope.overwrite_default_scope('mmseg'):
        return iter(
            build_keyed_loader(
                dict(
                    dataset=DATASETS.build(dataset),
                    batch_size=BATCH,
                    num_workers=0,
                    sampler=dict(type='InfiniteSampler', shuffle=True),
                    collate_fn=dict(type='pseudo_collate'),
                ),
                0,
            )
        )


class ByHand(Dataset):
    """Windows as twenty lines of rasterio read them: open files, a read of image and of mask.

    Args:
        folders: Folders of the scenes and of the label rasters.
        grid: Whether windows lie on a grid of their own size; else anywhere.
    """

    def __init__(self, folders: Sequence[Path], grid: bool) -> None:
        self._files = [
            [rasterio.open(folder / f'{scene}.tif') for folder in folders] for scene in SCENES
        ]
        self._steps, self._grid = self._files[0][0].width // SIDE, grid

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> Dict[str, torch.Tensor]:
        image, mask = self._files[np.random.randint(len(self._files))]
        if self._grid:
            row, column = np.random.randint(0, self._steps, 2) * SIDE
        else:
            row, column = np.random.randint(0, image.width - SIDE + 1, 2)
        window = Window(column, row, SIDE, SIDE)
        values, labels = image.read(window=window), mask.read(1, window=window)
        if values.dtype != np.uint8:
            values = values.astype(np.float32)
        if np.random.random() < 0.5:
            values, labels = values[..., ::-1].copy(), labels[..., ::-1].copy()
        return dict(image=torch.from_numpy(values), mask=torch.from_numpy(labels).long())


def by_hand(root: Path, kind: str, grid: bool = False, fast: bool = False) -> Iterator[Any]:
    """Return batches of a user's rasterio script."""
    prefix = 'fast_' if fast else ''
    folders = [root / str(_number(kind)) / f'{prefix}{name}' for name in ('scenes', 'labels')]
    return iter(DataLoader(ByHand(folders, grid), BATCH))


class _StubTorchvision(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules of torchvision, which TorchGeo imports and does not need for windows."""

    def find_spec(
        self, name: str, path: Any = None, target: Any = None
    ) -> Optional[importlib.machinery.ModuleSpec]:
        if name.partition('.')[0] != 'torchvision':
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        """Leave the creation of the module to Python."""

    def exec_module(self, module: Any) -> None:
        """Let every name of the module be an empty class."""
        module.__getattr__ = lambda name: type(name, (), {})


def import_torchgeo() -> Tuple[Any, Any]:
    """Return TorchGeo's modules of datasets and of samplers."""
    stub = _StubTorchvision()
    sys.meta_path.insert(0, stub)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            from torchgeo import datasets, samplers
    finally:
        sys.meta_path.remove(stub)
        # torchmetrics uses torchvision where it can be imported.
        for name in [name for name in sys.modules if name.partition('.')[0] == 'torchvision']:
            del sys.modules[name]
    return datasets, samplers


def torchgeo_loader(root: Path, kind: str) -> Iterator[Any]:
    """Return batches of TorchGeo's RandomGeoSampler on the scenes themselves."""
    datasets, samplers = import_torchgeo()

    def flip(sample: Dict[str, Any]) -> Dict[str, Any]:
        if np.random.random() < 0.5:
            sample.update({name: sample[name].flip(-1) for name in ('image', 'mask')})
        return sample

    class Masks(datasets.RasterDataset):  # type: ignore[misc, valid-type]
        is_image = False

    folder = root / str(_number(kind))
    images = datasets.RasterDataset(str(folder / 'scenes'))
    labels = Masks(str(folder / 'labels'))
    if kind == POLYGONS:
        labels = datasets.VectorDataset(
            str(root / 'polygons'), crs=images.crs, res=images.res, label_name='class'
        )
    dataset = images & labels
    dataset.transforms = flip
    sampler = samplers.RandomGeoSampler(images, SIDE, 10**6, units=samplers.Units.PIXELS)
    return iter(DataLoader(dataset, BATCH, sampler=sampler, collate_fn=datasets.stack_samples))


def _number(kind: str) -> int:
    return 0 if kind == POLYGONS else list(KINDS).index(kind)


def loaders(root: Path, kind: str) -> Dict[str, Callable[[], Iterator[Any]]]:
    """Return the loaders that are compared on a kind of scenes, by name."""
    random = dict(type='random')
    ways: Dict[str, Callable[[], Iterator[Any]]] = {
        'MapSage, grid': lambda: mapsage_loader(root, kind),
        'MapSage, random': lambda: mapsage_loader(root, kind, windows=random),
        'TorchGeo, random': lambda: torchgeo_loader(root, kind),
    }
    if kind != POLYGONS:
        ways.update(
            {
                'MapSage, random, fast copy': lambda: mapsage_loader(
                    root, kind, windows=random, fast=True
                ),
                'by hand, grid': lambda: by_hand(root, kind, grid=True),
                'by hand, random': lambda: by_hand(root, kind),
                'by hand, random, fast copy': lambda: by_hand(root, kind, fast=True),
            }
        )
    if _number(kind) == 0 and kind != POLYGONS:
        ways['MMSegmentation, PNG tiles'] = lambda: mmseg_tiles(root)
    return ways
