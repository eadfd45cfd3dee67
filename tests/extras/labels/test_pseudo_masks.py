"""Masks from maps and their confidence, and the thresholds, compared with slower computations."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import rasterio
from geo_scenes import UTM, write_raster
from hypothesis import given
from hypothesis import strategies as st

from mapsage.extras.labels.known_labels import KnownLabels
from mapsage.extras.labels.pseudo_masks import (
    PERCENT,
    MapPair,
    class_thresholds,
    table,
    write_masks,
)

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
        paths = [
            write_raster(tmp_path / f'{number}{kind}.tif', values[number][None], UTM)
            for kind, values in (('', classes), ('_confidence', confidence))
        ]
        pairs.append(MapPair(str(number), 'scene', *paths, is_picture))
    (tmp_path / 'masks').mkdir()
    result = write_masks(pairs, tmp_path / 'masks', NAMES, PALETTE, 0.9, 0.25, KnownLabels())
    rare = np.sort(confidence[classes == 1])[::-1]
    least = int(rare[int(np.ceil(0.25 * len(rare))) - 1])
    assert result.thresholds.tolist() == [90, least, 90] and 20 < least < 60
    expected = np.where(
        ((classes == 0) & (confidence >= 90)) | ((classes == 1) & (confidence >= least)),
        classes,
        255,
    )
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


def count(*confidences: list) -> np.ndarray:
    return np.array([np.bincount(pixels, minlength=PERCENT) for pixels in confidences], np.int64)


def test_a_rare_class_keeps_its_best_pixels_and_a_sure_one_has_the_limit() -> None:
    frequent, rare, absent = [99] * 90 + [50] * 10, [60, 55, 50, 45, 40, 35, 30, 25, 20, 20], []
    counts = count(frequent, rare, absent)
    assert class_thresholds(counts, 0.9, 0.2).tolist() == [90, 55, 90]
    assert class_thresholds(counts, 0.9, 0).tolist() == [90, 90, 90]


@pytest.mark.parametrize(
    'least, percent', [(0.9, 90), (0.895, 90), (0.07, 7), (0.29, 29), (1, 100), (0, 0)]
)
def test_fractions_of_a_per_cent_are_rounded_up(least: float, percent: int) -> None:
    assert class_thresholds(count([]), least, 0.2).tolist() == [percent]


@given(
    st.lists(st.integers(0, 100), min_size=1, max_size=60),
    st.integers(0, 100),
    st.sampled_from([0.05, 0.2, 0.5, 1.0]),
)
def test_what_is_kept_is_the_share_or_all_above_the_limit(
    confidences: list, limit: int, share: float
) -> None:
    threshold = int(class_thresholds(count(confidences), limit / 100, share)[0])
    minimum = share * len(confidences)
    assert threshold <= limit
    assert sum(pixel >= threshold for pixel in confidences) >= minimum - 1e-9
    if threshold < limit:
        # A higher threshold would keep less than the share.
        assert sum(pixel > threshold for pixel in confidences) < minimum + 1e-9
