"""Runs with FixMatchHook: what tools read of its checkpoints, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Dict

import numpy as np
import pytest
import torch
from geo_scenes import draw_classes, paint, write_raster
from mmengine.config import Config
from mmengine.registry import MODELS
from semi_runs import OF_FEATURES, semi_config, semi_train, write_semi_data
from support import write_tiny_config

from mapsage.engine import MapSageRunner
from mapsage.extras.labels.fixmatch import FixMatchHook, SemiSupervisedError
from mapsage.maps.model import load_weights

PLAIN = """
model['backbone']['norm_cfg'] = dict(type='BN')
model['data_preprocessor']['size'] = (32, 32)
model['decode_head'].update(loss_decode=dict(type='SegFocalLoss', gamma=0.))
env_cfg['accelerator'] = 'cpu'
default_hooks.update(preview=None)
"""
LOADED: Dict[str, Any] = {} if torch.__version__ < '2' else dict(weights_only=False)


@pytest.fixture(scope='module')
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run of epochs: its data, its folder, its runner, and what it has logged."""
    folder = tmp_path_factory.mktemp('semi')
    data = write_semi_data(folder / 'data')
    runner, followed = semi_train(
        data,
        folder / 'run',
        **{
            'train_cfg': dict(_delete_=True, by_epoch=True, max_epochs=1, val_interval=1),
            'train_dataloader.sampler.infinite': False,
            'param_scheduler': [],
            'default_hooks.checkpoint': dict(by_epoch=True, interval=1, save_best='mIoU'),
        },
    )
    return data, folder, runner, followed


def plain_config(data: Path, folder: Path, checkpoint: Path) -> Config:
    cfg = Config.fromfile(str(write_tiny_config(folder / 'plain.py', data, PLAIN)))
    cfg.merge_from_dict(
        dict(
            work_dir=str(folder / 'plain'),
            load_from=str(checkpoint),
            experiment_name=f'{folder.name}_plain',
        )
    )
    return cfg


def test_an_epoch_shows_the_unlabeled_images_once(run: Any) -> None:
    assert len(run[3].losses) == 6  # 11 unlabeled ones, two in a batch


def test_the_plain_config_tests_the_teacher(run: Any) -> None:
    """The figure of the training's validation is that of its checkpoint, the best one included."""
    data, folder, runner, followed = run
    (best,) = (folder / 'run').glob('best_mIoU_epoch_*.pth')
    last = folder / 'run' / 'epoch_1.pth'
    held = [torch.load(str(path), map_location='cpu', **LOADED) for path in (last, best)]
    assert [set(each) & {'semi_supervised'} for each in held] == [{'semi_supervised'}, set()]
    for path in (last, best):
        tested = MapSageRunner.from_cfg(plain_config(data, folder, path)).test()
        assert [tested['mIoU']] == followed.figures


def test_maps_are_drawn_with_the_teacher_of_either_config(run: Any) -> None:
    data, folder, runner, _ = run
    path = folder / 'run' / 'epoch_1.pth'
    kept = torch.load(str(path), map_location='cpu', **LOADED)
    for cfg in (plain_config(data, folder, path), Config.fromfile(str(folder / 'run/semi.py'))):
        model = MODELS.build(cfg.model)
        load_weights(model, str(path))
        for name, value in model.state_dict().items():
            assert torch.equal(value, kept['state_dict'][name])
    trained = runner.model.state_dict()
    assert not torch.equal(
        trained['decode_head.conv_seg.weight'], kept['state_dict']['decode_head.conv_seg.weight']
    )
    assert 'loss' not in vars(runner.model)


def test_what_is_evaluated_is_the_teacher_of_the_checkpoint(run: Any) -> None:
    _, folder, runner, followed = run
    kept = torch.load(str(folder / 'run' / 'epoch_1.pth'), map_location='cpu', **LOADED)
    assert [runner.test()['mIoU']] == followed.figures
    assert len(followed.evaluated) == 2  # in the training, and behind it
    for state in followed.evaluated:
        assert all(torch.equal(value, kept['state_dict'][name]) for name, value in state.items())


def test_the_log_has_a_table_and_how_long_an_epoch_is(run: Any) -> None:
    (log,) = (run[1] / 'run').glob('*/*.log')
    text = log.read_text()
    assert '5 labeled and 11 unlabeled samples, 1 and 2 in each batch of a rank' in text
    assert 'has 6 steps' in text
    assert 'unlabeled pixels pass 0.15' in text and 'of these are right' in text


def test_a_threshold_that_nothing_passes_is_a_warning(run: Any, tmp_path: Path) -> None:
    semi_train(
        run[0],
        tmp_path / 'run',
        extra=(
            'custom_hooks[0].update(threshold=.99, patience=4)\n'
            "train_dataloader['sampler']['unlabeled'], train_dataloader['batch_size'] = 1, 2\n"
        ),
        **{'val_cfg': None, 'val_dataloader': None, 'val_evaluator': None},
    )
    (log,) = (tmp_path / 'run').glob('*/*.log')
    warned = [line for line in log.read_text().splitlines() if 'WARNING - [FixMatch]' in line]
    assert len(warned) == 2 and 'has one unlabeled image' in warned[0]
    assert 'of any class has passed the threshold 0.99 for 4 steps or more' in warned[1]


