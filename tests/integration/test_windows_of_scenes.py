"""Random windows and splits through the user's launcher: the same bits on any ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from checkpoint_bits import checkpoint_bits
from geo_scenes import CLASSES, UTM, draw_classes, paint, write_raster
from mmengine.config import Config
from support import TINY_CONFIG, check_finished, launch, main_leg
from toy_runs import log_of

from mapsage.engine import MapSageRunner
from mapsage.geo import write_polygons

SCENES = """
env_cfg.update(virtual_ranks=2)
scenes = dict(
    type='GeoTiffDataset', data_root={data_root!r}, scenes='scenes', labels='map.gpkg', window=64,
    metainfo=dict(classes=('ground', 'house', 'water'),
                  palette=[[120, 160, 90], [200, 60, 40], [40, 90, 200]]))
split = dict(by='blocks', size=30, share=0.3, margin=3)
train_dataloader = dict(
    batch_size=2, num_workers={workers}, sampler=dict(type='DefaultSampler', shuffle=True),
    dataset=dict(**scenes, split=dict(**split, part='train'),
                 windows=dict(type='random', per_epoch=12, balance='classes'),
                 pipeline=[dict(type='LoadGeoTiffWindow'), dict(type='LoadGeoTiffLabels'),
                           dict(type='RandomFlip', prob=0.5), dict(type='PackSegInputs')]))
val_dataloader = dict(
    batch_size=1, num_workers=0, sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(**scenes, split=dict(**split, part='val'),
                 pipeline=[dict(type='LoadGeoTiffWindow'), dict(type='LoadGeoTiffLabels'),
                           dict(type='PackSegInputs')]))
test_dataloader = val_dataloader
model['decode_head']['num_classes'] = 3
train_cfg = dict(type='EpochBasedTrainLoop', max_epochs={epochs}, val_interval=2)
default_hooks = dict(checkpoint=dict(type='CheckpointHook', by_epoch=False, interval=4))
log_processor = dict(by_epoch=True)
"""


@pytest.fixture(scope='module')
def scenes(tmp_path_factory: Any) -> Path:
    """Two scenes side by side, with polygons for both."""
    root = tmp_path_factory.mktemp('scenes')
    classes = draw_classes()
    for number, name in enumerate('ab'):
        transform = UTM['transform'] * UTM['transform'].translation(300 * number, 0)
        place = dict(UTM, transform=transform)
        write_raster(root / f'scenes/{name}.tif', paint(classes), place)
    write_raster(root / 'map.tif', classes)
    write_polygons(root / 'map.tif', root / 'map.gpkg', CLASSES, background=0)
    return root


def write_config(path: Path, scenes: Path, workers: int = 0, epochs: int = 2) -> Path:
    text = SCENES.format(data_root=str(scenes), workers=workers, epochs=epochs)
    path.write_text(TINY_CONFIG.replace('{data_root!r}', "''") + text)
    return path


@main_leg
def test_ranks_workers_and_a_resume_draw_the_same_windows(tmp_path: Path, scenes: Path) -> None:
    config = write_config(tmp_path / 'config.py', scenes, workers=1)
    done = launch(config, ranks=2, environ=dict(WORK_DIR=str(tmp_path / 'ranks')))
    check_finished(done)
    assert 'windows: 12 an epoch, at random places, drawn at pixels of ground 33.3 %' in done.output
    assert "split: part 'val' has" in done.output and 'mIoU' in done.output
    assert 'lies in windows of train_dataloader' not in done.output
    # once for the ranks and the parts
    assert done.output.count('WARNING - split: blocks of 30 meters are 60 pixels') == 1
    cfg = Config.fromfile(str(write_config(tmp_path / 'alone.py', scenes)))
    cfg.update(work_dir=str(tmp_path / 'alone'), launcher='none', resume=True)
    Path(cfg.work_dir).mkdir()
    first = tmp_path / 'ranks/iter_4.pth'  # an epoch has 3 steps of 2 x 2 windows
    (Path(cfg.work_dir) / 'iter_4.pth').write_bytes(first.read_bytes())
    (Path(cfg.work_dir) / 'last_checkpoint').write_text(str(Path(cfg.work_dir) / 'iter_4.pth'))
    cfg.val_dataloader.dataset.split = None  # training is as before, and the scores are flattered
    runner = MapSageRunner.from_cfg(cfg)
    runner.train()
    assert re.search(
        'scores may be better than on new ground. [4-7].* % of the ground of '
        'val_dataloader lies in windows of train_dataloader',
        log_of(runner),
    )
    assert checkpoint_bits(tmp_path / 'alone/iter_6.pth') == checkpoint_bits(
        tmp_path / 'ranks/iter_6.pth'
    )


@main_leg
@pytest.mark.long
def test_fast_copies_leave_a_run_at_the_same_bits(tmp_path: Path, scenes: Path) -> None:
    """Ranks divide the copies, which a run in one process with two workers uses afterwards."""
    copies = dict(folder=str(tmp_path / 'copies'))
    config = write_config(tmp_path / 'ranks.py', scenes, workers=1)
    with config.open('a') as file:
        file.write(
            f'for loader in (train_dataloader, val_dataloader):\n'
            f'    loader["dataset"]["fast_copy"] = {copies}\n'
        )
    done = launch(config, ranks=2, environ=dict(WORK_DIR=str(tmp_path / 'ranks')))
    check_finished(done)
    assert '2 fast copies are made in' in done.output
    made = {path: path.stat().st_mtime_ns for path in (tmp_path / 'copies').glob('*/*.tif')}
    assert len(made) == 2 and not list((tmp_path / 'copies').glob('.partial-*'))
    bits = checkpoint_bits(tmp_path / 'ranks/iter_6.pth')
    for workers, fast_copy in ((0, None), (2, copies)):
        name = f'alone-{workers}'
        cfg = Config.fromfile(str(write_config(tmp_path / f'alone_{workers}.py', scenes, workers)))
        cfg.update(work_dir=str(tmp_path / name), launcher='none')
        for loader in (cfg.train_dataloader, cfg.val_dataloader):
            loader.dataset.fast_copy = fast_copy
        runner = MapSageRunner.from_cfg(cfg)
        runner.train()
        assert checkpoint_bits(tmp_path / name / 'iter_6.pth') == bits
    log = log_of(runner)
    assert '2 raster(s) are read from their fast copies in' in log
    assert 'fast copies are made' not in log
    assert {path: path.stat().st_mtime_ns for path in made} == made
