"""Heads split over real ranks against the same head on one rank."""

from __future__ import annotations

import copy
from datetime import timedelta
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

import pytest
import torch
import torch.distributed as dist
from forked import fork_ranks
from ranks import run_ranks
from support import main_leg
from torch import nn

pytestmark = main_leg
PATIENT = 60.0  # seconds
STEPS, MAX_NORM = 2, 0.05
# In float64 splitting changes the order of sums only: 1e-16 an operation, some thousand of them.
CLOSE = dict(rtol=1e-9, atol=1e-11)


def linear_head() -> Tuple[nn.Module, Any]:
    from mapsage.models.heads.linear_head import LinearHead

    # 7 classes: no number of ranks divides them; and features that are frozen
    head = LinearHead(
        in_channels=[12, 20],
        in_index=[0, 1],
        input_transform='resize_concat',
        channels=32,
        num_classes=7,
        dropout_ratio=0,
        align_corners=False,
        norm_cfg=dict(type='BN', requires_grad=True),
    )
    return head, [torch.randn(2, 12, 9, 7), torch.randn(2, 20, 5, 4)]


def uper_head() -> Tuple[nn.Module, Any]:
    from mmseg.models.decode_heads import UPerHead

    head = UPerHead(
        in_channels=[8, 10, 12, 14],
        in_index=[0, 1, 2, 3],
        pool_scales=(1, 2, 3),
        channels=18,
        num_classes=5,
        dropout_ratio=0,
        align_corners=False,
        norm_cfg=dict(type='GN', num_groups=3),
    )
    return head, [torch.randn(2, 8 + 2 * i, 16 >> i, 24 >> i) for i in range(4)]


class VitDecoder(nn.Module):
    """Blocks of DINOv3 on the tokens of a map, and a classifier of tokens."""

    def __init__(self, gated: bool) -> None:
        super().__init__()
        from mapsage.models.backbones.dinov3_blocks import Block
        from mapsage.models.backbones.dinov3_weights import Arch
        from mapsage.models.backbones.rope import RotaryPositions

        arch = Arch(
            embed_dims=32, num_layers=2, num_heads=4, feedforward_channels=64, gated_mlp=gated
        )
        self.inputs = nn.Conv2d(12, 32, 1)
        self.positions = RotaryPositions(8, 0)
        self.blocks = nn.ModuleList(Block(arch) for _ in range(2))
        for block in self.blocks:  # LayerScale starts at 1e-5: the block would not show in the sum
            nn.init.constant_(block.gamma_1, 0.5)
            nn.init.constant_(block.gamma_2, 0.5)
            nn.init.normal_(block.attn.q_bias)
            nn.init.normal_(block.attn.v_bias)
        self.norm, self.classes = nn.LayerNorm(32), nn.Linear(32, 7)

    def forward(self, features: Any) -> torch.Tensor:
        x = self.inputs(features[0])
        sine, cosine = self.positions(*x.shape[2:])
        tokens = x.flatten(2).transpose(1, 2)
        for block in self.blocks:
            tokens = block(tokens, sine, cosine)
        return self.classes(self.norm(tokens))


def vit_decoder() -> Tuple[nn.Module, Any]:
    return VitDecoder(gated=False), [torch.randn(2, 12, 5, 3)]


def gated_vit_decoder() -> Tuple[nn.Module, Any]:
    return VitDecoder(gated=True), [torch.randn(2, 12, 5, 3)]


class OddConvs(nn.Module):
    """What the heads above lack: grouped, strided, padded, without bias; and a trained input."""

    def __init__(self) -> None:
        super().__init__()
        self.few = nn.Conv2d(3, 1, 1)
        self.reflected = nn.Conv2d(
            3, 7, 3, stride=2, padding=2, dilation=2, padding_mode='reflect', bias=False
        )
        self.grouped = nn.Conv2d(7, 14, 3, groups=7, padding=1)
        self.up = nn.ConvTranspose2d(14, 6, 2, 2)
        self.linear = nn.Linear(6, 5, bias=False)
        self.scale = nn.Parameter(torch.ones(3, 1, 1))

    def forward(self, features: Any) -> torch.Tensor:
        x = features[0] * self.scale
        x = self.reflected(x + self.few(x)).relu()
        return self.linear(self.up(self.grouped(x)).permute(0, 2, 3, 1))


def odd_convs() -> Tuple[nn.Module, Any]:
    return OddConvs(), [torch.randn(2, 3, 11, 9)]


