"""Plans: sizes and allocations of the papers, draws with known probabilities, expectations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyproj
import pytest
import rasterio
import shapely
from assess_maps import KnownMap, without_companions, write_map
from geo_scenes import DEGREES, PALETTE, PIXELS, UTM
from rasterio.transform import from_origin

from mapsage.extras.assess.allocation import allocate, expected_error, required_points
from mapsage.extras.assess.census import digest_of, take_census
from mapsage.extras.assess.draw import draw_points
from mapsage.extras.assess.errors import AssessError
from mapsage.extras.assess.intervals import Z
from mapsage.extras.assess.labeled_sample import weights_of
from mapsage.extras.assess.map_reader import MapReader
from mapsage.extras.assess.plan import PlanOptions, make_plan
from mapsage.extras.assess.plan_record import PlanRecord
from mapsage.extras.assess.points_file import DesignPoints, LabeledPlan
from mapsage.extras.assess.strata import DOUBTFUL, build_strata
from mapsage.geo import (
    ClassMapWriter,
    MapInfo,
    ProbabilityWriter,
    confidence_path,
    probabilities_path,
)
from mapsage.geo.ellipsoid import EllipsoidArea
from mapsage.geo.outlines import walk

# Table 5 of Olofsson et al. 2014.
SHARES = np.array([0.02, 0.015, 0.32, 0.645])
DEVIATIONS = np.sqrt(np.array([0.7, 0.6, 0.9, 0.95]) * np.array([0.3, 0.4, 0.1, 0.05]))


def ignore(_: int) -> None:
    """Count nothing."""


def reader_of(known: KnownMap) -> MapReader:
    return MapReader(str(known.path), confidence_path(known.path), probabilities_path(known.path))


def test_the_sample_size_of_olofsson_2014_is_641() -> None:
    assert required_points('neyman', Z * 0.01, SHARES, DEVIATIONS) == 641


@pytest.mark.parametrize(
    'kind, minimum, points, expected',
    [
        ('proportional', 2, 641, [13, 10, 205, 413]),
        ('neyman', 2, 641, [23, 19, 243, 356]),
        # The paper rounds its compromise to 75, 75, 165, 325.
        ('balanced', 75, 641, [75, 75, 163, 328]),
    ],
)
def test_the_allocations_of_olofsson_2014(
    kind: str, minimum: int, points: int, expected: list
) -> None:
    numbers = allocate(kind, points, SHARES, DEVIATIONS, minimum)
    assert numbers.tolist() == expected and numbers.sum() == points


@pytest.mark.parametrize(
    'points, expected',
    [
        ([160, 160, 160, 160], '0.01349'),
        ([12.82, 9.615, 205.12, 413.445], '0.01024'),
        ([75, 75, 165, 325], '0.01089'),
    ],
)
def test_expected_standard_errors(points: list, expected: str) -> None:
    assert f'{expected_error(SHARES, DEVIATIONS, np.array(points)):.5f}' == expected


def test_more_points_than_a_stratum_has_pixels_go_to_the_others() -> None:
    assert allocate(
        'balanced', 100, np.array([0.01, 0.99]), np.ones(2), 50, [7, 1000]
    ).tolist() == [7, 93]
    with pytest.raises(AssessError, match='3 points for 2 strata, expected 4'):
        allocate('neyman', 3, np.array([0.5, 0.5]), np.ones(2))


def test_a_census_counts_every_pixel_once(tmp_path: Path) -> None:
    known = write_map(tmp_path)
    census = take_census(reader_of(known), ignore)
    valid = known.mapped != 255
    assert census.pixels.sum(1).tolist() == [int((known.mapped == k).sum()) for k in range(3)]
    assert census.area.sum() == pytest.approx(valid.sum() * 0.25, rel=1e-3)
    assert census.probability is not None
    np.testing.assert_allclose(
        census.probability.sum((0, 1)) / census.area.sum(),
        known.probability[:, valid].mean(1),
        rtol=1e-5,
    )


def test_pixels_of_a_map_in_degrees_have_the_area_of_their_latitude(tmp_path: Path) -> None:
    known = write_map(tmp_path, place=DEGREES)
    window = reader_of(known).read((0, 0, 200, 200))
    area = EllipsoidArea(DEGREES['crs'].to_wkt(), DEGREES['transform'], 200, 200)
    for row in (0, 37, 150, 199):
        expected = area.of(walk(np.array([shapely.box(0, row, 200, row + 1)])))[0] / 200
        assert window.pixel_area[row, 7] == pytest.approx(expected, rel=1e-9)
    assert window.pixel_area[199, 0] > window.pixel_area[0, 0] * 1.001


@pytest.mark.parametrize(
    'crs, left, top, side',
    [
        ('EPSG:3031', -3e6, 3e6, 4000),
        ('EPSG:3413', -2e6, 2e6, 4000),
        ('EPSG:3034', 2e6, 5.5e6, 4000),
        ('EPSG:32633', 3e5, 5e6, 1000),
    ],
)
def test_pixels_of_a_conformal_map_have_their_areas_on_the_ellipsoid(
    tmp_path: Path, crs: str, left: float, top: float, side: int
) -> None:
    """The scale varies along a row. An independent figure: geodesic polygons of pyproj."""
    place = dict(crs=rasterio.CRS.from_string(crs), transform=from_origin(left, top, side, side))
    path = tmp_path / 'map.tif'
    with rasterio.open(
        path, 'w', driver='GTiff', width=1024, height=1024, count=1, dtype='uint8', **place
    ) as file:
        file.write(np.zeros((1, 1024, 1024), np.uint8))
    window = MapReader(str(path)).read((0, 0, 1024, 1024))
    to_degrees = pyproj.Transformer.from_crs(crs, 'EPSG:4326', always_xy=True)
    ratios = []
    for row, column in np.random.RandomState(0).randint(0, 1024, (100, 2)):
        x = left + side * (column + np.array([0, 1, 1, 0]))
        y = top - side * (row + np.array([0, 0, 1, 1]))
        area = pyproj.Geod(ellps='WGS84').polygon_area_perimeter(*to_degrees.transform(x, y))[0]
        ratios.append(window.pixel_area[row, column] / abs(area))
    np.testing.assert_allclose(ratios, 1, atol=2e-5)


def test_the_shares_of_a_polar_map_do_not_depend_on_the_side_of_a_window(tmp_path: Path) -> None:
    """Two classes left and right of the middle, which is not the pole's meridian."""
    place = dict(crs=rasterio.CRS.from_epsg(3413), transform=from_origin(-4e6, 2e6, 4e3, 4e3))
    known = write_map(tmp_path, place=place)
    census = take_census(reader_of(known), ignore)
    area = EllipsoidArea(place['crs'].to_wkt(), place['transform'], 200, 200)
    row, column = np.nonzero(known.mapped == 1)
    exact = area.of(walk(shapely.box(column, row, column + 1, row + 1))).sum()
    assert census.area[1].sum() == pytest.approx(exact, rel=1e-6)


