"""The shift between two dates, measured on pictures that were shifted by known amounts."""
from __future__ import annotations

from pathlib import Path
from typing import Any, Tuple

import cv2
import numpy as np
import pytest
import rasterio
from rasterio.crs import CRS
from rasterio.transform import from_origin

from mapsage.commands.programs import measure_shift as measure_shift_program
from mapsage.datasets import draw_scene
from mapsage.datasets.demo.change_ground import draw_change
from mapsage.geo import GeoError
from mapsage.geo.registration import (
    block_shift,
    measure_shift,
    pair_shifts,
    summarize_shifts,
)


def write(path: Path, image: np.ndarray, crs: Any = 32631, origin: Tuple[float, float] = (0, 0),
          **options: Any) -> str:
    """Write (height, width, bands) as a GeoTIFF."""
    height, width, count = image.shape
    transform = from_origin(500_000 + origin[0], 4_500_000 - origin[1], .5, .5)
    with rasterio.open(str(path), 'w', driver='GTiff', dtype=image.dtype, count=count,
                       height=height, width=width, transform=transform,
                       crs=CRS.from_epsg(crs) if crs else None, **options) as file:
        file.write(image.transpose(2, 0, 1))
    return str(path)


@pytest.fixture(scope='module')
def town() -> np.ndarray:
    return draw_scene(3, 'town', 640).image


def moved(image: np.ndarray, columns: float, rows: float) -> np.ndarray:
    grid = np.array([[1, 0, columns], [0, 1, rows]], np.float32)
    return cv2.warpAffine(image, grid, image.shape[1::-1], flags=cv2.INTER_CUBIC)


@pytest.mark.parametrize('shift', [(0, 0), (1, 0), (-2, 1.5), (.5, .25), (6, -3)])
def test_a_known_shift_is_measured_to_a_fraction_of_a_pixel(
        tmp_path: Path, town: np.ndarray, shift: Tuple[float, float]) -> None:
    after = moved(town, *shift)
    report = measure_shift(write(tmp_path / 'before.tif', town),
                           write(tmp_path / 'after.tif', after))
    assert (report.columns, report.rows) == pytest.approx(shift, abs=.05)
    assert report.measured == report.blocks == 4 and report.spread < .05
    assert report.length == pytest.approx(np.hypot(*shift), abs=.2)


def test_blocks_of_a_large_scene_are_spread_over_it(tmp_path: Path, town: np.ndarray) -> None:
    """Ten blocks fit into the scene, and six are measured."""
    scene = np.tile(town[:512, :256], (1, 5, 1))
    # Only the blocks at the right edge are shifted: they count if the blocks reach it.
    after = scene.copy()
    after[:, -256:] = moved(town[:512, :256], 3, 0)
    shifts = pair_shifts(write(tmp_path / 'before.tif', scene),
                         write(tmp_path / 'after.tif', after), most=6)
    columns = [round(shift.columns) for shift in shifts if shift]
    assert len(shifts) == 6 and columns == [0, 0, 3, 0, 0, 3]


def test_changed_ground_under_another_sun_is_not_a_large_shift(tmp_path: Path) -> None:
    ground = draw_change(0, 'village', 640)
    before = write(tmp_path / 'before.tif', ground.before)
    aligned = measure_shift(before, write(tmp_path / 'after.tif', ground.after))
    assert aligned.length < .3 and aligned.measured >= 3
    badly = measure_shift(before, write(tmp_path / 'moved.tif', moved(ground.after, 3, 0)))
    assert badly.columns - aligned.columns == pytest.approx(3, abs=.1)


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


@pytest.mark.parametrize('options, crop, text', [
    (dict(), np.s_[:-1], '640x640 and 640x639 pixels.*gdalwarp.*-ts 640 640'),
    (dict(crs=32632), np.s_[:], 'CRS EPSG:32631 and EPSG:32632.*gdalwarp'),
    (dict(origin=(.25, 0)), np.s_[:], 'grids that differ by up to 0.50 pixels'),
    (dict(crs=None), np.s_[:], 'CRS EPSG:32631 and none.*Resample')])
def test_scenes_on_different_grids_are_refused(tmp_path: Path, town: np.ndarray, options: dict,
                                               crop: Any, text: str) -> None:
    before = write(tmp_path / 'before.tif', town)
    with pytest.raises(GeoError, match=f'(?s){text}'):
        measure_shift(before, write(tmp_path / 'after.tif', town[crop], **options))


def test_the_program_reports_scenes_and_folders(tmp_path: Path, town: np.ndarray,
                                                capsys: pytest.CaptureFixture) -> None:
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
