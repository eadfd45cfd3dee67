"""Agreement between real processes of which one is late, raises, dies, or differs."""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path
from typing import Any, Dict, List, Tuple

import pytest
import torch
import torch.distributed as dist
from agreeing import PATIENT, Answers, error_of, start, wait_for_others
from forked import DIED, fork_scenarios
from ranks import run_ranks
from support import main_leg

from mapsage.distributed import (
    Consensus,
    all_ranks_or_none,
    open_channel,
    raise_together,
)
from mapsage.distributed.channels import consensus as consensus_module
from mapsage.distributed.channels.group_channel import GroupChannel

pytestmark = main_leg
WORLDS = [2, 4, 8]
GBK_NAME = b'\xb5\xd8.tif'.decode('utf-8', 'surrogateescape')  # as os.listdir gives it
ROUNDS = 400  # of two threads at once: by then an unlocked store of torch 1.10 is stuck


def run_scenarios(folder: Path) -> Dict[Tuple[str, int], Any]:
    return fork_scenarios(
        {
            (name, world): (function, world, *args)
            for (name, world), (function, *args) in scenarios().items()
        },
        folder,
    )


@pytest.fixture(scope='module')
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    folder = tmp_path_factory.mktemp('consensus')
    return Answers(run_ranks(run_scenarios, 1, folder, folder, timeout=600)[0])


def agree_and_differ() -> Dict[str, Any]:
    rank, world = start(), int(os.environ['WORLD_SIZE'])
    consensus = Consensus(['step', 'left', 'seed'], must_agree=['seed'])
    if rank == world - 1:
        time.sleep(1)  # late
    facts = consensus.tick(step=rank - 1, left=rank % 2, seed=7)
    silent: Dict[str, int] = {} if rank == world - 1 else dict(step=5, left=1)
    partial = consensus.tick(**silent)
    answers = dict(
        all_came=[
            facts.max('step'),
            facts.min('step'),
            facts.any('step'),
            facts.all('step'),
            facts.agree('step'),
            facts.complete('step'),
            facts.all('left'),
        ],
        one_silent=[
            partial.max('step'),
            partial.agree('step'),
            partial.complete('step'),
            partial.all('left'),
            partial.max('seed'),
        ],
        by_rank=partial.by_rank('step'),
        error=error_of(lambda: consensus.tick(seed=7 + (rank == world - 1))),
    )
    # the error has left nothing behind: the next tick works
    answers['after'] = consensus.tick(step=rank).max('step')
    return answers


def agree_by_maximum() -> Dict[str, Any]:
    """Agree as many ranks do: they gather facts only if these differ."""
    consensus_module._GATHER_BYTES = 0
    told = agree_and_differ()
    consensus = Consensus(['a', 'b'])
    gathered = []
    consensus.channel.gather = gathered.append  # type: ignore[method-assign, assignment]
    extremes = [consensus.tick(a=value, b=-value) for value in (2**63 - 1, 1 - 2**63 + 1, 0)]
    nothing = consensus.tick()
    assert not gathered and nothing.by_rank('a') == {}
    assert [facts.max('a') for facts in extremes] == [2**63 - 1, 2 - 2**63, 0]
    return told


def test_facts_are_the_same_with_and_without_a_gather(answers: Answers) -> None:
    assert answers.of('agree by maximum', 4) == answers.of('agree', 4)


@pytest.mark.parametrize('world', WORLDS)
def test_late_silent_and_differing_ranks(world: int, answers: Answers) -> None:
    every = answers.of('agree', world)
    assert all(each == every[0] for each in every)
    last = world - 1
    values = {rank: 7 + (rank == last) for rank in range(world)}
    assert every[0]['all_came'] == [
        last - 1,
        -1,
        True,
        world == 2 and all([-1, 0]),
        False,
        True,
        False,
    ]
    assert every[0]['one_silent'] == [5, True, False, True, None]
    assert every[0]['by_rank'] == dict.fromkeys(range(last), 5)
    assert every[0]['error']['type'] == 'DisagreementError'
    assert (every[0]['error']['field'], every[0]['error']['values']) == ('seed', values)
    assert f'8 on rank(s) [{last}]' in every[0]['error']['message']
    assert every[0]['after'] == last


