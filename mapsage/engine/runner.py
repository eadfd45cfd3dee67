"""MMEngine's Runner on any accelerator."""
from __future__ import annotations

import copy
import os
from contextlib import nullcontext
from typing import Any, Dict, Optional, Union, cast

import torch.distributed as dist
from mmengine.dist import broadcast_object_list, is_main_process
from mmengine.model import convert_sync_batchnorm, is_model_wrapper, revert_sync_batchnorm
from mmengine.optim import OptimWrapper, OptimWrapperDict
from mmengine.registry import HOOKS, MODEL_WRAPPERS, RUNNERS
from mmengine.runner import EpochBasedTrainLoop
from mmengine.runner import runner as host_runner
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from mapsage.accelerator import Accelerator, explain
from mapsage.distributed import (
    RankError,
    Strategy,
    all_ranks_or_none,
    broadcast_tensors,
    check_equal_weights,
    local_rank,
    lost_ranks_named,
    make_replicas,
    resolve_strategy,
)
from mapsage.distributed.nodes.writer_lease import take_lease
from mapsage.distributed.strategy import MODEL_PARALLEL
from mapsage.distributed.virtual_ranks import VirtualRanks, VirtualRanksError
from mapsage.hooks import CompileReportHook, StopHook
from mapsage.runner_view import MapSageRun, plain_model
from mapsage.wrappers import HeadReplicas, place_module
from mapsage.wrappers.fused import watch_fused_steps, without_missing_fusion
from mapsage.wrappers.memory_layout import drawn_in_order, put_channels_last
from mapsage.wrappers.placement import has_sync_batchnorm
from mapsage_launcher.nodes.elastic import ELASTIC_VARIABLE
from mapsage_launcher.stop_request import listening

from .checkpoints.neighbor.copies import copies_for_run
from .checkpoints.resume import (
    Choice,
    ResumeError,
    batches_done,
    choose_checkpoint,
    folders_of,
    not_read_again,
)
from .checkpoints.resume_report import kept_settings, long_warm_ups, settings_of
from .checkpoints.saving import SavingRunner
from .compiled_parts import compile_parts, compiled_parts
from .config_mistakes import (
    check_clipping,
    check_settings,
    missing_trackers,
    misspelling_note,
    optimizer_mistake,
    saving_mistake,
)
from .config_report import config_report
from .encoder_rates import encoder_rate_warning
from .env_cfg import ConfigError, names_model_parallel, parse_env_cfg
from .loading import data_checks
from .loading.block_loader import build_block_loader
from .loading.build import build_keyed_loader, checked_dataset, set_test_mode
from .loading.ground_checks import ground_note
from .loading.input_checks import watch_inputs
from .nodes import compare_data, meet_nodes
from .ranks import startup
from .ranks.encoder_rank import take_role
from .replica_settings import check_head_replicas, one_rank_a_replica, ranks_per_head
from .run_end import end_told
from .training_memory import estimate_training_bytes
from .virtual_settings import (
    can_replay,
    expected_processes,
    obstacle,
    settle_virtual_ranks,
)
from .work_dir import alone_in_work_dir
from .wrapping import training_obstacle, wrap_for_ranks

# Hooks that are registered in this order, by their key in default_hooks: None there leaves a hook
# out, as with MMEngine's. Without the key, one of the same type in custom_hooks takes its place.
_HOOKS = dict(accelerator='AcceleratorHook', device_check='DeviceCheckHook',
              non_finite_loss='NonFiniteLossHook', preview='PreviewHook',
              reproducibility='ReproducibilityHook', progress_bar='ProgressBarHook',
              accumulated_gradients='AccumulatedGradientsHook', equal_buffers='EqualBuffersHook',
              stop='StopHook', nodes='NodesHook', slowest_rank='SlowestRankHook',
              report='RunReportHook')


