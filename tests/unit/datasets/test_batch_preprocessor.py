"""Normalization of a batch at once gives the bits of MMSegmentation's, which does it by image."""

from __future__ import annotations

import copy
from typing import Any, Dict, List, Optional, Tuple

import pytest
import torch
from mmengine.registry import MODELS, DefaultScope
from mmengine.structures import PixelData
from mmseg.models import SegDataPreProcessor as Stock
from mmseg.structures import SegDataSample

from mapsage.datasets import BandDataPreProcessor, SegDataPreProcessor

IMAGENET = dict(mean=[123.675, 116.28, 103.53], std=[58.395, 57.12, 57.375])
INTEGERS = dict(mean=[124, 116, 104], std=[58, 57, 57])
ONE = dict(mean=[127.5], std=[33.3])
FOUR = dict(mean=[1.5, 20.25, 300.1, 4000.3], std=[1.1, 7.7, 33.3, 999.9])
DTYPES = (torch.uint8, torch.int16, torch.int64, torch.float16, torch.float32, torch.float64)
EVEN, UNEVEN = [(9, 13)] * 3, [(9, 13), (12, 6), (16, 16)]


def preprocessors(config: Dict[str, Any]) -> Tuple[Any, Any]:
    """Return MMSegmentation's own preprocessor of a config, and what the config builds here."""
    if len(config.get('mean') or ()) == 4:  # which MMSegmentation does not take everywhere
        ours = BandDataPreProcessor(**config)
        stock = Stock(**{key: value for key, value in config.items() if key not in ('mean', 'std')})
        stock._enable_normalize = True
        for name in ('mean', 'std'):
            stock.register_buffer(name, torch.tensor(config[name]).view(-1, 1, 1), False)
        return stock, ours
    with DefaultScope.overwrite_default_scope('mmseg'):
        return Stock(**config), MODELS.build(dict(config, type='SegDataPreProcessor'))


def make_batch(
    channels: int,
    sizes: List[Tuple[int, int]],
    dtype: torch.dtype = torch.uint8,
    labels: Tuple[str, ...] = ('gt_sem_seg', 'gt_depth_map'),
) -> Dict[str, Any]:
    """Return what a loader hands out: random images, and data samples with labels."""
    draw = torch.Generator().manual_seed(0)
    images, samples = [], []
    for height, width in sizes:
        image = torch.rand(channels, height, width, generator=draw) * 255
        images.append(image.to(dtype))
        sample = SegDataSample(metainfo=dict(img_shape=(1, 2), path=f'{height}.png'))
        for name in labels:
            values = torch.randint(0, 7, (1, height, width), generator=draw)
            setattr(sample, name, PixelData(data=values))
        samples.append(sample)
    return dict(inputs=images, data_samples=samples)


def outcome(prepare: Any, batch: Dict[str, Any], training: bool) -> Dict[str, Any]:
    """Return what is to be equal: bits, layout, labels, metainfo, or else the error."""
    try:
        with torch.no_grad():
            data = prepare(copy.deepcopy(batch), training)
    except (AssertionError, IndexError, RuntimeError, TypeError) as error:
        return dict(error=type(error))
    images = data['inputs']
    samples = [
        (
            sorted(sample.metainfo.items()),
            sorted((key, value.data.tolist()) for key, value in sample.items()),
        )
        for sample in data['data_samples'] or ()
    ]
    return dict(
        shape=images.shape,
        dtype=images.dtype,
        strides=images.stride(),
        samples=samples,
        bits=images.reshape(-1)
        .view(torch.int32 if images.dtype == torch.float32 else torch.int64)
        .tolist(),
    )


def check(
    config: Dict[str, Any], batch: Dict[str, Any], training: bool, at_once: Optional[bool] = True
) -> None:
    """Check that both preprocessors end alike, and whether ours took the batch at once."""
    stock, ours = preprocessors(config)
    assert type(ours) in (SegDataPreProcessor, BandDataPreProcessor)
    untouched = copy.deepcopy(batch)
    assert outcome(ours, batch, training) == outcome(stock, batch, training)
    assert all(torch.equal(one, other) for one, other in zip(batch['inputs'], untouched['inputs']))
    if at_once is not None:
        assert (ours._stack(batch['inputs']) is not None) == at_once


@pytest.mark.parametrize(
    'normalization, channels',
    [(IMAGENET, 3), (INTEGERS, 3), (ONE, 1), (ONE, 3), (ONE, 4), (FOUR, 4), ({}, 3), ({}, 5)],
)
@pytest.mark.parametrize(
    'padding',
    [
        dict(size=(16, 16)),
        dict(size=(5, 16)),
        dict(size_divisor=8),
        dict(size_divisor=1),
        dict(size=(16, 17), pad_val=-3.5, seg_pad_val=7),
    ],
)
@pytest.mark.parametrize('order', [{}, dict(bgr_to_rgb=True), dict(rgb_to_bgr=True)])
def test_a_training_batch_has_the_bits_of_the_host(
    normalization: Dict[str, Any], channels: int, padding: Dict[str, Any], order: Dict[str, Any]
) -> None:
    for dtype in DTYPES if not order else (torch.uint8, torch.float32):
        check({**normalization, **padding, **order}, make_batch(channels, EVEN, dtype), True)


