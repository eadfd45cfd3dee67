"""``randomness.deterministic``: what still computes in an undefined order on the accelerator."""
from __future__ import annotations

from contextlib import contextmanager
from typing import Iterator

from mapsage.engine.run_extension import EngineRun, RunExtension


class Determinism(RunExtension):
    """Warns of modules that no setting of the accelerator makes deterministic."""

    @contextmanager
    def training(self, run: EngineRun) -> Iterator[None]:
        if run._randomness_cfg.get('deterministic'):
            warning = run.accelerator.deterministic_obstacle(run.model)
            if warning:
                run.logger.warning(warning)
        yield
