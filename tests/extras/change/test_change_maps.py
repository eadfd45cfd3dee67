"""A map of change of two scenes, and its polygons, from tools/predict.py."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any, List, Tuple

import numpy as np
import pytest
import rasterio
import torch
from map_runs import read, run
from mmengine.config import Config
from mmengine.registry import MODELS, DefaultScope
from qgis_here import qgis_python, read_legends
from rasterio.crs import CRS
from rasterio.transform import from_origin
from support import Launch, check_finished, main_leg

from mapsage.maps.errors import PredictError

CLASSES = ('unchanged', 'field > house')
SENSORS = dict(image=dict(bands=[1, 2, 3], max_dates=2))
CONFIG = """
default_scope = 'mmseg'
custom_imports = dict(imports=['mapsage'])
env_cfg = dict(accelerator='cpu')
sensors = dict(image=dict(bands=[1, 2, 3], max_dates=2))
model = dict(
    type='EncoderDecoder',
    data_preprocessor=dict(type='StackDataPreProcessor', sensors=sensors, size=(64, 64),
                           mean=dict(image=[127.] * 3), std=dict(image=[60.] * 3)),
    backbone=dict(type='SiameseBackbone', sensors=sensors, fusion='abs_diff', encoder=dict(
        type='EfficientNetLite', out_indices=(0, ))),
    decode_head=dict(type='FCNHead', in_channels=24, in_index=0, channels=24, num_convs=0,
                     concat_input=False, num_classes=2, dropout_ratio=0., align_corners=False),
    test_cfg=dict(mode='whole'))
test_dataloader = dict(dataset=dict(type='ChangeDataset', sensors=sensors, pipeline=[
    dict(type='LoadChangePair'), dict(type='LoadChangeLabels'), dict(type='PackStackInputs')]))
