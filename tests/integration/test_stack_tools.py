"""Scene stacks in training and in the tools around it: each works, or says clearly that it cannot.

Places are tiny; the model of `stack_files.write_model` has one frozen or trained encoder a sensor.
"""

from __future__ import annotations

import datetime
import json
import re
import shutil
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any, Dict, List, Tuple

import numpy as np
import pyogrio.raw
import pytest
import rasterio
import torch
from geo_scenes import write_raster
from map_runs import WITHOUT_HOSTS, read
from mmengine.config import Config
from mmengine.hooks import Hook
from stack_files import (
    DATES,
    PIPELINE,
    SENSORS,
    SIZE,
    build_stacks,
    grid,
    save_weights,
    write_model,
    write_place,
)
from support import ON_MAIN_LEG, ROOT, check_finished, launch, main_leg

from mapsage.commands import browse_dataset, doctor
from mapsage.commands import predict as predict_command
from mapsage.commands.checkpoint_model import load_model
from mapsage.engine import MapSageRunner
from mapsage.engine.loading.ground_checks import ground_note
from mapsage.extras.demo import CropParams, write_crop_places
from mapsage.extras.labels import suggest_labels
from mapsage.extras.labels.window_facts import FileWindow, WindowJudge
from mapsage.extras.streaming import cache_features
from mapsage.extras.streaming.cache.shards import CacheError
from mapsage.maps.errors import PredictError
from mapsage.maps.predictor import WindowPredictor

DROPS = [
    *PIPELINE[:2],
    dict(type='DropDates', prob=0.4),
    dict(type='RandomFlip', prob=0.5),
    PIPELINE[2],
]


