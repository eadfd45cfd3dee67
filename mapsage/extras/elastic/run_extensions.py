"""What machines that train together do in a run: comparisons, and copies of checkpoints.

The comparisons are in `nodes.py` and `node_settings.py`, the copies in `neighbor/`.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Iterator, Optional

from mmengine.runner import BaseLoop

from mapsage.engine.checkpoints.resume import Choice
from mapsage.engine.run_extension import EngineRun, Phase, RunExtension
from mapsage.host.runner import dataset_of

from .neighbor.copies import NeighborCopies, copies_for_run
from .nodes import compare_data, meet_nodes


class Nodes(RunExtension):
    """Machines that train together have the same code, config and data."""

    # A difference between machines explains what other checks would find on one of them.
    acts_first = True
    warning = ''

    def join(self, run: EngineRun) -> None:
        self.warning = meet_nodes(run.cfg, run.work_dir, run.env.heartbeat_timeout)

    def startup_warning(self, run: EngineRun) -> Optional[str]:
        return self.warning

    def on_loop_built(self, run: EngineRun, phase: Phase, loop: BaseLoop) -> None:
        if phase is Phase.TRAINING:
            compare_data(dataset_of(loop))


class CheckpointCopies(RunExtension):
    """``CheckpointHook(neighbor_copy=True)`` sends its checkpoints while the training runs.

    It acts after ``Resume``, because copies of a run that starts over are removed.
    """

    _copies: Optional[NeighborCopies] = None

    def join(self, run: EngineRun) -> None:
        # The warning of Nodes says that a machine does not see rank 0's work dir.
        separate_disks = any(
            isinstance(extension, Nodes) and extension.warning for extension in run.extensions
        )
        self._copies = copies_for_run(run.cfg, run.work_dir, separate_disks)

    def choose_checkpoint(self, run: EngineRun) -> Optional[Choice]:
        return self._copies.choose() if self._copies else None

    def copy_checkpoint(self, run: EngineRun, path: str) -> None:
        if self._copies:
            self._copies.send(path)

    @contextmanager
    def training(self, run: EngineRun) -> Iterator[None]:
        if not self._copies:
            yield
            return
        with self._copies.running(run.logger, bool(run._resume)):
            yield
