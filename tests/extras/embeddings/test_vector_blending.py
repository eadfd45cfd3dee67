"""Windows of cells and their blending, compared with the whole scene at once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from geo_scenes import write_raster
from support import main_leg

from mapsage.extras.embeddings.blending import AlignedGrid, CellScene, VectorBlender
from mapsage.extras.embeddings.vectors import quantize, to_unit
from mapsage.maps.description import Bands
from mapsage.maps.inputs import Scene
from mapsage.maps.windows import blend_weights

pytestmark = main_leg


@pytest.mark.parametrize('step', [1, 4])
def test_sums_are_those_of_all_windows(step: int) -> None:
    """Windows with other vectors each, so that every one that is lost changes the result."""
    random = np.random.RandomState(0)
    grid = AlignedGrid(37, 53, (16, 20), 8, step=step)
    assert all(start % step == 0 for start in (*grid.rows, *grid.columns))
    weights = np.outer(blend_weights(16, 8), blend_weights(20, 8))
    total, sums = np.zeros((5, 60, 80)), np.zeros((60, 80))
    blender, rows = VectorBlender(5, (16, 20), 53, grid.shared_rows, probabilities=True), []
    for number, row in enumerate(grid.rows):
        start, stop = grid.strip(number)
        blender.begin(stop - start)
        for column in grid.columns:
            vectors = random.standard_normal((5, 16, 20)).astype(np.float32) * weights
            total[:, row : row + 16, column : column + 20] += vectors
            sums[row : row + 16, column : column + 20] += weights
            valid = np.ones((min(16, 37 - row), min(20, 53 - column)), bool)
            blender.add(column, vectors, weights, valid)
        finished = blender.take()
        assert finished.classes.all()
        rows.append(finished.probabilities.view(np.int8))
    expected = quantize(to_unit((total / np.maximum(sums, 1e-9))[:, :37, :53]))
    difference = np.concatenate(rows, 1).astype(int) - expected
    assert difference.shape == (5, 37, 53) and np.abs(difference).max() <= 1


def test_context_comes_from_neighbors_and_is_mirrored_beyond_the_scene(tmp_path: Path) -> None:
    image = np.random.RandomState(0).randint(1, 255, (3, 40, 50)).astype(np.uint8)
    scene = Scene(str(write_raster(tmp_path / 'a.tif', image)), Bands(3, False))
    mirrored = np.pad(image, ((0, 0), (8, 40), (8, 40)), mode='reflect')
    for column, row in ((0, 0), (3, 2), (8, 7), (0, 6)):
        pixels, valid, damage = CellScene(scene, 4, 8).read(column, row, (4, 5))
        box = np.s_[:, row * 4 : row * 4 + 32, column * 4 : column * 4 + 36]
        np.testing.assert_array_equal(pixels, mirrored[box])
        inside = min(4, 10 - row), min(5, -(-(50 - column * 4) // 4))
        assert valid.shape == inside and valid.all() and not damage
