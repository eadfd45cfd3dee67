"""What each rank of a cluster test writes down of its run, and the run's pace."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from mmengine.dist import get_rank, get_world_size
from mmengine.hooks import Hook
from mmengine.registry import HOOKS

# Where a rank shows that it has started to import, and stays.
STARTING = 'STEP_LOG_STARTING'
if STARTING in os.environ:
    Path(os.environ[STARTING]).touch()
    time.sleep(600)


@HOOKS.register_module()
class StepLog(Hook):
    """Writes a line of JSON at each event of this rank.

    Args:
        folder: Where each process gets a file.
        pace: Seconds that each step takes longer, so that a fault can strike in the middle of it.
        slow: Additional seconds of a step by host, of a validation by ``'validation'``, and of a
            save by ``'save'``.
    """

    priority = 'VERY_LOW'

    def __init__(self, folder: str, pace: float = 0.1, slow: Any = None) -> None:
        self._path = Path(folder) / f'{socket.gethostname()}-{os.getpid()}'
        self._pace, self._slow = pace, slow or {}

    def _write(self, event: str, step: int, **facts: Any) -> None:
        facts.update(
            time=time.time(),
            event=event,
            step=step,
            rank=get_rank(),
            world=get_world_size(),
            host=socket.gethostname(),
            pid=os.getpid(),
        )
        with open(self._path, 'a') as file:
            file.write(json.dumps(facts) + '\n')

    def before_train(self, runner: Any) -> None:
        self._write('start', runner.iter)

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        time.sleep(self._pace + self._slow.get(socket.gethostname(), 0))

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        self._write('step', runner.iter + 1, loss=float(outputs['loss'].detach()))

    def before_val_epoch(self, runner: Any) -> None:
        self._write('validation', runner.iter)
        time.sleep(self._slow.get('validation', 0))

    def before_save_checkpoint(self, runner: Any, checkpoint: dict) -> None:
        self._write('save', runner.iter + 1)
        time.sleep(self._slow.get('save', 0))

    def after_train(self, runner: Any) -> None:
        self._write('end', runner.iter)