# Two scenes of 128 x 128 pixels: one with labels, one without and with no data of value 0.
SCENES = """
model['decode_head']['num_classes'] = 3
common = dict(type='GeoTiffDataset', data_root={root!r}, window=64, metainfo=dict(
    classes=('ground', 'house', 'water'), palette=[[1, 1, 1], [2, 2, 2], [3, 3, 3]]))
window = dict(type='LoadGeoTiffWindow')
train_dataloader['dataset'] = dict(
    type='SemiSupervisedDataset',
    labeled=dict(common, scenes='scenes/a.tif', labels='labels', pipeline=[
        window, dict(type='LoadGeoTiffLabels'), dict(type='PackSegInputs')]),
    unlabeled=dict(common, scenes='scenes/遥 感.tif', pipeline=[
        window, dict(type='HideLabels'), dict(type='RandomFlip', prob=0.5),
        dict(type='PackUnlabeledInputs')]))
model['data_preprocessor']['size'] = (64, 64)
train_dataloader.update(batch_size=5)
train_dataloader['sampler'].update(labeled=1, unlabeled=4)
val_cfg = val_dataloader = val_evaluator = None
train_cfg = dict(type='IterBasedTrainLoop', max_iters=2)
"""


def test_no_data_of_scenes_counts_nowhere(tmp_path: Path) -> None:
    """Each of the two steps shows all windows of the scene without labels."""
    classes = draw_classes(128, 128)
    values = paint(classes)
    write_raster(tmp_path / 'scenes' / 'a.tif', values)
    write_raster(tmp_path / 'labels' / 'a.tif', classes)
    values[:, :37, 20:] = 0
    write_raster(tmp_path / 'scenes' / '遥 感.tif', values, nodata=0)
    _, followed = semi_train(
        write_semi_data(tmp_path / 'data'),
        tmp_path / 'run',
        extra=SCENES.format(root=str(tmp_path)),
    )
    assert all(np.isfinite(followed.losses))
    (log,) = (tmp_path / 'run').glob('*/*.log')
    pixels = 2 * (128 * 128 - 37 * 108)
    assert re.search(rf'of 2 step\(s\): [\d.]+% of {pixels:,} unlabeled pixels', log.read_text())


REFUSED = {
    'the dataset': ("train_dataloader['dataset'] = labeled_dataset", 'sampler', {}),
    'the sampler': (
        "train_dataloader['sampler'] = dict(type='InfiniteSampler')",
        'expected LabeledUnlabeledSampler',
        {},
    ),
    'the batch': (
        "train_dataloader['batch_size'] = 4",
        'batch_size=4, and 1 labeled and 2 unlabeled samples',
        {},
    ),
    'an average': ("custom_hooks.append(dict(type='EMAHook'))", 'EMAHook, whose average', {}),
    'sampling': (
        "custom_hooks.append(dict(type='DynamicSamplingHook', score=dict("
        "type='LabelScore'), validity=dict(low=0.)))",
        'DynamicSamplingHook, which',
        {},
    ),
    'an encoder that is trained': (
        "custom_hooks[0]['views'] = 'features'",
        'are trained, the first',
        {},
    ),
    'images of a source': (
        OF_FEATURES + "custom_hooks[0]['views'] = 'images'\nfeature_source = dict(type='Local')",
        "set views='features'",
        {},
    ),
    'a step in two passes': (
        "model['decode_head']['loss_decode'] = [dict(type='CrossEntropyLoss'), "
        "dict(type='JaccardLoss')]\nenv_cfg['virtual_ranks'] = 2\n",
        'each step would be computed twice',
        {},
    ),
    'endless epochs': (
        '',
        'the first would never end',
        {'train_cfg': dict(_delete_=True, by_epoch=True, max_epochs=1)},
    ),
}


@pytest.mark.parametrize('name', REFUSED)
def test_what_does_not_suit_it_is_refused(run: Any, tmp_path: Path, name: str) -> None:
    extra, message, changes = REFUSED[name]
    runner = (
        MapSageRunner.from_cfg(semi_config(run[0], tmp_path / 'run', extra, **changes))
        if name != 'the dataset'
        else None
    )
    if runner is None:
        with pytest.raises(ValueError, match='expected a SemiSupervisedDataset'):
            MapSageRunner.from_cfg(semi_config(run[0], tmp_path / 'run', extra, **changes)).train()
        return
    with pytest.raises(ValueError, match=message) as raised:
        runner.train()
    assert isinstance(raised.value, SemiSupervisedError) or name == 'an encoder that is trained'


@pytest.mark.parametrize(
    'settings, message',
    [
        (dict(momentum=1.5), 'momentum=1.5'),
        (dict(cut_mix=-1), 'cut_mix=-1'),
        (dict(views='tokens'), "views='tokens', expected one of"),
        (dict(threshold=1), 'threshold=1'),
        (dict(views='features', strong=dict(blur=0.0)), 'leave it out'),
    ],
)
def test_arguments_out_of_range(settings: Dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FixMatchHook(**settings)
