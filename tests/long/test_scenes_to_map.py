"""docs/tutorials/scenes.md: from six unlike scenes and polygons to one map, by its commands."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any, List

import numpy as np
import pyogrio
import pytest
import rasterio
from qgis_here import qgis_python, read_legends
from rasterio.windows import from_bounds
from support import ROOT, Finished, check_finished, launch, main_leg

pytestmark = main_leg

CONFIG = 'configs/geotiff/efficientnet_lite0_fpn_geotiff.py'
STEPS = 60

# Smaller in every respect: the scenes have 240 pixels for 1,000.
SMALL = [
    '--cfg-options',
    'model.data_preprocessor.size=(64,64)',
    'train_dataloader.batch_size=8',
    *(
        f'{loader}_dataloader.{key}'
        for loader in ('train', 'val', 'test')
        for key in (
            'dataset.window=64',
            'dataset.split.size=30',
            'dataset.split.margin=4',
            'num_workers=0',
            'persistent_workers=False',
        )
    ),
    'val_dataloader.dataset.stride=48',
    'test_dataloader.dataset.stride=48',
    f'train_cfg.max_iters={STEPS}',
    f'train_cfg.val_interval={STEPS}',
    f'param_scheduler.1.end={STEPS}',
    f'default_hooks.checkpoint.interval={STEPS}',
]


def miou(finished: Finished, name: str = 'mIoU') -> float:
    return float(re.findall(rf'\b{name}: ([\d.]+)', finished.output)[-1])


def changes(values: np.ndarray) -> np.ndarray:
    """Return, for each column but the first, the share of pixels unlike those at their left."""
    known = (values[:, 1:] != 255) & (values[:, :-1] != 255)
    return ((values[:, 1:] != values[:, :-1]) & known).sum(0) / np.maximum(known.sum(0), 1)


@pytest.fixture(scope='module')
def walk(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function that runs a tool on the data, in a folder; both have been made."""
    folder = tmp_path_factory.mktemp('walk')

    def run(tool: str, *arguments: Any) -> Finished:
        finished = launch(
            *arguments,
            command=[sys.executable, f'tools/{tool}.py'],
            environ=dict(
                MAPSAGE_GEOTIFF=str(folder / 'geotiff'),
                ACCELERATOR='cpu',
                MAPSAGE_SCENE_CACHE=str(folder / 'cache'),
            ),
        )
        check_finished(finished)
        assert 'Traceback' not in finished.output
        return finished

    run.folder = folder  # type: ignore[attr-defined]
    finished = run('make_demo_data', folder / 'geotiff', '--geotiff', '--scene-size', 240)
    assert 'wrote 6 scenes of 240x240 pixels, labels.gpkg and truth.tif' in finished.output
    return run


def test_own_scenes_become_a_map(walk: Any) -> None:
    folder: Path = walk.folder
    scenes = folder / 'geotiff' / 'scenes'
    found = walk('geotiff_statistics', scenes, '--bands', 1, 2, 3, 4).output
    assert '6 scene(s)' in found
    mean, std = (
        re.findall(rf'{name}=(\[[^]]*\])', found)[-1].replace(' ', '') for name in ('mean', 'std')
    )
    assert mean.count(',') == 3
    options = [*SMALL, f'model.data_preprocessor.mean={mean}', f'model.data_preprocessor.std={std}']

    trained = walk('train', ROOT / CONFIG, '--work-dir', folder / 'work', *options)
    assert miou(trained) > miou(trained, 'single_class_mIoU') + 15, trained.output[-3000:]
    config = folder / 'work' / Path(CONFIG).name
    checkpoint = folder / 'work' / f'iter_{STEPS}.pth'
    tested = walk('test', config, checkpoint, '--work-dir', folder / 'test')
    assert miou(tested) == miou(trained)

    made = walk(
        'predict',
        config,
        checkpoint,
        scenes,
        '--out',
        folder / 'map',
        '--mosaic',
        'city',
        '--polygons',
        '--skip-class',
        'background',
    )
    assert 'city.tif' in made.output
    names = {path.name for path in (folder / 'map').iterdir()}
    assert names >= {'city.tif', 'city.qml', 'city.gpkg', 'city.json', 'preview.png'}
    _check_map(folder)
    if qgis_python() is not None:
        shown, polygons = read_legends(
            folder / 'map' / 'city.tif', f'{folder}/map/city.gpkg|layername=map'
        )
        assert len(shown['entries']) == 7 and len(polygons['entries']) == 6
        assert shown['entries'][1:] == polygons['entries']


def _check_map(folder: Path) -> None:
    with rasterio.open(str(folder / 'geotiff' / 'truth.tif')) as file:
        truth, place = file.read(1), file.bounds
        columns = truth.shape[1]
    with rasterio.open(str(folder / 'map' / 'city.tif')) as file:
        assert file.crs.to_epsg() == 32631 and file.transform[:6:4] == (0.5, -0.5)
        window = from_bounds(*place, transform=file.transform)
        city = file.read(1, window=window, boundless=True, fill_value=255)
    assert city.shape == truth.shape
    covered = city != 255
    gaps = np.zeros_like(covered)
    corner = np.add.outer(np.arange(72), 1.5 * np.arange(72)) <= 0.3 * 240
    gaps[:72, :72] = corner  # of a1
    inner = np.s_[24:-24, 24:-24]  # the edges of turned scenes are in the ground's outer margin
    assert covered[inner][~gaps[inner]].all() and not covered[:40, :20].any()
    assert (city == truth)[covered].mean() > 0.5
    # a seam would show as a column in which far more classes change than in its neighbors
    ours = changes(city)
    borders: List[int] = [round(240 * 0.9 * i + shift) for i in (1, 2) for shift in (0, 24)]
    for border in filter(lambda each: 2 < each < columns - 3, borders):
        assert ours[border - 3 : border + 2].max() < 4 * ours.mean() + 0.02, border
    counts = pyogrio.raw.read(str(folder / 'map' / 'city.gpkg'), layer='map')[3]
    assert len(counts[0]) > 10 and 'background' not in set(counts[1])
