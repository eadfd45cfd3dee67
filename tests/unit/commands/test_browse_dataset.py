"""Pictures of a config's samples, by the program that users start."""

from __future__ import annotations

from pathlib import Path
from typing import Any, List

import cv2
import numpy as np
import pytest
import torch
from geo_scenes import CLASSES, PALETTE, UTM, rectangle, write_raster
from geotiff_data import write_vector
from mmengine.config import ConfigDict
from support import on_host

from mapsage.commands import browse_dataset, cli
from mapsage.commands.browse_dataset import browse
from mapsage.engine.env_cfg import ConfigError
from mapsage.engine.loading.data_checks import DataError
from mapsage.pictures.preview import TILE_WIDTH

pytestmark = on_host
LEFT, TOP, STEP = 28, 70, TILE_WIDTH + 14  # of the tiles in a sheet, in pixels


def program(*words: Any) -> None:
    browse_dataset.main([str(word) for word in words])


def tile(path: Any, column: int, row_pixels: int = 0) -> np.ndarray:
    """Return a tile of a sheet, RGB; image and overlay take turns."""
    picture = cv2.imread(str(path))[:, :, ::-1]
    left, top = LEFT + column * STEP, TOP + row_pixels
    return picture[top : top + TILE_WIDTH, left : left + TILE_WIDTH].astype(int)


def test_a_stock_dataset(tiny_config: Path, tiny_data: Path, capsys: Any, tmp_path: Path) -> None:
    """Colors in their order, one sheet in the work dir, and the same one again."""
    tiny_config.write_text(
        tiny_config.read_text().replace(
            "dict(type='RandomFlip', prob=0.5),\n    dict(type='PhotoMetricDistortion')",
            "dict(type='RandomFlip', prob=1.0)",
        )
        + f'\nwork_dir = {str(tmp_path / "work")!r}\n'
    )
    program(tiny_config, '--not-show')
    path = capsys.readouterr().out.split()[-1]
    assert path == str(tmp_path / 'work/browse/train.png')
    first = sorted((tiny_data / 'img_dir/train').iterdir())[0]
    flipped = cv2.resize(cv2.imread(str(first))[:, ::-1, ::-1], (TILE_WIDTH,) * 2)
    assert np.abs(tile(path, 0) - flipped).mean() < 1
    before = Path(path).read_bytes()
    program(tiny_config, '--output-dir', tmp_path / 'again')
    assert (tmp_path / 'again/train.png').read_bytes() == before
    program(tiny_config, '--split', 'val', '--each', '--output-dir', tmp_path / 'each')
    assert sorted(each.name for each in (tmp_path / 'each').iterdir()) == [
        f'val_{number}.png' for number in range(4)
    ]


def test_augmentation_is_drawn_and_nothing_else_is(tiny_config: Path, tmp_path: Path) -> None:
    """PhotoMetricDistortion draws from the config's seed, and the caller's draws stay theirs."""
    np.random.seed(3)
    torch.manual_seed(3)
    states = np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    pictures = [
        Path(browse(config(tiny_config, seed), folder=str(tmp_path / str(seed)))[0]).read_bytes()
        for seed in (1, 2)
    ]
    assert pictures[0] != pictures[1]
    assert states == (np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())


def config(path: Path, seed: int = 0, **changes: Any) -> Any:
    cfg = cli.load_config(
        ConfigDict(
            config=str(path),
            launcher='none',
            local_rank=None,
            accelerator=None,
            work_dir=None,
            cfg_options=None,
        )
    )
    cfg.randomness = dict(seed=seed)
    for key, value in changes.items():
        cfg[key] = value
    return cfg


def scenes(root: Path, dtype: str, **changes: Any) -> Any:
    """Write a scene: red left, green right, the lower half infrared; return its dataset."""
    values = np.full((4, 128, 128), 10.0)
    values[0, :, :64] = values[1, :, 64:] = values[3, 64:] = 200
    values *= {'uint8': 1, 'uint16': 40, 'float32': 1e-3}[dtype]
    values[:, :4] = 0
    write_raster(root / 'scenes/a.tif', values.astype(dtype), nodata=0, photometric='minisblack')
    write_vector(root / 'labels.gpkg', [rectangle(UTM, 32, 32, 96, 96)], [CLASSES[1]], 'EPSG:32650')
    steps = [
        dict(type=name) for name in ('LoadGeoTiffWindow', 'LoadGeoTiffLabels', 'PackSegInputs')
    ]
    return dict(
        dict(
            type='GeoTiffDataset',
            data_root=str(root),
            scenes='scenes',
            window=128,
            labels='labels.gpkg',
            bands=[1, 2, 3, 4],
            pipeline=steps,
            metainfo=dict(classes=CLASSES, palette=PALETTE),
        ),
        **changes,
    )


