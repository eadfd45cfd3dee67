"""MMEngine's Runner on any accelerator."""
from __future__ import annotations

import copy
import os
from typing import Any, Dict, Optional, Union

import torch.distributed as dist
from mmengine.dist import broadcast_object_list, get_dist_info, is_main_process
from mmengine.model import convert_sync_batchnorm, is_model_wrapper, revert_sync_batchnorm
from mmengine.registry import DATA_SAMPLERS, DATASETS, HOOKS, MODEL_WRAPPERS, RUNNERS
from mmengine.runner import Runner
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from mapsage.accelerator import Accelerator, explain
from mapsage.distributed import (
    Strategy,
    all_ranks_or_none,
    check_equal_weights,
    local_rank,
    make_replicas,
    resolve_strategy,
)
from mapsage.distributed.strategy import MODEL_PARALLEL
from mapsage.wrappers import HeadReplicas, place_module, whole_model

from . import data_checks, startup
from .config_report import config_report
from .data_order import KeyedDataset, ResumableSampler
from .encoder_rank import take_role
from .env_cfg import names_model_parallel, parse_env_cfg
from .replica_settings import check_head_replicas, one_rank_a_replica, ranks_per_head
from .resume import Choice, choose_checkpoint
from .training_memory import estimate_training_bytes

# Hooks that are registered in this order, unless the config lists one of the same type.
_HOOKS = ('AcceleratorHook', 'DeviceCheckHook', 'NonFiniteLossHook', 'PreviewHook',
          'ProgressBarHook')


