"""The doctor recommends fast copies where they gain, and makes none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from geo_scenes import write_raster
from geotiff_data import build_dataset, write_scene

from mapsage.commands.doctor.scene_copies import check_fast_copies, without_fast_copies

LOADER = 'train_dataloader'


def test_scenes_in_strips_get_a_measured_advice(tmp_path: Path) -> None:
    values = np.random.RandomState(0).randint(0, 50, (3, 1200, 1600)).astype('uint8')
    write_raster(
        tmp_path / 'scenes/a.tif',
        values,
        tiled=False,
        blockysize=1,
        blockxsize=1600,
        compress='lzw',
    )
    (finding,) = check_fast_copies(LOADER, [build_dataset(tmp_path, labels=None)], [])
    assert finding.level == 'note' and 'times faster' in finding.text
    assert 'a.tif has blocks of 1600 x 1 pixels; reading a window of 128 takes' in finding.text
    assert 'fast_copy=dict(folder=' in finding.next_step
    assert check_fast_copies('val_dataloader', [build_dataset(tmp_path, labels=None)], []) == []
    assert check_fast_copies(LOADER, [], []) == []


def test_copies_of_a_config_are_planned_and_not_made(tmp_path: Path) -> None:
    write_scene(tmp_path)
    folder = tmp_path / 'fast'
    settings = dict(folder=str(folder))
    config, left_out = without_fast_copies(dict(datasets=[dict(fast_copy=settings, window=3)]))
    assert config == dict(datasets=[dict(window=3)]) and left_out == [settings]
    dataset = build_dataset(tmp_path)
    (finding,) = check_fast_copies(LOADER, [dataset], left_out)
    assert finding.level == 'ok' and f'makes 2 fast copies, about 0 MB, in {folder}' in finding.text
    assert not folder.exists()
    (finding,) = check_fast_copies(LOADER, [dataset], [dict(settings, max_size='1K')])
    assert finding.level == 'problem' and 'max_size = 1,000 bytes' in finding.text
    build_dataset(tmp_path, fast_copy=settings)
    (finding,) = check_fast_copies(LOADER, [dataset], left_out)
    assert f'all fast copies are in {folder}' in finding.text
