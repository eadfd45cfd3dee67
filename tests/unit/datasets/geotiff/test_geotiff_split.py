"""Training and validation from the same scenes, by blocks of ground."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Dict, List, Tuple

import numpy as np
import pytest
from geo_scenes import DEGREES, PIXELS, UTM, paint, write_raster
from geotiff_data import build_dataset, load_window, write_scene
from mmengine.logging import MMLogger

from mapsage.geo import GeoError

SPLIT: Dict[str, Any] = dict(by='blocks', size=25, share=0.4, margin=4, seed=1)


def of_part(part: str, **changes: Any) -> Dict[str, Any]:
    return dict(SPLIT, part=part, **changes)


def counted(dataset: Any, shape: Tuple[int, int] = (260, 300)) -> Dict[str, np.ndarray]:
    """Return in how many windows each pixel of each scene counts."""
    found: Dict[str, np.ndarray] = {}
    for index in range(len(dataset)):
        info = dataset.get_data_info(index)
        column, row, side = info['window']
        there = found.setdefault(Path(info['scene']).stem, np.zeros(shape, int))
        mask = load_window(dataset, index)[1] != 255
        here = there[row : row + side, column : column + side]
        here += mask[: here.shape[0], : here.shape[1]]
        assert mask.any() or dataset.test_mode or info['scene'].endswith('gaps.tif')
    return found


@pytest.mark.parametrize(
    'unit, place, size', [('meters', UTM, 25), ('pixels', PIXELS, 50), ('meters', DEGREES, 1000)]
)
def test_no_pixel_counts_in_two_parts(tmp_path: Path, unit: str, place: Any, size: float) -> None:
    write_scene(tmp_path, place=place)
    arguments = dict(window=64, stride=50)
    margin = size / 6
    train, val = (
        counted(
            build_dataset(
                tmp_path,
                split=of_part(part, unit=unit, size=size, margin=margin),
                test_mode=part == 'val',
                **arguments,
            )
        )['a']
        for part in ('train', 'val')
    )
    assert val.max() == 1  # scored once
    assert not ((train > 0) & (val > 0)).any()
    assert 0.25 < (train > 0).mean() < 0.7 and 0.2 < val.mean() < 0.55
    pixel = 0.5 if place is UTM else 1
    if place is not DEGREES:
        rows, columns = np.nonzero(val)
        near = int(margin / pixel)
        for down, right in ((near, 0), (-near, 0), (0, near), (0, -near)):
            inside = (
                (rows + down >= 0)
                & (rows + down < 260)
                & (columns + right >= 0)
                & (columns + right < 300)
            )
            assert not train[rows[inside] + down, columns[inside] + right].any()


def test_scenes_that_come_later_move_no_block(tmp_path: Path) -> None:
    write_scene(tmp_path, 'k')
    alone = counted(build_dataset(tmp_path, split=of_part('val')))
    write_scene(tmp_path, 'a')
    write_scene(tmp_path, 'z')
    together = counted(build_dataset(tmp_path, split=of_part('val')))
    np.testing.assert_array_equal(alone['k'], together['k'])
    np.testing.assert_array_equal(alone['k'], together['z'])  # the same place on the ground


def test_every_sample_of_the_part_is_labeled(tmp_path: Path) -> None:
    """Masks are those of the scene where the part counts, and no-data stays ignored."""
    _, classes = write_scene(tmp_path)
    values = paint(classes, 3)
    values[:, :, :100] = 0
    write_raster(tmp_path / 'scenes/gaps.tif', values, nodata=0)
    (tmp_path / 'scenes/a.tif').unlink()
    (tmp_path / 'labels/a.tif').rename(tmp_path / 'labels/gaps.tif')
    dataset = build_dataset(tmp_path, window=40, split=of_part('train'))
    seen = counted(dataset)['gaps']
    assert seen[100:].any() and not seen[:, :100].any()
    for index in range(len(dataset)):
        column, row, side = dataset.get_data_info(index)['window']
        mask = load_window(dataset, index)[1]
        there = classes[row : row + side, column : column + side]
        np.testing.assert_array_equal(mask[mask != 255], there[mask != 255])


def test_the_log_says_what_a_part_has(tmp_path: Path, caplog: Any) -> None:
    write_scene(tmp_path)
    logger = MMLogger.get_current_instance()
    logger.addHandler(caplog.handler)
    try:
        build_dataset(tmp_path, split=of_part('val'))
        build_dataset(tmp_path, split=dict(by='blocks', size=120, part='val', seed=2))
    finally:
        logger.removeHandler(caplog.handler)
    lines: List[Any] = [each for each in caplog.records if 'split: part' in each.getMessage()]
    assert [each.levelname for each in lines] == ['INFO', 'WARNING']
    assert re.search(
        r"part 'val' has (\d+) of the (\d+) blocks of 25 meters that 1 scene\(s\) "
        r'show, .* % \(40.0 % asked for\)',
        lines[0].getMessage(),
    )
    assert 'choose smaller blocks, or another seed' in lines[1].getMessage()


@pytest.mark.parametrize(
    'split, message',
    [
        (dict(SPLIT), r"part=None, expected one of \('train', 'val', 'test'\)"),
        (of_part('valid'), "part='valid', expected one of"),
        (of_part('val', share=1.2), 'share=1.2, expected .* more than 0 and less than 1'),
        (of_part('val', share=0), 'share=0, expected'),
        (of_part('val', share='a'), "share='a', expected"),
        (of_part('val', share=dict(val=0.6, test=0.4)), 'sum below 1'),
        (of_part('val', share=dict(vall=0.6)), 'share={.*expected'),
        (of_part('test'), r"part='test' and share=0.4, .*expected share=dict\(val=0.2, test=0.1\)"),
        (of_part('val', by='scenes'), "by='scenes', expected 'blocks'"),
        (of_part('val', size=-3), 'size=-3, expected the side of a block'),
        (of_part('val', unit='m'), "unit='m', expected 'meters' or 'pixels'"),
        (of_part('val', margin=-1), 'margin=-1, expected a distance in meters'),
        (of_part('val', seed=1.5), 'seed=1.5, expected an integer'),
        (of_part('val', blocks=3), 'split has no setting blocks; it has by, size'),
        (
            of_part('val', size=1e6, seed=3),
            r"part 'val' has 0 of the 1 blocks of 1,000,000 meters that 1 scene.*a\.tif with 300 x 260 "
            r'pixels: expected at least one',
        ),
        (of_part('train', margin=90), 'the margin of 90 meters leaves nothing .* choose a smaller'),
    ],
)
def test_bad_settings(tmp_path: Path, split: Any, message: str) -> None:
    write_scene(tmp_path)
    with pytest.raises(GeoError, match=message):
        build_dataset(tmp_path, split=split)


def test_meters_without_a_crs(tmp_path: Path) -> None:
    write_scene(tmp_path, place=PIXELS)
    with pytest.raises(GeoError, match=r"a\.tif has no georeference\. .*unit='pixels'"):
        build_dataset(tmp_path, split=of_part('val'))