@RUNNERS.register_module()
class MapSageRunner(SavingRunner, MapSageRun):
    """Runs any MMEngine config on the accelerator and backend of its ``env_cfg``.

    Everything not mentioned in the methods below is MMEngine's. Choose it with
    ``custom_imports = dict(imports=['mapsage'])`` and ``runner_type = 'MapSageRunner'``.

    Attributes:
        accelerator: The accelerator in force.
        local_rank: This process's rank on its node; 0 without a launcher.
        strategy: How the run is spread over processes and devices. Until the model is built it
            does not know whether the model fits a device.
        virtual_ranks: Virtual ranks of the run and the processes that carry them out; known once
            the model is wrapped.
    """

    accelerator: Accelerator
    local_rank: int
    strategy: Strategy
    virtual_ranks: VirtualRanks
    _world_size: int
    _train_dataloader: Any
    _resume: Union[bool, str]
    _load_from: Optional[str]
    _randomness_cfg: Dict[str, Any]
    _determinism: Optional[str] = None  # what the accelerator set for it, for the log
    _choice: Optional[Choice] = None  # of the checkpoint to resume from
    _sync_layers: bool = False  # whether the model has SyncBN layers that the accelerator computes
    _refusal: Optional[Exception] = None  # of a training, while a test may go on

    @classmethod
    def from_cfg(cls, cfg: Any) -> Any:
        """Build a Runner from a config, or an :class:`EncoderRank` where this rank only encodes.

        Raises:
            RoleError: If ``feature_source`` wants encoders and there are too few ranks.
            ConfigError: If a key is missing that a training, a validation or a test needs.
        """
        check_settings(cfg)
        if (cfg.get('feature_source') or {}).get('type') == 'Streamed':
            encoder = take_role(cfg)
            if encoder is not None:
                return encoder
        return super().from_cfg(cfg)

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
        self._env = parse_env_cfg(env_cfg, self.cfg.get('model_wrapper_cfg'))
        self.save_timeout = 0.9 * self._env.timeout
        self._cleared = startup.identify_process(self.launcher, self._env.port)
        self.local_rank = local_rank()
        self.accelerator = startup.choose_accelerator(self._env.accelerator)
        self._precision_note = self.accelerator.set_float32_precision(
            self._env.float32_matmul_precision, self._env.cudnn_allow_tf32)
        self.strategy = self._resolve_strategy()
        startup.join_ranks(self.launcher, self.accelerator, self._env.backend, self._env.timeout)
        self._nodes_note = meet_nodes(self.cfg, self.work_dir, self._env.heartbeat_timeout)
        self.neighbor_copies = copies_for_run(self.cfg, self.work_dir, bool(self._nodes_note))
        super().setup_env(env_cfg)

    def set_randomness(self, seed: Optional[int], diff_rank_seed: bool = False,
                       deterministic: bool = False) -> None:
        """Seed as MMEngine does, and the accelerator."""
        if deterministic:
            self._determinism = self.accelerator.make_deterministic() or self._determinism
        super().set_randomness(seed, diff_rank_seed, deterministic)
        self.accelerator.seed(self.seed)

    def wrap_model(self, model_wrapper_cfg: Optional[Dict[str, Any]],
                   model: nn.Module) -> nn.Module:
        """Decide the strategy, now that the model's size is known, and place the model by it."""
        watch_inputs(model)
        if self._env.channels_last:
            put_channels_last(model)
        wrapper = self._wrap(model_wrapper_cfg, model)
        self._refusal = self._refusal or training_obstacle(
            wrapper, self._env.reduction, self.cfg.get('compile'), self.accelerator,
            self.world_size)
        return wrapper

    def _wrap(self, model_wrapper_cfg: Optional[Dict[str, Any]], model: nn.Module) -> nn.Module:
        if is_model_wrapper(model):
            self.virtual_ranks = VirtualRanks(self.world_size, self.world_size)
            if self._env.virtual_ranks not in (None, self.world_size):
                self._refusal = VirtualRanksError(
                    f'env_cfg.virtual_ranks={self._env.virtual_ranks} with {self.world_size} '
                    f'process(es) and a model that is wrapped already ({type(model).__name__}): '
                    f'expected a plain model, which is wrapped for them.')
            return super().wrap_model(model_wrapper_cfg, model)
        self.strategy = self._resolve_strategy(
            estimate_training_bytes(model, self.optim_wrapper))
        self.logger.info(f'strategy {self.strategy.name}: {self.strategy.reason}')
        self._sync_layers = self.accelerator.supports.sync_bn and has_sync_batchnorm(model)
        try:
            self._settle_virtual_ranks()
        except (VirtualRanksError, ResumeError, RankError, OSError) as error:
            self.virtual_ranks = VirtualRanks(self.world_size, self.world_size)
            self._refusal = error
        if self.strategy.name == MODEL_PARALLEL:
            wrapper = copy.deepcopy(dict(model_wrapper_cfg or {}))
            if not names_model_parallel(wrapper.get('type')):
                wrapper = dict(type='MMModelParallel')  # the config's is for several processes
            return MODEL_WRAPPERS.build(wrapper, default_args=dict(module=model))
        if not self.distributed and self.virtual_ranks.one_each:
            return place_module(revert_sync_batchnorm(model), self.accelerator, 0)
        if self.cfg.get('sync_bn') and self.accelerator.supports.sync_bn:
            model = convert_sync_batchnorm(model, self.cfg.sync_bn)
        if ranks_per_head(self.cfg) > 1:
            check_head_replicas(self.cfg, self.accelerator, self._env.backend)
            return HeadReplicas(model, make_replicas(ranks_per_head(self.cfg), self._env.timeout))
        return wrap_for_ranks(
            model, model_wrapper_cfg, self.cfg.get('find_unused_parameters', False),
            self.accelerator, self.virtual_ranks, self.distributed, self._env.reduction)

    def build_optim_wrapper(self, optim_wrapper: Any) -> Any:
        """Build as MMEngine does, and fuse optimizers only where that is possible."""
        optim_wrapper, notes = without_missing_fusion(optim_wrapper, self.accelerator)
        for note in notes:
            self.logger.warning(note)
        try:
            built = super().build_optim_wrapper(optim_wrapper)
        except (KeyError, TypeError, ValueError) as error:
            mistake = optimizer_mistake(optim_wrapper)
            if mistake is None:
                raise
            raise ConfigError(mistake) from error
        check_clipping(built)
        return watch_fused_steps(built)

    def build_visualizer(self, visualizer: Any = None) -> Any:
        """Build as MMEngine does, if the packages of its backends are installed.

        Raises:
            ConfigError: If a package is missing on the main process, which alone needs it.
        """
        missing = missing_trackers(visualizer) if is_main_process() else []
        if missing:
            raise ConfigError(' '.join(missing))
        return super().build_visualizer(visualizer)

    def _init_model_weights(self) -> None:
        """Initialize as MMEngine does, and send rank 0's weights over the device's backend.

        MMEngine sends each tensor alone, and over gloo unless that backend is nccl alone.
        """
        model = plain_model(self)
        if hasattr(model, 'init_weights'):
            with drawn_in_order(self.model):
                cast(Any, model).init_weights()
                broadcast_tensors(model.state_dict().values())

    def scale_lr(self, optim_wrapper: Any, auto_scale_lr: Optional[Dict] = None) -> None:
        """Scale the learning rate as MMEngine does, by the batch of all virtual ranks."""
        processes, self._world_size = self._world_size, self.virtual_ranks.count
        try:
            super().scale_lr(optim_wrapper, auto_scale_lr)
        finally:
            self._world_size = processes

    def register_hooks(self, default_hooks: Any = None, custom_hooks: Any = None) -> None:
        """Register MapSage's own hooks along with the config's."""
        others = dict(default_hooks or {})
        ours = {key: others.pop(key, 'absent') for key in _HOOKS}
        super().register_hooks(others, custom_hooks)
        self._refusal = self._refusal or saving_mistake(self._hooks)
        for key, hook in ours.items():
            kind = HOOKS.get(_HOOKS[key])
            if hook == 'absent':
                hook = None if any(isinstance(each, kind) for each in self._hooks) else {}
            if hook is not None:
                self.register_hook(dict(dict(type=kind), **hook) if isinstance(hook, dict)
                                   else hook)
        if self.cfg.get('feature_source'):
            self.register_hook(HOOKS.build(dict(
                type='FeatureSourceHook', source=self.cfg.feature_source,
                timeout=self._env.timeout)))
            if self.distributed and ranks_per_head(self.cfg) > 1:
                self.register_hook(HOOKS.build(dict(type='HeadReplicaHook')))

    def build_train_loop(self, loop: Any) -> Any:
        """Build the loop; the ranks of a head replica read the same samples.

        Where this process carries out several virtual ranks, it reads the samples of all.

        Raises:
            NodesDifferError: If the nodes do not have the same training data.
            DataError: If a decode head has fewer classes than the training data.
        """
        if isinstance(self.model, HeadReplicas):
            with one_rank_a_replica(self.model.replicas):
                built = super().build_train_loop(loop)
        elif self.virtual_ranks.one_each or not isinstance(loop, dict):
            built = super().build_train_loop(loop)
        else:
            config, self._train_dataloader = self._train_dataloader, self._block_loader()
            try:
                built = super().build_train_loop(loop)
            finally:
                self._train_dataloader = config
        dataset = getattr(getattr(built, 'dataloader', None), 'dataset', None)
        compare_data(dataset)
        data_checks.compare_heads(self.model, dataset)
        return built

    def build_val_loop(self, loop: Any) -> Any:
        """Build the loop; of scenes in windows that overlap, each pixel is scored once.

        The log warns if training shows the ground that is validated.
        """
        built = set_test_mode(super().build_val_loop(loop))
        training, validation = (getattr(getattr(each, 'dataloader', None), 'dataset', None)
                                for each in (self._train_loop, built))
        if is_main_process() and training is not None and validation is not None:
            note = ground_note(training, validation)
            if note:
                self.logger.warning(note)
        return built

    def build_test_loop(self, loop: Any) -> Any:
        """Build the loop; of scenes in windows that overlap, each pixel is scored once."""
        return set_test_mode(super().build_test_loop(loop))

    @staticmethod
    def build_dataloader(dataloader: Union[DataLoader, Dict[str, Any]], seed: Optional[int] = None,
                         diff_rank_seed: bool = False) -> DataLoader:
        """Build a loader whose order and augmentation follow from the seed.

        The dataset is checked for missing files, every sample for labels outside the classes.

        Raises:
            DataError: Naming the file.
        """
        if isinstance(dataloader, DataLoader):
            return dataloader
        config = dict(dataloader)
        if isinstance(config.get('dataset'), dict):
            config['dataset'] = dict(type=checked_dataset, config=config['dataset'])
        return build_keyed_loader(config, seed, diff_rank_seed)

    def refuse_training(self) -> None:
        """Raise what was found to rule a training out while the run was built, such as too many
        processes for its virtual ranks; a test may go on all the same."""
        if self._refusal is not None:
            raise self._refusal

    def train(self) -> nn.Module:
        """Train; with ``resume``, first choose the checkpoint, since it decides the seed."""
        stops = any(isinstance(hook, StopHook) for hook in self._hooks)
        with alone_in_work_dir(self.work_dir, self.logger), listening(stops), \
                end_told(self), lost_ranks_named('training'):
            self.refuse_training()
            if self._resume and self._choice is None:
                self._choose_checkpoint()
                self._settle_virtual_ranks()
            self._take_choice()
            if self._randomness_cfg.get('deterministic'):
                obstacle_note = self.accelerator.deterministic_obstacle(self.model)
                if obstacle_note:
                    self.logger.warning(obstacle_note)
            host_runner.get_git_hash()  # before anything forks, see mapsage/compat/git_hash.py
            # What ends the run in a step comes behind all other hooks, those that were registered
            # since included.
            self._hooks.sort(key=lambda hook: isinstance(hook, StopHook))
            copies = self.neighbor_copies
            with copies.running(self.logger, bool(self._resume)) if copies else nullcontext():
                return super().train()

    def _maybe_compile(self, target: str) -> None:
        """Compile the modules that ``compile`` names; without any, do what MMEngine does."""
        setting = self.cfg.get('compile')
        if compiled_parts(setting):
            parts = compile_parts(self.model, setting)
            self.logger.info(f'compile: {", ".join(parts) or "nothing"}, at the first steps, which '
                             f'will be slow')
        else:
            super()._maybe_compile(target)
            parts = [target]
        if parts and setting not in (None, False):
            self.register_hook(CompileReportHook(', '.join(parts)))

    def val(self) -> Dict[str, Any]:
        """Validate; a rank that is lost is named."""
        with end_told(self), lost_ranks_named('validation'):
            return super().val()

    def test(self) -> Dict[str, Any]:
        """Test; a rank that is lost is named."""
        with end_told(self), lost_ranks_named('testing'):
            return super().test()

    def can_replay(self) -> bool:
        """Return whether ``tools/train.py --replay`` could carry out a step of this run."""
        stream = isinstance(getattr(self.train_dataloader, 'dataset', None), IterableDataset)
        return not stream and can_replay(self.cfg, self.strategy.name, self._sync_layers,
                                         self.virtual_ranks.count)

    def load_or_resume(self) -> None:
        """Load or resume as MMEngine does, then prove that all ranks hold the same weights."""
        super().load_or_resume()
        model = plain_model(self)
        # A hook that reads runner.iter before a test has the loop built, and no schedule.
        if isinstance(self.optim_wrapper, (OptimWrapper, OptimWrapperDict)):
            for line in long_warm_ups(self.param_schedulers, self.max_iters, self.max_epochs):
                self.logger.warning(line)
            warning = encoder_rate_warning(model, self.optim_wrapper,
                                           None if self._resume else self._load_from)
            if warning is not None:
                self.logger.warning(f'{warning.text}. Set {warning.next_step}.')
        if self.distributed:
            check_equal_weights(model, 'after initialization and loading')

    def resume(self, filename: str, resume_optimizer: bool = True,
               resume_param_scheduler: bool = True,
               map_location: Any = 'default') -> None:
        """Resume as MMEngine does, and say which settings of the config are not used.

        The checkpoint is read into host memory, since not every device type can be a
        ``map_location``. A checkpoint that was saved inside an epoch continues inside it.
        """
        built = isinstance(self.optim_wrapper, (OptimWrapper, OptimWrapperDict))
        asked = settings_of(self.optim_wrapper, self.param_schedulers) if built else {}
        super().resume(filename, resume_optimizer, resume_param_scheduler,
                       'cpu' if map_location == 'default' else map_location)
        kept = kept_settings(asked, settings_of(self.optim_wrapper, self.param_schedulers)) \
            if built else ''
        if kept:
            self.logger.warning(kept)
        if isinstance(self.train_loop, EpochBasedTrainLoop):
            self._continue_epoch(self.train_loop)

    def _choose_checkpoint(self) -> None:
        if ELASTIC_VARIABLE in os.environ:  # whoever wrote before adds nothing from now on
            with all_ranks_or_none('becoming the writer of the work dir'):
                if is_main_process():
                    take_lease(self.work_dir)
        # With resume=True, load_from may name an earlier checkpoint of rank 0's machine.
        if self.neighbor_copies and not (self._resume is True and self._load_from):
            found = self.neighbor_copies.choose()
            if found is not None:
                found.notes.extend(not_read_again(self._load_from, found))
                self._choice = found
                return
        # Rank 0 chooses for all, so that no two ranks resume from different files.
        shared: list = [None]
        with all_ranks_or_none('choosing the checkpoint'):
            if is_main_process():
                shared = [choose_checkpoint(self.work_dir, self._load_from, self._resume,
                                            folders_of(self.cfg, self.work_dir))]
        broadcast_object_list(shared, src=0)
        self._choice = shared[0]

    def _take_choice(self) -> None:
        """Have the training begin with the checkpoint that was chosen, if one was."""
        choice = self._choice
        if choice is None or not self._resume:
            return
        for line in choice.skipped:
            self.logger.warning(f'skipped a checkpoint that cannot be read. {line}')
        for line in choice.notes:
            self.logger.warning(line)
        self._resume = choice.path is not None
        if choice.path is None:
            return
        self.logger.info(f'resuming from {choice.path}')
        self._load_from = choice.path
        # The loaders are built before MMEngine reads the checkpoint, and draw their order from it.
        if choice.seed is not None and self._randomness_cfg.get('seed') != choice.seed:
            self.logger.info(f'the run continues with the seed of its checkpoint, {choice.seed}')
            self._randomness_cfg = dict(self._randomness_cfg, seed=choice.seed)
            self.set_randomness(**self._randomness_cfg)

    def _settle_virtual_ranks(self) -> None:
        """Decide how many virtual ranks the run has, which the checkpoint says if it resumes.

        Raises:
            VirtualRanksError: If config, checkpoint and processes do not go together, or the model
                has been wrapped for another number.
        """
        if self._resume and self._choice is None and self._train_loop is not None:
            self._choose_checkpoint()
        saved = None if self._choice is None else self._choice.virtual_ranks
        asked, processes = self._env.virtual_ranks, self.world_size
        reason = obstacle(self.cfg, self.strategy.name, self._sync_layers)
        if reason and asked is None:
            ranks = VirtualRanks(processes, processes)
            if saved not in (None, processes):
                self.logger.warning(
                    f'the checkpoint is of a run with {saved} virtual ranks, and this one has '
                    f'{processes} process(es) with {reason}. It goes on with {processes} virtual '
                    f'ranks, so that batches and results are others. Start {saved} processes to '
                    f'go on exactly.')
        else:
            ranks = settle_virtual_ranks(asked, saved, processes,
                                         expected_processes(self.cfg, os.environ))
        if reason and not ranks.one_each:
            raise VirtualRanksError(
                f'{ranks.count} virtual ranks in {processes} process(es) with {reason}. '
                f'Start {ranks.count} processes, or do without it.')
        settled = getattr(self, 'virtual_ranks', ranks)
        if settled != ranks:
            raise VirtualRanksError(
                f'the checkpoint is of a run with {ranks.count} virtual ranks, and the model was '
                f'wrapped for {settled.count}: set resume in the config, before the Runner is '
                f'built.')
        self.virtual_ranks = ranks
        if ranks.count > 1:
            self.logger.info(ranks.describe())

    def _block_loader(self) -> DataLoader:
        """Build the training loader for all virtual ranks of this process."""
        config = self._train_dataloader
        if not isinstance(config, dict):
            raise VirtualRanksError(
                f'train_dataloader is a {type(config).__name__}, whose sampler knows '
                f'{self.virtual_ranks.processes} process(es) and not the '
                f'{self.virtual_ranks.count} virtual ranks: expected its config, a dict.')
        dataset = config['dataset']
        if isinstance(dataset, dict):
            dataset = checked_dataset(copy.deepcopy(dataset))
        return build_block_loader(
            config, lambda each: build_keyed_loader(each, self.seed), dataset,
            self.virtual_ranks, self.rank)

    def _continue_epoch(self, loop: EpochBasedTrainLoop) -> None:
        done, length = batches_done(loop.epoch, loop.iter, self.message_hub.runtime_info)
        if done and length == len(loop.dataloader):
            loop.batches_done = done  # see mapsage/compat/loop_resume.py
        elif done:
            self.logger.warning(
                f'the checkpoint was saved after {done} of {length} batches of epoch '
                f'{loop.epoch + 1}, which now has {len(loop.dataloader)}: the epoch starts anew, '
                f'as under MMEngine. Resume with the same virtual ranks and batch '
                f'size to go on behind them.')

    def _resolve_strategy(self, needed_bytes: Optional[int] = None) -> Strategy:
        # MMModelParallel may be given devices that are not the accelerator's, such as the CPU.
        devices = (self.cfg.get('model_wrapper_cfg') or {}).get('devices')
        count = len(devices) if devices else self.accelerator.device_count()
        return resolve_strategy(
            self._env.use_model_parallel, os.environ, count, launcher=self.launcher,
            needed_bytes=needed_bytes,
            device_bytes=None if needed_bytes is None else self.accelerator.memory_total())

    def _log_env(self, env_cfg: Dict[str, Any]) -> None:
        super()._log_env(env_cfg)
        backend = f', backend {dist.get_backend()}' if self.distributed else ''
        self.logger.info(f'{explain(self.accelerator, self._env.accelerator)}; '
                         f'world size {self.world_size}{backend}')
        if self._determinism:
            self.logger.info(self._determinism)
        for note in (self._env.note, self._precision_note, self._nodes_note,
                     data_checks.band_order_note(self.cfg), misspelling_note(self.cfg)):
            if note:
                self.logger.warning(note)
        if self._cleared:
            left = ', '.join(f'{name}={value}' for name, value in self._cleared.items())
            self.logger.warning(
                f'cleared the launcher variables {left}: no launcher started this process, so they '
                f'are left over from another. If one did, name it with --launcher.')
        if is_main_process():
            self.logger.info(config_report(self.cfg))