class Record(Hook):
    """Losses and image names of a training."""

    def __init__(self) -> None:
        self.losses: List[float] = []
        self.names: List[str] = []

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        self.losses.append(float(outputs['loss'].detach()))
        self.names += [Path(sample.img_path).name for sample in data_batch['data_samples']]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Config of a frozen encoder on two places, with random dates in training."""
    for number, name in enumerate('ab'):
        write_place(tmp_path, name, number)
    path = write_model(tmp_path, SENSORS, frozen=True)
    path.write_text(
        path.read_text() + f"train_dataloader['dataset']['pipeline'] = {DROPS!r}\n"
        'val_dataloader = val_cfg = val_evaluator = None\n'
        'train_cfg = dict(type="IterBasedTrainLoop", max_iters=4)\n'
    )
    return path


def train(config: Path, **changes: Any) -> Tuple[Record, torch.Tensor]:
    """Train in this process; return the record, and all weights that are trained."""
    cfg = Config.fromfile(str(config))
    cfg.merge_from_dict(dict(changes, experiment_name=uuid.uuid4().hex))
    cfg.work_dir = str(config.parent / cfg.experiment_name)
    runner, record = MapSageRunner.from_cfg(cfg), Record()
    runner.register_hook(record)
    runner.train()
    return record, torch.cat(
        [
            parameter.detach().flatten()
            for parameter in runner.model.parameters()
            if parameter.requires_grad
        ]
    )


def cache(config: Path, *options: str) -> str:
    folder = str(config.parent / 'cache')
    assert (
        cache_features.main(
            [
                str(config),
                '--work-dir',
                str(config.parent / 'work'),
                '--folder',
                folder,
                '--accelerator',
                'cpu',
                *options,
            ]
        )
        == 0
    )
    return folder


def test_training_on_cached_dates_is_training_on_the_places(config: Path, capsys: Any) -> None:
    folder = cache(config, '--views', '2')
    assert '8 samples x 2 view(s)' in capsys.readouterr().out
    source = dict(type='Cached', folder=folder, views=2)
    cached, weights = train(config, feature_source=source)
    # The same views, encoded in the step.
    again, expected = train(config, feature_source=dict(source, load_images=True))
    assert cached.losses == again.losses and torch.equal(weights, expected)
    assert len(set(cached.losses)) == 4
    # One more date is another sample.
    write_raster(config.parent / 's1/a_20240720.tif', torch.ones(2, SIZE, SIZE).numpy(), grid())
    text = config.read_text()
    config.write_text(text.replace("'max_dates': 2", "'max_dates': 3"))
    with pytest.raises(CacheError, match='transforms .* there'):
        train(config, feature_source=source)
    config.write_text(text)
    (config.parent / 's1/a_20240115.tif').unlink()
    with pytest.raises(CacheError, match='not complete: 8 of 16 items are missing'):
        train(config, feature_source=source)


def test_cached_features_are_those_of_the_step(config: Path) -> None:
    text = config.read_text()
    config.write_text(text + f"train_dataloader['dataset']['pipeline'] = {PIPELINE!r}\n")
    cached, weights = train(config, feature_source=dict(type='Cached', folder=cache(config)))
    local, expected = train(config, feature_source=dict(type='Local'))
    plain, plain_weights = train(config)
    assert cached.losses == local.losses == plain.losses
    assert torch.equal(weights, expected) and torch.equal(weights, plain_weights)


@main_leg
def test_encoder_ranks_send_the_features_of_all_dates(config: Path) -> None:
    weights = []
    for source, ranks in ((dict(type='Streamed', encoders=1), 2), (dict(type='Local'), 1)):
        path = config.with_name(f'{source["type"]}.py')
        work = config.parent / str(source['type'])
        path.write_text(config.read_text() + f'feature_source = {source!r}\n')
        check_finished(
            launch(path, '--work-dir', work, ranks=ranks, environ=dict(ACCELERATOR='cpu'))
        )
        weights.append(
            torch.load(str(work / 'iter_4.pth'), map_location='cpu', **_load())['state_dict']
        )
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def _load() -> Dict[str, Any]:
    return dict(weights_only=False) if torch.__version__ >= '2' else {}


@pytest.mark.parametrize(
    'score, source', [(dict(type='LabelScore'), None), (dict(type='ModelScore'), 'Cached')]
)
def test_dynamic_sampling_leaves_out_windows(
    config: Path, score: Dict[str, Any], source: Any
) -> None:
    # Place b has one class, so no window of it teaches anything.
    write_raster(config.parent / 'labels/b.tif', torch.zeros(SIZE, SIZE).byte().numpy(), grid(1))
    hook = dict(type='DynamicSamplingHook', score=score, validity=dict(low=0.01))
    if score['type'] == 'ModelScore':
        hook['validity'] = dict(low=-1.0)
    changes: Dict[str, Any] = dict(custom_hooks=[hook])
    if source:
        changes['feature_source'] = dict(type='Cached', folder=cache(config, '--views', '1'))
    record, _ = train(config, **changes)
    names = {name[0] for name in record.names}
    assert names == ({'a'} if score['type'] == 'LabelScore' else {'a', 'b'})


def test_doctor_and_browse_dataset_take_a_config_of_stacks(config: Path, capsys: Any) -> None:
    assert doctor.main([str(config), '--accelerator', 'cpu']) == 0
    text = capsys.readouterr().out
    assert '8 sample(s)' in text and 'FAIL' not in text
    browse_dataset.main([str(config), '--output-dir', str(config.parent / 'pictures')])
    assert (config.parent / 'pictures/train.png').stat().st_size > 5000


def test_doctor_names_a_date_that_is_none(config: Path, capsys: Any) -> None:
    (config.parent / 's2/a_20240115.tif').rename(config.parent / 's2/a_20241315.tif')
    assert doctor.main([str(config), '--accelerator', 'cpu']) == 1
    assert "'20241315' is no date" in capsys.readouterr().out


def test_other_dates_of_the_same_ground_are_the_same_ground(tmp_path: Path) -> None:
    """Training and validation may name a place differently, and have other dates of it."""
    write_place(tmp_path / 'train', 'a', 0, ('20240115',))
    write_place(tmp_path / 'val', 'b', 0, ('20240720',))
    write_place(tmp_path / 'apart', 'a', 3, ('20240115',))
    train_set = build_stacks(tmp_path / 'train')
    note = ground_note(train_set, build_stacks(tmp_path / 'val'))
    assert note is not None and '100.0 % of the ground of val_dataloader' in note
    assert ground_note(train_set, build_stacks(tmp_path / 'apart')) is None


@pytest.mark.parametrize(
    'path', sorted((ROOT / 'configs/stacks').glob('*.py')), ids=lambda path: path.stem
)
def test_shipped_configs_train_and_are_validated(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_crop_places(tmp_path, CropParams(train_places=2, val_places=1, size=64))
    monkeypatch.setenv('MAPSAGE_CROPS', str(tmp_path))
    cfg = Config.fromfile(str(path))
    cfg.merge_from_dict(
        dict(
            experiment_name=uuid.uuid4().hex,
            work_dir=str(tmp_path / 'work'),
            env_cfg=dict(accelerator='cpu'),
            param_scheduler=None,
            visualizer=dict(vis_backends=None),
            train_cfg=dict(max_iters=2, val_interval=2),
            **{
                f'{loader}_dataloader': dict(num_workers=0, persistent_workers=False)
                for loader in ('train', 'val', 'test')
            },
        )
    )
    cfg.train_dataloader.batch_size = 2
    runner, record = MapSageRunner.from_cfg(cfg), Record()
    runner.register_hook(record)
    runner.train()
    assert len(set(record.losses)) == 2 and all(0 < loss < 10 for loss in record.losses)
    assert 0 <= runner.message_hub.get_scalar('val/mIoU').current() <= 100


@pytest.fixture
def model(config: Path) -> Tuple[Path, Path]:
    return config, save_weights(config, {})


def test_what_is_sure_in_new_places_trains(
    model: Tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Masks have the grid of their place; the list names the images; labels are not replaced."""
    new, out = tmp_path / 'new', tmp_path / 'more'
    write_place(new, 'c', 5, DATES[:2])
    assert (
        predict_command.main(
            [
                *map(str, model),
                str(new),
                str(tmp_path),
                '--pseudo-labels',
                str(out),
                '--min-confidence',
                '0.5',
                '--accelerator',
                'cpu',
            ]
        )
        == 0
    )
    assert 'masks of 1 input(s)' in capsys.readouterr().out
    mask = read(out / 'masks/c.tif')
    assert np.array_equal(mask, read(out / 'maps/c.tif')) and len(np.unique(mask)) == 2
    with rasterio.open(str(out / 'masks/c.tif')) as file:
        assert file.transform == grid(5)['transform'] and file.crs == grid(5)['crs']
    rows = (out / 'places.csv').read_text().splitlines()
    assert len(rows) == 5 and all(str(out / 'masks/c.tif') in row for row in rows[1:])
    config = out / 'pseudo_labels.py'
    record, _ = train(config, train_cfg=dict(max_iters=6))
    assert {name[0] for name in record.names} == {'a', 'b', 'c'}