class Dropouts(nn.Module):
    """What draws random numbers: on activations that are whole on every rank."""

    def __init__(self) -> None:
        super().__init__()
        from mapsage.models.backbones.dinov3_blocks import Block
        from mapsage.models.backbones.dinov3_weights import Arch

        self.inputs, self.channels = nn.Conv2d(12, 32, 1), nn.Dropout2d(0.5)
        self.block = Block(Arch(embed_dims=32, num_layers=1, num_heads=4, feedforward_channels=64))
        self.block.drop_path = 0.5
        nn.init.constant_(self.block.gamma_1, 0.5)
        nn.init.constant_(self.block.gamma_2, 0.5)
        self.values, self.classes = nn.Dropout(0.25), nn.Linear(32, 7)

    def forward(self, features: Any) -> torch.Tensor:
        from mapsage.models.backbones.rope import RotaryPositions

        x = self.channels(self.inputs(features[0]))
        tokens = self.block(x.flatten(2).transpose(1, 2), *RotaryPositions(8, 0)(*x.shape[2:]))
        return self.classes(self.values(tokens))


def dropouts() -> Tuple[nn.Module, Any]:
    return Dropouts(), [torch.randn(4, 12, 5, 3)]


HEADS = dict(
    linear=linear_head,
    uper=uper_head,
    vit=vit_decoder,
    gated=gated_vit_decoder,
    odd=odd_convs,
    dropouts=dropouts,
)
BY_RANKS = {1: ['linear'], 2: list(HEADS), 4: ['linear', 'uper', 'vit', 'odd']}


def train(head: nn.Module, features: Any, clip: Callable[[nn.Module], float]) -> Dict[str, Any]:
    """Return losses, outputs and norms of a few steps of AdamW."""
    optimizer = torch.optim.AdamW(head.parameters(), lr=0.01)
    told: Dict[str, Any] = dict(losses=[], norms=[])
    for step in range(STEPS):
        torch.manual_seed(step)  # the ranks of a replica draw alike
        output = head(features)
        loss = (
            output * torch.linspace(-1, 1, output.numel(), dtype=torch.float64).view(output.shape)
        ).tanh().mean() * 10
        optimizer.zero_grad()
        loss.backward()
        told['losses'].append(loss.detach())
        told['norms'].append(clip(head))
        told.setdefault(
            'grads',
            {
                name: whole(parameter.grad).reshape(-1)
                for name, parameter in head.named_parameters()
            },
        )
        optimizer.step()
    told['output'] = output.detach()
    return told


def clip_whole(head: nn.Module) -> float:
    return float(nn.utils.clip_grad_norm_(head.parameters(), MAX_NORM))


def whole(value: torch.Tensor) -> torch.Tensor:
    return (value.full_tensor() if hasattr(value, 'full_tensor') else value).detach().clone()


def bytes_of(head: nn.Module) -> int:
    total = 0
    for parameter in head.parameters():
        local = parameter.to_local() if hasattr(parameter, 'to_local') else parameter
        total += local.numel() * local.element_size()
    return total


def compare_heads(names: List[str]) -> Dict[str, Any]:
    from mapsage.extras.streaming.split_head.tensor_parallel import parallelize_head

    dist.init_process_group('gloo', timeout=timedelta(seconds=PATIENT))
    rank, told = dist.get_rank(), {}
    for name in names:
        torch.manual_seed(3)
        head, features = HEADS[name]()
        head, features = head.double().train(), [each.double() for each in features]
        plain = copy.deepcopy(head)
        before = {key: value.clone() for key, value in plain.state_dict().items()}
        expected = train(plain, features, clip_whole)
        if rank:  # the first rank's weights count
            with torch.no_grad():
                for each in [*head.parameters(), *head.buffers()]:
                    each.zero_()
        split = parallelize_head(head, dist.group.WORLD)
        start = split.gather_state_dict()
        got = train(head, features, lambda _: split.clip_grad_norm(MAX_NORM))  # noqa: B023
        after, every = split.gather_state_dict(), plain.state_dict()
        order = [key for key, _ in head.named_parameters()]
        split.load_state_dict(every)
        loaded = split.gather_state_dict()
        told[name] = dict(
            start=all(torch.equal(start[key], before[key]) for key in before),
            keys=list(start) == list(before) == list(after),
            order=order == [key for key, _ in plain.named_parameters()],
            output=torch.allclose(got['output'], expected['output'], **CLOSE),
            losses=torch.allclose(
                torch.stack(got['losses']), torch.stack(expected['losses']), **CLOSE
            ),
            clipped=expected['norms'][0] > MAX_NORM,
            norms=torch.allclose(torch.tensor(got['norms']), torch.tensor(expected['norms'])),
            grads=[
                key
                for key, value in expected['grads'].items()
                if not torch.allclose(got['grads'][key], value, **CLOSE)
            ]
            == [],
            trained=any(not torch.equal(after[key], before[key]) for key in before),
            after=[key for key in every if not torch.allclose(after[key], every[key], **CLOSE)],
            loaded=all(torch.equal(loaded[key], every[key]) for key in every),
            crc=[float(value.double().sum()) for value in after.values()],
            bytes=(bytes_of(head), bytes_of(plain)),
            plan=sorted(split.plan),
        )
    # A rank that ends while others still wait in a collective closes their connections.
    dist.monitored_barrier()
    return told