def test_the_doubtful_stratum_takes_the_least_confident_pixels_of_common_classes(
    tmp_path: Path,
) -> None:
    known = write_map(tmp_path)
    strata = build_strata(take_census(reader_of(known), ignore), 0.05)
    assert strata.names[-1] == DOUBTFUL and 0.02 < strata.shares[-1] <= 0.05
    # Water is rare, so all its pixels stay in its stratum.
    assert strata.pixels[2] == (known.mapped == 2).sum() and strata.composition[-1, 2] == 0
    np.testing.assert_allclose(strata.joint.sum((1, 2)), 1)
    np.testing.assert_allclose(strata.joint.sum(2), strata.composition)


def test_names_of_classes_are_distinct(tmp_path: Path) -> None:
    known = write_map(tmp_path, names=('doubtful', ' water ', 'water'))
    reader = reader_of(known)
    assert reader.class_names == ['doubtful', 'water (1)', 'water (2)']
    strata = build_strata(take_census(reader, ignore), 0.05)
    assert strata.names == ['doubtful', 'water (1)', 'water (2)', 'doubtful pixels']


def test_a_sure_map_has_no_doubtful_stratum(tmp_path: Path) -> None:
    known = write_map(tmp_path)
    with rasterio.open(confidence_path(known.path), 'r+') as file:
        file.write(np.where(known.mapped == 255, 255, 100).astype(np.uint8), 1)
    strata = build_strata(
        take_census(MapReader(str(known.path), confidence_path(known.path)), ignore), 0.05
    )
    assert strata.threshold == 0 and strata.names == ['ground', 'house', 'water']


def test_points_are_drawn_without_replacement_from_their_strata(tmp_path: Path) -> None:
    known = write_map(tmp_path)
    reader = reader_of(known)
    strata = build_strata(take_census(reader, ignore), 0.05)
    numbers = np.array([40, 30, 12, 20])
    drawn = draw_points(reader, strata, numbers, 3, ignore)
    assert np.bincount(drawn.stratum).tolist() == numbers.tolist()
    assert len(set(zip(drawn.column.tolist(), drawn.row.tolist()))) == 102
    assert (known.mapped[drawn.row, drawn.column] == drawn.mapped).all()
    np.testing.assert_allclose(
        drawn.probability, known.probability[:, drawn.row, drawn.column].T, atol=1e-6
    )
    again = draw_points(reader, strata, numbers, 3, ignore)
    assert (again.column == drawn.column).all() and (again.row == drawn.row).all()
    assert (draw_points(reader, strata, numbers, 4, ignore).column != drawn.column).any()