@RUNNERS.register_module()
class MapSageRunner(Runner):
    """Runs any MMEngine config on the accelerator and backend of its ``env_cfg``.

    Everything not mentioned in the methods below is MMEngine's. Choose it with
    ``custom_imports = dict(imports=['mapsage'])`` and ``runner_type = 'MapSageRunner'``.

    Attributes:
        accelerator: The accelerator in force.
        local_rank: This process's rank on its node; 0 without a launcher.
        strategy: How the run is spread over processes and devices. Until the model is built it
            does not know whether the model fits a device.
    """

    accelerator: Accelerator
    local_rank: int
    strategy: Strategy
    _load_from: Optional[str]
    _randomness_cfg: Dict[str, Any]

    @classmethod
    def from_cfg(cls, cfg: Any) -> Any:
        """Build a Runner from a config, or an :class:`EncoderRank` where this rank only encodes.

        Raises:
            RoleError: If ``feature_source`` wants encoders and there are too few ranks.
        """
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
            StrategyError: If ``use_model_parallel`` cannot be obeyed, or the launcher's variables
                do not fit the launcher.
        """
        self._env = parse_env_cfg(env_cfg, self.cfg.get('model_wrapper_cfg'))
        self._cleared = startup.identify_process(self.launcher)
        self.local_rank = local_rank()
        self.accelerator = startup.choose_accelerator(self._env.accelerator)
        self.strategy = self._resolve_strategy()
        startup.join_ranks(self.launcher, self.accelerator, self._env.backend, self._env.timeout)
        super().setup_env(env_cfg)

    def set_randomness(self, seed: Optional[int], diff_rank_seed: bool = False,
                       deterministic: bool = False) -> None:
        """Seed as MMEngine does, and the accelerator."""
        super().set_randomness(seed, diff_rank_seed, deterministic)
        self.accelerator.seed(self.seed)

    def wrap_model(self, model_wrapper_cfg: Optional[Dict[str, Any]],
                   model: nn.Module) -> nn.Module:
        """Decide the strategy, now that the model's size is known, and place the model by it."""
        if is_model_wrapper(model):
            return super().wrap_model(model_wrapper_cfg, model)
        self.strategy = self._resolve_strategy(
            estimate_training_bytes(model, self.optim_wrapper))
        self.logger.info(f'strategy {self.strategy.name}: {self.strategy.reason}')
        if self.strategy.name == MODEL_PARALLEL:
            wrapper = copy.deepcopy(dict(model_wrapper_cfg or {}))
            if not names_model_parallel(wrapper.get('type')):
                wrapper = dict(type='MMModelParallel')  # the config's is for several processes
            return MODEL_WRAPPERS.build(wrapper, default_args=dict(module=model))
        if not self.distributed:
            return place_module(revert_sync_batchnorm(model), self.accelerator, 0)
        if self.cfg.get('sync_bn') and self.accelerator.supports.sync_bn:
            model = convert_sync_batchnorm(model, self.cfg.sync_bn)
        if ranks_per_head(self.cfg) > 1:
            check_head_replicas(self.cfg, self.accelerator, self._env.backend)
            return HeadReplicas(model, make_replicas(ranks_per_head(self.cfg), self._env.timeout))
        wrapper = copy.deepcopy(dict(model_wrapper_cfg)) if model_wrapper_cfg else dict(
            broadcast_buffers=False,
            find_unused_parameters=self.cfg.get('find_unused_parameters', False))
        wrapper.setdefault('type', 'MMDistributedDataParallel')
        return MODEL_WRAPPERS.build(wrapper, default_args=dict(module=model))

    def register_hooks(self, default_hooks: Any = None, custom_hooks: Any = None) -> None:
        """Register MapSage's own hooks along with the config's."""
        super().register_hooks(default_hooks, custom_hooks)
        present = {type(hook).__name__ for hook in self._hooks}
        for name in _HOOKS:
            if name not in present:
                self.register_hook(HOOKS.build(dict(type=name)))
        if self.cfg.get('feature_source'):
            self.register_hook(HOOKS.build(dict(
                type='FeatureSourceHook', source=self.cfg.feature_source,
                timeout=self._env.timeout)))
            if self.distributed and ranks_per_head(self.cfg) > 1:
                self.register_hook(HOOKS.build(dict(type='HeadReplicaHook')))

    def build_train_loop(self, loop: Any) -> Any:
        """Build the loop; the ranks of a head replica read the same samples."""
        if isinstance(self.model, HeadReplicas):
            with one_rank_a_replica(self.model.replicas):
                return super().build_train_loop(loop)
        return super().build_train_loop(loop)

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
            config['dataset'] = dict(type=_keyed_dataset, config=config['dataset'])
        if isinstance(config.get('sampler'), dict) and config.get('batch_sampler') is None:
            config['sampler'] = dict(type=_resumable_sampler, config=config['sampler'],
                                     run_seed=seed or 0, batch_size=config['batch_size'],
                                     drop_last=config.get('drop_last', False))
        return Runner.build_dataloader(config, seed, diff_rank_seed)

    def train(self) -> nn.Module:
        """Train; with ``resume``, first choose the checkpoint, since it decides the seed."""
        if self._resume:
            self._choose_checkpoint()
        return super().train()

    def load_or_resume(self) -> None:
        """Load or resume as MMEngine does, then prove that all ranks hold the same weights."""
        super().load_or_resume()
        if self.distributed:
            model = self.model.module if is_model_wrapper(self.model) else self.model
            check_equal_weights(model, 'after initialization and loading')

    def resume(self, filename: str, resume_optimizer: bool = True,
               resume_param_scheduler: bool = True,
               map_location: Any = 'default') -> None:
        """Resume by way of host memory: not every device type can be a ``map_location``."""
        super().resume(filename, resume_optimizer, resume_param_scheduler,
                       'cpu' if map_location == 'default' else map_location)

    def save_checkpoint(self, out_dir: str, filename: str, *args: Any, **kwargs: Any) -> None:
        """Save a checkpoint under its name only once it is whole, when ``out_dir`` is local.

        MMEngine's ``before_save_checkpoint`` runs on the main process alone. Hooks that keep
        something of every rank collect it in ``gather_state``, which runs on all of them.
        """
        for hook in self._hooks:
            if hasattr(hook, 'gather_state'):
                hook.gather_state(self)
        local = '://' not in out_dir and not kwargs.get('backend_args')
        partial = f'{filename}.partial' if local else filename
        with whole_model(self.model):
            super().save_checkpoint(out_dir, partial, *args, **kwargs)
        if local and is_main_process():
            os.replace(os.path.join(out_dir, partial), os.path.join(out_dir, filename))

    def _choose_checkpoint(self) -> None:
        # Rank 0 chooses for all, so that no two ranks resume from different files.
        shared: list = [None]
        with all_ranks_or_none('choosing the checkpoint'):
            if is_main_process():
                shared = [choose_checkpoint(self.work_dir, self._load_from)]
        broadcast_object_list(shared, src=0)
        choice: Choice = shared[0]
        for line in choice.skipped:
            self.logger.warning(f'skipped a checkpoint that cannot be read. {line}')
        self.logger.info(f'resuming from {choice.path}')
        self._load_from = choice.path
        # The loaders are built before MMEngine reads the checkpoint, and draw their order from it.
        if choice.seed is not None and self._randomness_cfg.get('seed') != choice.seed:
            self.logger.info(f'the run continues with the seed of its checkpoint, {choice.seed}')
            self._randomness_cfg = dict(self._randomness_cfg, seed=choice.seed)
            self.set_randomness(**self._randomness_cfg)

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
        for note in (self._env.note, data_checks.band_order_note(self.cfg)):
            if note:
                self.logger.warning(note)
        if self._cleared:
            left = ', '.join(f'{name}={value}' for name, value in self._cleared.items())
            self.logger.warning(
                f'cleared the launcher variables {left}: no launcher started this process, so they '
                f'are left over from another. If one did, name it with --launcher.')
        if is_main_process():
            self.logger.info(config_report(self.cfg))


# MMEngine's registries take functions for types. Its build_dataloader copies a loader's config
# deeply, so what is built here must be built inside it.
def _keyed_dataset(config: Dict[str, Any]) -> Any:
    dataset = data_checks.build_checked(_build_dataset, config)
    if isinstance(dataset, IterableDataset):
        return dataset
    return KeyedDataset(dataset, data_checks.check_labels, data_checks.explain_error)


def _build_dataset(config: Dict[str, Any]) -> Any:
    dataset = DATASETS.build(config)
    if hasattr(dataset, 'full_init'):
        dataset.full_init()
    return dataset


def _resumable_sampler(config: Dict[str, Any], dataset: Any, seed: Optional[int], run_seed: int,
                       batch_size: int, drop_last: bool) -> ResumableSampler:
    sampler = DATA_SAMPLERS.build(config, default_args=dict(dataset=dataset, seed=seed))
    rank, world_size = get_dist_info()
    return ResumableSampler(sampler, run_seed, rank, world_size, batch_size, drop_last)
