"""MMEngine's Runner on any accelerator.

MapSageRunner starts the ranks on their devices, and lets its features act at every moment of a run:
it composes them and implements none. The features are in ``extensions/``, their moments in
``run_extension.py``, and the way a model is wrapped in ``wrapping.py``. How checkpoints are written
is in the base class, ``checkpoints/saving.py``.

Default hooks of MapSage are registered with MMEngine's, and optimizers are fused where the device can. A
config replaces, changes or removes a default hook by its key in ``default_hooks``, as with
MMEngine's own.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Tuple, Union

from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.logging import MMLogger
from mmengine.registry import HOOKS, RUNNERS
from mmengine.runner import BaseLoop
from mmengine.runner import runner as host_runner
from torch import nn
from torch.utils.data import DataLoader

from mapsage.accelerator import Accelerator
from mapsage.distributed import broadcast_tensors, local_rank
from mapsage.distributed.strategy import MODEL_PARALLEL
from mapsage.distributed.wrappers.fused import (
    watch_fused_steps,
    with_default_fusion,
    without_missing_fusion,
)
from mapsage.distributed.wrappers.memory_layout import drawn_in_order
from mapsage.host.runner import OptimWrappers, plain_model
from mapsage_launcher.extras import default_hooks_of_extras, missing_extra
from mapsage_launcher.hosts import check_distutils

from . import startup, wrapping
from .checkpoints.saving import SavingRunner
from .compiled_parts import compile_model
from .config import (
    check_clipping,
    check_config,
    check_trackers,
    optimizer_mistake,
    saving_mistake,
)
from .display.terminal import quiet_start
from .env_cfg import ConfigError, parse_env_cfg
from .extensions import EXTENSIONS, virtual_ranks
from .loading.build import build_loader
from .run_extension import EngineRun, Phase
from .startup import alone_in_work_dir, end_reported, listening_for_stops, log_start

# Key in ``default_hooks`` -> class, in the order of registration. A value of None in the config
# leaves the hook out. Without the key, a hook of the same class in custom_hooks replaces it.
_HOOKS = dict(
    accelerator='AcceleratorHook',
    device_check='DeviceCheckHook',
    non_finite_loss='NonFiniteLossHook',
    preview='PreviewHook',
    reproducibility='ReproducibilityHook',
    progress_bar='ProgressBarHook',
    accumulated_gradients='AccumulatedGradientsHook',
    equal_buffers='EqualBuffersHook',
    stop='StopHook',
    slowest_rank='SlowestRankHook',
    report='RunReportHook',
    **default_hooks_of_extras(),
)

HookSetting = Union[Hook, Dict[str, Any], None]


def split_default_hooks(
    default_hooks: Optional[Mapping[str, HookSetting]],
) -> Tuple[Dict[str, HookSetting], Dict[str, HookSetting]]:
    """Divide ``default_hooks`` of a config into the entries for MMEngine and for MapSage.

    Returns:
        Entries that MMEngine registers, and entries with a key of MapSage.
    """
    settings = dict(default_hooks or {})
    return (
        {
            key: hook
            for key, hook in settings.items()
            # A hook of an extra that is not installed is left out anyway.
            if key not in _HOOKS
            and (hook is not None or missing_extra('names', f'default_hooks.{key}') is None)
        },
        {key: hook for key, hook in settings.items() if key in _HOOKS},
    )


def hooks_to_register(
    settings: Mapping[str, HookSetting], registered: List[Hook]
) -> Iterator[Union[Hook, Dict[str, Any]]]:
    """Yield MapSage's default hooks of a run, built or as configs, in the order of registration.

    Args:
        settings: Entries of ``default_hooks`` with a key of MapSage.
        registered: Hooks of the runner; the caller registers each hook before it asks for the next.
    """
    for key, name in _HOOKS.items():
        kind = HOOKS.get(name)
        hook: HookSetting = settings.get(key)
        if key not in settings and not any(isinstance(other, kind) for other in registered):
            hook = {}
        if isinstance(hook, dict):
            yield dict(dict(type=kind), **hook)
        elif hook is not None:
            yield hook


def build_optimizers(
    config: Any,
    build: Callable[[Any], OptimWrappers],
    accelerator: Accelerator,
    logger: logging.Logger,
) -> OptimWrappers:
    """Build the optimizers of a run.

    Args:
        config: ``optim_wrapper`` of the config, or a built wrapper.
        build: MMEngine's ``build_optim_wrapper``.
        accelerator: Accelerator in force.
        logger: Logger for a warning about ``fused=True`` that the accelerator cannot obey.

    Raises:
        ConfigError: If no registry knows the optimizer, or the function that clips gradients does
            not take an argument of ``clip_grad``.
    """
    config, warnings = without_missing_fusion(config, accelerator)
    for warning in warnings:
        logger.warning(warning)
    try:
        optimizers = build(config)
    except (KeyError, TypeError, ValueError) as error:
        mistake = optimizer_mistake(config)
        if mistake is None:
            raise
        raise ConfigError(mistake) from error
    check_clipping(optimizers)
    return watch_fused_steps(optimizers)


@RUNNERS.register_module()
class MapSageRunner(SavingRunner, EngineRun):
    """Runs any MMEngine config on the accelerator and backend of its ``env_cfg``.

    Everything not mentioned in the methods below is MMEngine's. Choose it with
    ``custom_imports = dict(imports=['mapsage'])`` and ``runner_type = 'MapSageRunner'``.

    Attributes:
        accelerator: The accelerator in force.
        local_rank: This process's rank on its node; 0 without a launcher.
        strategy: Distribution of the run over processes and devices. Whether the model fits a
            device is taken into account once the model is built.
        virtual_ranks: Virtual ranks of the run and the processes that train them; known once the
            model is wrapped.
        env: Parsed ``env_cfg``.
        extensions: Features of the runner, in the order of their effects.
    """

    _determinism: Optional[str] = None
    _obstacle_to_training: Optional[Exception] = None

    @classmethod
    def from_cfg(cls, cfg: Config) -> Any:
        """Build a Runner from a config, or what an extension has this process run in its place.

        Raises:
            ConfigError: If a key is missing that a training, a validation or a test needs.
        """
        check_config(cfg)
        for extension in EXTENSIONS:
            other = extension.take_process(cfg)
            if other is not None:
                return other
        return super().from_cfg(cfg)

    # --- the start of a run, in the order in which MMEngine calls these methods

    def setup_env(self, env_cfg: Dict[str, Any]) -> None:
        """Choose the accelerator and start torch.distributed, then do what MMEngine does.

        Raises:
            ConfigError: If ``env_cfg`` has an unknown key.
            AcceleratorError: If the accelerator is absent or has too few devices.
            BackendError: If the accelerator cannot use the backend.
            NodesDifferError: If the nodes do not run the same code or config.
            StrategyError: If ``use_model_parallel`` cannot be obeyed, or the launcher's variables
                do not fit the launcher.
        """
        self.extensions = [extension() for extension in EXTENSIONS]
        self.env = parse_env_cfg(env_cfg, self.cfg.get('model_wrapper_cfg'))
        self.save_timeout = 0.9 * self.env.timeout
        self._cleared_variables = startup.identify_process(self.launcher, self.env.port)
        self.local_rank = local_rank()
        check_distutils()
        self.accelerator = startup.choose_accelerator(self.env.accelerator)
        self._precision_warning = self.accelerator.set_float32_precision(
            self.env.float32_matmul_precision, self.env.cudnn_allow_tf32
        )
        self.strategy = wrapping.choose_strategy(self)
        startup.join_ranks(self.launcher, self.accelerator, self.env.backend, self.env.timeout)
        for extension in self.extensions:
            extension.join(self)
        super().setup_env(env_cfg)

    def set_randomness(
        self, seed: Optional[int], diff_rank_seed: bool = False, deterministic: bool = False
    ) -> None:
        """Seed as MMEngine does, and the accelerator."""
        if deterministic:
            self._determinism = self.accelerator.make_deterministic() or self._determinism
        super().set_randomness(seed, diff_rank_seed, deterministic)
        self.accelerator.seed(self.seed)

    def build_logger(self, log_level: Union[int, str] = 'INFO', **kwargs: Any) -> MMLogger:
        """Build as MMEngine does; the terminal shows only the essence of the start."""
        logger = super().build_logger(log_level, **kwargs)
        quiet_start(logger, log_level)
        return logger

    def _log_env(self, env_cfg: Dict[str, Any]) -> None:
        super()._log_env(env_cfg)
        log_start(
            self,
            self._determinism,
            [
                self.env.note,
                self._precision_warning,
                *(extension.startup_warning(self) for extension in self.extensions),
                startup.describe_cleared(self._cleared_variables),
            ],
        )

    def build_visualizer(self, visualizer: Any = None) -> Any:
        """Build as MMEngine does, if the packages of its backends are installed.

        Raises:
            ConfigError: If a package is missing on the main process, the only one that needs it.
        """
        check_trackers(visualizer)
        return super().build_visualizer(visualizer)

    def wrap_model(
        self, model_wrapper_cfg: Optional[Dict[str, Any]], model: nn.Module
    ) -> nn.Module:
        """Decide the strategy, now that the model's size is known, and place the model by it."""
        wrapping.choose_resumed_checkpoint(self)
        for extension in self.extensions:
            extension.prepare_model(self, model)
        return wrapping.wrap_model(self, model_wrapper_cfg, model, keep=super().wrap_model)

    def register_hooks(self, default_hooks: Any = None, custom_hooks: Any = None) -> None:
        """Register MapSage's own hooks along with the config's."""
        host_hooks, own_hooks = split_default_hooks(default_hooks)
        super().register_hooks(host_hooks, custom_hooks)
        self.rule_out_training(saving_mistake(self._hooks))
        for hook in hooks_to_register(own_hooks, self._hooks):
            self.register_hook(hook)
        for extension in self.extensions:
            for config in extension.hook_configs(self):
                self.register_hook(HOOKS.build(config))

    def copy_checkpoint(self, path: str) -> None:
        """Let extensions copy a checkpoint of ``CheckpointHook(neighbor_copy=True)``."""
        for extension in self.extensions:
            extension.copy_checkpoint(self, path)

    # --- tasks

    def train(self) -> nn.Module:
        """Train; with ``resume``, first choose the checkpoint, since it decides the seed."""
        with alone_in_work_dir(self.work_dir, self.logger), listening_for_stops(self), end_reported(
            self, 'training'
        ), ExitStack() as stack:
            self.refuse_training()
            # Before anything forks, see mapsage/compat/git_hash.py.
            host_runner.get_git_hash()
            for extension in self.extensions:
                stack.enter_context(extension.training(self))
            return super().train()

    def val(self) -> Dict[str, Any]:
        """Validate; a rank that is lost is named."""
        with end_reported(self, 'validation'):
            return super().val()

    def test(self) -> Dict[str, Any]:
        """Test; a rank that is lost is named."""
        with end_reported(self, 'testing'):
            return super().test()

    def can_replay(self) -> bool:
        """Return whether ``tools/train.py --replay`` could carry out a step of this run."""
        return virtual_ranks.can_replay(self)

    def refuse_training(self) -> None:
        """Raise the first error that ruled out a training while the run was built, if any.

        An example is more processes than virtual ranks. A test may work all the same.
        """
        if self._obstacle_to_training is not None:
            raise self._obstacle_to_training

    def rule_out_training(self, error: Optional[Exception]) -> None:
        """Keep an error for :meth:`refuse_training`, unless there is an earlier one."""
        self._obstacle_to_training = self._obstacle_to_training or error

    # --- what a task builds and loads, in the order in which MMEngine calls these methods

    @staticmethod
    def build_dataloader(
        dataloader: Union[DataLoader, Dict[str, Any]],
        seed: Optional[int] = None,
        diff_rank_seed: bool = False,
    ) -> DataLoader:
        """Build a loader whose order and augmentation follow from the seed.

        The dataset is checked for missing files, every sample for labels outside the classes.

        Raises:
            DataError: Naming the file.
        """
        return build_loader(dataloader, seed, diff_rank_seed)

    def build_train_loop(self, loop: Union[BaseLoop, Dict[str, Any]]) -> BaseLoop:
        """Build the loop over the samples of this rank, its head replica or its virtual ranks.

        Raises:
            NodesDifferError: If the nodes do not have the same training data.
            DataError: If a decode head has fewer classes than the training data.
        """
        with ExitStack() as stack:
            for extension in self.extensions:
                stack.enter_context(extension.building_train_loop(self, loop))
            built = super().build_train_loop(loop)
        return self._extend_loop(Phase.TRAINING, built)

    def build_val_loop(self, loop: Union[BaseLoop, Dict[str, Any]]) -> BaseLoop:
        """Build the loop, in which overlapping windows of a scene score each pixel once.

        The log warns if training shows the ground that is validated.
        """
        return self._extend_loop(Phase.VALIDATION, super().build_val_loop(loop))

    def build_test_loop(self, loop: Union[BaseLoop, Dict[str, Any]]) -> BaseLoop:
        """Build the loop, in which overlapping windows of a scene score each pixel once."""
        return self._extend_loop(Phase.TEST, super().build_test_loop(loop))

    def _extend_loop(self, phase: Phase, loop: BaseLoop) -> BaseLoop:
        for extension in self.extensions:
            extension.on_loop_built(self, phase, loop)
        return loop

    def build_optim_wrapper(self, optim_wrapper: Any) -> OptimWrappers:
        """Build as MMEngine does, and fuse optimizers only where that is possible.

        Raises:
            ConfigError: If no registry knows the optimizer, or ``clip_grad`` has a wrong argument.
        """
        if self.fast and self.strategy.name != MODEL_PARALLEL:
            optim_wrapper = with_default_fusion(optim_wrapper, self.accelerator)
        return build_optimizers(
            optim_wrapper, super().build_optim_wrapper, self.accelerator, self.logger
        )

    def scale_lr(self, optim_wrapper: Any, auto_scale_lr: Optional[Dict] = None) -> None:
        """Scale the learning rate as MMEngine does, by the batch of all virtual ranks."""
        with virtual_ranks.counted_as_world(self):
            super().scale_lr(optim_wrapper, auto_scale_lr)

    def _init_model_weights(self) -> None:
        """Call the model's ``init_weights``, then send rank 0's weights over the device's backend.

        MMEngine would send one tensor at a time, and over gloo unless nccl is the only backend.
        Collective. A model without ``init_weights`` stays as it is.
        """
        model: Any = plain_model(self)
        if hasattr(model, 'init_weights'):
            with drawn_in_order(self.model):
                model.init_weights()
                broadcast_tensors(model.state_dict().values())

    def load_or_resume(self) -> None:
        """Load or resume as MMEngine does, then prove that all ranks hold the same weights."""
        super().load_or_resume()
        for extension in self.extensions:
            extension.after_load(self)

    def resume(
        self,
        filename: str,
        resume_optimizer: bool = True,
        resume_param_scheduler: bool = True,
        map_location: Any = 'default',
    ) -> None:
        """Resume as MMEngine does, and say which settings of the config are not used.

        The checkpoint is read into host memory, since not every device type can be a
        ``map_location``. A checkpoint that was saved inside an epoch continues inside it.
        """
        with ExitStack() as stack:
            for extension in self.extensions:
                stack.enter_context(extension.resuming(self))
            super().resume(
                filename,
                resume_optimizer,
                resume_param_scheduler,
                'cpu' if map_location == 'default' else map_location,
            )

    def _maybe_compile(self, target: str) -> None:
        """Compile the modules that ``compile`` names; without any, do what MMEngine does."""
        compile_model(self, target, super()._maybe_compile)