def test_the_windows_of_a_place_to_label_next(
    model: Tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new, out = tmp_path / 'new', tmp_path / 'next.gpkg'
    write_place(new, 'c', 5, DATES[:2])
    arguments = [
        *map(str, model),
        str(tmp_path),
        str(new),
        '--count',
        '3',
        '--min-distance',
        '0',
        '--accelerator',
        'cpu',
    ]
    assert suggest_labels.main([*arguments, '--out', str(out)]) == 0
    capsys.readouterr()
    # Places a and b are labeled.
    meta, _, _, values = pyogrio.raw.read(str(out), layer='tiles')
    paths = values[list(meta['fields']).index('path')]
    assert len(paths) == 3 and {Path(path).name for path in paths} == {'c_20240115.tif'}
    assert (tmp_path / 'next.png').stat().st_size > 5000
    with pytest.raises(PredictError, match='--scale: the model takes scene stacks'):
        suggest_labels.main([*arguments, '--out', str(tmp_path / 'b.csv'), '--scale', '2'])


def test_windows_are_compared_by_features_and_not_by_dates(model: Tuple[Path, Path]) -> None:
    net, _, bands = load_model(Config.fromfile(str(model[0])), str(model[1]))
    judge = WindowJudge(net, WindowPredictor(net, torch.device('cpu'), (32, 32), 0, 1), 2)
    window = np.ones((1, bands.count, 32, 32), np.float32)
    (facts,) = judge.measure(window, [np.ones((32, 32), bool)], [FileWindow('a.tif', 0, 0, 32, 32)])
    # Eight channels of each sensor; the days of the year would be 2 * 5.
    assert facts.feature.shape == (16,)


@pytest.mark.parametrize(
    'change, message',
    [
        (
            "train_dataloader['dataset']['type'] = 'ChangeDataset'",
            'this model takes pairs of scenes',
        ),
        ("train_dataloader['dataset']['grid'] = 'labels'", "the config has grid='labels'"),
    ],
)
def test_where_labels_cannot_be_found_both_refuse(
    model: Tuple[Path, Path], tmp_path: Path, change: str, message: str
) -> None:
    model[0].write_text(f'{model[0].read_text()}{change}\n')
    for command, option in ((suggest_labels, '--out'), (predict_command, '--pseudo-labels')):
        with pytest.raises(PredictError, match=message):
            command.main(
                [
                    *map(str, model),
                    str(tmp_path),
                    option,
                    str(tmp_path / 'out.gpkg'),
                    '--accelerator',
                    'cpu',
                ]
            )
    assert not (tmp_path / 'out.gpkg').exists()


def test_an_exported_file_makes_the_map_of_its_checkpoint(
    model: Tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Place c lacks a date, which both say; without radar, the page's own code gives the map."""
    onnx = pytest.importorskip('onnx')
    pytest.importorskip('onnxruntime')
    from mapsage.extras.export import export

    config, _ = model
    config.write_text(
        config.read_text() + 'val_dataloader = dict(train_dataloader, batch_size=1)\n'
        "val_cfg = dict(type='ValLoop')\n"
    )
    checkpoint = save_weights(config, dict(s2=[15, 202], s1=[15]))
    write_place(tmp_path / 'new', 'c', 5, DATES[:2])
    path = tmp_path / 'out' / 'model.onnx'
    target = [] if ON_MAIN_LEG else ['--target', 'gcu']
    assert (
        export.main(
            [
                str(config),
                str(checkpoint),
                '--out',
                str(path),
                '--tiles',
                '4',
                '--accelerator',
                'cpu',
                *target,
            ]
        )
        == 0
    )
    text = capsys.readouterr().out
    batch = 'batch' if ON_MAIN_LEG else '1'
    assert '4 tiles of the val set' in text and 'equal pixels 100.0000 %' in text
    assert f'  s2_pixels [{batch}, 3, 3, 32, 32]' in text and 'GeoAI' not in text
    assert sorted(file.name for file in path.parent.iterdir()) == ['model.onnx', 'model.stac.json']
    assert [entry.key for entry in onnx.load(str(path)).metadata_props] == ['mapsage']
    item = json.loads((path.parent / 'model.stac.json').read_text())['properties']
    entry = {entry['name']: entry for entry in item['mlm:input']}['s1_pixels']
    assert entry['bands'] == ['s1 1', 's1 2'] and entry['input']['dim_order'] == [
        'batch',
        'time',
        'bands',
        'height',
        'width',
    ]

    options = [str(tmp_path / 'new'), '--probabilities', '--overlap', '0']
    for name, source in (
        ('onnx', ['--model', str(path)]),
        ('torch', [str(config), str(checkpoint), '--accelerator', 'cpu']),
    ):
        assert predict_command.main([*source, *options, '--out', str(tmp_path / name)]) == 0
        text = capsys.readouterr().out
        assert "place 'c' has no image of s2 within 30 days of day(s) 202 of the year" in text
    maps = [read(tmp_path / name / 'c.tif') for name in ('onnx', 'torch')]
    assert np.array_equal(*maps) and len(np.unique(maps[0])) == 2

    from mapsage.extras.export.errors import ExportError

    with pytest.raises(ExportError, match='--int8: models of several dates are written in float32'):
        export.main([str(config), str(checkpoint), '--out', str(path), '--overwrite', '--int8'])

    # The function of the page, with NumPy and ONNX Runtime only.
    scope: Dict[str, Any] = {}
    page = (ROOT / 'docs/how-to/export.md').read_text(encoding='utf-8')
    exec(re.findall(r'```python\n(.*?)```', page, re.DOTALL)[0], scope)  # noqa: S102
    images = []
    for date in DATES[:2]:
        with rasterio.open(str(tmp_path / f'new/s2/c_{date}.tif')) as file:
            images.append(
                (
                    datetime.datetime.strptime(date, '%Y%m%d').date(),
                    file.read()[:, :32, :32],
                    np.ones((32, 32)),
                )
            )
    scores = scope['scores_of'](str(path), dict(s2=images))
    assert scores.shape == (2, 32, 32) and np.allclose(scores.sum(0), 1, atol=1e-5)
    without_radar = tmp_path / 'no_radar'
    (without_radar / 's2').mkdir(parents=True)
    for date in DATES[:2]:
        shutil.copy(str(tmp_path / f'new/s2/c_{date}.tif'), str(without_radar / 's2'))
    # In a process in which PyTorch and the MM packages cannot be imported.
    finished = subprocess.run(
        [
            sys.executable,
            '-c',
            WITHOUT_HOSTS,
            '--model',
            str(path),
            str(without_radar),
            '--overlap',
            '0',
            '--out',
            str(tmp_path / 'optical'),
        ],
        cwd=str(ROOT),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        universal_newlines=True,
        timeout=300,
    )
    assert finished.returncode == 0, finished.stdout
    assert "place 'c' has no image of sensor 's1'" in finished.stdout
    assert np.array_equal(read(tmp_path / 'optical/c.tif')[:32, :32], scores.argmax(0))
