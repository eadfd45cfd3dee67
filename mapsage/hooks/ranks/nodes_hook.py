"""What a job whose nodes come and go does between steps."""
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
from mapsage.distributed.nodes.writer_lease import take_lease
from mapsage_launcher.nodes.elastic import (
    ELASTIC_VARIABLE,
    RESTART_VARIABLE,
    STEP_FILE,
    write_step,
)

_PARTS = ('until the loss was noticed', 'until the ranks had ended and the machines met again',
          'until the ranks had started', 'to read the checkpoint', 'for the first step')


@HOOKS.register_module()
class NodesHook(Hook):
    """Hook that keeps the launchers informed and logs what a restart has cost.

    It does nothing outside a job whose nodes come and go (``NNODES=MIN:MAX``). There:

    - the first rank of each node writes the last step into a file of its launcher, which counts
      restarts without progress by it;
    - rank 0 becomes the one writer of the work dir
      (:func:`~mapsage.distributed.nodes.writer_lease.take_lease`);
    - after a restart, rank 0 logs the time from the last step before to the first one behind it, in
      parts, and how many steps are done again.

    ``MapSageRunner`` registers it.
    """

    # Last before the loop begins: what others do at the start belongs to the start.
    priority = 'LOWEST'

    def __init__(self) -> None:
        self._elastic = ELASTIC_VARIABLE in os.environ
        self._file: Optional[int] = None
        self._ready = self._loaded = 0.0
        self._parts: List[float] = []
        self._again = 0

    def before_run(self, runner: Any) -> None:
        """Note that the ranks have started: the checkpoint is read next."""
        self._ready = time.time()

    def before_train(self, runner: Any) -> None:
        """Take the lease of the work dir, and learn from the other ranks about the restart."""
        if not self._elastic:
            return
        self._loaded = time.time()
        if is_main_process():
            take_lease(runner.work_dir)
        notes = os.environ.get('MAPSAGE_ERROR_NOTES')
        if notes and local_rank() == 0 and os.path.isdir(notes):
            self._file = os.open(str(Path(notes, STEP_FILE)), os.O_RDWR | os.O_CREAT, 0o600)
        told: Dict[str, Any] = json.loads(os.environ.pop(RESTART_VARIABLE, '{}'))
        # A machine that has just joined knows nothing of a restart, and may have become the first.
        mine = torch.tensor([float(bool(told.get('last_step'))), 0, 0, 0, 0], dtype=torch.float64)
        if mine[0]:
            mine[1:] = torch.tensor([told['noticed'] - told['last_step'],
                                     told['formed'] - told['noticed'],
                                     self._ready - told['formed'],
                                     told['iteration'] + 1 - runner.iter])
        known = [each for each in open_channel().gather(mine) if each[0]]
        if known:
            *parts, again = known[0][1:].tolist()
            self._parts, self._again = [*parts, self._loaded - self._ready], int(again)

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None,
                         outputs: Any = None) -> None:
        """Write down the step; behind the first one of a restart, log what that has cost."""
        if self._file is not None:
            write_step(self._file, runner.iter)
        if self._parts:
            parts = [*self._parts, time.time() - self._loaded]
            runner.logger.info(
                f'training goes on {sum(parts):.1f} s after the last step before the restart: '
                + ', '.join(f'{seconds:.1f} s {what}' for seconds, what in zip(parts, _PARTS))
                + f'. {max(0, self._again)} step(s) are done again.')
            self._parts = []

    def after_train(self, runner: Any) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
