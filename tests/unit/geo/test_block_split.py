"""Blocks of ground: every place belongs to one part, in each scene that shows it."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any, Dict, List

import affine
import cv2
import numpy as np
import pyproj
import pytest
import shapely
from geo_scenes import DEGREES, PIXELS, UTM, write_raster
from rasterio.crs import CRS

from mapsage.geo import PARTS, BlockSplit, GeoError, Raster, to_map

# The ground of UTM, 150 x 130 m, from a grid turned by 30 degrees, and in Web Mercator.
ROTATED = dict(
    crs=UTM['crs'],
    transform=affine.Affine.translation(500030, 4099980)
    * affine.Affine.rotation(-30)
    * affine.Affine.scale(0.4, -0.4),
)
MERCATOR = dict(
    crs=CRS.from_epsg(3857), transform=affine.Affine(0.7, 0, 13024370, 0, -0.7, 4445560)
)


def open_scene(
    folder: Path, place: Dict[str, Any], width: int = 300, height: int = 260, name: str = 'a'
) -> Raster:
    return Raster(write_raster(folder / f'{name}.tif', np.zeros((height, width), 'uint8'), place))


def masks(scene: Raster, split: BlockSplit) -> List[np.ndarray]:
    return [split.of_scene(scene, part).mask(0, 0, scene.width, scene.height) for part in PARTS]


def centers(scene: Raster, mask: np.ndarray) -> np.ndarray:
    """Return where in UTM the centers of the pixels of a mask are, float64 (N, 2)."""
    there = to_map(scene.transform, np.argwhere(mask)[:, ::-1] + 0.5)
    return np.stack(
        pyproj.Transformer.from_crs(
            scene.crs.to_wkt(), UTM['crs'].to_wkt(), always_xy=True
        ).transform(*there.T),
        1,
    )


@pytest.mark.parametrize('place', [UTM, ROTATED, MERCATOR, DEGREES], ids=lambda p: str(p['crs']))
def test_every_pixel_is_of_one_part(tmp_path: Path, place: Any) -> None:
    size = 1000.0 if place is DEGREES else 20.0
    scene, split = open_scene(tmp_path, place), BlockSplit(size, val=0.3, test=0.2, seed=4)
    found = masks(scene, split)
    assert (sum(mask.astype(int) for mask in found) == 1).all()
    for part, mask, share in zip(PARTS, found, (0.5, 0.3, 0.2)):
        area = split.of_scene(scene, part)
        assert abs(mask.mean() - share) < 0.15
        assert abs(area.pixels - mask.sum()) < 0.01 * mask.size
        assert abs(area.blocks[0] / area.blocks[1] - share) < 0.15


@pytest.mark.parametrize('others', [ROTATED, MERCATOR], ids=['rotated', 'mercator'])
def test_scenes_agree_and_parts_keep_their_distance(tmp_path: Path, others: Any) -> None:
    one = open_scene(tmp_path, UTM, 120, 110)
    other = open_scene(tmp_path, others, 120, 110, name='b')
    split = BlockSplit(15, val=0.3, test=0.2, margin=3)
    parts = [masks(scene, split) for scene in (one, other)]
    least = []
    for first, second in ((0, 1), (0, 2), (1, 2)):
        for this, that in ((0, 1), (1, 0)):  # the one part is seen in one scene, and the other
            scenes = (one, other)[this], (one, other)[that]
            tree = shapely.STRtree(shapely.points(centers(scenes[0], parts[this][first])))
            _, distances = tree.query_nearest(
                shapely.points(centers(scenes[1], parts[that][second])), return_distance=True
            )
            least.append(distances.min())
    assert 3 * 0.9996 <= min(least) < 3.2  # UTM's meters are up to 0.04 % short
    whole = BlockSplit(15, val=0.3, test=0.2)
    inner = [
        cv2.erode(mask.astype(np.uint8), np.ones((5, 5), np.uint8), borderValue=0)
        for mask in masks(one, whole)
    ]
    for part, mask in enumerate(masks(other, whole)):
        column, row = np.floor(to_map(~one.transform, centers(other, mask))).astype(int).T
        inside = (column >= 0) & (column < 120) & (row >= 0) & (row < 110)
        seen = [each[row[inside], column[inside]].sum() for each in inner]
        assert seen[part] > 100 and sum(seen) == seen[part]


def test_training_gives_way_to_validation(tmp_path: Path) -> None:
    scene = open_scene(tmp_path, UTM)
    for part, same in (('train', False), ('val', True)):
        without, with_margin = (
            BlockSplit(30, margin=margin).of_scene(scene, part) for margin in (0, 5)
        )
        assert (with_margin.pixels == pytest.approx(without.pixels)) is same
        assert with_margin.blocks == without.blocks


def test_parts_stay_the_same_for_ever(tmp_path: Path) -> None:
    """A run is resumed, and compared with others, with the blocks that it began with."""
    mask = masks(open_scene(tmp_path, UTM), BlockSplit(20, val=0.3))[1]
    assert [''.join('#' if on else '.' for on in row) for row in mask[20::40, 20::40]] == [
        '#...#..',
        '..#....',
        '.#...##',
        '.#.#.#.',
        '....#.#',
        '.##..#.',
    ]
    other = masks(open_scene(tmp_path, UTM), BlockSplit(20, val=0.3, seed=1))[1]
    assert (mask != other).mean() > 0.2


def test_blocks_in_pixels_follow_from_the_name(tmp_path: Path) -> None:
    split = BlockSplit(50, 'pixels', val=0.4, margin=10)
    found = masks(open_scene(tmp_path / 'x', PIXELS), split)
    np.testing.assert_array_equal(found, masks(open_scene(tmp_path / 'y', UTM), split))
    whole = masks(open_scene(tmp_path / 'x', PIXELS), BlockSplit(50, 'pixels', val=0.4))
    assert (whole[0].reshape(-1, 300)[:250].reshape(5, 50, 6, 50).std((1, 3)) == 0).all()
    assert (
        whole[0]
        != masks(open_scene(tmp_path, PIXELS, name='b'), BlockSplit(50, 'pixels', val=0.4))[0]
    ).any()
    points = [shapely.points(np.argwhere(mask)) for mask in found[:2]]
    assert (
        10
        <= shapely.STRtree(points[1]).query_nearest(points[0], return_distance=True)[1].min()
        < 11
    )


@pytest.mark.parametrize(
    'crs, transform, shape, size',
    [
        (4326, (1, 0, -180, 0, -1, 90), (180, 360), 1e6),  # the globe
        (4326, (1, 0, 0, 0, -1, 90), (180, 360), 1e6),  # the globe from 0 to 360 degrees
        (3857, (4e5, 0, -20037508, 0, -4e5, 20037508), (100, 100), 1e6),
        (4326, (0.01, 0, 179.5, 0, -0.01, -17), (100, 100), 5e3),  # across the antimeridian
        (4267, (0.01, 0, 179.5, 0, -0.01, 52), (100, 100), 5e3),  # and in another datum
        (32701, (100, 0, 150000, 0, -100, 8000000), (100, 100), 2e3),
        (4807, (0.01, 0, 2, 0, -0.01, 52), (100, 100), 5e3),  # in grads from Paris
        (32633, (100, 0, 300000, 0, 100, 5000000), (100, 100), 2e3),
    ],
)  # the south above
def test_places_where_longitudes_jump(
    tmp_path: Path, crs: int, transform: Any, shape: Any, size: float
) -> None:
    place = dict(crs=CRS.from_epsg(crs), transform=affine.Affine(*transform))
    found = masks(open_scene(tmp_path, place, *shape[::-1]), BlockSplit(size, val=0.4))
    counts = sum(mask.astype(int) for mask in found)
    assert counts.max() == 1 and counts.mean() > 0.9998
    assert 0.2 < found[1].mean() < 0.6


def test_both_sides_of_the_antimeridian_agree(tmp_path: Path) -> None:
    split = BlockSplit(5e3, val=0.4)
    east, west = (
        masks(
            open_scene(
                tmp_path,
                dict(crs=DEGREES['crs'], transform=affine.Affine(0.01, 0, start, 0, -0.01, -17)),
                100,
                100,
            ),
            split,
        )
        for start in (179.5, -180.5)
    )
    np.testing.assert_array_equal(east, west)


def test_a_pole(tmp_path: Path) -> None:
    place = dict(crs=CRS.from_epsg(3031), transform=affine.Affine(3e4, 0, -3e6, 0, -3e4, 3e6))
    found = masks(open_scene(tmp_path, place, 200, 200), BlockSplit(3e5, val=0.4))
    assert (sum(mask.astype(int) for mask in found) == 1).mean() > 0.999


def test_windows_of_a_mask(tmp_path: Path) -> None:
    scene = open_scene(tmp_path, ROTATED)
    part = BlockSplit(17, margin=2).of_scene(scene, 'train')
    whole = part.mask(-40, -40, 380, 340)
    assert not whole[:40].any() and not whole[:, :40].any() and not whole[300:].any()
    for each in (part, pickle.loads(pickle.dumps(part)), copy.deepcopy(part)):
        for column, row, width, height in ((0, 0, 300, 260), (30, 50, 64, 64), (-20, 200, 64, 99)):
            window = whole[row + 40 : row + 40 + height, column + 40 : column + 40 + width]
            np.testing.assert_array_equal(each.mask(column, row, width, height), window)
            assert each.meets(column, row, width, height) == window.any()
        assert repr(each) == repr(part) and ' at 0x' not in repr(part)
    random = np.random.RandomState(0)
    for column, row in random.randint(0, 250, (200, 2)):
        assert (
            part.meets(column, row, 9, 7)
            == whole[row + 40 : row + 47, column + 40 : column + 49].any()
        )
    np.testing.assert_array_equal(part.mask(10, 20, 20, 20, 5), whole[62:162:5, 52:152:5])


def test_blocks_without_a_place_and_too_many(tmp_path: Path) -> None:
    with pytest.raises(
        GeoError,
        match=r'a\.tif has no georeference\. Blocks of 500 meters '
        r"need a georeference: .*unit='pixels'",
    ):
        BlockSplit(500).of_scene(open_scene(tmp_path, PIXELS), 'val')
    local = CRS.from_wkt('LOCAL_CS["site",UNIT["metre",1]]')
    with pytest.raises(GeoError, match="has a CRS without a place on the globe.*unit='pixels'"):
        BlockSplit(500).of_scene(open_scene(tmp_path, dict(UTM, crs=local)), 'val')
    with pytest.raises(GeoError, match='blocks of 0.01 meters are more than 1,000,000'):
        BlockSplit(0.01).of_scene(open_scene(tmp_path, UTM), 'val')
    with pytest.raises(GeoError, match='blocks of 0.1 pixels are more than'):
        BlockSplit(0.1, 'pixels').of_scene(open_scene(tmp_path, UTM), 'val')
