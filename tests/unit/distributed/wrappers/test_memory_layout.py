"""Channels last: the order in memory changes, and neither the values nor what is drawn does."""

from __future__ import annotations

import copy
import io
from typing import Any, Dict, Tuple

import numpy as np
import pytest
import torch
from mask_models import CLASSES, build, eomt_config, labels_of, losses_of, pmt_config
from mmengine.config import Config
from support import ON_MAIN_LEG, ROOT
from torch import nn

from mapsage.accelerator import resolve_accelerator, set_current_accelerator
from mapsage.distributed.wrappers.memory_layout import drawn_in_order, put_channels_last
from mapsage.maps.predictor import WindowPredictor


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.Conv2d(8, 2, 1),
        nn.Flatten(),
        nn.Linear(128, 4),
    )


def is_last(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous(memory_format=torch.channels_last)


def draw(model: nn.Module) -> None:
    torch.manual_seed(5)
    for each in model.parameters():
        nn.init.normal_(each)


def test_values_stay_and_the_order_is_kept_by_results_and_copies() -> None:
    plain, last = net(), put_channels_last(net())
    assert not is_last(plain[0].weight) and is_last(last[0].weight)
    for one, other in zip(plain.parameters(), last.parameters()):
        assert torch.equal(one, other)
    images = torch.randn(2, 3, 8, 8)
    assert is_last(last[0](images)) or not ON_MAIN_LEG  # torch 1.10 on the CPU: contiguous
    assert torch.allclose(last(images), plain(images), atol=1e-5)
    assert is_last(copy.deepcopy(last)[0].weight)
    last(images).sum().backward()
    assert is_last(last[0].weight.grad)


def test_checkpoints_go_both_ways() -> None:
    plain, last = net(), put_channels_last(net())
    draw(plain)
    for source, target in ((plain, last), (last, net())):
        file = io.BytesIO()
        torch.save(source.state_dict(), file)
        file.seek(0)
        before = [each.stride() for each in target.parameters()]
        target.load_state_dict(torch.load(file))
        assert [each.stride() for each in target.parameters()] == before
        for one, other in zip(source.parameters(), target.parameters()):
            assert torch.equal(one, other)


def test_weights_are_drawn_as_without_it() -> None:
    plain, last = net(), put_channels_last(net())
    optimized = list(last.parameters())
    strides = [each.stride() for each in optimized]
    draw(plain)
    with drawn_in_order(last):
        draw(last)
    for one, other in zip(plain.parameters(), last.parameters()):
        assert torch.equal(one, other)
    assert all(one is other for one, other in zip(optimized, last.parameters()))
    assert [each.stride() for each in last.parameters()] == strides


EFFICIENTNET = ROOT / 'configs' / '_base_' / 'efficientnet_lite0_fpn.py'


def efficientnet_config() -> Any:
    cfg = Config.fromfile(str(EFFICIENTNET)).model
    cfg.backbone.update(init_cfg=None, norm_eval=False)  # random weights want their own statistics
    cfg.data_preprocessor.size = (64, 64)
    cfg.decode_head.num_classes = CLASSES
    return cfg


def step_of(model: Any) -> Tuple[float, Dict[str, torch.Tensor]]:
    loss, _ = model.parse_losses(losses_of(model, labels_of(2)))
    loss.backward()
    return float(loss), {
        name: each.grad for name, each in model.named_parameters() if each.grad is not None
    }


@pytest.mark.parametrize('name', ['efficientnet', 'eomt', 'pmt'])
def test_models_compute_the_same(name: str) -> None:
    set_current_accelerator(resolve_accelerator('cpu'))
    plain = build(dict(efficientnet=efficientnet_config, eomt=eomt_config, pmt=pmt_config)[name]())
    last = put_channels_last(copy.deepcopy(plain))
    for each in (plain, last):
        each.train()
    assert any(not each.is_contiguous() for each in last.parameters())
    (loss, gradients), (other, others) = step_of(plain), step_of(last)
    assert other == pytest.approx(loss, rel=1e-4) and gradients.keys() == others.keys()
    largest = max(each.norm() for each in gradients.values())
    for key, each in gradients.items():  # some are nothing but rounding
        assert (others[key] - each).norm() <= 1e-2 * each.norm() + 1e-4 * largest, key
    # As tools/predict.py asks, with mirror images.
    windows = torch.randint(0, 255, (3, 3, 64, 64), dtype=torch.uint8)
    scores = [
        WindowPredictor(each, torch.device('cpu'), (64, 64), 8, 2, tta=True)(windows)
        for each in (plain, last)
    ]
    assert np.allclose(scores[0], scores[1], atol=1e-3)
