"""Masks from maps and their confidence, compared with a computation on whole arrays."""
from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import rasterio
from geo_scenes import UTM, write_raster

from mapsage.labeling.known_labels import KnownLabels
from mapsage.labeling.pseudo_masks import MapPair, table, write_masks

NAMES = ('land', 'water', 'road')
PALETTE = [[0, 255, 0], [0, 0, 255], [9, 9, 9]]


@pytest.mark.parametrize('is_picture', [False, True], ids=['scene', 'picture'])
def test_strips_of_several_maps(tmp_path: Path, is_picture: bool) -> None:
    """Maps with more rows than a strip; confidence at, below and above the threshold; no data."""
    random = np.random.RandomState(0)
    classes = random.choice([0, 1, 255], size=(2, 1100, 70), p=[0.6, 0.3, 0.1]).astype(np.uint8)
    confidence = random.randint(85, 101, classes.shape).astype(np.uint8)
    confidence[classes == 1] = random.randint(20, 60, (classes == 1).sum())
    confidence[classes == 255] = 255
    pairs = []
    for number in range(2):
        paths = [write_raster(tmp_path / f'{number}{kind}.tif', values[number][None], UTM)
                 for kind, values in (('', classes), ('_confidence', confidence))]
        pairs.append(MapPair(str(number), 'scene', *paths, is_picture))
    (tmp_path / 'masks').mkdir()
    result = write_masks(pairs, tmp_path / 'masks', NAMES, PALETTE, 0.9, 0.25, KnownLabels())
    rare = np.sort(confidence[classes == 1])[::-1]
    least = int(rare[int(np.ceil(0.25 * len(rare))) - 1])
    assert result.thresholds.tolist() == [90, least, 90] and 20 < least < 60
    expected = np.where(((classes == 0) & (confidence >= 90))
                        | ((classes == 1) & (confidence >= least)), classes, 255)
    for number, pair in enumerate(pairs):
        with rasterio.open(str(pair.mask(tmp_path / 'masks'))) as file:
            np.testing.assert_array_equal(file.read(1), expected[number])
            if not is_picture:
                assert file.crs == UTM['crs'] and file.transform == UTM['transform']
    assert result.kept.tolist() == [(expected == label).sum() for label in range(3)]
    assert result.predicted.tolist() == [(classes == label).sum() for label in range(3)]
    assert result.pairs == pairs and result.empty == []
    assert table(result, NAMES)[3].split() == ['road', '0.90', '0', '0', '-']
    assert [line.split(':')[0] for line in result.lost(NAMES)] == ['no pseudo-label teaches road']
