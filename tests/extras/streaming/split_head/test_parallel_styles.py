"""Plain tensors in place of split parameters, without ranks."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from support import main_leg
from torch import nn

pytestmark = main_leg


def test_forward_code_sees_plain_tensors_and_gradients_reach_the_parameters() -> None:
    from mapsage.extras.streaming.split_head.parallel_styles import hide_plain, show_plain

    layer = nn.Linear(3, 2)
    weight, bias = layer.weight, layer.bias
    show_plain(layer, '', lambda parameter: 2 * parameter)
    assert not isinstance(layer.weight, nn.Parameter) and list(layer.parameters()) == []
    layer(torch.ones(1, 3)).sum().backward()
    hide_plain(layer)
    assert [name for name, _ in layer.named_parameters()] == ['weight', 'bias']
    assert layer.weight is weight and layer.bias is bias
    assert weight.grad is not None and bool((weight.grad == 2).all())
    assert bias.grad is not None and bool((bias.grad == 2).all())


def test_a_child_can_be_shown_and_a_missing_bias_stays_missing() -> None:
    from mapsage.extras.streaming.split_head.parallel_styles import hide_plain, show_plain

    block = nn.ModuleDict(dict(qkv=nn.Linear(3, 6, bias=False), proj=nn.Linear(3, 3)))
    qkv = block['qkv']
    weight = qkv.weight
    show_plain(block, 'qkv', lambda parameter: parameter + 1)
    assert torch.equal(qkv.weight, weight + 1) and qkv.bias is None
    assert isinstance(block['proj'].weight, nn.Parameter)
    hide_plain(block)
    assert qkv.weight is weight and qkv.bias is None


def test_a_copy_is_hidden_by_itself() -> None:
    from mapsage.extras.streaming.split_head.parallel_styles import hide_plain, show_plain

    layer = nn.Conv2d(2, 3, 1)
    twin = copy.deepcopy(layer)
    show_plain(layer, '', lambda parameter: parameter.detach() * 0)
    hide_plain(twin)  # nothing was shown there
    assert float(twin(torch.ones(1, 2, 1, 1)).detach().abs().sum()) > 0
    assert float(layer(torch.ones(1, 2, 1, 1)).abs().sum()) == 0
    hide_plain(layer)
    assert len(list(layer.parameters())) == len(list(twin.parameters())) == 2


def test_all_shares_of_one_rank_are_the_whole(tmp_path: Path) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import parallelize_module

    from mapsage.extras.streaming.split_head.parallel_styles import SplitConv2d

    dist.init_process_group('gloo', init_method=f'file://{tmp_path}/store', rank=0, world_size=1)
    try:
        conv = nn.Conv2d(2, 5, 3, padding=1)
        alone, x = copy.deepcopy(conv), torch.randn(1, 2, 4, 4)
        parallelize_module(conv, DeviceMesh.from_group(dist.group.WORLD, 'cpu'), SplitConv2d())
        assert isinstance(conv.weight, DTensor)
        output = conv(x)
        assert torch.equal(output, alone(x))
        output.sum().backward()
        alone(x).sum().backward()
        grad = conv.weight.grad
        assert isinstance(grad, DTensor) and torch.equal(grad.full_tensor(), alone.weight.grad)
        with pytest.raises(RuntimeError, match='expected input'):
            conv(torch.zeros(1, 3, 4, 4))
        assert isinstance(conv.weight, DTensor)  # put back although forward raised
    finally:
        dist.destroy_process_group()
