"""Runs on several machines: facts that must be equal, copies of checkpoints, requests to stop.

The comparisons are in ``engine/nodes.py`` and ``node_settings.py``, the copies in
``engine/checkpoints/neighbor/``. Which copy a run resumes from is decided in ``resume.py``.
Requests to stop are in ``mapsage_launcher/stop_request.py``, the answer in
``engine/guards/stop_hook.py``.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import ContextManager, Iterator, Optional

from mmengine.runner import BaseLoop

from mapsage.engine.guards import StopHook
from mapsage.engine.run_extension import EngineRun, Phase, RunExtension
from mapsage.extras.elastic.neighbor.copies import copies_for_run
from mapsage.extras.elastic.nodes import compare_data, meet_nodes
from mapsage.host.runner import dataset_of, hooks_of_type
from mapsage_launcher.stop_request import listening


class Nodes(RunExtension):
    """Machines that train together have the same code, config and data."""

    _warning = ''

    def join(self, run: EngineRun) -> None:
        self._warning = meet_nodes(run.cfg, run.work_dir, run.env.heartbeat_timeout)
        run.machines_share_work_dir = not self._warning

    def startup_warning(self, run: EngineRun) -> Optional[str]:
        return self._warning

    def on_loop_built(self, run: EngineRun, phase: Phase, loop: BaseLoop) -> None:
        if phase is Phase.TRAINING:
            compare_data(dataset_of(loop))


class CheckpointCopies(RunExtension):
    """``CheckpointHook(neighbor_copy=True)`` sends its checkpoints while the training runs."""

    def join(self, run: EngineRun) -> None:
        run.neighbor_copies = copies_for_run(run.cfg, run.work_dir, not run.machines_share_work_dir)

    @contextmanager
    def training(self, run: EngineRun) -> Iterator[None]:
        if not run.neighbor_copies:
            yield
            return
        with run.neighbor_copies.running(run.logger, bool(run._resume)):
            yield


def listening_for_stops(run: EngineRun) -> ContextManager[None]:
    """Take SIGTERM and SIGUSR1 for requests while the context is open, if a StopHook answers them."""
    return listening(bool(hooks_of_type(run, StopHook)))


class StopRequests(RunExtension):
    """Hooks that can end the run are sorted last, after hooks that were registered later."""

    @contextmanager
    def training(self, run: EngineRun) -> Iterator[None]:
        run._hooks.sort(key=lambda hook: isinstance(hook, StopHook))
        yield
