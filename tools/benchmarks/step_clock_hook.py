"""Writes down when each step of a rank ends, on the wall clock and on its processor; see
virtual_ranks.py."""

import json
import os
import time
from pathlib import Path

from mmengine.hooks import Hook
from mmengine.registry import HOOKS


@HOOKS.register_module()
class StepClockHook(Hook):
    """Times the ends of steps; a file for each rank, named after it, holds (wall, processor)."""

    priority = 'LOWEST'

    def __init__(self) -> None:
        self.ends: list = []

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        self.ends.append((time.time(), time.process_time()))

    def after_train(self, runner) -> None:
        path = Path(os.environ['MAPSAGE_STEP_CLOCK']) / f'{runner.rank}.json'
        path.write_text(json.dumps(self.ends))
