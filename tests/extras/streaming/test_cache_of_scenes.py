"""tools/cache_features.py and a training on its cache, with windows of scenes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import frozen_config
import pytest
import rasterio
import torch
from geo_scenes import UTM, rectangle
from geotiff_data import METAINFO, write_scene, write_vector
from mmengine.config import Config
from support import write_tiny_config

from mapsage.engine import MapSageRunner
from mapsage.extras.streaming import cache_features as command
from mapsage.extras.streaming.cache.shards import CacheError
from mapsage.geo import pool

CONFIG = (
    frozen_config.FROZEN
    + """
train_dataloader['dataset'] = dict(
    type='GeoTiffDataset', data_root={root!r}, scenes='scenes', labels={labels!r}, window=96,
    bands=[1, 2, 3, 4], metainfo={metainfo!r}, pipeline=[
        dict(type='LoadGeoTiffWindow'), dict(type='LoadGeoTiffLabels'),
        dict(type='PackSegInputs')])
model['data_preprocessor'] = dict(
    type='BandDataPreProcessor', mean=[90.] * 4, std=[40.] * 4, size=(96, 96), seg_pad_val=255)
model['backbone'].update(in_channels=4)
model['decode_head']['num_classes'] = 3
default_hooks.update(checkpoint=dict(type='CheckpointHook', by_epoch=False, interval=100))
train_cfg.update(max_iters=6)
val_dataloader = val_cfg = val_evaluator = None
"""
)


@pytest.fixture(params=['labels', 'houses.gpkg'])
def config(request: Any, tmp_path: Path) -> Path:
    """Two scenes of 12 windows with label rasters, or with polygons."""
    for name, kind in (('a', 'uint8'), ('b', 'uint8')):
        write_scene(tmp_path, name, bands=4, values=kind)
    write_vector(
        tmp_path / 'houses.gpkg',
        [rectangle(UTM, 20, 30, 90, 80), rectangle(UTM, 150, 100, 200, 240)],
        ['house', 'water'],
        'EPSG:32650',
    )
    return write_tiny_config(
        tmp_path / 'frozen.py',
        tmp_path,
        CONFIG.format(root=str(tmp_path), labels=request.param, metainfo=METAINFO),
    )


def cache(config: Path) -> Path:
    """Run the command in this process; return the folder."""
    folder = config.parent / 'cache'
    assert (
        command.main(
            [
                str(config),
                '--work-dir',
                str(config.parent / 'work'),
                '--folder',
                str(folder),
                '--accelerator',
                'cpu',
            ]
        )
        == 0
    )
    return folder


def train(config: Path, name: str, **source: Any) -> torch.Tensor:
    """Return all weights of the head at the end of a training."""
    cfg = Config.fromfile(str(config))
    cfg.merge_from_dict(
        dict(
            work_dir=str(config.parent / name),
            experiment_name=str(config.parent / name).replace('/', '_'),
            feature_source=source,
        )
    )
    cfg.env_cfg.accelerator = 'cpu'
    runner = MapSageRunner.from_cfg(cfg)
    runner.train()
    return torch.cat([each.flatten() for each in runner.model.decode_head.state_dict().values()])


def halve(path: Path) -> None:
    """Change a raster's values, and close it where this process has it open."""
    with rasterio.open(str(path), 'r+') as file:
        file.write(file.read() // 2)
    pool._thread_state.__dict__.clear()


def test_training_on_the_cache_is_training_on_the_scenes(config: Path, capsys: Any) -> None:
    folder = cache(config)
    assert '24 samples x 1 view(s)' in capsys.readouterr().out
    cached = train(config, 'cached', type='Cached', folder=str(folder))
    assert torch.equal(cached, train(config, 'here', type='Local'))

    # other labels need no other features
    (config.parent / 'houses.gpkg').unlink()
    write_vector(
        config.parent / 'houses.gpkg', [rectangle(UTM, 60, 30, 90, 80)], ['water'], 'EPSG:32650'
    )
    for name in 'ab':
        halve(config.parent / f'labels/{name}.tif')
    corrected = train(config, 'corrected', type='Cached', folder=str(folder))
    assert torch.equal(corrected, train(config, 'correct', type='Local'))
    assert not torch.equal(corrected, cached)

    # another scene needs those of its windows
    halve(config.parent / 'scenes/a.tif')
    with pytest.raises(CacheError, match='not complete: 12 of 24 items are missing'):
        train(config, 'stale', type='Cached', folder=str(folder))
    capsys.readouterr()
    assert '12 of 24 items are there' in (cache(config), capsys.readouterr().out)[1]
    assert torch.equal(
        train(config, 'again', type='Cached', folder=str(folder)),
        train(config, 'new', type='Local'),
    )


@pytest.mark.parametrize('change', ['bands=[2, 1, 3, 4]', 'window=80'])
@pytest.mark.parametrize('config', ['labels'], indirect=True)
def test_other_bands_and_windows_are_another_cache(config: Path, change: str) -> None:
    folder = cache(config)
    name = change.partition('=')[0]
    config.write_text(config.read_text() + f"train_dataloader['dataset'].update({change})\n")
    with pytest.raises(CacheError, match=rf'transforms .* there, .*config.dataset.{name}'):
        cache(config)
    with pytest.raises(CacheError, match=f'config.dataset.{name}'):
        train(config, 'other', type='Cached', folder=str(folder))