def lose_a_rank(how: str, folder: Path) -> Any:
    rank, world = start(), int(os.environ['WORLD_SIZE'])
    # only a rank that hangs may cost the deadline
    consensus = Consensus(['step'], timeout=8 if how == 'hangs' else PATIENT)
    consensus.tick(step=1)
    survivors = list(range(world - 1))
    if rank == world - 1:
        if how == 'dies':
            os._exit(1)
        wait_for_others(folder, survivors)
        # it comes when nobody waits any more
        error = error_of(lambda: consensus.tick(step=2))
        wait_for_others(folder, [], 'told')
        return error
    error = error_of(lambda: consensus.tick(step=2))
    again = error_of(lambda: consensus.tick(step=3))
    wait_for_others(folder, survivors)
    if how == 'hangs':
        wait_for_others(folder, [world - 1], 'told')
    return error, again


@pytest.mark.parametrize(
    'how, world', [('dies', 2), ('dies', 4), ('dies', 8), ('hangs', 2), ('hangs', 4)]
)
def test_a_lost_rank_is_named(how: str, world: int, answers: Answers) -> None:
    *every, _ = answers.of(how, world)
    for rank, (error, again) in enumerate(every):
        assert error['type'] == 'RankLostError' and error['ranks'] == [world - 1]
        assert (
            f'rank {rank} waited at agreement 3 and rank(s) [{world - 1}] did not come'
            in error['message']
        )
        assert (
            f'Rank {world - 1} on host {socket.gethostname()}'
            + (': its process has ended' if how == 'dies' else ' answers')
        ) in error['message']
        assert again == error


def test_a_rank_that_comes_too_late_is_told(answers: Answers) -> None:
    *others, late = answers.of('hangs')
    assert late['type'] == 'RankLostError' and late['ranks'] == [len(others)]
    assert f'the others have waited for it, rank {len(others)}, in vain' in late['message']


def die_inside() -> Any:
    rank = start()
    consensus = Consensus(['step'], timeout=PATIENT)
    if rank == 1:
        channel = consensus.channel
        assert isinstance(channel, GroupChannel)
        # as its collective begins, while the others already have its connection
        channel._roll.mesh.send = lambda *_: os._exit(1)  # type: ignore[method-assign]
    return error_of(lambda: consensus.tick(step=2))


def test_a_rank_that_dies_in_the_collective_is_named(answers: Answers) -> None:
    error, gone = answers.of('dies inside')
    assert gone == DIED
    assert error['ranks'] == [1] and 'They died, there or in it' in error['message']


def differ_in_fields() -> Dict[str, Any]:
    rank = start()
    return error_of(lambda: Consensus(['a', 'b'] if rank else ['a']))


def test_different_fields_are_an_error_and_no_wrong_numbers(answers: Answers) -> None:
    every = answers.of('fields')
    assert all(each == every[0] for each in every)
    assert "1: \"(('a', 'b'), ())\"" in every[0]['message']


def of_two_groups(folder: Path) -> Dict[str, Any]:
    rank = start()
    groups = [dist.new_group([0, 3]), dist.new_group([1, 2])]
    consensus = Consensus(['rank'], group=groups[rank in (1, 2)], must_agree=['rank'])
    assert consensus.tick(rank=5).max('rank') == 5
    values = error_of(lambda: consensus.tick(rank=rank))['values']
    wait_for_others(folder, [0, 1, 2, 3])
    return values


def test_a_group_agrees_for_itself_and_names_global_ranks(answers: Answers) -> None:
    assert answers.of('groups', 4) == [{0: 0, 3: 3}, {1: 1, 2: 2}, {1: 1, 2: 2}, {0: 0, 3: 3}]


