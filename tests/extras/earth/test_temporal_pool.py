"""Pooling over dates: missing dates change nothing, and a stack without any date gives no NaN."""

from __future__ import annotations

import pytest
import torch
from mmengine.registry import MODELS, DefaultScope
from support import ON_MAIN_LEG
from torch import nn

from mapsage.extras.earth.temporal_attention import TemporalAttention, _normalize
from mapsage.geo.stacks import StackLayout, StackLayoutError
from mapsage.models import StackBackbone, TemporalPool

SENSORS = dict(
    s2=dict(bands=['B02', 'B03', 'B04'], max_dates=3), sar=dict(bands=['vv', 'vh'], max_dates=2)
)
CHANNELS = [16, 32]
HEADS = dict(heads=8)


@MODELS.register_module()
class HalvedTwice(nn.Module):
    """Two levels at a half and a quarter of the side of the image."""

    def __init__(self, in_channels: int = 3) -> None:
        super().__init__()
        self.first = nn.Conv2d(in_channels, CHANNELS[0], 2, 2)
        self.second = nn.Conv2d(CHANNELS[0], CHANNELS[1], 2, 2)

    def forward(self, images):
        first = self.first(images)
        return first, self.second(first)


def backbone_of(sensors=SENSORS, **arguments):
    torch.manual_seed(0)
    encoder = {
        name: dict(type='HalvedTwice', in_channels=len(sensor['bands']))
        for name, sensor in sensors.items()
    }
    return StackBackbone(sensors, **dict(dict(encoder=encoder), **arguments))


def inputs_of(
    valid=None, days=(45000.0, 45100.0, 45200.0, 45000.0, 45100.0), sensors=SENSORS, seed=1
):
    """Return the input of two stacks of 16 x 16 pixels; ``valid`` by date, for all pixels."""
    layout = StackLayout.of_config(sensors)
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(2, layout.image_channels, 16, 16, generator=generator)
    images[:, layout.pixel_channels :] = torch.tensor(valid or [1.0] * layout.dates)[:, None, None]
    return layout.add_planes(images, torch.tensor([days] * 2))


@pytest.mark.parametrize(
    'pool, channels',
    [('mean', [32, 64]), ('max', [32, 64]), ('attention', [32, 64]), ('concat', [80, 160])],
)
def test_dates_and_sensors_are_pooled_at_each_level(pool, channels):
    neck = TemporalPool(SENSORS, CHANNELS, pool, attention=HEADS)
    assert neck.out_channels == channels
    levels = neck(backbone_of()(inputs_of()))
    assert [tuple(level.shape) for level in levels] == [
        (2, channels[0], 8, 8),
        (2, channels[1], 4, 4),
    ]
    assert all(torch.isfinite(level).all() for level in levels)


def test_mean_and_max_are_over_the_valid_dates_of_a_cell():
    sensors = dict(s2=SENSORS['s2'])
    backbone = backbone_of(sensors)
    inputs = inputs_of(days=(45000.0, 45100.0, 45200.0), sensors=sensors)
    layout = StackLayout.of_config(sensors)
    # The second date is clouded in the left half, the third has a cloud over half of a cell.
    inputs[:, layout.pixel_channels + 1, :, :8] = 0
    inputs[:, layout.pixel_channels + 2, 0, :2] = 0
    levels = [level.reshape(2, 3, -1, *level.shape[2:]) for level in backbone(inputs)[:-1]]
    first = levels[0][:, :, :, 0, 0]
    mean, largest = (
        TemporalPool(sensors, CHANNELS, pool)(backbone(inputs))[0] for pool in ('mean', 'max')
    )
    assert torch.allclose(mean[:, :, 0, 0], (first[:, 0] + 0.5 * first[:, 2]) / 1.5)
    assert torch.equal(largest[:, :, 0, 0], torch.maximum(first[:, 0], first[:, 2]))
    assert torch.allclose(mean[:, :, 7, 7], levels[0][:, :, :, 7, 7].mean(1))


