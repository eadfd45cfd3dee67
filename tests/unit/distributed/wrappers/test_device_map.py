"""Which part goes where: pure decisions, on every leg."""

from __future__ import annotations

import itertools
from typing import Any, Dict, List, Tuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mmengine.model import BaseModel
from mmseg.models.backbones import (
    MixVisionTransformer,
    PIDNet,
    ResNetV1c,
    SwinTransformer,
    VisionTransformer,
)
from torch import nn

from mapsage.distributed.wrappers import DeviceMapError
from mapsage.distributed.wrappers.device_map import (
    automatic_map,
    find_units,
    partition,
    resolve_device_map,
    tensor_owners,
)

DEVICES = (torch.device('cuda:0'), torch.device('cuda:1'), torch.device('cuda:2'))


class Segmentor(BaseModel):
    """A backbone, a head and mean and std: what a device map is about, without a forward pass."""

    def __init__(self, backbone: nn.Module, head: nn.Module) -> None:
        super().__init__(dict(type='ImgDataPreprocessor', mean=[1.0] * 3, std=[2.0] * 3))
        self.backbone = backbone
        self.decode_head = head

    def forward(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError


def small_segmentor() -> Segmentor:
    backbone = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1))
    return Segmentor(backbone, nn.Conv2d(8, 2, 1))


def names(model: nn.Module) -> List[str]:
    return [unit.name for unit in find_units(model)]


def brute_force(sizes: List[int], parts: int) -> Tuple[int, int]:
    """The smallest largest part, and the smallest sum of squares among the cuts that reach it."""
    costs = []
    for cuts in itertools.combinations_with_replacement(range(len(sizes) + 1), parts - 1):
        ends = (0, *cuts, len(sizes))
        runs = [sum(sizes[begin:end]) for begin, end in zip(ends, ends[1:])]
        costs.append((max(runs), sum(run * run for run in runs)))
    return min(costs)


@given(st.lists(st.integers(0, 30), max_size=8), st.integers(1, 5))
def test_partition_is_the_most_even_of_all(sizes: List[int], parts: int) -> None:
    owner = partition(sizes, parts)
    assert len(owner) == len(sizes)
    assert owner == sorted(owner)
    assert all(0 <= part < parts for part in owner)
    runs = [sum(size for size, part in zip(sizes, owner) if part == each) for each in range(parts)]
    assert (max(runs), sum(run * run for run in runs)) == brute_force(sizes, parts)


def test_a_residual_network_is_cut_between_its_blocks_only() -> None:
    resnet = ResNetV1c(depth=18, stem_channels=8, base_channels=8)
    assert names(Segmentor(resnet, nn.Conv2d(8, 2, 1))) == [
        *[f'backbone.stem.{i}' for i in (0, 1, 3, 4, 6, 7)],
        *[f'backbone.layer{stage}.{block}' for stage in range(1, 5) for block in range(2)],
        'decode_head',
    ]


def test_position_embeddings_go_with_the_patches() -> None:
    vit = VisionTransformer(img_size=32, embed_dims=8, num_layers=2, num_heads=1, final_norm=True)
    units = find_units(Segmentor(vit, nn.Conv2d(8, 2, 1)))
    assert [unit.name for unit in units] == [
        'backbone.patch_embed',
        'backbone.layers.0',
        'backbone.layers.1',
        'backbone.ln1',
        'decode_head',
    ]
    assert units[0].parents == ('backbone',)
    assert {id(vit.pos_embed), id(vit.cls_token)} <= set(units[0].sizes)


def test_segformer_is_cut_between_its_layers() -> None:
    mit = MixVisionTransformer(
        embed_dims=8,
        num_stages=2,
        num_layers=[1, 2],
        num_heads=[1, 1],
        patch_sizes=[3, 3],
        strides=[4, 2],
        sr_ratios=[2, 1],
        out_indices=(0, 1),
    )
    assert names(Segmentor(mit, nn.Conv2d(8, 2, 1))) == [
        'backbone.layers.0.0',
        'backbone.layers.0.1.0',
        'backbone.layers.0.2',
        'backbone.layers.1.0',
        'backbone.layers.1.1.0',
        'backbone.layers.1.1.1',
        'backbone.layers.1.2',
        'decode_head',
    ]


