"""A map that follows clicks, compared with the vectors and with mapsage classify."""

from __future__ import annotations

from pathlib import Path
from typing import List, NamedTuple

import numpy as np
import pytest
from embedding_runs import unit_vectors, write_alpha_earth, write_tessera
from support import main_leg

from mapsage.extras.embeddings import EmbeddingError
from mapsage.extras.embeddings.classifiers import Classifier
from mapsage.extras.embeddings.labeling import TILE, ClickedMap

pytestmark = main_leg


class Point(NamedTuple):
    file: int
    x: float
    y: float
    name: str


def tile(
    clicked: ClickedMap, kind: str, level: int = 0, column: int = 0, row: int = 0
) -> np.ndarray:
    values = np.frombuffer(clicked.tile(0, kind, level, column, row), np.uint8)
    return values.reshape(TILE, TILE, -1)


def two_fields(dims: int, height: int, width: int) -> np.ndarray:
    """Return vectors about one of three, by thirds of the rows, unequal in each cell."""
    random = np.random.RandomState(0)
    centers = unit_vectors(random, dims, 3)[:, np.arange(height) * 3 // height]
    vectors = centers[:, :, None] + 0.05 * random.standard_normal((dims, height, width))
    return (vectors / np.linalg.norm(vectors, axis=0)).astype(np.float32)


@pytest.mark.parametrize('kind', ['alphaearth', 'tessera'])
def test_tiles_are_those_of_the_classifier(tmp_path: Path, kind: str) -> None:
    """AlphaEarth's files begin in the south; points and tiles count from the north."""
    vectors = two_fields(64 if kind == 'alphaearth' else 128, 300, 270)
    vectors[:, :40, :30] = np.nan
    write = write_alpha_earth if kind == 'alphaearth' else write_tessera
    clicked = ClickedMap([str(write(tmp_path / 'a.tif', vectors))])
    assert not clicked.has_data(0, 10.5, 10.5) and clicked.has_data(0, 10.5, 60.5)
    assert not clicked.has_data(0, -1, 60) and not clicked.has_data(0, 10, 300.5)
    assert (tile(clicked, 'classes') == 255).all()
    points: List[Point] = [Point(0, 50.5, 60.2, 'wet'), Point(0, 60.5, 150.2, 'dry')]
    clicked.fit(points[:1], ['wet'])
    assert (tile(clicked, 'classes') == 255).all()
    points.append(Point(0, 61.5, 280.2, 'wet'))
    # A class that was named and has no point yet.
    clicked.fit(points, ['empty', 'wet', 'dry'])
    at = [vectors[:, int(point.y), int(point.x)] for point in points]
    classifier = Classifier('probe', np.stack(at), np.array([0, 1, 0]), 2)
    known = ~np.isnan(vectors[0])
    best, probability = classifier.predict(vectors[:, known].T)
    whole = np.full((512, 512, 2), 255, np.uint8)
    for row in range(2):
        for column in range(2):
            box = np.s_[row * TILE : (row + 1) * TILE, column * TILE : (column + 1) * TILE]
            whole[box] = tile(clicked, 'classes', 0, column, row)
    assert (whole[300:] == 255).all() and (whole[:, 270:] == 255).all()
    made = whole[:300, :270]
    assert (made[~known] == 255).all()
    # AlphaEarth's 8 bits move a vector by less than a hundredth.
    assert (made[known][:, 0] == best + 1).mean() > 0.995
    assert np.abs(made[known][:, 1] - 100.0 * probability).max() < 4
    # The picture differs where the ground does, and is transparent without data.
    picture = tile(clicked, 'picture').astype(int)
    assert (picture[:40, :30, 3] == 0).all() and (picture[60:255, :, 3] == 255).all()
    assert np.abs(picture[60, 50, :3] - picture[150, 50, :3]).max() > 60
    # A level up, one tile has everything.
    upper = tile(clicked, 'classes', 1)
    assert (upper[150:] == 255).all() and (
        upper[50:145, 20:130, 0] == made[100:290:2, 40:260:2, 0]
    ).mean() > 0.95
    x, y = clicked.least_sure(0, points)
    assert min(np.hypot(x - point.x, y - point.y) for point in points) > 15
    for level, column, row in ((0, 2, 0), (1, 1, 0), (50, 1, 1)):
        with pytest.raises(IndexError):
            clicked.tile(0, 'classes', level, column, row)


def test_two_encoders_and_no_data(tmp_path: Path) -> None:
    first = write_tessera(tmp_path / 'a.tif', two_fields(128, 20, 20))
    other = write_tessera(tmp_path / 'b.tif', two_fields(128, 20, 20), 'v2')
    with pytest.raises(EmbeddingError, match='two kinds'):
        ClickedMap([str(first), str(other)])
    empty = write_tessera(tmp_path / 'c.tif', np.full((128, 20, 20), np.nan))
    with pytest.raises(EmbeddingError, match='no data'):
        ClickedMap([str(empty)])
    with pytest.raises(EmbeddingError, match='label two classes'):
        ClickedMap([str(first)]).least_sure(0, [])
