"""What moves between ranks, bit by bit and byte by byte, and on devices."""

from __future__ import annotations

import importlib.util
import os
import random
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from forked import fork_scenarios
from ranks import run_ranks
from sampling_ranks import Answers, answers_of, batches, sampler_of, start
from support import no_simulated_cards

from mapsage.accelerator import resolve_accelerator
from mapsage.distributed import init_process_group, open_channel
from mapsage.distributed.channels.group_channel import GroupChannel
from mapsage.distributed.nested_tensors import move
from mapsage.sampling import DynamicSampler, Traffic, Validity, exchange, plan_exchange


@pytest.fixture(scope='module')
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    return answers_of(run_scenarios, tmp_path_factory.mktemp('sampling'))


def run_scenarios(folder: Path) -> Dict[str, Any]:
    return fork_scenarios(scenarios(), folder)


def counted(function: Callable[[], Any]) -> Tuple[Any, List[Tuple[str, int]]]:
    """Return what ``function`` returns, and each collective it entered with its bytes."""
    entered: List[Tuple[str, int]] = []
    originals = [
        (place, name, getattr(place, name))
        for place, names in (
            (GroupChannel, ('max', 'broadcast', 'gather', 'trade', 'all_to_all')),
            (
                dist,
                (
                    'all_reduce',
                    'all_gather',
                    'all_to_all_single',
                    'broadcast',
                    'barrier',
                    'gather',
                    'scatter',
                    'send',
                    'recv',
                    'reduce',
                    'isend',
                    'irecv',
                    'all_gather_object',
                    'broadcast_object_list',
                    'gather_object',
                ),
            ),
        )
        for name in names
    ]
    for place, name, original in originals:

        def counting(
            *args: Any, _name: str = name, _original: Any = original, **kwargs: Any
        ) -> Any:
            sent = [each for each in args[:3] if isinstance(each, torch.Tensor)][-1:]
            entered.append((_name, sum(each.numel() * each.element_size() for each in sent)))
            return _original(*args, **kwargs)

        setattr(place, name, counting)
    try:
        return function(), entered
    finally:
        for place, name, original in originals:
            setattr(place, name, original)


def steps_that_are_all_valid() -> Any:
    rank = start()
    sampler = sampler_of(batches(rank, [16] * 3))
    return counted(lambda: [len(sampler.sample().samples) for _ in range(3)])


def test_a_step_of_valid_samples_costs_one_collective_of_64_bytes(answers: Answers) -> None:
    for world in (2, 8):
        for lengths, entered in answers.of(f'all valid {world}'):
            assert lengths == [16] * 3
            assert entered == [('gather', 64)] * 3


DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.float64]


def random_sample(rank: int, index: int) -> Dict[str, Any]:
    """Return a sample that can be made again anywhere."""
    rng = np.random.default_rng([rank, index])
    shape = tuple(int(n) for n in rng.integers(0, 6, rng.integers(0, 4)))
    tensor = torch.from_numpy(rng.integers(0, 2, shape)).to(DTYPES[int(rng.integers(6))])
    return dict(
        image=torch.from_numpy(rng.random((3, int(rng.integers(1, 9)), 4))).float(),
        odd=tensor,
        meta=dict(name=f'{rank}/{index}', at=(rank, index)),
        array=rng.random(3),
    )


def same_sample(one: Dict[str, Any], other: Dict[str, Any]) -> bool:
    return (
        list(one) == list(other)
        and one['meta'] == other['meta']
        and one['array'].tobytes() == other['array'].tobytes()
        and all(
            one[key].dtype == other[key].dtype
            and torch.equal(one[key], other[key])
            and one[key].shape == other[key].shape
            for key in ('image', 'odd')
        )
    )


def size_of(sample: Dict[str, Any]) -> int:
    return sum(sample[key].numel() * sample[key].element_size() for key in ('image', 'odd')) + 24


