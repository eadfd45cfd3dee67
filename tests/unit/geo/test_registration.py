"""The shift between two dates, measured on pictures that were shifted by known amounts."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, List, Optional, Tuple

import cv2
import numpy as np
import pytest
import rasterio
from rasterio.crs import CRS
from rasterio.transform import from_origin

from mapsage.commands import measure_shift as measure_shift_program
from mapsage.extras.demo import draw_scene
from mapsage.extras.demo.change_ground import draw_change
from mapsage.geo import GeoError
from mapsage.geo.places import shift_note
from mapsage.geo.registration import (
    BlockShift,
    block_shift,
    measure_shift,
    pair_shifts,
    summarize_shifts,
)


def write(
    path: Path,
    image: np.ndarray,
    crs: Any = 32631,
    origin: Tuple[float, float] = (0, 0),
    **options: Any,
) -> str:
    """Write (height, width, bands) as a GeoTIFF."""
    height, width, count = image.shape
    transform = from_origin(500_000 + origin[0], 4_500_000 - origin[1], 0.5, 0.5)
    with rasterio.open(
        str(path),
        'w',
        driver='GTiff',
        dtype=image.dtype,
        count=count,
        height=height,
        width=width,
        transform=transform,
        crs=CRS.from_epsg(crs) if crs else None,
        **options,
    ) as file:
        file.write(image.transpose(2, 0, 1))
    return str(path)


@pytest.fixture(scope='module')
def town() -> np.ndarray:
    return draw_scene(3, 'town', 640).image


def moved(image: np.ndarray, columns: float, rows: float) -> np.ndarray:
    grid = np.array([[1, 0, columns], [0, 1, rows]], np.float32)
    return cv2.warpAffine(image, grid, image.shape[1::-1], flags=cv2.INTER_CUBIC)


@pytest.mark.parametrize('shift', [(0, 0), (1, 0), (-2, 1.5), (0.5, 0.25), (6, -3)])
def test_a_known_shift_is_measured_to_a_fraction_of_a_pixel(
    tmp_path: Path, town: np.ndarray, shift: Tuple[float, float]
) -> None:
    after = moved(town, *shift)
    report = measure_shift(
        write(tmp_path / 'before.tif', town), write(tmp_path / 'after.tif', after)
    )
    assert (report.columns, report.rows) == pytest.approx(shift, abs=0.05)
    assert report.largest == pytest.approx(report.length, abs=0.05)
    assert report.measured == report.blocks == 4 and report.spread < 0.05
    assert report.length == pytest.approx(np.hypot(*shift), abs=0.2)


@pytest.fixture(scope='module')
def region() -> np.ndarray:
    return draw_scene(5, 'town', 768).image


def turned(image: np.ndarray, degrees: float, scale: float, columns: float = 0) -> np.ndarray:
    """Return an image turned clockwise about its center."""
    height, width = image.shape[:2]
    grid = cv2.getRotationMatrix2D((width / 2 - 0.5, height / 2 - 0.5), -degrees, scale)
    grid[0, 2] += columns
    return cv2.warpAffine(
        image, grid, (width, height), flags=cv2.INTER_CUBIC, borderMode=cv2.BORDER_REFLECT
    )


@pytest.mark.parametrize(
    'degrees, scale, columns', [(1, 1, 0), (-0.6, 1, 0), (0, 1.01, 0), (0.5, 0.99, 0), (0.8, 1, 4)]
)
def test_rotation_and_scale_are_named_where_they_explain_the_blocks(
    tmp_path: Path,
    region: np.ndarray,
    capsys: pytest.CaptureFixture,
    degrees: float,
    scale: float,
    columns: float,
) -> None:
    before = write(tmp_path / 'before.tif', region)
    after = write(tmp_path / 'after.tif', turned(region, degrees, scale, columns))
    report = measure_shift(before, after)
    # The block in the middle does not move.
    assert report.length == pytest.approx(columns, abs=0.4) and report.largest > 1.5
    assert report.rotation == pytest.approx(degrees, abs=0.05)
    assert report.scale == pytest.approx(scale, abs=0.001)
    assert measure_shift_program.main([before, after]) == 3
    text = capsys.readouterr().out
    assert 'clockwise by' in text and 'more than 1' in text
    # A shift at random in training does not mend a rotation.
    assert ('ShiftDate' in text) == (columns > 0)
    assert shift_note(report, 1.0)[0] == logging.WARNING


def test_a_pair_that_is_turned_is_measured_on_a_scene_that_is_not_square(
    tmp_path: Path, region: np.ndarray
) -> None:
    wide = region[:512]
    report = measure_shift(
        write(tmp_path / 'before.tif', wide), write(tmp_path / 'after.tif', turned(wide, 0.7, 1))
    )
    assert report.rotation == pytest.approx(0.7, abs=0.05) and report.blocks == 6


def test_a_part_of_the_scene_that_moved_is_reported_and_is_no_rotation(
    tmp_path: Path, region: np.ndarray
) -> None:
    after = region.copy()
    after[:, 512:] = moved(region, 5, 0)[:, 512:]
    report = measure_shift(
        write(tmp_path / 'before.tif', region), write(tmp_path / 'after.tif', after)
    )
    assert report.length < 0.1 and report.largest > 4 and np.isnan(report.rotation)
    assert 'clockwise' not in report.describe()


def blocks(count: int, **wrong: Tuple[float, float]) -> List[BlockShift]:
    """Return the shifts of blocks in a row, all 0.2 but those with the numbers b0, b1, ..."""
    return [
        BlockShift(*wrong.get(f'b{number}', (0.2, 0.0)), 256.0 * number, 128.0 * (number % 2))
        for number in range(count)
    ]


@pytest.mark.parametrize(
    'shifts',
    [
        blocks(16, b1=(9, 9), b5=(-8, 3), b9=(2, -12), b14=(5, 5)),
        blocks(4, b2=(9, 9)),
        blocks(3, b0=(9, 9)),
        [*blocks(5), None, None, None],
        blocks(64),
    ],
    ids=['changed ground', 'few blocks', 'three blocks', 'water', 'equal'],
)
def test_single_wrong_blocks_are_no_warning(shifts: List[Optional[BlockShift]]) -> None:
    report = summarize_shifts(shifts)
    assert report.largest == pytest.approx(0.2) and np.isnan(report.rotation)
    assert shift_note(report, 1.0)[0] == logging.INFO


def test_blocks_that_are_wrong_do_not_hide_a_rotation() -> None:
    angle = np.radians(0.5)
    shifts = []
    for right in (-384, -128, 128, 384):
        for down in (-384, -128, 128, 384):
            shifts.append(BlockShift(-angle * down, angle * right, right, down))
    shifts[3] = shifts[3]._replace(columns=40.0)
    shifts[10] = shifts[10]._replace(rows=-25.0)
    report = summarize_shifts(shifts)
    assert report.rotation == pytest.approx(0.5, abs=0.01)
    # Many small images have one block each, all in the middle.
    same_place = [shift._replace(right=0.0, down=0.0) for shift in shifts]
    assert np.isnan(summarize_shifts(same_place).rotation)


def test_blocks_of_a_large_scene_are_spread_over_it(tmp_path: Path, town: np.ndarray) -> None:
    """Ten blocks fit into the scene, and six are measured."""
    scene = np.tile(town[:512, :256], (1, 5, 1))
    # Only the blocks at the right edge are shifted: they count if the blocks reach it.
    after = scene.copy()
    after[:, -256:] = moved(town[:512, :256], 3, 0)
    shifts = pair_shifts(
        write(tmp_path / 'before.tif', scene), write(tmp_path / 'after.tif', after), most=6
    )
    columns = [round(shift.columns) for shift in shifts if shift]
    assert len(shifts) == 6 and columns == [0, 0, 3, 0, 0, 3]


def test_changed_ground_under_another_sun_is_not_a_large_shift(tmp_path: Path) -> None:
    ground = draw_change(0, 'village', 640)
    before = write(tmp_path / 'before.tif', ground.before)
    aligned = measure_shift(before, write(tmp_path / 'after.tif', ground.after))
    assert aligned.length < 0.3 and aligned.largest < 0.8 and aligned.measured >= 3
    assert np.isnan(aligned.rotation)
    badly = measure_shift(before, write(tmp_path / 'moved.tif', moved(ground.after, 3, 0)))
    assert badly.columns - aligned.columns == pytest.approx(3, abs=0.1)


def test_blocks_without_shared_texture_are_left_out(town: np.ndarray) -> None:
    gray = town[:256, :256].astype(np.float32).mean(2)
    valid = np.ones(gray.shape, bool)
    other = draw_scene(9, 'forest', 256).image.astype(np.float32).mean(2)
    assert block_shift(gray, np.full_like(gray, 70), valid) is None
    assert block_shift(gray, other, valid) is None
    assert block_shift(gray, gray, valid & (np.arange(256) < 128)) is None
    report = summarize_shifts([None, None, block_shift(gray, gray, valid)])
    assert np.isnan(report.length) and '1 of 3 blocks' in report.describe()


def test_scenes_without_data_are_no_shift(tmp_path: Path) -> None:
    empty = np.zeros((300, 300, 1), np.uint8)
    paths = [write(tmp_path / name, empty, nodata=0) for name in ('a.tif', 'b.tif')]
    report = measure_shift(*paths)
    assert (report.measured, report.blocks) == (0, 1)


@pytest.mark.parametrize(
    'options, crop, text',
    [
        (dict(), np.s_[:-1], '640x640 and 640x639 pixels.*gdalwarp.*-ts 640 640'),
        (dict(crs=32632), np.s_[:], 'CRS EPSG:32631 and EPSG:32632.*gdalwarp'),
        (dict(origin=(0.25, 0)), np.s_[:], 'grids that differ by up to 0.50 pixels'),
        (dict(crs=None), np.s_[:], 'CRS EPSG:32631 and none.*Resample'),
    ],
)
def test_scenes_on_different_grids_are_refused(
    tmp_path: Path, town: np.ndarray, options: dict, crop: Any, text: str
) -> None:
    before = write(tmp_path / 'before.tif', town)
    with pytest.raises(GeoError, match=f'(?s){text}'):
        measure_shift(before, write(tmp_path / 'after.tif', town[crop], **options))


def test_the_program_reports_scenes_and_folders(
    tmp_path: Path, town: np.ndarray, capsys: pytest.CaptureFixture
) -> None:
    for folder in ('A', 'B'):
        (tmp_path / folder).mkdir()
    before = write(tmp_path / 'A' / 'a.tif', town)
    after = write(tmp_path / 'B' / 'a.tif', moved(town, 2, 0))
    assert measure_shift_program.main([before, before]) == 0
    assert 'shift of' in capsys.readouterr().out
    assert measure_shift_program.main([str(tmp_path / 'A'), str(tmp_path / 'B')]) == 3
    text = capsys.readouterr().out
    assert '+2.0' in text and 'more than 1' in text
    assert measure_shift_program.main([before, after, '--bound', '2.5']) == 0
    write(tmp_path / 'B' / 'b.tif', town)
    with pytest.raises(GeoError, match='only one has b.tif'):
        measure_shift_program.main([str(tmp_path / 'A'), str(tmp_path / 'B')])
