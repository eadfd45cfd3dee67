"""Runs with adapters: what is in a checkpoint, resuming, testing, maps and exports from it."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any, Dict

import numpy as np
import pytest
import torch
from checkpoint_bits import checkpoint_bits
from support import check_finished, launch, write_tiny_config

from mapsage.models import DINOv3ViT
from mapsage.models.lora import is_adapter

ARCH = dict(embed_dims=32, num_layers=2, num_heads=2, feedforward_channels=48)
LOAD = {'weights_only': False} if torch.__version__ >= '2' else {}
# Everything at once that adapters must go with; the average and the frozen weights are those of
# the hooks in the checkpoint.
LORA = """
model.update(
    data_preprocessor=dict(type='SegDataPreProcessor', bgr_to_rgb=True, pad_val=0,
                           seg_pad_val=255, size=(64, 64)),
    backbone=dict(type='DINOv3ViT', arch={arch}, out_indices=(0, 1), with_cp=True,
                  lora=dict(rank=4, targets=('q', 'v', 'mlp.fc1')), frozen_stages={stages},
                  init_cfg=dict(type='Pretrained', checkpoint={weights!r})),
    decode_head=dict(
        type='LinearHead', in_channels=[32, 32], in_index=[0, 1],
        input_transform='resize_concat', channels=64, dropout_ratio=.1, num_classes=7,
        norm_cfg=dict(type='BN'), align_corners=False, loss_decode=dict(type='CrossEntropyLoss')))
optim_wrapper = dict({precision},
                     optimizer=dict(type='AdamW', lr=1e-2),
                     constructor='DINOv3LayerDecayConstructor', paramwise_cfg=dict(decay_rate=.9))
custom_hooks = [dict(type='EMAHook', momentum=.5), dict(type='TrainedWeightsHook')]
train_cfg = dict(type='IterBasedTrainLoop', max_iters=4, val_interval=4)
default_hooks['checkpoint']['interval'] = 2
default_hooks['preview'] = None
"""
# torch 1.10 has no layer norm of bfloat16 on the CPU.
PRECISION = "type='AmpOptimWrapper', dtype='bfloat16'" if LOAD else "type='OptimWrapper'"
SAMPLING = """
custom_hooks.append(dict(
    type='DynamicSamplingHook', score=dict(type='LabelScore'), validity=dict(low=0., high=1.)))
