"""Checks of a run: keys of its config, its data, images, schedules, rates and equal ranks.

A check raises an error, or returns a warning for the log; the checks themselves are in the modules
that are imported here.
"""
from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Dict, Iterator, List, Optional

from mmengine.dist import is_main_process
from mmengine.model import BaseModel
from mmengine.optim import OptimWrapper, OptimWrapperDict
from mmengine.runner import BaseLoop
from torch import nn

from mapsage.datasets import SegDataPreProcessor
from mapsage.distributed import check_equal_weights
from mapsage.engine.checkpoints.resume_report import long_warm_ups
from mapsage.engine.compiled_parts import compiled_parts
from mapsage.engine.config_mistakes import misspelling_note
from mapsage.engine.encoder_rates import encoder_rate_warning
from mapsage.engine.env_cfg import ConfigError
from mapsage.engine.guards import CrossCheckHook
from mapsage.engine.loading.build import set_test_mode
from mapsage.engine.loading.data_checks import band_order_note, compare_heads
from mapsage.engine.loading.ground_checks import ground_note
from mapsage.engine.loading.input_checks import watch_inputs
from mapsage.engine.loading.sensor_checks import compare_sensors
from mapsage.engine.run_extension import EngineRun, Phase, RunExtension
from mapsage.host.keyed_samples import keyed_samples
from mapsage.host.runner import dataset_of, hooks_of_type, plain_model
from mapsage.sampling.hooks import DynamicSamplingHook
from mapsage.wrappers import MMDistributedDataParallel, VirtualDataParallel
from mapsage.wrappers.memory_layout import put_channels_last


class ConfigTypos(RunExtension):
    """Warns of misspelt keys."""

    def startup_warning(self, run: EngineRun) -> Optional[str]:
        return misspelling_note(run.cfg)


# Key of the loader of a phase in the config.
_LOADERS = {Phase.TRAINING: 'train_dataloader', Phase.VALIDATION: 'val_dataloader',
            Phase.TEST: 'test_dataloader'}


class DataChecks(RunExtension):
    """Compares training data with heads and sensors, and with the ground that is validated.

    Label maps of a training on a card travel as uint8 if the model's preprocessor is MapSage's.

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
            self._warn_of_shared_ground(run, loop)

    @staticmethod
    def _narrow_labels(run: EngineRun, training: BaseLoop) -> None:
        preprocessor = getattr(plain_model(run), 'data_preprocessor', None)
        samples = keyed_samples(training.dataloader)
        # On the CPU the way is short, and hooks see the labels that they see under MMEngine.
        if samples is not None and isinstance(preprocessor, SegDataPreProcessor) \
                and preprocessor.device.type != 'cpu':
            samples.narrow = True

    @staticmethod
    def _warn_of_shared_ground(run: EngineRun, validation: BaseLoop) -> None:
        trained, validated = dataset_of(run._train_loop), dataset_of(validation)
        if is_main_process() and trained is not None and validated is not None:
            warning = ground_note(trained, validated)
            if warning:
                run.logger.warning(warning)


class CrossChecks(RunExtension):
    """``env_cfg.cross_check``: another rank computes gradients again, see CrossCheckHook."""

    def hook_configs(self, run: EngineRun) -> List[Dict[str, Any]]:
        interval = run.env.cross_check_interval
        return [] if interval is None else [dict(type=CrossCheckHook, interval=interval)]

    @contextmanager
    def training(self, run: EngineRun) -> Iterator[None]:
        obstacle = '' if run.env.cross_check_interval is None else cross_check_obstacle(run)
        if obstacle:
            raise ConfigError(f'env_cfg.cross_check with {obstacle}. Remove one of them.')
        yield


def cross_check_obstacle(run: EngineRun) -> str:
    """Return why another rank cannot compute a step of a run again; '' if it can."""
    model, wrapper = plain_model(run), type(run.model).__name__
    kind: Any = type(model)
    setting = run.cfg.get('compile')
    for applies, reason in (
        (run.accelerator.lazy,
         f'the lazy device {run.accelerator.name}, which compiles a step and its repetition as '
         f'different graphs, and rounds them differently'),
        (run.cfg.get('feature_source'),
         'feature_source, whose features of a batch only one rank has'),
        (any(hook.weighs_losses for hook in hooks_of_type(run, DynamicSamplingHook)),
         "DynamicSamplingHook with unbiased=True, shortfall='shrink' or rewards, where weights of "
         'the losses are not part of the batch'),
        (not isinstance(model, BaseModel),
         f'the model {kind.__name__}: expected a BaseModel of MMEngine'),
        (run.model is not model and not isinstance(
            run.model, (MMDistributedDataParallel, VirtualDataParallel)),
         f'the model wrapper {wrapper}: expected MMDistributedDataParallel, or none'),
        (run.model is model and kind.train_step is not BaseModel.train_step,
         f'the model {kind.__name__}, which has a train_step of its own'),
        (run.computes_sync_bn and run.distributed,
         'SyncBN layers, in which every rank takes part'),
        (setting and not compiled_parts(setting),
         'compile, which compiles the whole step: compile=dict(backbone=True) compiles parts of '
         'it, and'),
    ):
        if applies:
            return reason
    # A hook that changes the step declares why another rank cannot repeat it.
    return next((hook.cross_check_obstacle for hook in run.hooks
                 if getattr(hook, 'cross_check_obstacle', None)), '')


class ModelInputs(RunExtension):
    """Images that do not fit the model raise a DataError; ``env_cfg.channels_last`` is applied."""

    def prepare_model(self, run: EngineRun, model: nn.Module) -> None:
        watch_inputs(model)
        if run.env.channels_last:
            put_channels_last(model)


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


class Determinism(RunExtension):
    """Warns of modules that no setting of the accelerator makes deterministic."""

    @contextmanager
    def training(self, run: EngineRun) -> Iterator[None]:
        if run._randomness_cfg.get('deterministic'):
            warning = run.accelerator.deterministic_obstacle(run.model)
            if warning:
                run.logger.warning(warning)
        yield