def in_two_threads() -> List[int]:
    start()
    channels = [open_channel(None, PATIENT, purpose) for purpose in ('loop', 'ahead')]
    wrong = []

    def talk(channel: Any) -> None:
        for number in range(ROUNDS):
            got = [int(each) for each in channel.gather(torch.tensor(number))]
            wrong.extend(each for each in got if each != number)

    threads = [threading.Thread(target=talk, args=(channel,), daemon=True) for channel in channels]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENT - 30)
    return wrong + [-1 for thread in threads if thread.is_alive()]


def test_two_threads_of_a_rank_may_talk_at_once(answers: Answers) -> None:
    assert answers.of('two threads') == [[], []]


def pass_transposed_tensors() -> List[Any]:
    rank = start()
    channel = open_channel(None, PATIENT)
    values = torch.arange(6).view(2, 3) + 10 * rank
    largest, copied, output = values.t(), values.clone().t(), torch.zeros(2, 3).long().t()
    gathered = [each.tolist() for each in channel.gather(values.t())]
    traded = channel.trade(values.t()[:, :1]).tolist() + channel.trade(values[0].t()).tolist()
    channel.broadcast(copied, 1)
    channel.all_to_all(output, values.t(), [1] * 3, [1] * 3)
    channel.max(largest)
    return [gathered, traded, copied.tolist(), output.tolist(), largest.tolist()]


def test_a_tensor_need_not_be_contiguous(answers: Answers) -> None:
    every = [(torch.arange(6).view(2, 3) + 10 * rank).t() for rank in range(3)]
    for rank, found in enumerate(answers.of('layouts', 3)):
        own = torch.stack([each[rank] for each in every])
        assert found == [
            [each.tolist() for each in every],
            own[:, :1].tolist() + own[:, 0].tolist(),
            every[1].tolist(),
            own.tolist(),
            every[2].tolist(),
        ]


def one_raises() -> List[Any]:
    rank = start()
    failing = [1, dist.get_world_size() - 1]

    def step(fails: bool) -> None:
        with all_ranks_or_none('reading the list'):
            if fails:
                raise KeyError(f'no such scene on rank {rank} ü')

    step(False)
    error = error_of(lambda: step(rank in failing))
    step(False)  # and the ranks are still together
    return [error['type'], error['message'], error.get('rank')]


@pytest.mark.parametrize('world', WORLDS)
def test_an_exception_reaches_every_rank(world: int, answers: Answers) -> None:
    failing = [1, world - 1]
    for rank, (kind, message, lowest) in enumerate(answers.of('raises', world)):
        own = f"'no such scene on rank {rank} ü'"
        if rank in failing:
            assert (kind, message) == ('KeyError', own)
        else:
            assert (kind, lowest) == ('RankError', 1)
            assert message == (
                "rank 1 failed in reading the list: KeyError: 'no such scene on rank 1 ü'"
            )


def scenes_that_fail(failing: List[int]) -> List[Any]:
    rank = start()
    error = FileNotFoundError(f'cannot open {GBK_NAME} of rank {rank}')

    def in_a_block() -> None:
        with all_ranks_or_none('opening the scenes'):
            if rank in failing:
                raise error

    def after_a_tick() -> None:
        if consensus.tick(failed=rank in failing).any('failed'):
            raise_together(
                consensus.channel, error if rank in failing else None, 'opening the scenes'
            )

    def one_error_for_all() -> None:
        raise_together(
            consensus.channel,
            error if rank in failing else None,
            'opening the scenes',
            everywhere=lambda texts: ValueError(
                '; '.join(f'rank {rank}: {text}' for rank, text in texts.items())
            ),
        )

    consensus = Consensus(['failed'], timeout=PATIENT)
    answers = [error_of(action) for action in (in_a_block, after_a_tick, one_error_for_all)]
    # nothing is left behind: the next tick works
    return [*answers, consensus.tick(failed=rank).max('failed')]