@pytest.mark.parametrize('pool', ['mean', 'max', 'attention'])
def test_what_a_missing_date_holds_changes_nothing(pool):
    torch.manual_seed(0)
    neck = TemporalPool(SENSORS, CHANNELS, pool, attention=HEADS).eval()
    backbone = backbone_of()
    layout = StackLayout.of_config(SENSORS)
    inputs = inputs_of([1.0, 0.0, 1.0, 0.0, 1.0], (45000.0, 0.0, 45200.0, 0.0, 45100.0))
    others = inputs.clone()
    others[:, 3:6] = 7.0
    others[:, 9:11] = -5.0
    for expected, level in zip(neck(backbone(inputs)), neck(backbone(others))):
        assert torch.equal(expected, level)
    # The valid dates do matter.
    others[:, :3] += 1
    assert not torch.equal(neck(backbone(inputs))[1], neck(backbone(others))[1])
    assert layout.input_channels == inputs.shape[1]


@pytest.mark.parametrize('fuse', ['concat', 'mean'])
@pytest.mark.parametrize('pool', ['mean', 'max', 'attention'])
def test_a_stack_without_any_date_is_zero_and_has_finite_gradients(pool, fuse):
    backbone, neck = backbone_of(), TemporalPool(SENSORS, CHANNELS, pool, fuse, HEADS)
    levels = neck(backbone(inputs_of([0.0] * 5, (0.0,) * 5)))
    assert not any(level.detach().any() for level in levels)
    sum(level.sum() for level in levels).backward()
    assert all(
        torch.isfinite(parameter.grad).all()
        for module in (backbone, neck)
        for parameter in module.parameters()
        if parameter.grad is not None
    )


def test_the_mean_of_sensors_leaves_out_those_without_data():
    backbone = backbone_of()
    neck = TemporalPool(SENSORS, CHANNELS, 'mean', 'mean')
    only = TemporalPool(dict(s2=SENSORS['s2']), CHANNELS, 'mean')
    inputs = inputs_of([1.0, 1.0, 1.0, 0.0, 0.0])
    levels = backbone(inputs)
    facts = levels[-1][:, [0, 1, 2, 5, 6, 7]]
    expected = only([levels[0][:, :48], levels[1][:, :96], facts])
    for level, other in zip(neck(levels), expected):
        assert torch.allclose(level, other, atol=1e-6)


def test_attention_depends_on_the_dates_and_not_on_their_order():
    torch.manual_seed(0)
    sensors = dict(s2=SENSORS['s2'])
    neck = TemporalPool(sensors, CHANNELS, 'attention', attention=HEADS).eval()
    backbone = backbone_of(sensors)
    inputs = inputs_of(days=(45000.0, 45100.0, 45200.0), sensors=sensors)
    swapped = inputs.clone()
    swapped[:, :3], swapped[:, 3:6] = inputs[:, 3:6], inputs[:, :3]
    swapped[:, 12], swapped[:, 13] = inputs[:, 13], inputs[:, 12]
    later = inputs.clone()
    later[:, 12] += 60
    expected, same, other = (neck(backbone(stack))[1] for stack in (inputs, swapped, later))
    assert torch.allclose(expected, same, atol=1e-6)
    assert (expected - other).abs().max() > 1e-3


def test_all_dates_as_channels_are_one_image():
    layout = StackLayout.of_config(SENSORS)
    backbone = backbone_of(
        encoder=dict(type='HalvedTwice', in_channels=layout.pixel_channels), dates='channels'
    )
    inputs = inputs_of()
    levels = backbone(inputs)
    assert [tuple(level.shape) for level in levels] == [(2, 16, 8, 8), (2, 32, 4, 4)]
    assert torch.equal(levels[0], backbone.encoders['shared'].first(inputs[:, :13]))


