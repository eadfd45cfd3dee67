"""A training job over machines: one launcher on each, what its ranks wrote down, what they said."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional

from machines import ROOT, Machine, Machines, Process
from warm_python import warm_python

PATHS = ':'.join(str(ROOT / folder) for folder in ('tests/cluster', 'tests'))

# Small enough that eight ranks share two cores: BatchNorm, dropout, noise of each sample.
CONFIG = """
custom_imports = dict(imports=['mapsage', 'toy_runs', 'step_log'])
runner_type = 'MapSageRunner'
default_scope = 'mmengine'
env_cfg = dict(accelerator='cpu', dist_cfg=dict(timeout={timeout}))
randomness = dict(seed=3)
model = dict(type='ToyRegression')
train_dataloader = dict(
    batch_size=2, num_workers=0, sampler=dict(type='InfiniteSampler', shuffle=True),
    collate_fn=dict(type='pseudo_collate'), dataset=dict(type='ToyNumbers', length=37, noise=0.5))
val_dataloader = dict(
    batch_size=2, num_workers=0, sampler=dict(type='DefaultSampler', shuffle=False),
    collate_fn=dict(type='pseudo_collate'), dataset=dict(type='ToyNumbers', length=8))
val_evaluator = dict(type='MeanValue')
optim_wrapper = dict(type='OptimWrapper', optimizer=dict(type='SGD', lr=0.05, momentum=0.9))
train_cfg = dict(by_epoch=False, max_iters={steps}, val_interval={validate})
val_cfg = dict()
default_hooks = dict(
    checkpoint=dict(type='CheckpointHook', by_epoch=False, interval={save}, max_keep_ckpts=3),
    logger=dict(type='LoggerHook', interval=1))
custom_hooks = [dict(type='StepLog', folder={folder!r}, pace={pace}, slow={slow})]
log_processor = dict(by_epoch=False)
visualizer = dict(type='Visualizer', vis_backends=[dict(type='LocalVisBackend')])
"""


@dataclass
class Event:
    """What a rank wrote down (step_log.py)."""

    time: float
    event: str
    step: int
    rank: int
    world: int
    host: str
    pid: int
    loss: Optional[float] = None


class Job:
    """A job in a folder of its own.

    Args:
        machines: Where it runs; None for :meth:`train_here`.
        folder: For its config, work dir and the ranks' files.
        steps, save, validate: Iterations in all, from one checkpoint and one validation to the
            next.
        timeout: Of collectives, in seconds.
        pace, slow: Of :class:`~step_log.StepLog`.
        extra: More lines of the config.
        own_disks: Whether each machine has a work dir of its own.
    """

    def __init__(
        self,
        machines: Optional[Machines],
        folder: Path,
        steps: int = 100,
        save: int = 5,
        validate: int = 1000,
        timeout: int = 60,
        pace: float = 0.1,
        slow: Any = None,
        extra: str = '',
        own_disks: bool = False,
    ) -> None:
        self.machines, self.work, self._own_disks = machines, folder / 'work', own_disks
        self._folder, self._told = folder, folder / 'told'
        self._told.mkdir(parents=True)
        self.config = folder / 'job.py'
        self.config.write_text(
            CONFIG.format(
                timeout=timeout,
                steps=steps,
                save=save,
                validate=validate,
                folder=str(self._told),
                pace=pace,
                slow=slow,
            )
            + extra
        )
        self.launchers: Dict[str, List[Process]] = {}
        self.store: Any = None

    def start_store(self) -> None:
        """Start the rendezvous store on a machine that is no node, and wait until it listens."""
        host = self.machines.store
        self.store = host.run([host.python, 'tools/rendezvous.py'])
        self.until(lambda: 'RENDEZVOUS=' in self.store.output, 60, 'store')

    def launch(
        self, machine: Machine, *options: Any, nodes: str = '', cold: bool = False, **environ: str
    ) -> Process:
        """Start the user's script on a machine, with one rank.

        Args:
            machine: Where.
            options: Of tools/train.py.
            nodes: Smallest and largest number of machines, ``'2:3'``; they meet at the store.
            cold: Of :meth:`Machine.run`.
            environ: More variables.
        """
        if nodes:
            environ.update(NNODES=nodes, RENDEZVOUS=f'{self.machines.store.name}:29400')
            if self._own_disks:  # the job's name would be another with each work dir
                environ.setdefault('RDZV_ID', 'own disks')
        process = machine.run(
            [
                'bash',
                ROOT / 'scripts' / 'start_8card_training.sh',
                self.config,
                '--work-dir',
                self.work_of(machine),
                *options,
            ],
            cold,
            PYTHONPATH=PATHS,
            **{'NPROC_PER_NODE': '1', **environ},
        )
        self.launchers.setdefault(machine.name, []).append(process)
        return process

    def work_of(self, machine: Machine) -> Path:
        """Return the work dir of a machine."""
        return self.work / machine.name if self._own_disks else self.work

    def train_here(self) -> Process:
        """Start the same training in one process, outside of the machines."""
        environ = dict(os.environ, PYTHONPATH=PATHS, OMP_NUM_THREADS='1')
        return Process(
            [
                warm_python(),
                str(ROOT / 'tools' / 'train.py'),
                str(self.config),
                '--work-dir',
                str(self.work),
            ],
            environ,
        )

    def events(self, kind: str = 'step', after: float = 0) -> List[Event]:
        """Return the ranks' events of a kind since a time, in order."""
        found = [
            Event(**json.loads(line))
            for path in self._told.iterdir()
            for line in path.read_text().splitlines(keepends=True)
            if line.endswith('\n')
        ]
        return sorted(
            (each for each in found if each.event == kind and each.time >= after),
            key=lambda each: each.time,
        )

    def wait_for(
        self,
        kind: str = 'step',
        least: int = 0,
        after: float = 0,
        world: int = 0,
        timeout: float = 90,
    ) -> Event:
        """Wait for an event of rank 0 at step ``least`` or later, in a world of that size."""
        return self.until(
            lambda: next(
                (
                    each
                    for each in self.events(kind, after)
                    if each.rank == 0 and each.step >= least and world in (0, each.world)
                ),
                None,
            ),
            timeout,
            f'{kind} {least} in world {world}',
        )

    def rank_of(self, machine: Machine) -> int:
        """Return the pid of the latest rank on a machine."""
        return [each.pid for each in self.events('start') if each.host == machine.name][-1]

    def until(self, condition: Callable[[], Any], timeout: float, what: str) -> Any:
        """Return the condition's value once it is true."""
        deadline = time.monotonic() + timeout
        while True:
            value = condition()
            if value:
                return value
            if time.monotonic() > deadline:
                raise AssertionError(f'no {what} within {timeout} s\n{self.outputs()}')
            time.sleep(0.05)

    def outputs(self, tail: int = 3000) -> str:
        """Return the end of what each launcher printed."""
        return '\n'.join(
            f'--- {name}, launcher {number}, status {process.status}\n{process.output[-tail:]}'
            for name, processes in self.launchers.items()
            for number, process in enumerate(processes)
        )
