"""Machines without a shared disk resume from one checkpoint, whoever has it, whoever is lost."""

from __future__ import annotations

import logging
import os
import time
import zlib
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence

import pytest
import torch
import torch.distributed as dist
from agreeing import PATIENT, Answers, error_of, start, wait_for_others
from forked import DIED, fork_scenarios
from ranks import run_ranks
from support import on_host

from mapsage.distributed import open_channel
from mapsage.engine.checkpoints.resume import ResumeError
from mapsage.extras.elastic.neighbor import relay
from mapsage.extras.elastic.neighbor.copies import NeighborCopies, Offer, neighbor_of, newest
from mapsage.extras.elastic.neighbor.store import CopyStore

pytestmark = on_host

# Machines of each number of ranks: those of rank 0, 1, ...
LAYOUTS: Dict[int, Sequence[int]] = {2: (0, 1), 3: (0, 1, 2), 5: (0, 0, 1, 1, 2)}


class Here:
    """One rank of a machine with a disk and a memory of its own, in a folder that others see."""

    def __init__(self, folder: Path, machines: Optional[Sequence[int]] = None) -> None:
        rank, world = int(os.environ['RANK']), int(os.environ['WORLD_SIZE'])
        machines = machines or LAYOUTS[world]
        self.machine = machines[rank]
        nodes = sorted(set(machines))
        os.environ.update(
            GROUP_RANK=str(nodes.index(self.machine)),
            GROUP_WORLD_SIZE=str(len(nodes)),
            LOCAL_RANK=str(machines[:rank].count(self.machine)),
        )
        self.disk = folder / f'disk{self.machine}'
        self.memory = folder / f'memory{self.machine}'
        for place in (self.disk, self.memory):
            place.mkdir(parents=True, exist_ok=True)
        self.leads = os.environ['LOCAL_RANK'] == '0'
        self.rank = start()
        relay.CHUNK_BYTES = 10_000  # type: ignore[attr-defined]

    def copies(self) -> NeighborCopies:
        dist.barrier()  # all files are there
        return NeighborCopies(str(self.disk), memory=self.memory)

    def save(self, iteration: int, fill: float = 0.0, seed: int = 7) -> Path:
        """Save a checkpoint on this machine's disk, as its CheckpointHook does."""
        path = self.disk / f'iter_{iteration}.pth'
        torch.save(
            dict(
                meta=dict(iter=iteration, seed=seed, virtual_ranks=4),
                message_hub={},
                state_dict=dict(weight=torch.full((16_000,), fill)),
            ),
            str(path),
        )
        (self.disk / 'last_checkpoint').write_text(str(path))
        return path

    def remember(self, path: Path) -> Path:
        """Move a file from the disk into the memory."""
        data = path.read_bytes()
        arrival = CopyStore(str(self.disk), self.memory).arrive(path.name, len(data))
        arrival.write(data)
        path.unlink()
        (self.disk / 'last_checkpoint').unlink()
        return arrival.keep(zlib.crc32(data))


def told(choice: Any) -> Any:
    """Return what a rank would resume from."""
    if choice is None:
        return None
    data = Path(choice.path).read_bytes()
    return dict(
        path=choice.path,
        crc=zlib.crc32(data),
        iteration=choice.iteration,
        seed=choice.seed,
        virtual_ranks=choice.virtual_ranks,
        notes=choice.notes,
        skipped=choice.skipped,
    )


# --- what the machines have when they start


def have_nothing(here: Here) -> None:
    """A run that begins."""


def have_on_the_last_disk(here: Here) -> None:
    """The machine that wrote has become the last one."""
    here.save(5 if here.machine != 2 else 10, fill=here.machine)


def have_in_memory(here: Here) -> None:
    """The newest is a copy in the memory of a machine that is not the first."""
    here.save(5)
    if here.machine == 1:
        here.remember(here.save(10, fill=1.0))