"""
TEST = [sys.executable, 'tools/test.py']


def load(path: Path) -> Dict[str, Any]:
    return torch.load(str(path), map_location='cpu', **LOAD)


def pretrained(path: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    backbone = DINOv3ViT(ARCH, out_indices=(0, 1), normalization='web')
    for name, value in backbone.named_parameters():
        if 'gamma' in name:
            value.data.fill_(0.3)
    torch.save(backbone.state_dict(), str(path))
    return path


def scores(folder: Path) -> float:
    (found,) = {
        line['mIoU']
        for path in folder.glob('*/**/*.json')
        for line in map(json.loads, path.read_text().splitlines())
        if 'mIoU' in line
    }
    return found


@pytest.fixture(scope='module')
def run(tmp_path_factory: Any) -> Any:
    """A finished run on three ranks: its folder, its config and its pretrained weights."""
    from support import write_tiny_data

    folder = tmp_path_factory.mktemp('lora')
    weights = pretrained(folder / 'weights.pth', 0)
    data = write_tiny_data(folder / 'data')
    config = write_tiny_config(
        folder / 'lora.py',
        data,
        LORA.format(arch=ARCH, weights=str(weights), stages=-1, precision=PRECISION),
    )
    finished = launch(config, '--work-dir', folder / 'run', ranks=3)
    check_finished(finished)
    return folder, config, weights, finished.output


def test_a_checkpoint_holds_what_is_trained(run: Any) -> None:
    folder, _, weights, output = run
    checkpoint = load(folder / 'run' / 'iter_4.pth')
    names = set(checkpoint['state_dict'])
    assert {name for name in names if name.startswith('backbone.')} == {
        name for name in names if is_adapter(name)
    }
    assert any(name.startswith('decode_head.') for name in names)
    assert {name[7:] for name in checkpoint['ema_state_dict'] if name != 'steps'} == names
    assert set(checkpoint['meta']['left_out_weights']['names']) == {
        f'backbone.{name}' for name in load(weights)
    }
    assert any(
        float(value.abs().sum()) > 0
        for name, value in checkpoint['state_dict'].items()
        if '.lora_B.' in name
    )
    assert 'layers of DINOv3ViT: ' in output and 'checkpoints hold' in output
    assert 'the LoRA adapters of the pretrained encoder (DINOv3ViT, ' in output  # at a rate of 1e-2
    assert 'on average (0.0081 to 0.009). At 1e-4 a DINOv2-L' in output


def test_a_resumed_run_has_the_same_bits(run: Any, tmp_path: Path) -> None:
    folder, config, _, _ = run
    (tmp_path / 'cut').mkdir()
    shutil.copy(str(folder / 'run' / 'iter_2.pth'), str(tmp_path / 'cut'))
    check_finished(launch(config, '--work-dir', tmp_path / 'cut', '--resume', 'must', ranks=3))
    whole, cut = (
        checkpoint_bits(path / 'iter_4.pth') for path in (folder / 'run', tmp_path / 'cut')
    )
    assert whole == cut


def test_a_test_restores_the_frozen_weights(run: Any, tmp_path: Path) -> None:
    folder, config, _, _ = run
    checkpoint = folder / 'run' / 'iter_4.pth'
    check_finished(launch(config, checkpoint, '--work-dir', tmp_path / 'test', command=TEST))
    assert scores(tmp_path / 'test') == scores(folder / 'run')


@pytest.mark.parametrize(
    'seed, message',
    [
        (None, 'come from .*weights.pth, but these cannot be loaded: .*none.pth do not exist'),
        (1, r'come from .*weights.pth \(hash \w+\).*are different \(hash \w+\).*Point '),
    ],
)
def test_without_the_right_weights(run: Any, tmp_path: Path, seed: Any, message: str) -> None:
    folder, config, _, _ = run
    path = tmp_path / 'none.pth' if seed is None else pretrained(tmp_path / 'other.pth', seed)
    finished = launch(
        config,
        folder / 'run' / 'iter_4.pth',
        '--work-dir',
        tmp_path / 'test',
        '--cfg-options',
        f'model.backbone.init_cfg.checkpoint={path}',
        command=TEST,
    )
    assert finished.status == 1 and 'Traceback' not in finished.output
    assert re.search(message, finished.output.replace('\n', ' ')), finished.output[-2000:]


@pytest.mark.parametrize(
    'extra, message',
    [
        (
            "model['backbone'].pop('init_cfg'); model['backbone']['normalization'] = 'web'",
            'names no pretrained weights to restore them from',
        ),
        ("model['backbone'].pop('lora')", 'nothing in model.backbone (DINOv3ViT) is frozen'),
        ('load_from = {other!r}', 'differ from backbone.init_cfg'),
    ],
)
def test_what_cannot_be_left_out_is_an_error_at_the_start(
    run: Any, tmp_path: Path, extra: str, message: str
) -> None:
    folder, config, weights, _ = run
    other = {
        f'backbone.{name}': value
        for name, value in load(pretrained(tmp_path / 'other.pth', 1)).items()
    }
    torch.save(dict(state_dict=other), str(tmp_path / 'whole.pth'))
    changed = tmp_path / 'changed.py'
    changed.write_text(config.read_text() + extra.format(other=str(tmp_path / 'whole.pth')))
    finished = launch(changed, '--work-dir', tmp_path / 'run', ranks=1)
    assert finished.status == 1 and message in finished.output.replace('\n', ' ')
    assert 'Traceback' not in finished.output


def test_with_dynamic_sampling_on_two_ranks(run: Any, tmp_path: Path) -> None:
    folder, config, _, _ = run
    sampled = tmp_path / 'sampled.py'
    sampled.write_text(config.read_text() + SAMPLING)
    check_finished(launch(sampled, '--work-dir', tmp_path / 'run', ranks=2))
    state = load(tmp_path / 'run' / 'iter_4.pth')['state_dict']
    assert all(float(value.abs().sum()) > 0 for name, value in state.items() if '.lora_B.' in name)


def test_maps_are_those_of_the_merged_model(run: Any, tmp_path: Path) -> None:
    """The merged model needs neither the adapters' config nor the pretrained weights."""
    import rasterio

    folder, config, _, _ = run
    image = folder / 'data' / 'img_dir' / 'val' / '0.png'
    merged = tmp_path / 'merged.pth'
    check_finished(
        launch(
            config,
            folder / 'run' / 'iter_4.pth',
            '--merged',
            merged,
            '--peft',
            tmp_path / 'peft',
            command=[sys.executable, 'tools/export_lora.py'],
        )
    )
    assert 'lora=' not in merged.with_suffix('.py').read_text()
    maps = []
    for name, given in (
        ('adapters', [config, folder / 'run' / 'iter_4.pth']),
        ('merged', [merged.with_suffix('.py'), merged]),
    ):
        check_finished(
            launch(
                *given,
                image,
                '--out',
                tmp_path / name,
                '--confidence',
                '--accelerator',
                'cpu',
                command=[sys.executable, 'tools/predict.py'],
            )
        )
        with rasterio.open(str(tmp_path / name / '0.tif')) as classes, rasterio.open(
            str(tmp_path / name / '0_confidence.tif')
        ) as confidence:
            maps.append((classes.read(1), confidence.read(1).astype(int)))
    assert np.array_equal(maps[0][0], maps[1][0]) and np.ptp(maps[0][1]) > 0
    assert np.abs(maps[0][1] - maps[1][1]).max() <= 1
    again = launch(
        config,
        folder / 'run' / 'iter_4.pth',
        '--merged',
        merged,
        command=[sys.executable, 'tools/export_lora.py'],
    )
    assert again.status == 1 and 'exists already' in again.output


def test_with_every_stage_frozen_there_is_nothing_to_adapt(run: Any) -> None:
    folder, config, _, _ = run
    finished = launch(
        config,
        '--work-dir',
        folder / 'none',
        '--cfg-options',
        'model.backbone.frozen_stages=2',
        ranks=1,
    )
    assert finished.status == 1 and 'leaves no block of DINOv3ViT to adapt' in finished.output
