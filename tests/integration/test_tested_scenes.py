"""Scenes of a test and of a run with ``load_from`` are compared with the passport of the checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, List

import numpy as np
import pytest
import rasterio
from geotiff_data import PIPELINE, write_scene
from mmengine.config import Config
from mmengine.registry import MODELS, DefaultScope
from support import TINY_CONFIG
from toy_runs import log_of

from mapsage.commands.doctor.samples import try_split
from mapsage.engine import MapSageRunner
from mapsage.engine.loading.data_checks import DataError


def build_config(root: Path, folder: Path) -> Any:
    """Return the config of a small model on the scenes below ``root``."""
    path = folder / 'config.py'
    path.write_text(TINY_CONFIG.format(data_root=str(root)))
    cfg = Config.fromfile(str(path))
    for name in ('train', 'val', 'test'):
        cfg[f'{name}_dataloader'].dataset = dict(
            type='GeoTiffDataset', data_root=str(root), scenes='scenes', labels='labels', window=64,
            metainfo=dict(classes=('ground', 'house', 'water'), palette=[[9, 9, 9]] * 3),
            pipeline=PIPELINE,
        )  # fmt: skip
    cfg.model.decode_head.num_classes = 3
    cfg.work_dir, cfg.launcher = str(folder / 'run'), 'none'
    # Runs of one second share a log otherwise.
    cfg.experiment_name = folder.name
    return cfg


@pytest.fixture(scope='module')
def trained(tmp_path_factory: Any) -> Path:
    """A folder with scenes before the offset of Sentinel-2, and a checkpoint of a run on them."""
    folder = tmp_path_factory.mktemp('trained')
    write_scene(folder / 'old', values='uint16')
    with rasterio.open(folder / 'old/scenes/a.tif', 'r+') as file:
        file.scales, file.offsets = (1e-4,) * file.count, (0.0,) * file.count
    cfg = build_config(folder / 'old', folder)
    cfg.train_cfg.update(max_iters=1, val_interval=9)
    cfg.default_hooks.checkpoint = dict(type='CheckpointHook', by_epoch=False, interval=1)
    MapSageRunner.from_cfg(cfg).train()
    shutil.copytree(str(folder / 'old'), str(folder / 'new'))
    with rasterio.open(folder / 'new/scenes/a.tif', 'r+') as file:
        file.write(file.read() + np.uint16(1000))
        file.offsets = (-0.1,) * file.count
    shutil.copytree(str(folder / 'old'), str(folder / 'coarse'))
    for path in (folder / 'coarse').rglob('*.tif'):
        with rasterio.open(path, 'r+') as file:
            file.transform = file.transform * rasterio.Affine.scale(4)
    return folder


def run_test(trained: Path, root: str, folder: Path, **options: Any) -> Any:
    cfg = build_config(trained / root, folder)
    cfg.load_from = str(trained / 'run/iter_1.pth')
    cfg.test_dataloader.dataset.update(options)
    runner = MapSageRunner.from_cfg(cfg)
    return runner, runner.test()


def test_a_test_refuses_another_offset(trained: Path, tmp_path: Path) -> None:
    _, expected = run_test(trained, 'old', tmp_path)
    with pytest.raises(DataError, match=r'new/scenes/a.tif has .* offset -0.1.*--units harmonized'):
        run_test(trained, 'new', tmp_path)
    assert run_test(trained, 'new', tmp_path, units='harmonized')[1] == expected


def test_a_test_warns_of_pixels_of_another_size(trained: Path, tmp_path: Path) -> None:
    """The model may be made for several sizes, and a test has no --gsd."""
    runner, _ = run_test(trained, 'coarse', tmp_path)
    (line,) = [line for line in log_of(runner).splitlines() if 'has pixels of' in line]
    assert 'WARNING' in line and 'coarse/scenes/a.tif' in line


def test_the_doctor_compares_with_load_from(trained: Path, tmp_path: Path) -> None:
    def ask(root: str, load_from: str) -> List[str]:
        cfg = build_config(trained / root, tmp_path)
        cfg.load_from = load_from
        with DefaultScope.overwrite_default_scope('mmseg'):
            model = MODELS.build(cfg.model)
        return [
            f'{finding.level}: {finding.text}'
            for finding in try_split(cfg, 'train_dataloader', model)
            if any(word in finding.text for word in ('training had', 'passport', 'checkpoint'))
        ]

    checkpoint = str(trained / 'run/iter_1.pth')
    assert not ask('old', checkpoint)
    # What is no checkpoint is a mistake of the config, said once and not for each loader.
    assert not ask('old', __file__)
    (text,) = ask('new', checkpoint)
    assert text.startswith('note: train_dataloader: ') and 'offset -0.1' in text
    assert not ask('new', str(tmp_path / 'missing.pth'))