def have_different_ones(here: Here) -> None:
    """Two machines have gone on from different steps, and came to the same iteration."""
    if here.machine:
        here.save(10, fill=here.machine)


def have_damaged_ones(here: Here) -> None:
    """The newest on a disk is cut, the newest in a memory has changed."""
    if here.machine == 0:
        path = here.save(20)
        path.write_bytes(path.read_bytes()[:1000])
    if here.machine == 1:
        kept = here.remember(here.save(15))
        kept.write_bytes(b'?' + kept.read_bytes()[1:])
        here.save(10)


def have_no_memory(here: Here) -> None:
    """A machine that lacks the checkpoint has no memory for it."""
    if here.machine == 0:
        here.save(10)
    here.memory.rmdir()


def resume(folder: Path, have: Callable[[Here], None]) -> Any:
    here = Here(folder)
    if here.leads:
        have(here)
    return told(here.copies().choose())


def refuse(folder: Path) -> Any:
    """Only a machine that is not the first has a checkpoint, and it is cut."""
    here = Here(folder)
    if here.machine == 2 and here.leads:
        path = here.save(20)
        path.write_bytes(path.read_bytes()[:1000])
    try:
        return told(here.copies().choose())
    except ResumeError as error:
        return str(error)


# --- what goes wrong while it is passed on


def lose_rank(folder: Path) -> Any:
    """Rank 1 ends in the middle of the file."""
    here = Here(folder)
    if here.rank == 0:
        here.save(10)
    copies = here.copies()
    if here.rank == 1:
        swap, relay._swap = (
            relay._swap,
            lambda *args: os._exit(3) if len(turns) == 3 else turns.append(0) or swap(*args),
        )
        turns: List[int] = []
    return error_of(copies.choose)


def break_disk(folder: Path, whose: int) -> Any:
    """A file cannot be read or written from the third chunk on; no rank is left waiting."""
    here = Here(folder)
    channel, size = open_channel(purpose='test'), 95_000
    path = here.disk / 'file'
    path.write_bytes(bytes(size if whose else 25_000))
    arrival = CopyStore(str(here.disk), here.memory).arrive('file', size)
    if here.rank == whose:
        write = arrival.write
        arrival.write = lambda data: (  # type: ignore[method-assign]
            write(data) if arrival._left > 75_000 else fail()
        )
    with open(path, 'rb') as source:
        error = relay.pass_along(
            channel,
            list(range(dist.get_world_size())),
            size,
            None if here.rank else source,
            arrival,
        )
    dist.barrier()
    return [type(error).__name__, str(error), arrival._left]


def fail() -> None:
    raise OSError(28, 'No space left on device')


# --- a run whose first machine is lost


def train_and_be_lost(folder: Path) -> Any:
    """Rank 0 saves twice while the run continues; then all end without a word."""
    here = Here(folder)
    copies, log = here.copies(), logging.getLogger('run')
    records: List[str] = []
    log.setLevel(logging.INFO)
    log.handle = lambda record: records.append(record.getMessage())  # type: ignore
    if here.leads:
        here.remember(here.save(100))  # of an earlier run in this folder
    sent: List[str] = []
    try:
        with copies.running(log, resumed=False):
            earlier = list(here.memory.rglob('*.pth'))
            dist.barrier()
            for iteration in (5, 10):
                if here.rank == 0:
                    path = here.save(iteration, fill=iteration)
                    copies.send(str(path))
                    sent.append(path.name)
                    deadline = time.monotonic() + PATIENT
                    while not list((folder / 'memory1').glob(f'*/*-{path.name}')):
                        assert time.monotonic() < deadline, records
                        time.sleep(0.005)
                dist.barrier()
            raise KeyError('lost')
    except KeyError:
        pass
    wait_for_others(folder, list(range(dist.get_world_size())))
    held = (
        [
            sorted(path.name.split('-', 2)[2] for path in place.rglob('*.pth'))
            for place in sorted(folder.glob('memory*'))
        ]
        if here.rank == 0
        else []
    )
    return dict(sent=sent, held=held, log=records, earlier=earlier)


