"""A run of two ranks starts from the DINOv3 weights of the file, on both."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from support import check_finished, launch, write_tiny_config

from mapsage.models import DINOv3ViT

LOAD = {'weights_only': False} if torch.__version__ >= '2' else {}
ARCH = dict(embed_dims=16, num_layers=2, num_heads=2, feedforward_channels=32)

# The last block learns, the rest is frozen; a linear layer on top.
BACKBONE = """
model = dict(
    type='EncoderDecoder',
    data_preprocessor=dict(type='SegDataPreProcessor', bgr_to_rgb=True, pad_val=0,
                           seg_pad_val=255, size=(64, 64)),
    backbone=dict(type='DINOv3ViT', arch={arch}, out_indices=(1, ), frozen_stages=1,
                  init_cfg=dict(type='Pretrained', checkpoint={path!r})),
    decode_head=dict(type='LinearHead', in_channels=16, channels=16, num_classes=7,
                     dropout_ratio=0, norm_cfg=dict(type='SyncBN'), align_corners=False,
                     loss_decode=dict(type='CrossEntropyLoss')),
    train_cfg=dict(), test_cfg=dict(mode='whole'))
optim_wrapper = dict(type='OptimWrapper', optimizer=dict(type='AdamW', lr=0.01),
                     constructor='DINOv3LayerDecayConstructor', paramwise_cfg=dict(decay_rate=0.5))
train_cfg = dict(type='IterBasedTrainLoop', max_iters=3, val_interval=3)
default_hooks['checkpoint']['interval'] = 3
"""


def test_weights_of_the_file_reach_both_ranks_and_frozen_ones_stay(
    tiny_data: Path, tmp_path: Path
) -> None:
    torch.manual_seed(1)  # the run's seed is another
    path = tmp_path / 'sat493m.pth'
    torch.save(DINOv3ViT(ARCH, out_indices=(1,)).state_dict(), str(path))
    config = write_tiny_config(
        tmp_path / 'dinov3.py', tiny_data, BACKBONE.format(arch=ARCH, path=str(path))
    )
    finished = launch(config, '--work-dir', tmp_path / 'run', '--verbose')
    check_finished(finished)
    checked = re.findall(
        r'^[01] +\S+ +\S+ +\d+ +[\d.]+ +([0-9a-f]{8}) +good', finished.output, re.M
    )
    assert len(checked) == 2 and checked[0] == checked[1], finished.output[-3000:]
    assert finished.output.count('mapsage weights of') == 1  # one rank writes the log
    before = torch.load(str(path), **LOAD)
    after = torch.load(str(tmp_path / 'run' / 'iter_3.pth'), **LOAD)['state_dict']
    same = {name: torch.equal(value, after[f'backbone.{name}']) for name, value in before.items()}
    assert all(equal for name, equal in same.items() if not name.startswith(('blocks.1', 'norm')))
    assert not same['blocks.1.mlp.fc1.weight'] and not same['norm.weight']
