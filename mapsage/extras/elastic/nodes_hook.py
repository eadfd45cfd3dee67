"""What a job whose nodes come and go does between steps.

The launchers of such a job restart all ranks when a node is lost or joins. The hook writes the
last step to a file that the launcher of the node reads, and measures what a restart cost. The
restart itself is in `mapsage_launcher/nodes/elastic.py`.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any, Dict, List, Optional

import torch
from mmengine.dist import is_main_process
from mmengine.hooks import Hook
from mmengine.registry import HOOKS

from mapsage.distributed import local_rank, open_channel
from mapsage.distributed.wrappers.rank_batches import Batch
from mapsage.engine.checkpoints.writer_lease import take_lease
from mapsage.host.runner import HostRunner
from mapsage_launcher.nodes.elastic import RESTART_VARIABLE, STEP_FILE, write_step
from mapsage_launcher.rank_notes import ELASTIC_VARIABLE

# Stages of a restart, in the order of NodesHook._stage_seconds.
_STAGES = (
    'until the loss was noticed',
    'until the ranks had ended and the machines met again',
    'until the ranks had started',
    'to read the checkpoint',
    'for the first step',
)


@HOOKS.register_module()
class NodesHook(Hook):
    """Hook that keeps the launchers informed and logs what a restart has cost.

    It does nothing outside a job whose nodes come and go (``NNODES=MIN:MAX``). There:

    - the first rank of each node writes the last step into a file of its launcher, which counts
      restarts without progress by it;
    - rank 0 becomes the one writer of the work dir
      (:func:`~mapsage.engine.checkpoints.writer_lease.take_lease`);
    - after a restart, rank 0 logs the time from the last step before it to the first step after it,
      stage by stage, and how many steps are repeated.

    ``MapSageRunner`` registers it.
    """

    # Last before the loop begins, because the start of the other hooks counts as starting.
    priority = 'LOWEST'

    def __init__(self) -> None:
        self._elastic = ELASTIC_VARIABLE in os.environ
        # Descriptor of the launcher's file for the last step.
        self._file: Optional[int] = None
        # Times at which the ranks had started, and at which the checkpoint was loaded.
        self._ready = self._loaded = 0.0
        # Seconds of each stage of a restart but the last, until the restart is logged.
        self._stage_seconds: List[float] = []
        self._repeated_steps = 0

    def before_run(self, runner: HostRunner) -> None:
        """Note that the ranks have started: the checkpoint is read next."""
        self._ready = time.time()

    def before_train(self, runner: HostRunner) -> None:
        """Take the lease of the work dir, and share what is known of a restart. Collective."""
        if not self._elastic:
            return
        self._loaded = time.time()
        if is_main_process():
            take_lease(runner.work_dir)
        notes = os.environ.get('MAPSAGE_ERROR_NOTES')
        if notes and local_rank() == 0 and os.path.isdir(notes):
            self._file = os.open(str(Path(notes, STEP_FILE)), os.O_RDWR | os.O_CREAT, 0o600)
        restart: Dict[str, Any] = json.loads(os.environ.pop(RESTART_VARIABLE, '{}'))
        # A machine that has just joined knows nothing of the restart, and may have become the
        # first. So every rank sends what it knows: a flag, three durations, the repeated steps.
        local_facts = torch.tensor(
            [float(bool(restart.get('last_step'))), 0, 0, 0, 0], dtype=torch.float64
        )
        if local_facts[0]:
            local_facts[1:] = torch.tensor(
                [
                    restart['noticed'] - restart['last_step'],
                    restart['formed'] - restart['noticed'],
                    self._ready - restart['formed'],
                    restart['iteration'] + 1 - runner.iter,
                ]
            )
        known = [facts for facts in open_channel().gather(local_facts) if facts[0]]
        if known:
            *seconds, repeated = known[0][1:].tolist()
            self._stage_seconds = [*seconds, self._loaded - self._ready]
            self._repeated_steps = int(repeated)

    def after_train_iter(
        self,
        runner: HostRunner,
        batch_idx: int,
        data_batch: Optional[Batch] = None,
        outputs: Optional[Dict[str, Any]] = None,
    ) -> None:
        """Write the step to the file; after the first step of a restart, log what it cost."""
        if self._file is not None:
            write_step(self._file, runner.iter)
        if self._stage_seconds:
            stages = [*self._stage_seconds, time.time() - self._loaded]
            runner.logger.info(
                f'training goes on {sum(stages):.1f} s after the last step before the restart: '
                + ', '.join(f'{seconds:.1f} s {stage}' for seconds, stage in zip(stages, _STAGES))
                + f'. {max(0, self._repeated_steps)} step(s) are done again.'
            )
            self._stage_seconds = []

    def after_train(self, runner: HostRunner) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