def test_swin_is_cut_between_its_blocks() -> None:
    swin = SwinTransformer(
        pretrain_img_size=32,
        embed_dims=4,
        depths=(2, 1),
        num_heads=(1, 1),
        strides=(4, 2),
        out_indices=(0, 1),
        window_size=2,
    )
    assert names(Segmentor(swin, nn.Conv2d(8, 2, 1))) == [
        'backbone.patch_embed',
        'backbone.stages.0.blocks.0',
        'backbone.stages.0.blocks.1',
        'backbone.stages.0.downsample',
        'backbone.stages.1.blocks.0',
        'backbone.norm0',
        'backbone.norm1',
        'decode_head',
    ]


def test_a_backbone_that_adds_stays_whole() -> None:
    pid = PIDNet(channels=4, ppm_channels=4)
    assert names(Segmentor(pid, nn.Conv2d(8, 2, 1))) == ['backbone', 'decode_head']


def test_every_parameter_is_counted_once() -> None:
    model = Segmentor(ResNetV1c(depth=18, stem_channels=8, base_channels=8), nn.Conv2d(8, 2, 1))
    counted = [size for unit in find_units(model) for size in unit.sizes.values()]
    assert sum(counted) == sum(p.numel() * p.element_size() for p in model.parameters())


def test_an_automatic_map_is_even_and_in_order() -> None:
    layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(6)])
    found = automatic_map(Segmentor(layers, nn.Linear(4, 4, bias=False)), 3)
    # six times 80 bytes and once 64: 160, 160 and 224
    assert found == {
        'backbone.0': 0,
        'backbone.1': 0,
        'backbone.2': 1,
        'backbone.3': 1,
        'backbone.4': 2,
        'backbone.5': 2,
        'decode_head': 2,
    }


def test_tied_parameters_stay_together() -> None:
    model = small_segmentor()
    model.decode_head = nn.Conv2d(8, 8, 1)
    model.decode_head.weight = model.backbone[0].weight
    found = automatic_map(model, 3)
    assert found['decode_head'] == found['backbone.0'] == 0
    assert found['backbone.3'] != 0
    with pytest.raises(DeviceMapError, match="'backbone.0' and 'decode_head' share a tensor"):
        resolve_device_map(model, {'backbone': 0, 'decode_head': 1}, DEVICES)


def test_nothing_to_split() -> None:
    with pytest.raises(DeviceMapError, match='ReLU has no parameters'):
        automatic_map(nn.ReLU(), 2)


def test_the_longest_path_decides() -> None:
    places = resolve_device_map(
        small_segmentor(), {'': 0, 'backbone': 2, 'backbone.3': 'cuda:1'}, DEVICES
    )
    assert {
        name: str(places[name]) for name in (*tensor_owners(small_segmentor()), 'data_preprocessor')
    } == {
        'backbone.0': 'cuda:2',
        'backbone.1': 'cuda:2',
        'backbone.3': 'cuda:1',
        'decode_head': 'cuda:0',
        'data_preprocessor': 'cuda:2',
    }  # with the first module, which takes the images


def test_the_preprocessor_may_be_named() -> None:
    places = resolve_device_map(small_segmentor(), {'': 0, 'data_preprocessor': 1}, DEVICES)
    assert places['data_preprocessor'] == DEVICES[1]


def test_a_path_is_not_a_prefix_of_letters() -> None:
    model = Segmentor(nn.Sequential(*[nn.Linear(1, 1) for _ in range(11)]), nn.Linear(1, 1))
    places = resolve_device_map(model, {'': 0, 'backbone.1': 1}, DEVICES)
    assert places['backbone.1'] == DEVICES[1]
    assert places['backbone.10'] == DEVICES[0]


@pytest.mark.parametrize(
    'device_map, message',
    [
        ({'': 0, 'backbone.layer9': 1}, "'backbone.layer9', which is not a module"),
        ({'': 0, 'decode_haed': 1}, "Did you mean 'decode_head'"),
        (
            {'': 3},
            r"device_map\[''\] is 3: expected an index from 0 to 2, or one of cuda:0, cuda:1",
        ),
        ({'': -1}, 'expected an index from 0 to 2'),
        ({'': True}, 'expected an index from 0 to 2'),
        ({'': 'cuda:7'}, "is 'cuda:7'"),
        ({'': None}, 'is None'),
        ({'backbone': 0}, r'no device to 1 module\(s\) with parameters or buffers: decode_head'),
        ({'decode_head': 0}, r'no device to 3 module\(s\)'),
    ],
)
def test_a_map_that_does_not_fit(device_map: Dict[str, Any], message: str) -> None:
    with pytest.raises(DeviceMapError, match=message):
        resolve_device_map(small_segmentor(), device_map, DEVICES)
