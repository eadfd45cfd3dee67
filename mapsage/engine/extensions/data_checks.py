"""Checks of the datasets that a run reads; the checks are in ``engine/loading/``."""
from __future__ import annotations

from typing import Optional

from mmengine.dist import is_main_process
from mmengine.runner import BaseLoop

from mapsage.engine.loading.build import set_test_mode
from mapsage.engine.loading.data_checks import band_order_note, compare_heads
from mapsage.engine.loading.ground_checks import ground_note
from mapsage.engine.run_extension import EngineRun, Phase, RunExtension
from mapsage.host.runner import dataset_of


class DataChecks(RunExtension):
    """Compares training data with the heads, and with the ground that is validated.

    Windows of a scene may overlap. Each pixel of a scene is therefore scored in one window only.
    """

    def startup_warning(self, run: EngineRun) -> Optional[str]:
        return band_order_note(run.cfg)

    def on_loop_built(self, run: EngineRun, phase: Phase, loop: BaseLoop) -> None:
        if phase is Phase.TRAINING:
            compare_heads(run.model, dataset_of(loop))
            return
        set_test_mode(loop)
        if phase is Phase.VALIDATION:
            self._warn_of_shared_ground(run, loop)

    @staticmethod
    def _warn_of_shared_ground(run: EngineRun, validation: BaseLoop) -> None:
        trained, validated = dataset_of(run._train_loop), dataset_of(validation)
        if is_main_process() and trained is not None and validated is not None:
            warning = ground_note(trained, validated)
            if warning:
                run.logger.warning(warning)
