"""Head replicas of real processes: each item ends as the same tensors or the same error on all."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

import pytest
import torch
import torch.distributed as dist
from agreeing import PATIENT, error_of, start, wait_for_others
from forked import DIED, fork_scenarios
from ranks import run_ranks
from support import ON_MAIN_LEG, on_host

from mapsage.distributed import RankLostError
from mapsage.extras.streaming import StreamingError
from mapsage.extras.streaming.remote.blocks import BlockPool
from mapsage.extras.streaming.remote.state import State
from mapsage.extras.streaming.split_head.replica_facts import Agreed, read_agreed
from mapsage.extras.streaming.split_head.replica_features import ReplicaFeatures
from mapsage.extras.streaming.wire.payload import Layout, pack_levels

pytestmark = on_host
# seconds by which a rank is late; the other legs test the same code
LATE = 20.0 if ON_MAIN_LEG else 2.5
CPU = torch.device('cpu')
TOKENS, DIMS, BLOCK_TOKENS = 2000, 6, 128  # of the report's item


class Pool(BlockPool):
    """Blocks of which the first are taken, with the order in which others are handed out."""

    def __init__(self, blocks: int, block_bytes: int, taken: int = 0) -> None:
        super().__init__(blocks, block_bytes)
        super().alloc(taken, (-1, 0))
        self.history: List[List[int]] = []

    def alloc(self, count: int, owner: Sequence[int]) -> List[int]:
        self.history.append(super().alloc(count, owner))
        return self.history[-1]

    def release(self, blocks: Sequence[int], owner: Sequence[int]) -> None:
        for block in blocks:  # what is still looked at after this is wrong
            self.data(block, owner).fill_(255)
        super().release(blocks, owner)


def layout_of(levels: Sequence[torch.Tensor]) -> Layout:
    return Layout(tuple(tuple(level.shape) for level in levels), levels[0].dtype, levels[0].dtype)


class Scripted:
    """An item whose data come stage by stage, one at each wait."""

    def __init__(
        self,
        number: int,
        levels: Sequence[torch.Tensor],
        *stages: Tuple[State, int],
        error: Optional[str] = None,
    ) -> None:
        self.number, self.attempt, self.error = number, 0, error
        self.layout, self.bytes = pack_levels(levels)
        self.total = len(self.bytes)
        self._stages = list(stages) or [(State.READY, self.total)]
        self.state, self.arrived = self._stages.pop(0)

    def read(self, start: int, stop: int) -> torch.Tensor:
        assert stop <= self.arrived
        return self.bytes[start:stop].clone()

    def wait(self, timeout: float) -> None:
        if self._stages:
            self.state, self.arrived = self._stages.pop(0)
        else:
            time.sleep(timeout)


class Again(Scripted):
    """An item that begins again on another encoder, with other bytes, when half of it arrived."""

    def wait(self, timeout: float) -> None:
        if not self.attempt:
            self.bytes, self.attempt, self.arrived = 255 - self.bytes, 1, 0
        super().wait(timeout)


class Unreadable(Scripted):
    def read(self, start: int, stop: int) -> torch.Tensor:
        raise IndexError(f'block of byte {start} was reused')


class Watched(ReplicaFeatures):
    """Keeps what this rank read in each tick."""

    def __init__(self, *args: Any) -> None:
        self.read: List[Agreed] = []
        super().__init__(*args)

    def _ask(self, *args: Any, **kwargs: Any) -> Any:
        facts = super()._ask(*args, **kwargs)
        self.read.append(read_agreed(facts))
        return facts


def levels_of(seed: int, *shapes: Tuple[int, ...]) -> List[torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=draw) for shape in shapes]


def same(features: Sequence[torch.Tensor], levels: Sequence[torch.Tensor]) -> bool:
    return len(features) == len(levels) and all(
        mine.dtype == its.dtype and torch.equal(mine, its) for mine, its in zip(features, levels)
    )


def scenario_of_the_report() -> Dict[str, Any]:
    rank, token = start(), DIMS * 4
    pool = Pool(8 * rank + 8, BLOCK_TOKENS * token, taken=8 * rank)
    item = levels_of(0, (1, DIMS, TOKENS, 1))
    arriving = Scripted(0, item, (State.PARTIAL, 1024 * token), (State.READY, TOKENS * token))
    replica = Watched(None, pool, CPU, PATIENT)
    features = replica.deliver(arriving if rank == 0 else None)
    return dict(
        read=[(each.total, each.arrived, each.state) for each in replica.read],
        blocks=pool.history,
        equal=same(features, item),
        free=pool.free,
    )


def test_the_scenario_of_the_report(answers: Dict[Any, Any]) -> None:
    every, token = answers['report', 4], DIMS * 4
    total, sent = TOKENS * token, 1024 * token
    for rank, told in enumerate(every):
        assert told['read'][:2] == [(total, sent, State.PARTIAL), (total, total, State.READY)]
        assert told['equal'] and told['free'] == 8
        # the owner reads from its transport; the others resume with all of their eight blocks
        own = list(range(8 * rank, 8 * rank + 8))
        assert told['blocks'] == ([own, own] if rank else [])
    assert [told['blocks'][0][0] for told in every[1:]] == [8, 16, 24]


def many_items(owner: int) -> Dict[str, Any]:
    """Deliver items of many kinds, one after the other, from one rank."""
    rank = start()
    pool = Pool(5, 60, taken=rank % 3)  # bytes: a level of odd size fills no whole block
    replica = Watched(None, pool, CPU, PATIENT)
    shapes: Dict[str, List[Tuple[int, ...]]] = dict(
        odd=[(1, 3, 5, 7), (2, 1, 1, 1)],
        zero=[(0, 4, 3, 3), (0, 8, 1, 1)],
        one=[(1, 1, 1, 1)],
        none_in_the_middle=[(1, 2, 2, 2), (1, 0, 9, 9), (1, 1, 3, 1)],
        large=[(1, 5, 11, 9)],
    )
    told: Dict[str, Any] = {}
    number = 0
    for name, its in shapes.items():
        for dtype in (torch.float32, torch.float64):
            levels = [level.to(dtype) for level in levels_of(number, *its)]
            features = replica.deliver(Scripted(number, levels) if rank == owner else None)
            told[f'{name} {dtype}'] = same(features, levels)
            number += 1
    levels = levels_of(number, (1, 3, 5, 7))
    pieces = [
        (State.NEW, 0),
        (State.FILLING, 1),
        (State.FILLING, 333),
        (State.PARTIAL, 399),
        (State.RESUMING, 400),
        (State.READY, 420),
    ]
    arriving = Scripted(number, levels, *pieces)
    arriving.total = None if rank == owner else arriving.total  # type: ignore[assignment]
    told['in pieces'] = same(replica.deliver(Late(arriving) if rank == owner else None), levels)
    again = Again(number, levels, (State.PARTIAL, 200), (State.FILLING, 300), (State.READY, 420))
    features = replica.deliver(again if rank == owner else None)
    told['other attempt'] = bool(
        (features[0].numpy().view('uint8') == 255 - levels[0].numpy().view('uint8')).all()
    )
    half = levels_of(number, (1, 3, 5, 7))
    wire = Scripted(number, half)
    wire.layout, wire.bytes = pack_levels(half, torch.bfloat16)
    wire.total = wire.arrived = len(wire.bytes)
    told['wire dtype'] = same(
        replica.deliver(wire if rank == owner else None), [half[0].bfloat16().float()]
    )
    told['free'] = pool.free == 5 - rank % 3
    return told


class Late(Scripted):
    """An item whose header comes with its first byte."""

    def __init__(self, item: Scripted) -> None:
        self.__dict__.update(item.__dict__)
        self._total, self._layout = len(self.bytes), self.layout
        self.total, self.layout = None, None  # type: ignore[assignment]

    def wait(self, timeout: float) -> None:
        self.total, self.layout = self._total, self._layout
        super().wait(timeout)


@pytest.mark.parametrize('owner, world', [(0, 1), (0, 2), (1, 2), (0, 4), (2, 4)])
def test_any_item_from_any_rank(owner: int, world: int, answers: Dict[Any, Any]) -> None:
    for told in answers[f'items of {owner}', world]:
        assert told == dict.fromkeys(told, True)


def count_ticks() -> Dict[str, Any]:
    rank, number = start(), 20
    replica = ReplicaFeatures(None, Pool(4, 100), CPU, PATIENT)
    every = [levels_of(item, (1, 2, 5, 5)) for item in range(number)]
    items: List[Optional[Scripted]] = [
        Scripted(item, levels) if rank == 0 else None for item, levels in enumerate(every)
    ]
    told: Dict[str, Any] = dict(equal=True)
    for item, levels in enumerate(every):
        following = items[item + 1] if item + 1 < number else None
        told['equal'] &= same(replica.deliver(items[item], following), levels)
    told['named'] = replica.report()
    again = Scripted(number, every[0]) if rank == 0 else None
    replica.deliver(again)
    told['not named'] = replica.report()['ticks']
    # a following item that fails is told with the one before, and raised in its own turn
    failed = Scripted(1, every[0], (State.FAILED, 0), error='out of memory') if rank == 0 else None
    told['good'] = same(
        replica.deliver(Scripted(0, every[0]) if rank == 0 else None, failed), every[0]
    )
    told['error'] = error_of(lambda: replica.deliver(failed))['message']
    return told


def test_one_tick_a_step_when_the_next_item_is_known(answers: Dict[Any, Any]) -> None:
    for told in answers['ticks', 2]:
        assert told['equal'] and told['good']
        assert told['named']['items'] == 20
        assert told['named']['ticks'] == 21  # the first step has one more
        assert told['named']['bytes'] == 20 * 200
        assert told['not named'] == 2
        assert told['error'] == 'item 1 failed on rank 0: out of memory'


def fail_in_many_ways() -> Dict[str, Any]:
    rank, levels = start(), levels_of(0, (1, 2, 5, 5))
    pool = Pool(4, 64)
    replica = ReplicaFeatures(None, pool, CPU, PATIENT)
    total = 200

    def failing(item: Optional[Scripted], following: Optional[Scripted] = None) -> str:
        answer = error_of(lambda: replica.deliver(item, following))
        assert answer['type'] == 'StreamingError', answer
        # the ranks are together, nothing is left in the pool, and the next item comes
        assert pool.free == 4
        assert same(replica.deliver(Scripted(9, levels) if rank == 1 else None), levels)
        return answer['message']

    def here(item: Scripted) -> Optional[Scripted]:
        return item if rank == 1 else None

    told = dict(
        half_way=failing(
            here(
                Scripted(
                    3,
                    levels,
                    (State.PARTIAL, 130),
                    (State.FAILED, 130),
                    error='encoder 2 died: signal 9 ü',
                )
            )
        ),
        unreadable=failing(here(Unreadable(4, levels))),
        nobody=failing(None),
        two=failing(Scripted(5, levels) if rank in (0, 2) else None),
        too_few=failing(here(Scripted(6, levels, (State.READY, total - 1)))),
        shrunk=failing(
            here(
                Scripted(
                    6, levels, (State.PARTIAL, 100), (State.RESUMING, 99), (State.READY, total)
                )
            )
        ),
    )
    wrong = Scripted(7, levels)
    wrong.layout = layout_of([torch.zeros(1, 2, 5, 6)])
    told['wrong layout'] = failing(here(wrong))
    wrong.layout = layout_of([torch.zeros(50)])
    told['no map'] = failing(here(wrong))
    replica.deliver(here(Scripted(7, levels)), here(Scripted(8, levels)))
    told['not as announced'] = failing(here(Scripted(7, levels)))
    if rank == 3:
        pool.alloc(4, (0, 0))
    told['no block'] = error_of(lambda: replica.deliver(here(Scripted(8, levels))))['message']
    if rank == 3:
        pool.release(range(4), (0, 0))
    if rank == 2:
        received = pool.data
        pool.data = lambda *args: received(*args).clone()  # type: ignore[method-assign]
    told['damaged'] = error_of(lambda: replica.deliver(here(Scripted(8, levels))))['message']
    sizes = Pool(4, 64 + (rank == 3))
    told['block sizes'] = error_of(lambda: ReplicaFeatures(None, sizes, CPU, PATIENT))['message']
    return told


def test_a_failure_is_the_same_error_on_all_ranks(answers: Dict[Any, Any]) -> None:
    every = answers['failures', 4]
    for told in every:
        assert {**told, 'block sizes': ''} == {**every[0], 'block sizes': ''}
    told = every[0]
    assert told['half_way'] == 'item 3 failed on rank 1: encoder 2 died: signal 9 ü'
    assert told['unreadable'] == 'item 4 failed on rank 1: IndexError: block of byte 0 was reused'
    assert 'no rank of the replica holds an item' in told['nobody']
    assert 'ranks [0, 2] of one head replica all hold an item' in told['two']
    assert 'it is READY and 199 bytes of 200 arrived' in told['too_few']
    assert 'attempt 0 had 100 bytes of 200, and then attempt 0 had 99 of 200' in told['shrunk']
    assert 'it has 200 bytes, and they are Layout(shapes=((1, 2, 5, 6),)' in told['wrong layout']
    assert 'rank 1: ValueError: features have the shapes [(50,)]' in told['no map']
    assert told['not as announced'] == (
        'item 8 failed on rank 1: rank 1 announced item 8 as following, and this rank brings item '
        '7. Deliver items in the order announced.'
    )
    assert 'item 8 failed on rank 3: no block of the pool is free' in told['no block']
    assert 'item 8 arrived differently on the ranks: checksums by rank {0: ' in told['damaged']
    assert '{0: 64, 1: 64, 2: 64, 3: 65} by rank' in told['block sizes']


def stand_still() -> Any:
    rank, levels = start(), levels_of(0, (1, 2, 5, 5))
    replica = ReplicaFeatures(None, Pool(4, 64), CPU, 6.0)
    item = Scripted(0, levels, (State.FILLING, 70)) if rank == 0 else None
    return error_of(lambda: replica.deliver(item))['message']


def test_an_item_that_stands_still_is_an_error_on_all(answers: Dict[Any, Any]) -> None:
    for message in answers['stands still', 2]:
        assert message.startswith(
            'item 0 failed on rank 0: nothing came for 6 s; it is FILLING with 70 of 200 bytes.'
        )


def lose_a_rank(who: int, folder: Path) -> Any:
    rank, levels = start(), levels_of(0, (1, 2, 5, 5))
    pool = Pool(4, 64)
    replica = ReplicaFeatures(None, pool, CPU, PATIENT)
    if rank == who:
        # in mid-item: some ranks have its first bytes and the others wait for them
        pool.alloc = lambda *args: os._exit(1)  # type: ignore[method-assign]
    stages = [(State.PARTIAL, 70), (State.READY, 200)]
    arriving = Killed(0, levels, *stages) if who == 1 else Scripted(0, levels, *stages)
    error = error_of(lambda: replica.deliver(arriving if rank == 1 else None))
    again = error_of(lambda: replica.deliver(arriving if rank == 1 else None))
    assert again == error and pool.free == 4
    wait_for_others(folder, [each for each in range(4) if each != who])
    return error


class Killed(Scripted):
    def wait(self, timeout: float) -> None:
        os.kill(os.getpid(), 9)


@pytest.mark.parametrize('who', [1, 3])
def test_a_killed_rank_is_named_on_the_others(who: int, answers: Dict[Any, Any]) -> None:
    every = answers[f'killed {who}', 4]
    assert every.pop(who) == DIED
    for error in every:
        assert error['type'] == 'RankLostError' and error['ranks'] == [who]


def be_late(timeout: float, folder: Path) -> Any:
    rank, levels = start(), levels_of(0, (1, 2, 5, 5))
    replica = ReplicaFeatures(None, Pool(4, 64), CPU, timeout)
    if rank == 1 and timeout < PATIENT:
        wait_for_others(folder, [0, 2])  # it comes when nobody waits any more
    elif rank == 1:
        time.sleep(LATE)
    arriving = Scripted(0, levels) if rank == 0 else None
    try:
        told: Any = same(replica.deliver(arriving), levels)
    except RankLostError as error:
        told = error.ranks, str(error)
    wait_for_others(folder, [0, 2])
    wait_for_others(folder, range(3), 'told')
    return told


def test_a_late_rank_is_waited_for_until_the_deadline(answers: Dict[Any, Any]) -> None:
    assert answers['late, in time', 3] == [True] * 3
    first, late, third = answers['late, too late', 3]
    assert first[0] == third[0] == [1]
    assert late[0] == [1] and 'the others have waited for it, rank 1, in vain' in late[1]


def replicas_side_by_side(folder: Path) -> Any:
    rank = start()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    replica = ReplicaFeatures(groups[rank // 2], Pool(4, 64), CPU, PATIENT)
    told = []
    for number in range(3):
        levels = levels_of(10 * (rank // 2) + number, (1, 2, 5 + rank // 2, 5))
        fails = rank == 2 and number == 1
        item = Scripted(number, levels, (State.FAILED if fails else State.READY, 400))
        item.arrived = item.total
        try:
            told.append(same(replica.deliver(item if not rank % 2 else None), levels))
        except StreamingError as error:
            told.append(str(error))
    wait_for_others(folder, range(4))
    return told


def test_replicas_fail_for_themselves(answers: Dict[Any, Any]) -> None:
    failed = 'item 1 failed on rank 2: no reason was given'
    assert answers['two replicas', 4] == [[True] * 3] * 2 + [[True, failed, True]] * 2


def scenarios() -> Dict[Tuple[str, int], Tuple[Any, ...]]:
    """Return (function, *args) by name and ranks; Path stands for a folder of its own."""
    table: Dict[Tuple[str, int], Tuple[Any, ...]] = {
        (f'items of {owner}', world): (many_items, owner)
        for owner, world in [(0, 1), (0, 2), (1, 2), (0, 4), (2, 4)]
    }
    table.update(
        {
            ('report', 4): (scenario_of_the_report,),
            ('ticks', 2): (count_ticks,),
            ('failures', 4): (fail_in_many_ways,),
            ('stands still', 2): (stand_still,),
            ('killed 1', 4): (lose_a_rank, 1, Path),
            ('killed 3', 4): (lose_a_rank, 3, Path),
            ('late, in time', 3): (be_late, PATIENT, Path),
            ('late, too late', 3): (be_late, 6.0, Path),
            ('two replicas', 4): (replicas_side_by_side, Path),
        }
    )
    return table


def run_scenarios(folder: Path) -> Dict[Tuple[str, int], Any]:
    return fork_scenarios(
        {
            (name, world): (function, world, *args)
            for (name, world), (function, *args) in scenarios().items()
        },
        folder,
    )


class Answers(Dict[Any, Any]):
    """What the ranks of each scenario returned; the error of a scenario that failed is raised."""

    def __getitem__(self, key: Any) -> Any:
        answer = super().__getitem__(key)
        assert isinstance(answer, list), answer
        return answer


@pytest.fixture(scope='module')
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    folder = tmp_path_factory.mktemp('replicas')
    return Answers(run_ranks(run_scenarios, 1, folder, folder, timeout=600)[0])