@pytest.mark.parametrize('dtype', ['uint8', 'uint16', 'float32'])
def test_scenes_of_any_type(dtype: str, tiny_config: Path, tmp_path: Path) -> None:
    said: List[str] = []
    dataset = dict(type='RepeatDataset', times=3, dataset=scenes(tmp_path, dtype))
    cfg = config(tiny_config, train_dataloader=dict(dataset=dataset))
    (path,) = browse(cfg, folder=str(tmp_path / 'out'), say=said.append)
    assert f'4 band(s) of {dtype}' in said[0] and 'a.tif 1' in said[1]
    image, overlay = tile(path, 0), tile(path, 1)
    red, green = image[300, 60], image[300, 400]
    assert red[0] > 150 and red[1] < 60 and green[1] > 150 and green[0] < 60
    assert overlay[225, 225].tolist() != image[225, 225].tolist()
    edge = overlay[225, 225 - 120 : 225 - 100]
    assert PALETTE[1] in edge.tolist()  # the outline of the polygon
    assert not image[:10].any()  # no data
    (path,) = browse(cfg, folder=str(tmp_path / 'out'), say=said.append, bands=[4, 3, 2])
    assert tile(path, 0)[400, 60, 0] > 150 > 60 > tile(path, 0)[100, 60, 0]


def test_bands_in_another_order_and_no_labels(tiny_config: Path, tmp_path: Path) -> None:
    dataset = scenes(tmp_path, 'uint8', bands=[4, 3, 2, 1], labels=None)
    dataset['pipeline'] = [dataset['pipeline'][0], dataset['pipeline'][2]]
    cfg = config(tiny_config, test_dataloader=dict(dataset=dataset))
    cfg.model.backbone.bands = dict(rgb=(3, 2, 1))
    (path,) = browse(cfg, 'test', str(tmp_path / 'out'), say=[].append)
    assert tile(path, 0)[300, 60, 0] > 150 > 60 > tile(path, 0)[300, 60, 1]
    assert (tile(path, 1)[100:300, 20:200] == 255).all()  # nothing is laid over


def test_random_windows(tiny_config: Path, tmp_path: Path) -> None:
    dataset = scenes(tmp_path, 'uint8', window=64, windows=dict(type='random', balance='classes'))
    dataset['metainfo'] = dict(classes=CLASSES[:2], palette=PALETTE[:2])
    cfg = config(tiny_config, train_dataloader=dict(dataset=dataset))
    said: List[str] = []
    pictures = [
        Path(browse(cfg, folder=str(tmp_path / name), say=said.append)[0]).read_bytes()
        for name in 'ab'
    ]
    assert pictures[0] == pictures[1] and 'random windows of 64 pixels, 4 an epoch' in said[0]


def test_what_it_refuses(tiny_config: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match='no test_dataloader with a dataset, which --split test'):
        browse(config(tiny_config, test_dataloader=None), 'test')
    with pytest.raises(ConfigError, match='--show-number 0'):
        browse(config(tiny_config), count=0)
    with pytest.raises(ConfigError, match=r'--bands \[1, 2, 4\]: sample 0 has 3 channels'):
        browse(config(tiny_config), bands=[1, 2, 4])
    cfg = config(tiny_config)
    cfg.train_dataloader.dataset.data_root = str(tmp_path / 'none')
    with pytest.raises(DataError, match='none.* does not exist'):
        browse(cfg)
    cfg = config(tiny_config)
    cfg.train_dataloader.dataset.pipeline = cfg.train_dataloader.dataset.pipeline[:2]
    with pytest.raises(ConfigError, match='sample 0 has NoneType as its inputs and cannot be'):
        browse(cfg)