def go_on_without(folder: Path, lost: int) -> Any:
    """The machines that are left resume, train on and come to the end."""
    machines = [machine for machine in (0, 1, 2) if machine != lost]
    here = Here(folder, machines)
    copies = here.copies()
    first = told(copies.choose())
    with copies.running(logging.getLogger('run'), resumed=True):
        if here.rank == 0:
            copies.send(str(here.save(15)))
    left = [
        str(path.relative_to(here.disk.parent))
        for place in (here.memory, here.disk)
        for path in place.rglob('*')
    ]
    return dict(first, left=sorted(left))


HAVE: List[Any] = [
    have_nothing,
    have_on_the_last_disk,
    have_in_memory,
    have_different_ones,
    have_damaged_ones,
    have_no_memory,
]
HAVE_OF: List[Any] = [
    (have, ranks)
    for have in HAVE
    for ranks in LAYOUTS
    if ranks == 3 or have is not have_nothing and ranks != 2 or have is have_in_memory
]


def run_scenarios(folder: Path) -> Dict[Any, Any]:
    found = fork_scenarios(
        {
            **{(have.__name__, ranks): (resume, ranks, Path, have) for have, ranks in HAVE_OF},
            ('refuses', 3): (refuse, 3, Path),
            **{('loses', ranks): (lose_rank, ranks, Path) for ranks in (2, 3)},
            **{(f'breaks {whose}', 3): (break_disk, 3, Path, whose) for whose in (0, 1, 2)},
            **{
                (f'run {lost}', 3): (train_and_be_lost, 3, folder / f'lost{lost}')
                for lost in (0, 1)
            },
        },
        folder,
        PATIENT,
    )
    return {
        **found,
        **fork_scenarios(
            {
                (f'without {lost}', 2): (go_on_without, 2, folder / f'lost{lost}', lost)
                for lost in (0, 1)
            },
            folder / 'later',
            PATIENT,
        ),
    }


@pytest.fixture(scope='module')
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    folder = tmp_path_factory.mktemp('neighbor')
    return Answers(run_ranks(run_scenarios, 1, folder, folder, timeout=400)[0])


def check_all_alike(answers: List[Any], iteration: int, ranks: int) -> None:
    assert [each['iteration'] for each in answers] == [iteration] * ranks
    assert len({each['crc'] for each in answers}) == 1
    assert {(each['seed'], each['virtual_ranks']) for each in answers} == {(7, 4)}
    for machine, each in zip(LAYOUTS[ranks], answers):  # each reads what is its own
        assert f'/disk{machine}/' in each['path'] or f'/memory{machine}/' in each['path']


@pytest.mark.parametrize('ranks', [3, 5])
def test_the_newest_of_all_disks_is_resumed(ranks: int, answers: Answers) -> None:
    found = answers.of('have_on_the_last_disk', ranks)
    check_all_alike(found, 10, ranks)
    assert found[-1]['path'].endswith('/disk2/iter_10.pth')
    assert ['/memory' in each['path'] for each in found] == [
        machine != 2 for machine in LAYOUTS[ranks]
    ]
    assert 'iter_10.pth of iteration 10 on the disk of' in found[0]['notes'][0]
    assert 'iter_10.pth (0.1 MB) was sent to ' in found[0]['notes'][1]


def test_a_run_does_not_begin_anew_beside_damaged_checkpoints(answers: Answers) -> None:
    for text in answers.of('refuses', 3):
        assert 'no machine has a checkpoint that can be read' in text and 'iter_20.pth' in text


@pytest.mark.parametrize('ranks', [2, 3, 5])
def test_a_copy_in_memory_is_resumed(ranks: int, answers: Answers) -> None:
    found = answers.of('have_in_memory', ranks)
    check_all_alike(found, 10, ranks)
    assert all('/memory' in each['path'] for each in found)
    assert 'iter_10.pth of iteration 10 in the memory of' in found[0]['notes'][0]


