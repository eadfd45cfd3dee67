"""Writes down when a rank passes each phase of its start; see launch_time.py."""

import json
import os
import time
from pathlib import Path

from mmengine.hooks import Hook
from mmengine.registry import HOOKS

IMPORTED = time.time()


def process_start() -> float:
    """Return when this process started, in seconds since the epoch (Linux)."""
    ticks = int(Path('/proc/self/stat').read_text().rsplit(')', 1)[1].split()[19])
    up = float(Path('/proc/uptime').read_text().split()[0])
    return time.time() - up + ticks / os.sysconf('SC_CLK_TCK')


@HOOKS.register_module()
class TimelineHook(Hook):
    """Times the start; MMEngine builds hooks once the model is wrapped."""

    def __init__(self) -> None:
        self.marks = [process_start(), IMPORTED, time.time()]

    def before_train(self, runner) -> None:
        self.marks.append(time.time())

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        if len(self.marks) == 4:
            self.marks.append(time.time())
            path = Path(os.environ['MAPSAGE_TIMELINE']) / f'{runner.rank}.json'
            path.write_text(json.dumps(self.marks))
