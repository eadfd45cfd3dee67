"""How heads are split, without ranks; tests/extras/streaming/test_tensor_parallel_head.py has ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, Iterator

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from support import main_leg, no_simulated_cards
from torch import nn

from mapsage.accelerator import resolve_accelerator, set_current_accelerator
from mapsage.distributed import init_process_group
from mapsage.extras.streaming.split_head import tensor_parallel
from mapsage.extras.streaming.split_head.tensor_parallel import (
    TensorParallelError,
    check_torch,
    parallelize_head,
    plan_of,
    scale_to_norm,
)


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[Any]:
    dist.init_process_group('gloo', init_method=f'file://{tmp_path}/store', rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def styles(head: nn.Module, ranks: int) -> Dict[str, str]:
    return {name: type(style).__name__ for name, style in plan_of(head, ranks).items()}


class Mlp(nn.Module):
    """Two linear layers under the names that DINOv3 gives them."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(4, inner), nn.Linear(inner, 4)


class Attention(nn.Module):
    """The modules of DINOv3's attention."""

    num_heads, has_bias = 2, True

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(4, 12, bias=False), nn.Linear(4, 4)


@main_leg
def test_convolutions_and_linear_layers_are_split_and_the_rest_is_whole() -> None:
    head = nn.ModuleDict(
        dict(
            conv=nn.Conv2d(3, 7, 3),
            grouped=nn.Conv2d(4, 8, 3, groups=2),
            up=nn.ConvTranspose2d(4, 4, 2),
            norm=nn.BatchNorm2d(4),
            linear=nn.Linear(5, 6),
            text=nn.MultiheadAttention(4, 2),
        )
    )
    assert styles(head, 2) == dict(conv='SplitConv2d', linear='ColwiseParallel')


@main_leg
@pytest.mark.parametrize(
    'channels, ranks, split',
    [(2, 2, True), (1, 2, False), (3, 2, True), (4, 3, False), (5, 3, True), (4, 4, True)],
)
def test_a_layer_is_split_if_every_rank_gets_a_channel(
    channels: int, ranks: int, split: bool
) -> None:
    # 4 channels in shares of 2 reach two ranks of three
    assert bool(plan_of(nn.Conv2d(1, channels, 1), ranks)) == split
    assert bool(plan_of(nn.Sequential(nn.Linear(1, channels)), ranks)) == split


@main_leg
def test_an_mlp_takes_one_sum_if_ranks_divide_its_inner_features() -> None:
    head = nn.ModuleDict(dict(even=Mlp(6), odd=Mlp(5)))
    assert styles(head, 2) == {
        'even.fc1': 'ColwiseParallel',
        'even.fc2': 'RowwiseParallel',
        'odd.fc1': 'ColwiseParallel',
        'odd.fc2': 'ColwiseParallel',
    }


@main_leg
def test_an_attention_gathers_its_qkv() -> None:
    assert styles(nn.ModuleDict(dict(attn=Attention())), 2) == {
        'attn': 'GatherQkv',
        'attn.proj': 'ColwiseParallel',
    }


@pytest.mark.parametrize('max_norm', [0.5, 1000.0])
def test_the_norm_is_that_of_torch(max_norm: float, one_rank: Any) -> None:
    layer = nn.Linear(3, 4)
    layer(torch.randn(5, 3)).square().sum().backward()
    grads = [each.grad.clone() for each in layer.parameters() if each.grad is not None]
    norm = scale_to_norm(grads[:1], grads[1:], one_rank, max_norm)
    assert norm == pytest.approx(float(nn.utils.clip_grad_norm_(layer.parameters(), max_norm)))
    for grad, parameter in zip(grads, layer.parameters()):
        assert torch.allclose(grad, parameter.grad)  # type: ignore[arg-type]


def test_a_gradient_that_is_no_number_spreads(one_rank: Any) -> None:
    share, whole = torch.tensor([1.0, float('nan')]), torch.ones(2)
    scale_to_norm([share], [whole], one_rank, 1.0)
    assert share.isnan().all() and whole.isnan().all()


def clip_on_cards() -> Any:
    """Clip gradients of which each rank holds a part, on simulated cards."""
    sim = set_current_accelerator(resolve_accelerator('sim'))
    init_process_group(sim, timeout=60)
    device = sim.device(dist.get_rank())
    share = torch.full((4,), 3.0 + dist.get_rank(), device=device)
    whole = torch.full((2,), 5.0, device=device)
    norm = scale_to_norm([share], [whole], dist.distributed_c10d._get_default_group(), 1.0)
    return norm, share.tolist()


@pytest.mark.skipif(no_simulated_cards() is not None, reason='no simulated cards')
def test_cards_that_add_no_64_bit_numbers(tmp_path: Path) -> None:
    answers = run_ranks(clip_on_cards, 2, tmp_path, environ={'MAPSAGE_SIM_GCU': '2.11'})
    want = (4 * 9 + 4 * 16 + 2 * 25) ** 0.5
    for rank, (norm, share) in enumerate(answers):
        assert norm == pytest.approx(want, rel=1e-12)
        assert share == pytest.approx([(3 + rank) / want] * 4)


@main_leg
def test_one_rank_splits_nothing_and_loads_its_own_state(one_rank: Any) -> None:
    head = nn.Sequential(nn.Conv2d(2, 4, 1), nn.BatchNorm2d(4))
    start = {name: value.clone() for name, value in head.state_dict().items()}
    split = parallelize_head(head, one_rank)
    assert split.plan == {} and split.head is head
    state = split.gather_state_dict()
    assert list(state) == list(start) and all(torch.equal(state[key], start[key]) for key in state)
    state['0.bias'] = torch.arange(4.0)
    split.load_state_dict(state)
    assert torch.equal(head[0].bias, torch.arange(4.0))
    with pytest.raises(TensorParallelError, match=r'0.bias: \(3,\), expected \(4,\)'):
        split.load_state_dict({**state, '0.bias': torch.zeros(3)})
    with pytest.raises(TensorParallelError, match=r"missing \['0.bias'\], unknown \['0.bia'\]"):
        split.load_state_dict(
            {key.replace('0.bias', '0.bia'): value for key, value in state.items()}
        )


@main_leg
def test_a_head_on_two_devices_is_refused(one_rank: Any) -> None:
    head = nn.Sequential(nn.Conv2d(2, 4, 1), nn.Conv2d(4, 4, 1, device='meta'))
    with pytest.raises(TensorParallelError, match=r"are on \['cpu', 'meta'\]"):
        parallelize_head(head, one_rank)


def test_an_older_torch_is_refused_by_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_parallel, 'TORCH', (99, 0))
    with pytest.raises(RuntimeError, match='torch >= 99.0, and this is torch .*ranks_per_head=1'):
        check_torch()