@pytest.mark.parametrize('ranks', [3, 5])
def test_ranks_never_resume_from_different_bytes(ranks: int, answers: Answers) -> None:
    found = answers.of('have_different_ones', ranks)
    check_all_alike(found, 10, ranks)
    assert [each['path'] for each in found if '/disk1/' in each['path']]
    assert not [each['path'] for each in found if '/disk2/' in each['path']]


@pytest.mark.parametrize('ranks', [3, 5])
def test_a_damaged_file_is_passed_over(ranks: int, answers: Answers) -> None:
    found = answers.of('have_damaged_ones', ranks)
    check_all_alike(found, 10, ranks)
    assert any('iter_20.pth' in line for line in found[0]['skipped']), found[0]['skipped']


@pytest.mark.parametrize('ranks', [3, 5])
def test_a_machine_without_memory_takes_its_disk(ranks: int, answers: Answers) -> None:
    found = answers.of('have_no_memory', ranks)
    check_all_alike(found, 10, ranks)
    assert '/disk2/.neighbor_copy/' in found[-1]['path']


def test_without_any_checkpoint_nothing_is_resumed(answers: Answers) -> None:
    assert answers.of('have_nothing', 3) == [None] * 3


@pytest.mark.parametrize('ranks', [2, 3])
def test_a_rank_that_is_lost_on_the_way_is_named(ranks: int, answers: Answers) -> None:
    first, lost, *others = answers.of('loses', ranks)
    assert lost == DIED
    for error in (first, *others):
        assert error['type'] == 'RankLostError' and 1 in error['ranks']


@pytest.mark.parametrize('whose', [0, 1, 2])
def test_a_disk_that_fails_leaves_no_rank_waiting(whose: int, answers: Answers) -> None:
    found = answers.of(f'breaks {whose}', 3)
    words = 'became shorter' if not whose else 'No space left on device'
    assert [words in text for _, text, _ in found] == [rank == whose for rank in range(3)]
    received = [left for _, _, left in found[1:]]
    assert received == [0 if rank != whose else 75_000 for rank in (1, 2)]


@pytest.mark.parametrize('lost', [0, 1])
def test_a_run_goes_on_after_any_machine_is_lost(lost: int, answers: Answers) -> None:
    first, *others = answers.of(f'run {lost}', 3)
    assert first['sent'] == ['iter_5.pth', 'iter_10.pth']
    assert first['held'] == [[], ['iter_10.pth'], []]
    assert [each['earlier'] for each in (first, *others)] == [[], [], []]
    assert len(first['log']) == 1 and 'iter_5.pth' in first['log'][0]
    assert [each['log'] for each in others] == [[], []]
    found = answers.of(f'without {lost}', 2)
    assert [each['iteration'] for each in found] == [10, 10]
    assert found[0]['crc'] == found[1]['crc']
    # In the end the memory is given back.
    assert [
        name for each in found for name in each['left'] if '/memory' in name or 'neighbor' in name
    ] == []


def test_which_offer_is_taken() -> None:
    assert newest({0: Offer(), 1: Offer()}) is None
    assert newest({0: Offer(), 2: Offer('a', iteration=0)}) == 2
    assert (
        newest(
            {0: Offer('a', iteration=5), 2: Offer('b', iteration=10), 1: Offer('c', iteration=10)}
        )
        == 1
    )


@pytest.mark.parametrize(
    'node, nodes, neighbor',
    [(0, [0], None), (0, [0, 1], 1), (1, [0, 1], 0), (2, [0, 1, 2], 0), (0, [0, 2, 5], 2)],
)
def test_the_neighbor_is_the_next_machine(node: int, nodes: List[int], neighbor: Any) -> None:
    assert neighbor_of(node, nodes) == neighbor