@pytest.mark.parametrize(
    'name, world', [(name, world) for world, names in BY_RANKS.items() for name in names]
)
def test_a_split_head_trains_as_the_whole_one(name: str, world: int, answers: Any) -> None:
    every = [told[name] for told in answers['heads', world]]
    for told in every:
        own, full = told['bytes']
        assert {key: value for key, value in told.items() if value is not True} == dict(
            after=[], crc=every[0]['crc'], bytes=told['bytes'], plan=told['plan']
        )
        assert bool(told['plan']) == (world > 1)
        if name != 'odd':  # which has hardly any weights
            assert own < full * (1 / world + 0.25)


def be_careful() -> Dict[str, Any]:
    from torch.distributed.device_mesh import DeviceMesh

    from mapsage.extras.streaming.split_head.tensor_parallel import (
        TensorParallelError,
        parallelize_head,
    )

    dist.init_process_group('gloo', timeout=timedelta(seconds=PATIENT))

    def error_of(action: Callable[[], Any], kind: Any = TensorParallelError) -> str:
        with pytest.raises(kind) as caught:
            action()
        return str(caught.value)

    told: Dict[str, Any] = {}
    group = dist.group.WORLD
    mesh = DeviceMesh.from_group(group, 'cpu')
    told['device'] = error_of(lambda: parallelize_head(nn.Conv2d(2, 2, 1, device='meta'), mesh))
    split = parallelize_head(OddConvs(), group)
    good = split.gather_state_dict()
    told['names'] = error_of(lambda: split.load_state_dict({'up.bias': torch.zeros(7)}))
    told['unchanged'] = all(
        torch.equal(value, good[key]) for key, value in split.gather_state_dict().items()
    )
    told['raises'] = error_of(lambda: split.head.reflected(torch.zeros(1, 5, 9, 9)), RuntimeError)
    told['restored'] = [key for key, _ in split.head.named_parameters()] == [
        key for key, _ in OddConvs().named_parameters()
    ]
    twin = copy.deepcopy(split.head)  # as an average of the weights makes one
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
        x = [torch.ones(1, 3, 9, 9)]
        told['twin'] = float(twin(x).abs().sum()) == 0 < float(split.head(x).abs().sum())
    # A rank that ends while others still wait in a collective closes their connections.
    dist.monitored_barrier()
    return told


def test_faults_and_copies(answers: Any) -> None:
    told, other = answers['care', 2]
    # each rank's own share is in the text of torch
    assert 'to have 3 channels, but got 5' in told.pop('raises')
    assert 'to have 3 channels, but got 5' in other.pop('raises')
    assert told == other
    assert "the head is on 'meta', and the mesh has 1 dimension(s) of 'cpu'" in told['device']
    assert 'up.bias: (7,), expected (6,)' in told['names']
    assert 'few.weight' in told['names'] and told['unchanged']
    assert told['restored'] and told['twin']


def run_scenarios(folder: Path) -> Dict[Tuple[str, int], Any]:
    table: List[Tuple[str, int, Any, Any]] = [
        ('heads', world, compare_heads, (names,)) for world, names in BY_RANKS.items()
    ]
    table.append(('care', 2, be_careful, ()))
    import mmseg.models  # noqa: F401  (once, and not on every rank)
    import torch.distributed.tensor.parallel  # noqa: F401

    import mapsage.extras.streaming.split_head.parallel_styles  # noqa: F401

    return {
        (name, world): fork_ranks(function, world, folder / f'{name} {world}', *args)
        for name, world, function, args in table
    }


@pytest.fixture(scope='module')
def answers(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp('split heads')
    return run_ranks(run_scenarios, 1, folder, folder, timeout=600)[0]
