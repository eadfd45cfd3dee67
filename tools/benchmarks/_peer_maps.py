"""Maps of a scene: by MapSage, a user's rasterio script, TorchGeo, and MMSegmentation's inference.

Windows of 512 pixels share 128. MapSage and the scripts add up weighted scores where windows
overlap. MMSegmentation's `inference_model` and the loop over TorchGeo's grid sampler have classes, of
which the later window counts.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, Tuple

import _peer_loaders
import numpy as np
import predict_scene
import rasterio
import torch
from mmengine.registry import DefaultScope
from mmseg.apis import inference_model
from rasterio.windows import Window
from torch.utils.data import DataLoader

from mapsage.commands import cli
from mapsage.commands.cli import build_model
from mapsage.maps.inputs import Scene
from mapsage.maps.model import Bands
from mapsage.maps.predictor import WindowPredictor
from mapsage.maps.strips import predict_strips
from mapsage.maps.windows import Grid

SIDE, SHARED, BATCH = 512, 128, 4


def _grid(size: int) -> Grid:
    return Grid(size, size, (SIDE, SIDE), SHARED)


def count_windows(size: int) -> int:
    """Return the number of windows of a scene with sides of ``size`` pixels."""
    grid = _grid(size)
    return len(grid.rows) * len(grid.columns)


def _batches(grid: Grid) -> List[List[Tuple[int, int]]]:
    corners = [(row, column) for row in grid.rows for column in grid.columns]
    return [corners[first : first + BATCH] for first in range(0, len(corners), BATCH)]


def map_by_hand(scene: Path, size: int, predictor: WindowPredictor, threads: int = 0) -> np.ndarray:
    """Return the classes of a scene: read windows, add up weighted scores, take the largest.

    With threads, each of which opens the file, windows are read while the model computes.
    """
    ramp = np.minimum(np.arange(SIDE) + 1, np.arange(SIDE)[::-1] + 1).clip(max=SHARED)
    weights = torch.from_numpy(np.outer(ramp, ramp).astype(np.float32))
    sums, total = None, torch.zeros(size, size)
    files = threading.local()

    def read(corners: List[Tuple[int, int]]) -> List[np.ndarray]:
        if not hasattr(files, 'scene'):
            files.scene = rasterio.open(scene)
        return [files.scene.read(window=Window(column, row, SIDE, SIDE)) for row, column in corners]

    batches = _batches(_grid(size))
    with contextlib.ExitStack() as stack, torch.no_grad():
        if threads:
            pool = stack.enter_context(ThreadPoolExecutor(threads))
            reads: Iterable[List[np.ndarray]] = pool.map(read, batches)
        else:
            reads = map(read, batches)
        for corners, images in zip(batches, reads):
            scores = predictor.logits(torch.from_numpy(np.stack(images))).softmax(1)
            sums = torch.zeros(scores.shape[1], size, size) if sums is None else sums
            for (row, column), window_scores in zip(corners, scores):
                inside = np.s_[row : row + SIDE, column : column + SIDE]
                sums[(slice(None), *inside)] += window_scores * weights
                total[inside] += weights
    assert sums is not None
    return (sums / total).argmax(0).numpy().astype(np.uint8)


def map_by_torchgeo(scene: Path, size: int, predictor: WindowPredictor) -> np.ndarray:
    """Return the classes of a scene by a loop over TorchGeo's GridGeoSampler."""
    datasets, samplers = _peer_loaders.import_torchgeo()
    dataset = datasets.RasterDataset(str(scene.parent), transforms=None)
    sampler = samplers.GridGeoSampler(dataset, SIDE, SIDE - SHARED, units=samplers.Units.PIXELS)
    classes = np.zeros((size, size), np.uint8)
    loader = DataLoader(dataset, BATCH, sampler=sampler, collate_fn=datasets.stack_samples)
    box = dataset.bounds
    with torch.no_grad():
        for batch in loader:
            predicted = predictor.logits(batch['image']).argmax(1).numpy()
            for place, window in zip(batch['bounds'], predicted):
                row = round((box.maxy - place.maxy) / dataset.res[1])
                column = round((place.minx - box.minx) / dataset.res[0])
                inside = classes[max(row, 0) : row + SIDE, column : column + SIDE]
                # A window at the border reaches beyond the scene.
                top = max(-row, 0)
                inside[:] = window[top : top + inside.shape[0], : inside.shape[1]]
    return classes


def map_by_mmseg(scene: Path, size: int, model: Any) -> np.ndarray:
    """Return the classes of a scene, window by window, of ``inference_model``."""
    classes = np.zeros((size, size), np.uint8)
    with rasterio.open(scene) as file, DefaultScope.overwrite_default_scope('mmseg'):
        for corners in _batches(_grid(size)):
            images = [
                np.ascontiguousarray(
                    file.read(window=Window(column, row, SIDE, SIDE)).transpose(1, 2, 0)[..., ::-1]
                )
                for row, column in corners
            ]
            for (row, column), sample in zip(corners, inference_model(model, images)):
                classes[row : row + SIDE, column : column + SIDE] = sample.pred_sem_seg.data[
                    0
                ].numpy()
    return classes


def ways(scene: Path, size: int) -> Dict[str, Callable[[], Any]]:
    """Return the ways to map a scene, which use the same weights."""
    config = cli.load_config(cli.build_parser('').parse_args([str(predict_scene.CONFIG)]))
    model = build_model(config).eval()
    model.cfg = config
    grid = _grid(size)
    predictor, folded = (
        WindowPredictor(each, torch.device('cpu'), (SIDE, SIDE), SHARED, BATCH)
        for each in (model, copy.deepcopy(model))
    )
    # As the command does on a CPU.
    folded.fold_batch_norms(folded.choose_folds(bands=3).folded)
    source = Scene(str(scene), Bands(3, True))

    def by_mapsage() -> None:
        predict_strips(
            source,
            grid,
            range(len(grid.rows)),
            folded,
            BATCH,
            False,
            lambda strip: None,
            lambda count: None,
        )

    return {
        'MapSage': by_mapsage,
        'by hand': lambda: map_by_hand(scene, size, predictor),
        'by hand, two threads read': lambda: map_by_hand(scene, size, predictor, 2),
        'TorchGeo, GridGeoSampler': lambda: map_by_torchgeo(scene, size, predictor),
        'MMSegmentation, inference_model': lambda: map_by_mmseg(scene, size, model),
    }