@pytest.mark.parametrize(
    'build, message',
    [
        (lambda: StackBackbone(SENSORS, dict(type='HalvedTwice')), r'sensors with \[2, 3\] bands'),
        (
            lambda: StackBackbone(SENSORS, dict(s2=dict(type='HalvedTwice'))),
            'expected one config, or',
        ),
        (
            lambda: backbone_of(
                encoder=dict(s2=dict(type='HalvedTwice'), sar=dict(type='HalvedTwice'))
            ),
            "the encoder of sensor 'sar', HalvedTwice, has in_channels=3, expected 2",
        ),
        (
            lambda: StackBackbone(
                dict(s2=SENSORS['s2']), dict(type='HalvedTwice'), dates='channels'
            ),
            'the encoder of all sensors, HalvedTwice, has in_channels=3, expected 9',
        ),
        (lambda: StackBackbone(SENSORS, {}, dates='all'), "expected 'separate' or 'channels'"),
        (lambda: TemporalPool(SENSORS, CHANNELS, 'median'), "pool='median'"),
        (lambda: TemporalPool(SENSORS, dict(s2=[16, 32])), 'expected as many levels'),
        (lambda: TemporalPool(SENSORS, CHANNELS, 'concat', 'mean'), "fuse='mean' of sensors"),
        (lambda: TemporalPool(SENSORS, [24, 64], 'attention'), 'multiples of heads'),
        (
            lambda: TemporalPool(SENSORS, [64, 32], 'attention'),
            r'leave 2 channel\(s\) a head.*expected 4 or more: at most 8 heads',
        ),
        (
            lambda: TemporalPool(SENSORS, [8, 16])(backbone_of()(inputs_of())),
            'expected .40, 80. and',
        ),
        (lambda: backbone_of()(torch.zeros(1, 3, 8, 8)), 'need the same sensors'),
    ],
)
def test_what_does_not_fit_is_an_error(build, message):
    with pytest.raises(StackLayoutError, match=message):
        build()


def test_the_default_channels_of_a_base_class_are_checked():
    sensors = dict(s2=dict(bands=[1, 2, 3, 4], max_dates=2))
    with DefaultScope.overwrite_default_scope('mmseg'):
        with pytest.raises(StackLayoutError, match='ResNetV1c, has in_channels=3, expected 4'):
            MODELS.build(
                dict(
                    type='StackBackbone', sensors=sensors, encoder=dict(type='ResNetV1c', depth=18)
                )
            )


def test_any_backbone_of_mmsegmentation_reads_stacks():
    sensors = dict(s2=SENSORS['s2'])
    with DefaultScope.overwrite_default_scope('mmseg'):
        backbone = MODELS.build(
            dict(
                type='StackBackbone',
                sensors=sensors,
                encoder=dict(
                    type='ResNetV1c',
                    depth=18,
                    in_channels=3,
                    num_stages=4,
                    out_indices=(0, 3),
                    norm_cfg=dict(type='BN'),
                ),
            )
        )
    levels = TemporalPool(sensors, [64, 512], 'attention')(
        backbone(inputs_of(days=(45000.0, 45100.0, 45200.0), sensors=sensors))
    )
    assert [level.shape[1] for level in levels] == [64, 512]


def attended(features, valid=(1.0, 1.0, 1.0), days=(250.0, 260.0, 270.0), heads=8):
    """Return what attention over 3 dates makes of features (3 dates, 32 channels, 4, 4)."""
    torch.manual_seed(0)
    pool = TemporalAttention([32], heads, width=32).eval()
    shares = torch.tensor(valid)[None, :, None, None].expand(-1, -1, 4, 4)
    return pool([features[None]], [shares], torch.tensor([days]))[0]