@pytest.mark.parametrize(
    'test_cfg',
    [
        None,
        {},
        dict(size=(16, 16)),
        dict(size=(8, 8)),
        dict(size_divisor=8),
        dict(size=(16, 16), size_divisor=8),
    ],
)
@pytest.mark.parametrize('labels', [(), ('gt_sem_seg',)])
def test_a_test_batch_has_the_bits_and_metainfo_of_the_host(
    test_cfg: Optional[Dict[str, Any]], labels: Tuple[str, ...]
) -> None:
    config = dict(IMAGENET, bgr_to_rgb=True, size=(99, 9), test_cfg=test_cfg)
    for sizes in (EVEN[:1], EVEN):  # one view of a list for test-time augmentation, and a batch
        check(config, make_batch(3, sizes, labels=labels), False)
    check(config, dict(make_batch(3, EVEN), data_samples=None), False)


def test_what_is_no_batch_of_one_kind_goes_to_the_host() -> None:
    config = dict(IMAGENET, bgr_to_rgb=True, size_divisor=8)
    check(config, make_batch(3, UNEVEN), True, at_once=False)
    check(config, make_batch(3, UNEVEN), False, at_once=False)  # an error there too
    check(config, make_batch(1, EVEN), True, at_once=False)  # a mean of three adds channels
    check(config, make_batch(4, EVEN), True, at_once=None)  # and of another number is an error
    mixed = make_batch(3, EVEN)
    mixed['inputs'][1] = mixed['inputs'][1].double()
    check(config, mixed, True, at_once=False)
    check(config, dict(inputs=[], data_samples=[]), True, at_once=None)
    check(config, dict(make_batch(3, EVEN), data_samples=None), True)  # labels are missing


def test_a_mean_of_64_bits_goes_to_the_host() -> None:
    batch = make_batch(3, EVEN)
    stock, ours = (each.double() for each in preprocessors(dict(IMAGENET, size_divisor=1)))
    assert outcome(ours, batch, True) == outcome(stock, batch, True)
    assert ours._stack(batch['inputs']) is None


@pytest.mark.parametrize('dtype', (torch.uint8, torch.float32))
def test_a_tensor_or_tuple_is_taken_as_a_list_is(dtype: torch.dtype) -> None:
    batch = make_batch(3, EVEN, dtype)
    tensor = torch.stack(batch['inputs'])
    for config in (dict(IMAGENET, size_divisor=8), dict(size_divisor=1)):
        for images in (
            tensor,
            tuple(batch['inputs']),
            tensor.flip(0).transpose(2, 3),
            tensor.contiguous(memory_format=torch.channels_last),
        ):
            check(config, dict(inputs=images, data_samples=[]), False)
    training = dict(
        batch, inputs=tensor[:, :, :7, :7], data_samples=make_batch(3, [(7, 7)] * 3)['data_samples']
    )
    check(dict(IMAGENET, size=(8, 8)), training, True)


def test_batch_augments_get_the_batch() -> None:
    def augment(images: torch.Tensor, samples: List[Any]) -> Tuple[torch.Tensor, List[Any]]:
        samples[0].set_metainfo(dict(mixed=True))
        return images.mul_(0.5) + images.flip(0), samples[::-1]

    batch = make_batch(3, EVEN, torch.float32)
    check(dict(IMAGENET, size_divisor=8, batch_augments=augment), batch, True)
    check(dict(size_divisor=1, batch_augments=augment), batch, True)


def test_autocast_changes_nothing() -> None:
    stock, ours = preprocessors(dict(IMAGENET, bgr_to_rgb=True, size=(16, 16)))
    batch = make_batch(3, EVEN)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        assert outcome(ours, batch, True) == outcome(stock, batch, True)


def test_on_an_xla_device() -> None:
    pytest.importorskip('torch_xla')
    from mapsage.accelerator import resolve_accelerator

    device = resolve_accelerator('xla').device(0)
    for config in (dict(IMAGENET, bgr_to_rgb=True, size=(16, 16)), dict(INTEGERS, size_divisor=1)):
        prepared = [each.to(device)(make_batch(3, EVEN), True) for each in preprocessors(config)]
        stock, ours = (each['inputs'] for each in prepared)
        assert ours.device.type == 'xla' and torch.equal(stock.cpu(), ours.cpu())


def test_users_classes_keep_their_own_way() -> None:
    """A subclass that was written for MMSegmentation's class is left alone."""

    class Doubled(Stock):
        def forward(self, data: Dict[str, Any], training: bool = False) -> Any:
            data = super().forward(data, training)
            return dict(data, inputs=data['inputs'] * 2)

    batch = make_batch(3, EVEN)
    expected = preprocessors(dict(IMAGENET, size_divisor=1))[1](copy.deepcopy(batch), True)
    doubled = Doubled(**IMAGENET, size_divisor=1)(batch, True)
    assert torch.equal(doubled['inputs'], 2 * expected['inputs'])