@pytest.mark.parametrize('failing', [[1], [2], [1, 2]])
def test_an_error_whose_text_is_no_utf8_reaches_every_rank(
    failing: List[int], answers: Answers
) -> None:
    text = r'FileNotFoundError: cannot open \udcb5\udcd8.tif of rank '
    for rank, (*own, everywhere, after) in enumerate(answers.of(f'scenes {failing}', 3)):
        for error in own:
            if rank in failing:
                assert error['type'] == 'FileNotFoundError' and GBK_NAME in error['message']
            else:
                assert (error['type'], error['rank']) == ('RankError', failing[0])
                assert error['message'] == (
                    f'rank {failing[0]} failed in opening the scenes: {text}{failing[0]}'
                )
        assert everywhere['type'] == 'ValueError'
        assert everywhere['message'] == '; '.join(f'rank {each}: {text}{each}' for each in failing)
        assert after == 2


def raise_past_a_collective(kind: str) -> Any:
    rank = start()
    consensus = Consensus(['step'])

    def step() -> None:
        with all_ranks_or_none('the step'):
            if rank == 1:
                raise KeyError('rank 1 alone')
            if kind == 'all_reduce':
                dist.all_reduce(torch.ones(3))
            else:
                consensus.tick(step=1)

    if rank == 1:
        assert error_of(step)['type'] == 'KeyError'
        os._exit(1)
    return error_of(step)


@pytest.mark.parametrize('kind', ['all_reduce', 'tick'])
def test_peers_stuck_in_a_collective_get_the_text(kind: str, answers: Answers) -> None:
    every = answers.of(kind)
    assert every[0]['message'] == "rank 1 failed in the step: KeyError: 'rank 1 alone'"


def die_in_block(folder: Path) -> Any:
    rank, world = start(), int(os.environ['WORLD_SIZE'])

    def step() -> None:
        with all_ranks_or_none():
            if rank == world - 1:
                os._exit(1)

    error = error_of(step)
    wait_for_others(folder, list(range(world - 1)))
    return error


def test_a_rank_that_dies_in_the_block_is_named(answers: Answers) -> None:
    *every, _ = answers.of('dies in block', 4)
    assert [each['ranks'] for each in every] == [[3]] * 3


def never_open(folder: Path) -> Any:
    rank = start()
    if rank == 1:
        wait_for_others(folder, [0])
        return None
    error = error_of(lambda: Consensus(['step'], timeout=2))
    wait_for_others(folder, [1])
    return error


def test_a_rank_that_never_makes_the_consensus_is_named(answers: Answers) -> None:
    error, _ = answers.of('never opens')
    assert error['ranks'] == [1] and 'or have opened no channel yet' in error['message']


def scenarios() -> Dict[Tuple[str, int], Tuple[Any, ...]]:
    """Return (function, *args) by name and world size; Path stands for a folder of its own."""
    table: Dict[Tuple[str, int], Tuple[Any, ...]] = {}
    for world in WORLDS:
        table.update(
            {
                ('agree', world): (agree_and_differ,),
                ('raises', world): (one_raises,),
                ('dies', world): (lose_a_rank, 'dies', Path),
            }
        )
    table.update(
        {
            ('hangs', 2): (lose_a_rank, 'hangs', Path),
            ('hangs', 4): (lose_a_rank, 'hangs', Path),
            ('dies in block', 4): (die_in_block, Path),
            ('agree by maximum', 4): (agree_by_maximum,),
            ('two threads', 2): (in_two_threads,),
            ('layouts', 3): (pass_transposed_tensors,),
            ('dies inside', 2): (die_inside,),
            ('fields', 2): (differ_in_fields,),
            ('groups', 4): (of_two_groups, Path),
            ('never opens', 2): (never_open, Path),
            ('all_reduce', 2): (raise_past_a_collective, 'all_reduce'),
            ('tick', 2): (raise_past_a_collective, 'tick'),
        }
    )
    for failing in ([1], [2], [1, 2]):
        table[f'scenes {failing}', 3] = (scenes_that_fail, failing)
    return table