def test_every_pixel_has_the_same_chance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts of 120 draws over four quarters of the map, in windows of 16 pixels."""
    monkeypatch.setattr('mapsage.extras.assess.map_reader._SIDE', 16)
    known = write_map(tmp_path, side=32)
    reader = MapReader(str(known.path))
    strata = build_strata(take_census(reader, ignore), 0)
    numbers = np.array([20, 2, 2])
    counts = np.zeros((32, 32))
    for seed in range(120):
        drawn = draw_points(reader, strata, numbers, seed, ignore)
        inside = drawn.stratum == 0
        counts[drawn.row[inside], drawn.column[inside]] += 1
    ground = known.mapped == 0
    assert counts[~ground].sum() == 0
    for quarter in (np.s_[:16, :16], np.s_[:16, 16:], np.s_[16:, :16], np.s_[16:, 16:]):
        share = ground[quarter].sum() / ground.sum()
        expected, spread = 2400 * share, np.sqrt(2400 * share * (1 - share))
        assert abs(counts[quarter].sum() - expected) < 4 * spread


def test_pixels_of_a_map_in_degrees_have_the_same_chance(tmp_path: Path) -> None:
    """And the plan stores their areas, which weight the estimates."""
    # From 75 to 15 degrees north: the lower half has 1.7 times the area of the upper half.
    place = dict(crs=DEGREES['crs'], transform=from_origin(10.0, 75.0, 1.0, 1.0))
    known = write_map(tmp_path, side=60, place=place)
    reader = MapReader(str(known.path))
    strata = build_strata(take_census(reader, ignore), 0)
    ground = known.mapped == 0
    area = reader.read((0, 0, 60, 60)).pixel_area
    assert area[:30].sum() < 0.4 * area.sum()
    drawn = np.concatenate(
        [
            draw_points(reader, strata, np.array([60, 2, 2]), seed, ignore).row[:60]
            for seed in range(40)
        ]
    )
    upper, expected = (drawn < 30).mean(), ground[:30].sum() / ground.sum()
    assert abs(upper - expected) < 4 * np.sqrt(0.25 / len(drawn))
    plan = make_plan(reader, PlanOptions(points=100), ignore)
    np.testing.assert_array_equal(plan.points.area, area[plan.points.row, plan.points.column])
    share = np.array(plan.record.points) / np.array(plan.record.pixels)
    np.testing.assert_array_equal(plan.points.inclusion, share[plan.points.stratum])


def test_a_plan_knows_that_a_rare_class_needs_the_doubtful_stratum(tmp_path: Path) -> None:
    known = write_map(tmp_path, side=400)
    plan = make_plan(reader_of(known), PlanOptions(points=300), ignore)
    assert sum(plan.record.points) == 300 and plan.record.threshold > 0
    assert plan.points.inclusion.max() <= 1
    # Horvitz-Thompson: the inverse inclusion probabilities add up to the pixels of the map.
    assert (1 / plan.points.inclusion).sum() == pytest.approx(sum(plan.record.pixels), rel=1e-3)
    assert [item.class_name for item in plan.expectations] == ['ground', 'house', 'water']
    assert len(plan.without_doubtful) == 3


def test_a_half_width_gives_the_number_of_points(tmp_path: Path) -> None:
    reader = reader_of(write_map(tmp_path, side=400))
    wide = make_plan(reader, PlanOptions(half_width=0.06), ignore)
    narrow = make_plan(reader, PlanOptions(half_width=0.03), ignore)
    assert wide.overall == pytest.approx(0.06, rel=0.02)
    assert narrow.overall == pytest.approx(0.03, rel=0.02)
    assert sum(narrow.record.points) > 2.5 * sum(wide.record.points)


def test_a_map_without_companions_and_georeference(tmp_path: Path) -> None:
    known = without_companions(write_map(tmp_path, place=PIXELS))
    plan = make_plan(MapReader(str(known.path)), PlanOptions(points=100), ignore)
    assert plan.record.unit == 'px' and plan.record.strata == ['ground', 'house', 'water']
    assert plan.record.probability is None
    with pytest.raises(AssessError, match='--target tree: the map has the classes ground, house'):
        make_plan(MapReader(str(known.path)), PlanOptions(points=100, target='tree'), ignore)


def test_a_digest_depends_on_grid_and_classes_and_not_on_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = write_map(tmp_path / 'a', side=1100)
    digest = digest_of(reader_of(known), ignore)
    assert take_census(reader_of(known), ignore).digest == digest
    with rasterio.open(str(known.path), 'r+') as file:
        block = file.read(1)
        file.write(np.where(block == 1, 0, block), 1)
    assert digest_of(MapReader(str(known.path)), ignore) != digest
    with rasterio.open(str(known.path), 'r+') as file:
        file.write(block, 1)
    monkeypatch.setattr('mapsage.extras.assess.map_reader._SIDE', 512)
    assert digest_of(MapReader(str(known.path)), ignore) == digest
    moved = write_map(tmp_path / 'b', side=1100, place=DEGREES)
    assert digest_of(MapReader(str(moved.path)), ignore) != digest


def test_the_threshold_of_a_model_of_one_score_is_no_contradiction(tmp_path: Path) -> None:
    random = np.random.RandomState(0)
    score = np.round(random.uniform(0, 250, (64, 64))).astype(np.uint8)
    steps = np.stack([250 - score, score])
    info = MapInfo(['ground', 'house'], PALETTE[:2], **UTM)
    for threshold, shuffled in ((50, False), (200, False), (125, True)):
        path = tmp_path / f'{threshold}.tif'
        with ClassMapWriter(path, 64, 64, info) as writer:
            writer.write(0, (score > threshold).astype(np.uint8)[:: -1 if shuffled else 1])
        with ProbabilityWriter(
            probabilities_path(path), 64, 64, ['ground', 'house'], 250, **UTM
        ) as file:
            file.write(0, steps)
        reader = MapReader(str(path), None, probabilities_path(path))
        if shuffled:
            with pytest.raises(AssessError, match='do not belong to this map'):
                take_census(reader, ignore)
        else:
            assert take_census(reader, ignore).pixels.sum() == 64 * 64


def test_a_class_as_no_data(tmp_path: Path) -> None:
    known = write_map(tmp_path)
    census = take_census(MapReader(str(known.path), nodata=[1]), ignore)
    assert census.pixels.sum(1).tolist() == [
        (known.mapped == 0).sum(),
        0,
        (known.mapped == 2).sum(),
    ]


def test_companions_of_another_map_are_refused(tmp_path: Path) -> None:
    known, other = write_map(tmp_path / 'a'), write_map(tmp_path / 'b', seed=1)
    small = write_map(tmp_path / 'c', side=150)
    with pytest.raises(AssessError, match='% of the pixels .* do not belong to this map'):
        take_census(MapReader(str(known.path), None, probabilities_path(other.path)), ignore)
    with pytest.raises(AssessError, match='150 x 150 pixels.*does not lie on the grid'):
        MapReader(str(known.path), confidence_path(small.path))
    with pytest.raises(AssessError, match=r'1 band\(s\).* has 3 classes'):
        MapReader(str(known.path), None, confidence_path(known.path))


def test_weights_of_a_plan_that_was_drawn_by_area() -> None:
    """Plans of earlier versions: 50 of 60 pixels, the large ones right and the small ones wrong."""
    areas = np.repeat([1.0, 0.2], 30) * np.random.RandomState(0).uniform(0.9, 1.1, 60)
    right = np.repeat([1, 0], 30)
    truth = areas[:30].sum() / areas.sum()
    record = PlanRecord(
        'map.tif',
        '',
        'm2',
        ['A'],
        [(0, 0, 0)],
        ['A'],
        [areas.sum()],
        [60],
        [50],
        [[1.0]],
        None,
        'balanced',
        0,
        0,
        '0.5.0',
    )
    assert record.draw == 'area'
    random, estimates, plain = np.random.RandomState(1), [], []
    for _ in range(400):
        drawn = np.argsort(random.exponential(size=60) / areas)[:50]
        zero = np.zeros(50, int)
        points = DesignPoints(
            zero,
            zero,
            np.full(50, 0.9),
            zero,
            zero,
            zero * 1.0,
            zero * 1.0,
            np.empty((50, 0)),
            areas[drawn],
        )
        weights = weights_of(LabeledPlan('a.gpkg', record, points, ['A'] * 50))
        estimates.append((weights * right[drawn]).sum() / weights.sum())
        plain.append(right[drawn].mean())
    assert abs(np.mean(plain) - truth) > 0.15
    assert abs(np.mean(estimates) - truth) < 0.005
    # Few of many pixels: the chances are in proportion to area, and the weights are equal.
    many = replace(record, pixels=[10**6], area=[areas.mean() * 10**6])
    weights = weights_of(LabeledPlan('a.gpkg', many, points, ['A'] * 50))
    assert np.ptp(weights) < 1e-3 * weights.mean()
