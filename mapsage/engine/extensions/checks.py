"""Checks of a run: keys of its config, its data, images, schedules, rates and equal ranks.

A check raises an error, or returns a warning for the log; the checks themselves are in the modules
that are imported here.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Iterator, Optional

from mmengine.dist import is_main_process
from mmengine.optim import OptimWrapper, OptimWrapperDict
from mmengine.runner import BaseLoop
from torch import nn

from mapsage.datasets import SegDataPreProcessor
from mapsage.distributed import check_equal_weights
from mapsage.engine.checkpoints.resume_report import long_warm_ups
from mapsage.engine.config import misspelling_note, monitored_mistake
from mapsage.engine.display.terminal import summary_lines
from mapsage.engine.encoder_rates import encoder_rate_warning
from mapsage.engine.env_cfg import ConfigError
from mapsage.engine.loading.build import set_test_mode
from mapsage.engine.loading.data_checks import band_order_note, compare_heads
from mapsage.engine.loading.ground_checks import copies_note, ground_note
from mapsage.engine.loading.input_checks import compare_sensors, watch_inputs
from mapsage.engine.run_extension import EngineRun, Phase, RunExtension
from mapsage.host.runner import dataset_of, keyed_samples, metrics_of, plain_model


class ConfigTypos(RunExtension):
    """Warns of misspelt keys."""

    def startup_warning(self, run: EngineRun) -> Optional[str]:
        return misspelling_note(run.cfg)


# Key of the loader of a phase in the config.
_LOADERS = {
    Phase.TRAINING: 'train_dataloader',
    Phase.VALIDATION: 'val_dataloader',
    Phase.TEST: 'test_dataloader',
}


class DataChecks(RunExtension):
    """Compares training data with heads and sensors, and with the ground that is validated.

    Label maps of a training on a card travel as uint8 if the model's preprocessor is MapSage's.

    A hook that waits for a score that the validation does not give is an error at the start.

    Windows of a scene may overlap. Each pixel of a scene is therefore scored in one window only.
    """

    def startup_warning(self, run: EngineRun) -> Optional[str]:
        return band_order_note(run.cfg)

    def on_loop_built(self, run: EngineRun, phase: Phase, loop: BaseLoop) -> None:
        samples = keyed_samples(getattr(loop, 'dataloader', None))
        if samples is not None:
            samples.loader_name = _LOADERS[phase]
        if phase is Phase.TRAINING:
            compare_heads(run.model, dataset_of(loop))
            compare_sensors(run.model, dataset_of(loop))
            self._narrow_labels(run, loop)
            return
        set_test_mode(loop)
        if phase is Phase.VALIDATION:
            mistake = monitored_mistake(run._hooks, metrics_of(loop))
            # A validation alone saves no checkpoint, and stops nothing early.
            if mistake and isinstance(run._train_loop, BaseLoop):
                raise ConfigError(mistake)
            self._warn_of_shared_ground(run, loop)

    @staticmethod
    def _narrow_labels(run: EngineRun, training: BaseLoop) -> None:
        preprocessor = getattr(plain_model(run), 'data_preprocessor', None)
        samples = keyed_samples(training.dataloader)
        # On the CPU the way is short, and hooks see the labels that they see under MMEngine.
        if (
            samples is not None
            and isinstance(preprocessor, SegDataPreProcessor)
            and preprocessor.device.type != 'cpu'
        ):
            samples.narrow = True

    @staticmethod
    def _warn_of_shared_ground(run: EngineRun, validation: BaseLoop) -> None:
        trained, validated = dataset_of(run._train_loop), dataset_of(validation)
        if is_main_process() and trained is not None and validated is not None:
            for warning in (ground_note(trained, validated), copies_note(trained, validated)):
                if warning:
                    run.logger.warning(warning)


class ModelInputs(RunExtension):
    """Images that do not fit the model raise a DataError."""

    def prepare_model(self, run: EngineRun, model: nn.Module) -> None:
        watch_inputs(model)


class StartChecks(RunExtension):
    """Warns of schedules and learning rates that ruin a training; proves that all ranks agree."""

    def after_load(self, run: EngineRun) -> None:
        # A hook that reads runner.iter before a test has the loop built, but not the schedulers.
        if isinstance(run.optim_wrapper, (OptimWrapper, OptimWrapperDict)):
            for line in long_warm_ups(run.param_schedulers, run.max_iters, run.max_epochs):
                run.logger.warning(line)
            warning = encoder_rate_warning(
                plain_model(run), run.optim_wrapper, None if run._resume else run._load_from
            )
            if warning is not None:
                run.logger.warning(f'{warning.text}. Set {warning.next_step}.')
        if run.distributed:
            check_equal_weights(plain_model(run), 'after initialization and loading')


class StartSummary(RunExtension):
    """Logs model, weights, schedule and folder of a run in three lines, before its first step."""

    def after_load(self, run: EngineRun) -> None:
        if is_main_process():
            for line in summary_lines(run):
                run.logger.info(line)


class Determinism(RunExtension):
    """Warns of modules that no setting of the accelerator makes deterministic."""

    @contextmanager
    def training(self, run: EngineRun) -> Iterator[None]:
        if run._randomness_cfg.get('deterministic'):
            warning = run.accelerator.deterministic_obstacle(run.model)
            if warning:
                run.logger.warning(warning)
        yield