def test_attention_normalizes_over_the_channels_of_a_head_and_the_dates_as_u_tae_does():
    features = torch.randn(3, 32, 4, 4, generator=torch.Generator().manual_seed(1))
    pool = TemporalAttention([32], 8, width=32)
    nn.init.normal_(pool.enter_norm.weight)
    # U-TAE normalizes (cells, C, T) tensors.
    expected = pool.enter_norm(features.permute(2, 3, 1, 0).reshape(16, 32, 3))
    given = _normalize(pool.enter_norm, features[None], torch.ones(1, 3, 1, 4, 4) > 0)
    assert torch.allclose(given[0].permute(2, 3, 1, 0).reshape(16, 32, 3), expected, atol=1e-5)
    # A date that is brighter than the others stays so.
    brighter = features * torch.tensor([1.0, 3.0, 1.0])[:, None, None, None]
    assert (attended(features) - attended(brighter)).abs().max() > 0.01


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_with_a_single_date_attention_still_sees_the_image(dtype):
    first, second = torch.randn(2, 3, 32, 4, 4, generator=torch.Generator().manual_seed(1))
    with torch.autocast('cpu', dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        one, other = (
            attended(features, (1.0, 0.0, 0.0), (250.0, 0.0, 0.0)) for features in (first, second)
        )
    assert (one - other).abs().max() > 0.1 and torch.isfinite(one).all()


SEPTEMBER = 45186.0  # 2023-09-18, day 261 of its year


def in_bfloat16(backbone, neck, stack, way):
    """Return the pooled levels of a model in 16 bits, and the days that the neck gets."""
    if way == 'autocast':
        with torch.autocast('cpu', dtype=torch.bfloat16):
            levels = backbone(stack)
            return neck(levels), levels[-1][:, 3:, 0, 0]
    levels = backbone.to(torch.bfloat16)(stack)
    return neck.to(torch.bfloat16)(levels), levels[-1][:, 3:, 0, 0]


@pytest.mark.parametrize('way', ['autocast', 'weights'])
@pytest.mark.parametrize('pool', ['attention', 'mean', 'max', 'concat'])
def test_days_stay_exact_in_16_bits(pool, way):
    if not ON_MAIN_LEG and (pool, way) == ('attention', 'weights'):
        pytest.skip('old versions of PyTorch do not interpolate in bfloat16 on a CPU')
    sensors = dict(s2=SENSORS['s2'])
    stack = inputs_of(days=(SEPTEMBER, SEPTEMBER + 1, 0.0), sensors=sensors)
    later = inputs_of(days=(SEPTEMBER, SEPTEMBER + 2, 0.0), sensors=sensors)
    torch.manual_seed(0)
    neck = TemporalPool(sensors, CHANNELS, pool, attention=HEADS).eval()
    expected = neck(backbone_of(sensors)(stack))
    levels, days = in_bfloat16(backbone_of(sensors), neck, stack, way)
    assert days[0].tolist() == [261.0, 262.0, 0.0]
    for level, wanted in zip(levels, expected):
        # Autocast itself computes a softmax in float32.
        assert level.dtype == torch.bfloat16 or (pool, way) == ('attention', 'autocast')
        assert (level.float() - wanted).abs().max() < 0.05 * wanted.abs().max()
    changed = in_bfloat16(backbone_of(sensors), neck, later, way)[0]
    assert (pool == 'attention') == any(
        not torch.equal(level, other) for level, other in zip(levels, changed)
    )


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_planes_of_days_are_float32_behind_images_of_16_bits(dtype):
    layout = StackLayout.of_config(dict(s2=SENSORS['s2']))
    images = torch.ones(1, layout.image_channels, 4, 4, dtype=dtype)
    stack = layout.split(
        layout.add_planes(
            images, torch.tensor([[SEPTEMBER, SEPTEMBER + 1, 0.0]]), torch.tensor([[11.53, 48.14]])
        )
    )
    assert stack.sensors['s2'].days.tolist() == [[SEPTEMBER, SEPTEMBER + 1, 0.0]]
    assert abs(float(stack.longitude) - 11.53) < 1e-4
