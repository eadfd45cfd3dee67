"""Maps of a scene: by MapSage, by a user's rasterio script, and by MMSegmentation's inference.

Windows of 512 pixels share 128. MapSage and the script add up weighted scores where windows
overlap; MMSegmentation's `inference_model` returns classes, of which the later window counts.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

import numpy as np
import predict_scene
import rasterio
import torch
from mmengine.registry import DefaultScope
from mmseg.apis import inference_model
from rasterio.windows import Window

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


def map_by_hand(scene: Path, size: int, predictor: WindowPredictor) -> np.ndarray:
    """Return the classes of a scene: read windows, add up weighted scores, take the largest."""
    ramp = np.minimum(np.arange(SIDE) + 1, np.arange(SIDE)[::-1] + 1).clip(max=SHARED)
    weights = torch.from_numpy(np.outer(ramp, ramp).astype(np.float32))
    sums, total = None, torch.zeros(size, size)
    with rasterio.open(scene) as file, torch.no_grad():
        for corners in _batches(_grid(size)):
            images = [file.read(window=Window(column, row, SIDE, SIDE)) for row, column in corners]
            scores = predictor.logits(torch.from_numpy(np.stack(images))).softmax(1)
            sums = torch.zeros(scores.shape[1], size, size) if sums is None else sums
            for (row, column), window_scores in zip(corners, scores):
                inside = np.s_[row : row + SIDE, column : column + SIDE]
                sums[(slice(None), *inside)] += window_scores * weights
                total[inside] += weights
    assert sums is not None
    return (sums / total).argmax(0).numpy().astype(np.uint8)


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
        'MMSegmentation, inference_model': lambda: map_by_mmseg(scene, size, model),
    }
