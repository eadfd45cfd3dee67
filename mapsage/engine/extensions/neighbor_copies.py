"""Copies of the newest checkpoint in another machine's memory, for machines that share no disk.

The copies themselves are in ``engine/checkpoints/neighbor/``; which of them a run resumes from is
decided in ``resume.py``.
"""
from __future__ import annotations

from contextlib import contextmanager
from typing import Iterator

from mapsage.engine.checkpoints.neighbor.copies import copies_for_run
from mapsage.engine.run_extension import EngineRun, RunExtension


class CheckpointCopies(RunExtension):
    """``CheckpointHook(neighbor_copy=True)`` sends its checkpoints while the training runs."""

    def join(self, run: EngineRun) -> None:
        run.neighbor_copies = copies_for_run(run.cfg, run.work_dir,
                                             not run.machines_share_work_dir)

    @contextmanager
    def training(self, run: EngineRun) -> Iterator[None]:
        if not run.neighbor_copies:
            yield
            return
        with run.neighbor_copies.running(run.logger, bool(run._resume)):
            yield