def exchange_often(rounds: int) -> Any:
    """Carry out random plans; return bytes sent and what the plans' samples weigh."""
    rank = int(os.environ['RANK'])
    world = int(os.environ['WORLD_SIZE'])
    if world > 1:
        start()
    channel = open_channel(None, None, 'sampling')
    traffic, planned, draw = Traffic(), 0, random.Random(5)
    for _ in range(rounds):
        counts = [draw.randint(0, 7) for _ in range(world)]
        targets = [draw.randint(0, 7) for _ in range(world)]
        while sum(targets) > sum(counts):
            targets[draw.randrange(world)] = 0
        plan = plan_exchange(counts, targets)
        placed: List[dict] = []
        headers_before = traffic.header_bytes
        mine = [random_sample(rank, index) for index in range(counts[rank])]

        def place(sample: dict, placed: List[dict] = placed) -> dict:
            placed.append(sample)
            return sample

        batch, entered = counted(lambda: exchange(mine, plan, channel, place, traffic))  # noqa: B023
        expected = [(rank, k) for k in range(plan.kept(rank))] + [
            move[:2] for move in plan.moves if move.destination_rank == rank
        ]
        assert len(batch) == len(expected) == targets[rank]
        assert all(same_sample(got, random_sample(*at)) for got, at in zip(batch, expected))
        assert [id(each) for each in placed] == [id(each) for each in batch[plan.kept(rank) :]]
        assert all(got is own for got, own in zip(batch, mine))  # what stays is not touched
        sent = [
            random_sample(rank, move.source_index)
            for move in plan.moves
            if move.source_rank == rank
        ]
        planned += sum(map(size_of, sent))
        sizes = [size for name, size in entered if name == 'all_to_all']
        # what is sent next to headers is the samples' tensors to the byte
        headers = traffic.header_bytes - headers_before
        assert (sizes[0] if plan.moves else 0) == sum(map(size_of, sent)) + headers
        assert len(entered) == (3 if plan.moves else 0)
        assert headers <= 1000 * len(sent)  # small metadata, no tensor
    return traffic.sent_bytes, planned, traffic.received_bytes


@pytest.mark.parametrize('world', [1, 2, 3, 4, 8])
def test_exactly_the_planned_samples_move_bit_equal(world: int, answers: Answers) -> None:
    every = answers.of(f'exchange {world}')
    assert all(sent == planned for sent, planned, _ in every)
    assert sum(sent for sent, _, _ in every) == sum(received for _, _, received in every)
    assert (sum(sent for sent, _, _ in every) > 0) == (world > 1)


def scenarios() -> Dict[str, Any]:
    named: Dict[str, Any] = {}
    for world in (1, 2, 3, 4, 8):
        named[f'exchange {world}'] = exchange_often, world, 12
    for world in (2, 8):
        named[f'all valid {world}'] = steps_that_are_all_valid, world
    return named


# ---- devices ----


def pool_on_devices(name: str) -> Any:
    """Fill every rank from samples that lie on the ranks' own devices, and stack them."""
    accelerator = resolve_accelerator(name)
    init_process_group(accelerator)
    rank = dist.get_rank()
    device = accelerator.device(rank)
    # ranks 0 and 1 have nothing valid, the last two twice what they need
    world = dist.get_world_size()
    valid = 8 if rank >= world // 2 else 0
    samples = [dict(x=torch.full((2, 2), 10.0 * rank + k).to(device), score=k) for k in range(8)]
    answers = {}
    sampler = DynamicSampler(
        lambda wanted: samples,
        # results that live on the device, float32 as devices have it
        lambda batch: torch.tensor([float(s['score'] < valid) for s in batch]).to(device),
        Validity(low=0.5),
        4,
        max_resample_times=0,
        place=lambda sample: move(sample, device),
    )
    batch = sampler.sample().samples
    stacked = torch.stack([sample['x'] for sample in batch])
    answers['device'], answers['own'] = str(stacked.device), str(device)
    answers['values'] = stacked[:, 0, 0].cpu().tolist()
    dist.barrier()
    return answers


def without_our_code() -> str:
    """Stack samples of gcu:2 and gcu:3 as they arrive from a pickled gather."""
    accelerator = resolve_accelerator('sim')
    init_process_group(accelerator)
    mine = torch.ones(2).to(accelerator.device(dist.get_rank()))
    pool: List[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pool, mine)
    try:
        torch.stack(pool[2:4])
    except RuntimeError as error:
        return str(error)
    return 'it stacked'


def check_devices(every: List[Any]) -> None:
    world = len(every)
    for each in every:
        assert each['device'] == each['own']
    values = [value for each in every for value in each['values']]
    assert sorted(values) == sorted(
        10.0 * rank + k for rank in range(world // 2, world) for k in range(8)
    )


@pytest.mark.skipif(no_simulated_cards() is not None, reason=str(no_simulated_cards()))
def test_samples_of_four_simulated_cards_meet_in_one_stack(tmp_path: Path) -> None:
    for said in run_ranks(without_our_code, 4, tmp_path / 'without'):
        assert 'Expected all tensors to be on the same device' in said
    every = run_ranks(pool_on_devices, 4, tmp_path / 'with', 'sim')
    check_devices(every)
    assert [each['device'] for each in every] == [f'gcu:{rank}' for rank in range(4)]


@pytest.mark.skipif(
    importlib.util.find_spec('torch_xla') is None,
    reason='torch_xla is not installed: the xla leg runs this',
)
def test_samples_of_xla_devices_move_through_host_memory(tmp_path: Path) -> None:
    every = run_ranks(pool_on_devices, 2, tmp_path, 'xla')
    check_devices(every)
    assert all(each['device'].startswith('xla') for each in every)
