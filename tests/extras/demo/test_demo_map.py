"""The georeferenced scene of the demo, and the map of it that ends a training."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
import rasterio
from color_model import write_checkpoint, write_config
from mmseg.datasets import LoveDADataset
from rasterio.transform import Affine
from support import ROOT

from mapsage.extras.demo import demo
from mapsage.extras.demo.demo_dataset import DemoParams, write_demo_data
from mapsage.extras.demo.demo_scenes import NO_DATA, draw_scene

SMALL = DemoParams(train_scenes=2, val_scenes=1, scene_size=128, tile_size=64)


def test_the_scene_lies_in_a_map_and_shows_its_label(tmp_path: Path) -> None:
    root = tmp_path / 'demo'
    assert write_demo_data(root, SMALL) == ['tiles', 'scene']
    with rasterio.open(str(root / 'scene.tif')) as scene, rasterio.open(
        str(root / 'scene_label.tif')
    ) as label:
        assert scene.crs.to_epsg() == label.crs.to_epsg() == 32631
        assert scene.transform == label.transform == Affine(0.5, 0, 5e5, 0, -0.5, 4.5e6)
        assert scene.bounds == (5e5, 4.5e6 - 256, 5e5 + 256, 4.5e6)  # 512 pixels of 0.5 m
        assert scene.block_shapes == [(256, 256)] * 3 and scene.profile['compress'] == 'deflate'
        image, mask, valid = scene.read(), label.read(1), scene.dataset_mask() > 0
        colors = label.colormap(1)
    drawn = draw_scene(1999, 'river', 512, no_data=True)
    np.testing.assert_array_equal(image.transpose(1, 2, 0), drawn.image)
    np.testing.assert_array_equal(mask, drawn.mask)
    np.testing.assert_array_equal(valid, mask != NO_DATA)
    assert set(np.unique(mask)) == set(range(8)) and not valid.all()
    assert [colors[v][:3] for v in range(1, 8)] == [
        tuple(c) for c in LoveDADataset.METAINFO['palette']
    ]


def test_a_training_of_the_demo_ends_with_a_map_and_the_command_of_the_viewer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    work_dir, data = tmp_path / 'my runs', tmp_path / 'demo'
    work_dir.mkdir()
    config, scene = write_config(work_dir), data / 'scene.tif'
    words = ['map', str(config), str(scene), '--accelerator', 'cpu']
    # Neither a checkpoint nor a scene.
    assert demo.main(words) == 0 and not (work_dir / 'map').exists()
    write_demo_data(data, SMALL)
    (work_dir / 'last_checkpoint').write_text(str(write_checkpoint(tmp_path)))
    for folder, viewer in ((ROOT, 'tools/view.py'), (tmp_path, f'{ROOT}/tools/view.py')):
        monkeypatch.chdir(folder)
        capsys.readouterr()
        assert demo.main(words) == 0
        assert (work_dir / 'map' / 'scene.tif').is_file()
        assert shlex.split(capsys.readouterr().out.splitlines()[-1]) == [
            sys.executable,
            viewer,
            f'{work_dir}/map',
            '--truth',
            f'{data}/scene_label.tif',
            '--reduce-zero-label',
        ]
