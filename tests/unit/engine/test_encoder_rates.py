"""The warning about a pretrained encoder that trains at a rate that has collapsed others."""

from __future__ import annotations

from typing import Any, Optional

import pytest
from mmengine.optim import build_optim_wrapper
from mmengine.registry import MODELS
from mmseg.utils import register_all_modules
from torch import nn

from mapsage.engine.encoder_rates import RateWarning, encoder_rate_warning

register_all_modules(init_default_scope=False)
pytestmark = pytest.mark.usefixtures('mmseg_scope')

DINOV3 = dict(
    type='DINOv3ViT', arch=dict(embed_dims=16, num_layers=4, num_heads=2, feedforward_channels=24)
)
WEIGHTS = dict(type='Pretrained', checkpoint='weights/vit.pth')


class Segmentor(nn.Module):
    def __init__(self, **backbone: Any) -> None:
        super().__init__()
        self.backbone = MODELS.build(backbone)
        self.decode_head = nn.Conv2d(16, 2, 1)


def warning(
    lr: float,
    optimizer: str = 'AdamW',
    load_from: Optional[str] = None,
    constructor: str = 'DefaultOptimWrapperConstructor',
    paramwise: Any = None,
    initial: bool = False,
    **backbone: Any,
) -> Optional[RateWarning]:
    model = Segmentor(**dict(DINOV3, **backbone))
    wrapper = build_optim_wrapper(
        model,
        dict(
            type='OptimWrapper',
            constructor=constructor,
            paramwise_cfg=paramwise,
            optimizer=dict(type=optimizer, lr=lr),
        ),
    )
    if initial:  # a warm-up that has begun
        for group in wrapper.optimizer.param_groups:
            group.update(initial_lr=group['lr'], lr=group['lr'] * 1e-6)
    return encoder_rate_warning(model, wrapper, load_from)


def test_the_rate_the_figures_and_what_to_set() -> None:
    found = warning(2e-4, init_cfg=WEIGHTS)
    assert found is not None
    assert 'DINOv3ViT, weights/vit.pth) trains at a learning rate of 0.0002' in found.text
    assert '51.8' in found.text and '21.3' in found.text and '24.3' in found.text
    assert 'lr_mult=0.05)' in found.next_step
    again = warning(
        2e-4, init_cfg=WEIGHTS, paramwise=dict(custom_keys=dict(backbone=dict(lr_mult=0.05)))
    )
    assert again is None


def test_layer_decay_counts() -> None:
    decayed: Any = dict(constructor='DINOv3LayerDecayConstructor', init_cfg=WEIGHTS)
    found = warning(3.2e-3, paramwise=dict(decay_rate=0.5), **decayed)
    # The blocks train at 1/2 to 1/16, the embedding at 1/32 and the last norm at the whole rate.
    assert found is not None and 'on average (0.0001 to 0.0032)' in found.text
    assert warning(1e-4, paramwise=dict(decay_rate=0.5), **decayed) is None


@pytest.mark.parametrize(
    'settings',
    [
        dict(lr=1e-4, init_cfg=WEIGHTS),
        dict(lr=1e-4, load_from='stage1.pth'),
        dict(lr=1e-4, initial=True, init_cfg=WEIGHTS),
        dict(lr=3e-4, lora=dict(rank=2), init_cfg=WEIGHTS),
    ],
)
def test_what_is_warned_about(settings: Any) -> None:
    found = warning(**settings)
    assert found is not None
    assert found.text.startswith('the LoRA adapters of') == ('lora' in settings)


@pytest.mark.parametrize(
    'settings',
    [
        dict(lr=1e-2),
        dict(lr=1e-2, lora=dict(rank=2)),  # from scratch
        dict(lr=1e-2, init_cfg=WEIGHTS, frozen=True),
        dict(lr=6e-5, init_cfg=WEIGHTS),
        dict(lr=1e-2, optimizer='SGD', init_cfg=WEIGHTS),
    ],
)
def test_what_is_not(settings: Any) -> None:
    assert warning(**settings) is None


def test_other_models() -> None:
    resnet = Segmentor(type='ResNet', depth=18, init_cfg=WEIGHTS)
    wrapper: Any = build_optim_wrapper(
        resnet, dict(type='OptimWrapper', optimizer=dict(type='AdamW', lr=1e-2))
    )
    assert encoder_rate_warning(resnet, wrapper) is None
    beit = Segmentor(
        type='BEiT', img_size=32, embed_dims=16, num_layers=2, num_heads=2, init_cfg=WEIGHTS
    )
    wrapper = build_optim_wrapper(
        beit, dict(type='OptimWrapper', optimizer=dict(type='AdamW', lr=1e-4))
    )
    assert encoder_rate_warning(beit, wrapper) is not None
    assert encoder_rate_warning(nn.Linear(1, 1), wrapper) is None
