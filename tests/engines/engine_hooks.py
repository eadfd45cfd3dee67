"""Hooks of the trainings that an engine starts."""

import os
import signal
import time
from pathlib import Path

from mmengine.dist import get_rank
from mmengine.hooks import Hook
from mmengine.registry import HOOKS

from mapsage.extras.elastic.heartbeat import has_heartbeat


@HOOKS.register_module()
class DieOnce(Hook):
    """Kills rank 1 by SIGKILL before an iteration, unless the file of a mark exists."""

    def __init__(self, iteration: int, mark: str) -> None:
        self.iteration, self.mark = iteration, Path(mark)

    def before_train_iter(self, runner, batch_idx, data_batch=None) -> None:
        if runner.iter == self.iteration and get_rank() == 1 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


@HOOKS.register_module()
class MeetPeers(Hook):
    """Holds a run at an iteration until it has so many ranks; notes if machines watch each other."""

    def __init__(self, iteration: int, ranks: int, reached: str) -> None:
        self.iteration, self.ranks, self.reached = iteration, ranks, Path(reached)

    def before_train_iter(self, runner, batch_idx, data_batch=None) -> None:
        if runner.iter == self.iteration:
            self.reached.touch()
            while runner.world_size < self.ranks:
                time.sleep(0.1)
            if has_heartbeat():
                self.reached.with_name('watched').touch()


@HOOKS.register_module()
class SlowSteps(Hook):
    """Slow steps; the second one makes a file."""

    def __init__(self, reached: str, seconds: float = 0.5) -> None:
        self.reached, self.seconds = Path(reached), seconds

    def before_train_iter(self, runner, batch_idx, data_batch=None) -> None:
        if runner.iter == 1:
            self.reached.touch()
        time.sleep(self.seconds)
