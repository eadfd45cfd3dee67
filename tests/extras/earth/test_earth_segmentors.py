"""The encoders in segmentors: FPN, UPerNet, a linear head and PMT, from the loss to scores.

Also what a training writes about the license of the weights.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Dict, List

import pytest
import torch
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from mmengine.structures import PixelData
from mmseg.structures import SegDataSample

from mapsage.engine.guards.reproducibility import ReproducibilityHook
from mapsage.extras.export.model_card import license_of
from mapsage.models.weight_license import find_licenses

SENSORS = dict(s2=dict(bands=('B02', 'B03', 'B04', 'B8A'), max_dates=2))
ARCH: Dict[str, Any] = dict(embed_dims=32, num_layers=4, num_heads=2)
BACKBONES = dict(
    OlmoEarth=dict(arch=dict(ARCH, pixel_channels=4), patch_size=8),
    TerraMind=dict(arch=ARCH),
    PrithviEO=dict(arch=ARCH),
    DOFA=dict(arch=ARCH, mean=dict(s2=[2000.0] * 4), std=dict(s2=[1500.0] * 4)),
)
GROUPS = dict(type='GN', num_groups=8)
COMMON = dict(
    num_classes=3,
    norm_cfg=GROUPS,
    align_corners=False,
    loss_decode=dict(type='CrossEntropyLoss', avg_non_ignore=True),
)
PYRAMID = dict(
    type='Feature2Pyramid', embed_dim=32, rescales=[4, 2, 1, 0.5], norm_cfg=dict(type='BN')
)
WIDE: Dict[str, Any] = dict(in_channels=[32] * 4, in_index=[0, 1, 2, 3])
HEADS: Dict[str, Dict[str, Any]] = {
    'UPerNet': dict(neck=PYRAMID, decode_head=dict(type='UPerHead', channels=16, **WIDE, **COMMON)),
    'FPN': dict(
        neck=[PYRAMID, dict(type='FPN', in_channels=[32] * 4, out_channels=16, num_outs=4)],
        decode_head=dict(
            type='FPNHead',
            channels=16,
            feature_strides=[2, 4, 8, 16],
            in_channels=[16] * 4,
            in_index=[0, 1, 2, 3],
            **COMMON,
        ),
    ),
    'linear': dict(
        decode_head=dict(
            type='LinearHead',
            channels=128,
            dropout_ratio=0.0,
            input_transform='resize_concat',
            **WIDE,
            **COMMON,
        )
    ),
    'PMT': dict(
        decode_head=dict(
            type='PMTHead',
            in_channels=[32] * 4,
            num_heads=2,
            num_blocks=2,
            num_queries=5,
            num_prefix=0,
            num_classes=3,
            norm_cfg=dict(type='BN1d'),
            loss_decode=dict(type='MaskClassLoss'),
        )
    ),
}


def segmentor(backbone: str, head: str, **settings: Any) -> Dict[str, Any]:
    return dict(
        type='EncoderDecoder',
        data_preprocessor=dict(
            type='StackDataPreProcessor', sensors=SENSORS, size=(32, 32), pad_val=0, seg_pad_val=255
        ),
        backbone=dict(type=backbone, sensors=SENSORS, **BACKBONES[backbone], **settings),
        **HEADS[head],
        train_cfg=dict(),
        test_cfg=dict(mode='whole'),
    )


def batch_of(model: Any) -> Any:
    generator = torch.Generator().manual_seed(0)
    images, samples = [], []
    for number in range(2):
        pixels = torch.rand(8, 32, 32, generator=generator) * 4000
        valid = torch.ones(2, 32, 32)
        days = (45000.0, 45100.0)
        if number:
            valid[1] = 0
            days = (45000.0, 0.0)
        labels = torch.zeros(1, 32, 32, dtype=torch.long)
        labels[..., 16:] = 1 + number
        images.append(torch.cat([pixels, valid]))
        samples.append(
            SegDataSample(
                metainfo=dict(days=days, ori_shape=(32, 32), img_shape=(32, 32)),
                gt_sem_seg=PixelData(data=labels),
            )
        )
    return model.data_preprocessor(dict(inputs=images, data_samples=samples), training=True)


@pytest.mark.parametrize('head', HEADS)
@pytest.mark.parametrize('backbone', BACKBONES)
def test_a_training_lowers_the_loss(backbone: str, head: str) -> None:
    """Ten steps with tiny random weights, one of whose samples misses a date."""
    init_default_scope('mmseg')
    torch.manual_seed(0)
    model: Any = MODELS.build(Config(segmentor(backbone, head))).train()
    batch = batch_of(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(10):
        loss, _ = model.parse_losses(model(**batch, mode='loss'))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert min(losses[-3:]) < 0.9 * losses[0], losses
    assert all(parameter.grad is not None for parameter in model.parameters())
    with torch.no_grad():
        predictions = model.eval()(**batch, mode='predict')
    assert predictions[1].pred_sem_seg.data.shape == (1, 32, 32)


def licensed(tmp_path: Any) -> Any:
    cfg = segmentor(
        'OlmoEarth',
        'linear',
        init_cfg=dict(type='Pretrained', checkpoint=str(tmp_path / 'weights.pth')),
    )
    return MODELS.build(cfg), Config(dict(model=cfg))


def test_only_published_weights_have_a_license(tmp_path: Any) -> None:
    init_default_scope('mmseg')
    assert find_licenses(MODELS.build(segmentor('OlmoEarth', 'linear'))) == []
    model, _ = licensed(tmp_path)
    assert [license_.name for license_ in find_licenses(model)] == ['OlmoEarth Artifact License']


def test_the_license_is_in_checkpoints_of_all_runs_that_follow(tmp_path: Any) -> None:
    init_default_scope('mmseg')
    model, _ = licensed(tmp_path)
    first: Dict[str, Any] = dict(meta={})
    ReproducibilityHook().before_save_checkpoint(SimpleNamespace(model=model), first)
    (stated,) = first['meta']['weights_licenses']
    assert stated['name'] == 'OlmoEarth Artifact License' and 'military' in stated['forbids']
    # A run whose config names no weights, but that starts from this checkpoint.
    lines: List[str] = []
    unnamed = SimpleNamespace(
        model=MODELS.build(segmentor('OlmoEarth', 'linear')),
        _resume=False,
        logger=SimpleNamespace(info=lines.append),
    )
    hook, second = ReproducibilityHook(), dict(meta={})  # type: Any, Dict[str, Any]
    hook.after_load_checkpoint(unnamed, first)
    hook.before_save_checkpoint(unnamed, second)
    assert second['meta']['weights_licenses'] == [stated]
    assert len(lines) == 1 and 'It forbids use by the military' in lines[0]


@pytest.mark.parametrize('from_checkpoint', [False, True])
def test_the_license_is_in_the_model_card(tmp_path: Any, from_checkpoint: bool) -> None:
    """The config names the weights, or a checkpoint of an earlier run does that the run began with."""
    from mapsage.extras.export.card import _license

    init_default_scope('mmseg')
    model, cfg = licensed(tmp_path)
    meta: Dict[str, Any] = {}
    if from_checkpoint:
        meta['weights_licenses'] = [license_._asdict() for license_ in find_licenses(model)]
        cfg = Config(dict(model=segmentor('OlmoEarth', 'linear'), load_from='weights.pth'))
        model = MODELS.build(cfg.model)
    text = _license(license_of(cfg, model, str(tmp_path), meta))
    assert 'OlmoEarth Artifact License' in text and 'It forbids use by the military' in text
    assert '`weights.pth`' in text and 'No license is stated' not in text


def test_a_prediction_says_what_the_license_forbids(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mapsage.maps import model as module

    init_default_scope('mmseg')
    model, _ = licensed(tmp_path)
    lines: List[str] = []
    monkeypatch.setattr(module, 'print_log', lambda text, **settings: lines.append(text))
    for licenses in ([], [license_._asdict() for license_ in find_licenses(model)]):
        path = str(tmp_path / 'iter_1.pth')
        torch.save(dict(state_dict=model.state_dict(), meta=dict(weights_licenses=licenses)), path)
        module.load_weights(model, path)
    assert len(lines) == 1 and lines[0].startswith(f'{path} was trained from published weights')
    assert 'It forbids use by the military' in lines[0]
