"""Splits the head over the ranks of each head replica, and reassembles it where needed.

The split itself is in `mapsage/extras/streaming/split_head`. The hook decides when the model has the whole
head: in validations, in checkpoints and after the training. Between these, each rank has its shares
only, so whatever reads the head's weights on one rank sees a part of them.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, Dict, Iterable, Optional

import torch
from mmengine.dist import is_main_process
from mmengine.hooks import EMAHook
from mmengine.optim import OptimWrapper
from mmengine.registry import HOOKS

from mapsage.distributed.wrappers.rank_batches import Batch
from mapsage.extras.streaming.encoder_gate import FeatureSourceError
from mapsage.extras.streaming.split_head.replica_parallel import HeadReplicas
from mapsage.extras.streaming.split_head.trained_shares import TrainedShares
from mapsage.host.hook import MapSageHook
from mapsage.host.runner import HostRunner, MapSageRun, hooks_of_type
from mapsage.host.segmentors import child_module
from mapsage.sampling.hooks.dynamic_sampling_hook import DynamicSamplingHook


@HOOKS.register_module()
class HeadReplicaHook(MapSageHook):
    """Hook that trains ``model.decode_head`` split over the ranks of a head replica.

    ``MapSageRunner`` registers it if ``feature_source.ranks_per_head`` is 2 or more.

    - Before training, once weights and optimizer are initialized or loaded, each rank keeps only
      its shares of both.
    - During a validation, every rank has the whole head and evaluates its part of the data.
    - Checkpoints hold the whole head and the whole state of the optimizer, like checkpoints of a
      run without replicas.

    Raises:
        FeatureSourceError: If the model has no ``decode_head``, or if a hook or the optimizer
            wrapper does not work with a split head.
        TensorParallelError: If the optimizer, or the norm by which gradients are clipped, does not
            work with a split head.
    """

    # After DeviceCheckHook (LOW), which compares the whole weights before training.
    priority = 'VERY_LOW'

    def __init__(self) -> None:
        self._shares: Optional[TrainedShares] = None
        self._evaluation = ExitStack()
        # State by the number of the parameter in the optimizer.
        self._optimizer_state: Dict[int, Dict[str, torch.Tensor]] = {}

    def before_train(self, runner: HostRunner) -> None:
        """Split the head and the optimizer's state. Collective."""
        model = _replicas_of(runner)
        _check_run(runner, model)
        optim_wrapper, replicas = runner.optim_wrapper, model.replicas
        head: Any = model.module.decode_head
        self._shares = TrainedShares(head, replicas.group, optim_wrapper.optimizer)
        model.use_shares(self._shares)
        if (
            optim_wrapper.clip_grad_kwargs
            and optim_wrapper.clip_func is torch.nn.utils.clip_grad_norm_
        ):
            optim_wrapper.clip_func = self._shares.clip_grad_norm
        shares, whole = self._shares.parameters_of(optim_wrapper.optimizer)
        runner.logger.info(
            f'[Replicas] {replicas.count} head replica(s) of {replicas.size} ranks: this rank '
            f'trains {_count(shares)} values of split weights and {_count(whole)} of whole ones'
        )

    def before_train_iter(
        self, runner: HostRunner, batch_idx: int, data_batch: Optional[Batch] = None
    ) -> None:
        """Drop what was gathered in the previous iteration."""
        self._optimizer_state = {}

    def before_val_epoch(self, runner: HostRunner) -> None:
        """Assemble the whole head on every rank. Collective."""
        self._evaluation.enter_context(_replicas_of(runner).whole())

    def after_val_epoch(
        self, runner: HostRunner, metrics: Optional[Dict[str, float]] = None
    ) -> None:
        """Continue to train with the split head."""
        self._evaluation.close()

    def after_train(self, runner: HostRunner) -> None:
        """Leave the whole head in the model, for a test in the same process. Collective."""
        self._evaluation.enter_context(_replicas_of(runner).whole())

    def gather_state(self, runner: MapSageRun) -> None:
        """Collect the whole state of the optimizer before a checkpoint. Collective."""
        if self._shares is not None:
            state = self._shares.gather_optimizer_state(runner.optim_wrapper.optimizer)
            # Only the main process writes the checkpoint.
            self._optimizer_state = state if is_main_process() else {}

    def check_own_state(self, runner: MapSageRun) -> None:
        """Refuse to save if this rank has only its shares of the head and the optimizer.

        Raises:
            FeatureSourceError: If the head is split.
        """
        if self._shares is not None:
            raise FeatureSourceError(
                f'save_checkpoint was called on one rank, which has only its shares of '
                f'model.decode_head (ranks_per_head={_replicas_of(runner).replicas.size}). Let '
                f'CheckpointHook save, or call it inside `with runner.saving_together():`, which '
                f'every rank enters.'
            )

    def before_save_checkpoint(self, runner: HostRunner, checkpoint: Dict[str, Any]) -> None:
        """Replace this rank's share of the optimizer's state by the whole state."""
        state = checkpoint.get('optimizer', {}).get('state', {})
        for number, values in self._optimizer_state.items():
            if number in state:
                state[number] = {**state[number], **values}


def _replicas_of(runner: HostRunner) -> HeadReplicas:
    assert isinstance(runner.model, HeadReplicas), 'MapSageRunner registers the hook with replicas'
    return runner.model


def _check_run(runner: HostRunner, model: HeadReplicas) -> None:
    """Raise FeatureSourceError if a hook, the model or the optimizer cannot have a split head."""
    for kind, reason in (
        (EMAHook, 'averages weights that each rank has only a part of'),
        (DynamicSamplingHook, 'gives other samples to each rank'),
    ):
        if hooks_of_type(runner, kind):
            raise FeatureSourceError(
                f'feature_source.ranks_per_head={model.replicas.size} with '
                f'{kind.__name__}: this hook {reason}. Take it out of the config, or set '
                f'ranks_per_head=1.'
            )
    if child_module(model.module, 'decode_head') is None:
        raise FeatureSourceError(
            f'feature_source.ranks_per_head splits model.decode_head, but '
            f'{type(model.module).__name__} has none. Set ranks_per_head=1.'
        )
    if not isinstance(runner.optim_wrapper, OptimWrapper):
        raise FeatureSourceError(
            f'feature_source.ranks_per_head needs one optimizer, but optim_wrapper is a '
            f'{type(runner.optim_wrapper).__name__}. Use one optimizer with paramwise_cfg, or set '
            f'ranks_per_head=1.'
        )


def _count(parameters: Iterable[torch.Tensor]) -> int:
    return sum(parameter.numel() for parameter in parameters)
