"""Checks of a run whose weights are ready: unusual schedules and rates, and equal ranks."""
from __future__ import annotations

from mmengine.optim import OptimWrapper, OptimWrapperDict

from mapsage.distributed import check_equal_weights
from mapsage.engine.checkpoints.resume_report import long_warm_ups
from mapsage.engine.encoder_rates import encoder_rate_warning
from mapsage.engine.run_extension import EngineRun, RunExtension
from mapsage.host.runner import plain_model


class StartChecks(RunExtension):
    """Warns of schedules and learning rates that ruin a training; proves that all ranks agree."""

    def after_load(self, run: EngineRun) -> None:
        # A hook that reads runner.iter before a test has the loop built, but not the schedulers.
        if isinstance(run.optim_wrapper, (OptimWrapper, OptimWrapperDict)):
            for line in long_warm_ups(run.param_schedulers, run.max_iters, run.max_epochs):
                run.logger.warning(line)
            warning = encoder_rate_warning(plain_model(run), run.optim_wrapper,
                                           None if run._resume else run._load_from)
            if warning is not None:
                run.logger.warning(f'{warning.text}. Set {warning.next_step}.')
        if run.distributed:
            check_equal_weights(plain_model(run), 'after initialization and loading')