"""


@pytest.fixture(scope='module')
def model(tmp_path_factory: pytest.TempPathFactory) -> Tuple[Path, Path]:
    """Config and checkpoint of a model that calls strong differences of the dates change."""
    folder = tmp_path_factory.mktemp('model')
    path = folder / 'change.py'
    path.write_text(CONFIG)
    torch.manual_seed(0)
    with DefaultScope.overwrite_default_scope('mmseg'):
        segmentor = MODELS.build(Config.fromfile(str(path)).model)
    weights: Any = segmentor.state_dict()
    weights['decode_head.conv_seg.weight'][:] = torch.tensor([-1e4, 1e4])[:, None, None, None]
    weights['decode_head.conv_seg.bias'][:] = torch.tensor([0.5, -0.5])
    checkpoint = folder / 'model.pth'
    torch.save(
        dict(
            state_dict=weights,
            meta=dict(dataset_meta=dict(classes=CLASSES, palette=[[255, 255, 255], [230, 25, 75]])),
        ),
        str(checkpoint),
    )
    return path, checkpoint


def write(path: Path, image: np.ndarray, west: float = 500_000.0) -> Path:
    with rasterio.open(
        str(path),
        'w',
        driver='GTiff',
        dtype='uint8',
        count=3,
        width=150,
        height=len(image),
        crs=CRS.from_epsg(32631),
        nodata=0,
        transform=from_origin(west, 4_500_000, 0.5, 0.5),
    ) as file:
        file.write(image.transpose(2, 0, 1))
    return path


@pytest.fixture
def pair(tmp_path: Path) -> Tuple[Path, Path]:
    """Scenes that differ in a square of 40 pixels; one of them has a corner without data."""
    rng = np.random.default_rng(0)
    before = rng.integers(90, 130, (110, 150, 3), np.uint8)
    after = before.copy()
    after[30:70, 60:100] = rng.integers(1, 255, (40, 40, 3))
    after[:10, :20] = 0
    return (
        write(tmp_path / 'town_20190614.tif', before),
        write(tmp_path / 'town_20230702.tif', after),
    )


def test_two_scenes_become_a_map_and_polygons_of_change(
    model: Any, pair: Any, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    out = tmp_path / 'maps'
    assert run(model, *pair, '--out', out, '--polygons', '--confidence') == 0
    assert 'shift between the dates' in capsys.readouterr().out
    name = 'town_20190614_to_town_20230702'
    classes = read(out / f'{name}.tif')
    assert classes.shape == (110, 150)
    assert (classes[40:60, 70:90] == 1).mean() > 0.5 and (classes[85:] == 0).all()
    with sqlite3.connect(str(out / f'{name}.gpkg')) as file:
        file.row_factory = sqlite3.Row
        rows = [dict(row) for row in file.execute('SELECT * FROM map')]
    assert rows and {row['class_name'] for row in rows} == {CLASSES[1]}
    for row in rows:
        assert (row['from_class'], row['to_class']) == ('field', 'house')
        assert (row['date_from'], row['date_to']) == ('2019-06-14', '2023-07-02')
        assert 0.5 <= row['score'] <= 1
    assert sum(row['area_px'] for row in rows) == (classes == 1).sum()
    if qgis_python() is not None:
        polygons, image = read_legends(out / f'{name}.gpkg', out / f'{name}.tif')
        assert polygons['drawn'] == polygons['features'] == len(rows)
        assert polygons['crs'] == 'EPSG:32631' and polygons['attributes']['to_class'] == 'house'
        assert [label for label, _ in image['entries']] == list(CLASSES)
    # One of the dates has no data there.
    assert (classes[:10, :20] == 255).all() and (classes == 255).sum() == 200
    # The same command again makes nothing; the map does not depend on the overlap's batches.
    assert run(model, *pair, '--out', out, '--polygons', '--confidence') == 0
    assert 'skipped' in capsys.readouterr().out


def test_pairs_that_do_not_fit_are_refused(model: Any, pair: Any, tmp_path: Path) -> None:
    out = '--out', tmp_path / 'maps'
    with pytest.raises(PredictError, match='2023-07-02.*the dates are swapped'):
        run(model, pair[1], pair[0], *out)
    with pytest.raises(PredictError, match='1 input.* compares two dates'):
        run(model, pair[0], *out)
    moved = write(tmp_path / 'moved.tif', np.ones((110, 150, 3), np.uint8), 500_010.0)
    with pytest.raises(PredictError, match='grids that differ by up to 20.00 pixels'):
        run(model, pair[0], moved, *out)
    for path, offset in zip(pair, (0.0, -0.1)):
        with rasterio.open(path, 'r+') as file:
            file.scales, file.offsets = (1e-4,) * 3, (offset,) * 3
    with pytest.raises(PredictError, match=r"offset 0, and .*20230702.*units='harmonized'"):
        run(model, *pair, *out)


@main_leg
def test_ranks_share_a_pair_and_give_the_same_bytes(model: Any, pair: Any, tmp_path: Path) -> None:
    options = '--polygons', '--confidence', '--window', 64, '--overlap', 16
    assert run(model, *pair, '--out', tmp_path / '1', *options) == 0
    for ranks in (2, 3):
        finished = Launch(
            *model,
            *pair,
            '--out',
            tmp_path / str(ranks),
            *options,
            ranks=ranks,
            command=['bash', 'scripts/predict.sh'],
            environ={'ACCELERATOR': 'cpu'},
        ).finish()
        check_finished(finished)
        assert f'on {ranks} rank(s)' in finished.output
        for suffix in ('.tif', '_confidence.tif'):
            name = f'town_20190614_to_town_20230702{suffix}'
            assert (tmp_path / str(ranks) / name).read_bytes() == (
                tmp_path / '1' / name
            ).read_bytes(), name
        # A GeoPackage also holds the time at which it was made.
        polygons = [
            polygons_of(tmp_path / folder / 'town_20190614_to_town_20230702.gpkg')
            for folder in ('1', str(ranks))
        ]
        assert polygons[0] and polygons[0] == polygons[1]


def polygons_of(path: Path) -> List[Tuple[Any, ...]]:
    with sqlite3.connect(str(path)) as file:
        return file.execute('SELECT * FROM map').fetchall()
