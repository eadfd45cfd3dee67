"""Runs on several machines: compare code, config and data, and start the heartbeat.

The comparisons themselves are in ``engine/nodes.py`` and ``node_settings.py``.
"""
from __future__ import annotations

from typing import Optional

from mmengine.runner import BaseLoop

from mapsage.engine.nodes import compare_data, meet_nodes
from mapsage.engine.run_extension import EngineRun, Phase, RunExtension
from mapsage.host.runner import dataset_of


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
