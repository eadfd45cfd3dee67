"""Faults of an elastic job, each with what it has to come to, and what is measured of it.

Every scenario gets machines of its own, starts a job on them, lets a fault strike once it trains,
and says in an :class:`Outcome` what happened. A scenario that does not come to its end raises an
AssertionError with what all launchers printed.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence

from jobs import Event, Job
from machines import Machine, Machines

# What a launcher or a rank prints when it knows that something has happened.
NOTICED = r'^elastic: (?!\d)|RankLostError|No space left|^error: '
VIRTUAL = 'env_cfg.update(virtual_ranks={})\n'
COPIED = "default_hooks['checkpoint'].update(neighbor_copy=True)\n"
STRIKES_AT = 7  # the step after which faults strike; the last checkpoint is that of step 5


@dataclass
class Outcome:
    """What came of a fault.

    Attributes:
        happened: In words.
        noticed: Seconds until a launcher or a rank that survives said so; None if none did.
        next_step: Seconds until the next training step; None if there was none.
        lost: Steps that were trained again.
    """

    happened: str
    noticed: Optional[float] = None
    next_step: Optional[float] = None
    lost: Optional[int] = None

    def row(self, fault: str) -> str:
        """Return a row of a Markdown table."""
        cells = [
            f'{value:.1f}' if value is not None else '–' for value in (self.noticed, self.next_step)
        ]
        cells.append('–' if self.lost is None else str(self.lost))
        return f'| {fault} | {self.happened} | {" | ".join(cells)} |'


class Struck(Job):
    """An elastic job that trains, and the moment at which a fault strikes it."""

    hit = 0.0
    before: List[Event] = []

    def train(self, count: int = 3, least: int = 2, most: int = 3, **environ: str) -> None:
        """Start the store and a launcher on the first nodes; wait until the training is on."""
        self.start_store()
        self.nodes = f'{least}:{most}'
        for node in self.machines.nodes[:count]:
            self.launch(node, nodes=self.nodes, **environ)
        self.wait_for('step', STRIKES_AT, world=count)

    def strike(self, *faults: Callable[[], Any]) -> None:
        """Let a fault happen now, and count seconds from here."""
        self.before = self.events('start')
        self.hit = time.time()
        for fault in faults:
            fault()

    def kill(self, machine: Machine, number: int = signal.SIGKILL) -> None:
        """Send a signal to the rank of a machine."""
        os.kill(self.rank_of(machine), number)

    def node_of_rank(self, rank: int) -> Machine:
        name = [each.host for each in self.events('start') if each.rank == rank][-1]
        return next(node for node in self.machines.nodes if node.name == name)

    def noticed(self, words: str = NOTICED, but: Iterable[Machine] = ()) -> Optional[float]:
        """Return the seconds until a launcher other than those of some machines said something."""
        skip = {machine.name for machine in but}
        found = [
            process.first(words, self.hit)
            for name, processes in self.launchers.items()
            if name not in skip
            for process in processes
        ]
        times = [each[0] - self.hit for each in found if each]
        return min(times) if times else None

    def recovered(
        self, happened: str, world: int, but: Sequence[Machine] = (), timeout: float = 120
    ) -> Outcome:
        """Wait for the first step of new ranks, in a world of that size.

        Args:
            happened: Words for the table.
            world: Number of ranks that continue; 0 for any.
            but: Machines whose words do not count.
            timeout: Seconds until then.
        """
        old = {each.pid for each in self.before}
        step = self.until(
            lambda: next(
                (
                    each
                    for each in self.events('step', self.hit)
                    if world in (0, each.world) and each.rank == 0 and each.pid not in old
                ),
                None,
            ),
            timeout,
            f'step in a world of {world}',
        )
        done = max(each.step for each in self.events() if each.pid in old)
        return Outcome(happened, self.noticed(but=but), step.time - self.hit, done - step.step + 1)

    def untouched(self, happened: str, seconds: float) -> Outcome:
        """Check that the same ranks train on: another step after some seconds, and no new rank."""
        self.wait_for('step', after=self.hit + seconds)
        assert not self.events('start', self.hit), self.outputs()
        return Outcome(happened, self.noticed(), None, 0)

    def finish(self, but: Sequence[Machine] = (), timeout: float = 90) -> None:
        """Wait for the end of the training on the machines that are left."""
        skip = {machine.name for machine in but}
        for name, processes in self.launchers.items():
            if name not in skip:
                assert processes[-1].wait(timeout) == 0, self.outputs()
        self.check_writers()
        self.check_losses()

    def check_losses(self) -> None:
        """Check that each step has the loss of a run that nothing happened to, bit for bit."""
        expected = reference(len(self.machines.nodes), self.machines.folder)
        steps = [each for each in self.events() if each.rank == 0]
        wrong = [each for each in steps if each.loss != expected[each.step]]
        assert not wrong, (wrong[:3], self.outputs())

    def check_writers(self) -> None:
        """Check that no rank of an earlier start saved after a later one had begun to train."""
        begins: Dict[int, float] = {}
        for each in self.events('step'):
            if each.rank == 0:
                begins.setdefault(each.pid, each.time)
        for save in self.events('save'):
            later = [
                pid
                for pid, begin in begins.items()
                if begin > begins.get(save.pid, save.time) and begin < save.time
            ]
            assert not later, (save, later, self.outputs())


_losses: Dict[int, Dict[int, float]] = {}
_one_at_a_time = threading.Lock()


def reference(count: int, folder: Path, steps: int = 300) -> Dict[int, float]:
    """Return the loss of each step of a run of ``count`` virtual ranks in one process."""
    with _one_at_a_time:
        if count not in _losses:
            job = Job(None, folder / 'reference', steps=steps, pace=0, extra=VIRTUAL.format(count))
            trained = job.train_here()
            assert trained.wait(120) == 0, trained.output
            _losses[count] = {each.step: each.loss for each in job.events()}
        return _losses[count]


@dataclass(frozen=True)
class Scenario:
    """A fault to try.

    Attributes:
        fault: In words, as in the table.
        play: Gets the job and returns the outcome.
        nodes: Machines.
        core: Whether every CI run tries it.
        settings: Of :class:`Job`.
        disks: Of :class:`Machines`.
    """

    fault: str
    play: Callable[[Struck], Outcome]
    nodes: int = 3
    core: bool = False
    settings: Any = None
    disks: Any = None


SCENARIOS: Dict[str, Scenario] = {}


def scenario(
    fault: str, nodes: int = 3, core: bool = False, disks: Any = None, **settings: Any
) -> Callable[[Any], Any]:
    """Register a scenario under its function's name."""

    def register(play: Callable[[Struck], Outcome]) -> Callable[[Struck], Outcome]:
        SCENARIOS[play.__name__] = Scenario(fault, play, nodes, core, settings, disks)
        return play

    return register


def play(name: str, folder: Path) -> Outcome:
    """Play a scenario in a folder of its own."""
    each = SCENARIOS[name]
    with Machines(each.nodes, folder, each.disks) as machines:
        settings = dict(
            each.settings,
            extra=VIRTUAL.format(each.nodes) + (COPIED if each.settings.get('own_disks') else ''),
        )
        return each.play(Struck(machines, folder, **settings))


def play_all(names: Iterable[str], folder: Path, at_once: int = 3) -> Dict[str, Any]:
    """Play scenarios, a few at a time, since they mostly wait; return outcomes or errors by name."""

    def one(name: str) -> Any:
        try:
            return play(name, folder / name)
        except Exception as error:  # told by the test of this scenario
            return error

    with ThreadPoolExecutor(at_once) as pool:
        names = list(names)
        return dict(zip(names, pool.map(one, names)))
