"""Ranks of several nodes compare themselves, watch each other and name whom they have lost."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any, Dict, List, Tuple

import pytest
import torch.distributed as dist
from agreeing import PATIENT, Answers
from forked import DIED, fork_scenarios
from mmengine.config import Config
from ranks import run_ranks
from support import main_leg

from mapsage.distributed.lost_ranks import leave_watches
from mapsage.extras.elastic import heartbeat, node_settings, nodes
from mapsage.extras.elastic.nodes import NodesDifferError, compare_data, meet_nodes
from mapsage_launcher.rank_notes import ELASTIC_VARIABLE

pytestmark = main_leg
TIMEOUT, GRACE = 6.0, 0.5  # seconds

LOSSES = [('stopped', 4, 2), ('ended', 3, 1), ('ended', 3, 0), ('silent', 3, 2), ('silent', 3, 0)]


def run_scenarios(folder: Path) -> Dict[Any, Any]:
    notes = {loss: folder / '-'.join(map(str, loss)) for loss in LOSSES}
    for place in notes.values():
        place.mkdir()
    told = fork_scenarios(
        {
            ('busy', 3): (be_busy, 3),
            ('leaves', 3): (leave_early, 3),
            ('late', 3): (be_late, 3),
            **{(loss, loss[1]): (lose, loss[1], loss[0], loss[2], notes[loss]) for loss in LOSSES},
            ('config', 3): (differ, 3, 'config'),
            ('code', 3): (differ, 3, 'code'),
            ('ranks', 3): (differ, 3, 'ranks'),
            ('uneven', 3): (differ, 3, 'uneven'),
            ('data', 3): (differ, 3, 'data'),
            ('resume', 3): (differ, 3, 'resume'),
            ('folder', 3): (look_for_the_folder, 3, folder),
        },
        folder,
        2 * PATIENT,
    )
    for loss, place in notes.items():
        told[loss] = {int(note.name.split('-')[1]): note.read_text() for note in place.glob('*-*')}
    return told


class Losses(Answers):
    """Answers, and the notes that the ranks left for their launcher when they ended."""

    def notes(self, loss: Any) -> Dict[int, str]:
        return self._told[loss]


@pytest.fixture(scope='module')
def answers(tmp_path_factory: pytest.TempPathFactory) -> Losses:
    folder = tmp_path_factory.mktemp('nodes')
    return Losses(run_ranks(run_scenarios, 1, folder, folder, timeout=400)[0])


def meet(
    cfg: Any = None,
    work_dir: Any = '/',
    ranks_per_node: int = 1,
    timeout: float = TIMEOUT,
    reported: int = 0,
) -> str:
    """Start as a rank of a node; with two ranks a node, ranks 0 and 1 are on the first."""
    rank, world = int(os.environ['RANK']), int(os.environ['WORLD_SIZE'])
    os.environ.update(
        GROUP_RANK=str(rank // ranks_per_node),
        GROUP_WORLD_SIZE=str(world // ranks_per_node),
        LOCAL_RANK=str(rank % ranks_per_node),
        LOCAL_WORLD_SIZE=str(reported or ranks_per_node),
    )
    heartbeat.GRACE_SECONDS, nodes._FOLDER_SECONDS = GRACE, 0.5
    dist.init_process_group('gloo')
    return meet_nodes(Config(cfg or dict(model=dict(depth=18))), str(work_dir), timeout)


# --- whom the others lose


def be_busy() -> str:
    """A rank that holds its interpreter for longer than the timeout is alive."""
    meet()
    if dist.get_rank() == 1:
        ctypes.PyDLL(None).usleep(6_500_000)  # keeps the interpreter's lock
    else:
        time.sleep(TIMEOUT + 1)
    leave_watches()
    return 'alive'


def be_late() -> str:
    """The watch of a node starts after the time for which a node may be silent.

    A machine with much else to do may start processes so late.
    """
    if os.environ['RANK'] == '1':
        command = heartbeat.watch_command
        heartbeat.watch_command = lambda *sockets: [
            'sh',
            '-c',
            f'sleep {TIMEOUT + 1}; exec "$@"',
            'sh',
            *command(*sockets),
        ]
    enough = time.monotonic() + TIMEOUT + 2
    meet()
    time.sleep(max(0.0, enough - time.monotonic()))
    leave_watches()
    return 'alive'


def leave_early() -> str:
    """A rank that has finished may end long before the others."""
    meet()
    if dist.get_rank() != 1:
        time.sleep(TIMEOUT + 1)
    leave_watches()
    return 'alive'


def lose(how: str, whom: int, folder: Path) -> str:
    """A rank is lost while the others are in no collective, so that only the heartbeat can tell."""
    os.environ['MAPSAGE_ERROR_NOTES'] = str(folder)
    meet(ranks_per_node=2 if how == 'stopped' else 1)
    if dist.get_rank() != whom:
        time.sleep(PATIENT)
        return 'not noticed'
    if how == 'ended':
        os._exit(3)
    if how == 'silent':  # as if the whole machine were frozen
        watch = heartbeat._watches[0].pid
        os.kill(watch, signal.SIGSTOP)
        while len(list(folder.glob('*-*'))) < dist.get_world_size() - 1:  # the others have ended
            time.sleep(0.05)
        os.kill(watch, signal.SIGCONT)
        time.sleep(PATIENT)
        return 'not told'
    os.kill(os.getpid(), signal.SIGSTOP)
    return 'continued'


# --- what is compared


def differ(what: str) -> str:
    """Rank 1 has another config, other code, another number of ranks or other data."""
    odd = os.environ['RANK'] == '1'
    if what == 'code' and odd:
        node_settings.code_digest = lambda: '0123abcd'  # type: ignore[assignment]
    if what == 'ranks':
        os.environ[ELASTIC_VARIABLE] = '2:3'
    depth = 34 if what == 'config' and odd else 18
    try:
        meet(
            dict(
                model=dict(depth=depth, act=(len, 'relu')),
                work_dir=f'runs/{odd}',
                resume=what == 'resume' and odd,
            ),
            ranks_per_node=1,
            reported=2 if what in ('ranks', 'uneven') and odd else 1,
        )
        compare_data([0] * (17 if what == 'data' and odd else 16))
    except NodesDifferError as error:
        return str(error)
    return 'all is equal'


def look_for_the_folder(folder: Path) -> Tuple[str, List[Path]]:
    rank = int(os.environ['RANK'])
    place = folder / ('own' if rank == 1 else 'shared')
    place.mkdir(exist_ok=True)
    note = meet(work_dir=place)
    dist.barrier()
    return note, list(place.iterdir())


# --- what is expected


@pytest.mark.parametrize('how', ['busy', 'leaves', 'late'])
def test_a_rank_that_is_only_slow_or_done_is_not_lost(how: str, answers: Answers) -> None:
    assert answers.of(how, 3) == ['alive'] * 3


@pytest.mark.parametrize('loss', LOSSES)
def test_the_others_name_who_is_lost_and_end(loss: Any, answers: Losses) -> None:
    how, ranks, whom = loss
    words = {
        'stopped': f'rank {whom} on host {socket.gethostname()}: its process ',
        'ended': f'on host {socket.gethostname()}: its process',
        'silent': f'rank(s) [{whom}] on host {socket.gethostname()}: nothing was heard',
    }[how]
    told = answers.of(loss, ranks)
    # a frozen machine ends as well, once it wakes up; a stopped process is killed
    assert told == [DIED] * ranks
    survivors = set(range(ranks)) - ({whom} if how != 'silent' else set())
    assert set(answers.notes(loss)) == survivors
    assert [text for text in answers.notes(loss).values() if words not in text] == []
    if how == 'stopped':
        assert 'has been stopped (SIGSTOP)' in answers.notes(loss)[0]


@pytest.mark.parametrize(
    'what, line',
    [
        ('config', '  config model.depth: 18 on {0}, {2}; 34 on {1}\n'),
        ('code', '0123abcd on {1}\n'),
        ('ranks', '  ranks_per_node: 1 on {0}, {2}; 2 on {1}\n'),
        ('resume', '  resume: False on {0}, {2}; True on {1}\n'),
        ('data', '  training samples: 16 on {0}, {2}; 17 on {1}\n'),
    ],
)
def test_nodes_that_differ_are_named_on_every_rank(what: str, line: str, answers: Answers) -> None:
    first, *others = answers.of(what, 3)
    nodes = [f'{socket.gethostname()} (node {number})' for number in range(3)]
    assert line.format(*nodes) in first
    assert first.count('\n') == 2  # nothing else differs
    assert others == [first, first]


def test_nodes_of_a_static_job_may_have_different_numbers_of_ranks(answers: Answers) -> None:
    assert answers.of('uneven', 3) == ['all is equal'] * 3


def test_a_work_dir_that_a_node_does_not_see_is_a_warning(answers: Answers) -> None:
    notes, left = zip(*answers.of('folder', 3))
    assert 'is not the folder of that name on ' in notes[0] and '(node 1):' in notes[0]
    assert notes[2] == notes[0]
    assert left == ([], [], [])
