"""Makes validations part of an exact resume.

A checkpoint is written before the validation of its iteration or epoch. On this validation depend
learning rates (ReduceOnPlateauLR), the end of a run (EarlyStoppingHook) and the best checkpoint, so
a resumed run first makes up for a validation that was due and that its checkpoint does not record.
"""

from __future__ import annotations

import copy
from typing import Any, Dict, List, NamedTuple, Optional

from mmengine.hooks import EarlyStoppingHook, Hook
from mmengine.optim import OptimWrapperDict
from mmengine.registry import HOOKS
from mmengine.runner import BaseLoop, EpochBasedTrainLoop, IterBasedTrainLoop

from mapsage.host.runner import HostRunner, hooks_of_type

META_KEY = 'validations'


class _State(NamedTuple):
    """What a validation changes, other than scores, as it was before the validation.

    Attributes:
        early_stopping: Counts of each EarlyStoppingHook.
        schedulers: ``param_schedulers`` of a checkpoint; None if no scheduler follows a score.
        settings: Settings of the optimizers' parameter groups; None likewise.
    """

    early_stopping: List[Dict[str, Any]]
    schedulers: Any
    settings: Any


@HOOKS.register_module()
class ValidationRecordHook(Hook):
    """Hook that records validations in checkpoints, and runs at a resume one that is missing.

    ``meta['validations']`` of a checkpoint has the position of the last completed validation
    (``iter`` and ``epoch``, 0 before the first), and the counts of each EarlyStoppingHook
    (``early_stopping``), which MMEngine does not save. A checkpoint that is saved inside a
    validation, as CheckpointHook does after a best score, has the counts, schedulers and learning
    rates of before the validation, because a resumed run repeats it.

    A checkpoint without this record is resumed as under MMEngine: without the validation.

    ``MapSageRunner`` registers it, and sorts it behind all other hooks.
    """

    priority = 'LOWEST'

    def __init__(self) -> None:
        self._last = dict(iter=0, epoch=0)
        # Whether a resumed run has not looked yet whether a validation is due.
        self._is_resumed = False
        self._has_record = False
        # State before the running validation; None outside of one.
        self._before: Optional[_State] = None

    def after_load_checkpoint(self, runner: HostRunner, checkpoint: Dict[str, Any]) -> None:
        """Restore the record and the counts, if the run continues from the checkpoint."""
        if not runner._resume:
            return
        record = checkpoint.get('meta', {}).get(META_KEY)
        self._is_resumed, self._has_record = True, record is not None
        if record is None:
            return
        self._last = {unit: int(record[unit]) for unit in ('iter', 'epoch')}
        entries = list(record['early_stopping'])
        for hook in hooks_of_type(runner, EarlyStoppingHook):
            entry = next((entry for entry in entries if entry['monitor'] == hook.monitor), None)
            if entry is not None:
                entries.remove(entry)
                hook.wait_count = int(entry['wait_count'])
                hook.best_score = entry['best_score']

    def before_save_checkpoint(self, runner: HostRunner, checkpoint: Dict[str, Any]) -> None:
        """Add the record to the checkpoint."""
        state = self._before or _State(_counts(runner), None, None)
        checkpoint['meta'][META_KEY] = dict(self._last, early_stopping=state.early_stopping)
        if state.settings is not None:
            if 'param_schedulers' in checkpoint:
                checkpoint['param_schedulers'] = copy.deepcopy(state.schedulers)
            if 'optimizer' in checkpoint:
                checkpoint['optimizer'] = _with_settings(checkpoint['optimizer'], state.settings)

    def before_train(self, runner: HostRunner) -> None:
        """Run a missing validation before the first epoch. Collective."""
        if isinstance(runner.train_loop, EpochBasedTrainLoop):
            self._catch_up(runner)

    def before_train_epoch(self, runner: HostRunner) -> None:
        """Run a missing validation before the first iteration. Collective."""
        if isinstance(runner.train_loop, IterBasedTrainLoop):
            self._catch_up(runner)

    def before_val(self, runner: HostRunner) -> None:
        """Keep what the hooks of the validation may change."""
        follows_score = any(
            getattr(scheduler, 'need_val_args', False)
            for scheduler in _schedulers(runner.param_schedulers)
        )
        self._before = _State(
            _counts(runner),
            *(
                [copy.deepcopy(_states(runner.param_schedulers)), _settings(runner.optim_wrapper)]
                if follows_score
                else [None] * 2
            ),
        )

    def after_val(self, runner: HostRunner) -> None:
        """Record the validation."""
        self._before = None
        if isinstance(runner._train_loop, BaseLoop):
            self._last = dict(iter=runner.iter, epoch=runner.epoch)

    def _catch_up(self, runner: HostRunner) -> None:
        is_resumed, self._is_resumed = self._is_resumed, False
        if not is_resumed or runner.val_loop is None or not _follows(runner.train_loop):
            return
        by_epoch = isinstance(runner.train_loop, EpochBasedTrainLoop)
        position = f'epoch {runner.epoch}' if by_epoch else f'iteration {runner.iter}'
        if not self._has_record:
            runner.logger.warning(
                f'the checkpoint does not record its validations: as under MMEngine, the one after '
                f'{position} does not run.'
            )
            return
        unit = 'epoch' if by_epoch else 'iter'
        if self._last[unit] == getattr(runner, unit):
            return
        runner.logger.info(
            f'the validation after {position} was not completed and runs first',
            extra=dict(validates_first=True),
        )
        # In an uninterrupted run, the next epoch or step has not updated the number yet.
        runner.message_hub.update_info('iter', runner.iter - 1)
        if by_epoch:
            runner.message_hub.update_info('epoch', runner.epoch - 1)
        runner.val_loop.run()


def _follows(loop: Any) -> bool:
    """Return whether MMEngine's loops validate at the position of a resumed loop."""
    if isinstance(loop, EpochBasedTrainLoop):
        # Inside an epoch: its end is still to come.
        done, last = (0 if loop.batches_done else loop.epoch), loop.max_epochs
    else:
        done, last = loop.iter, loop.max_iters
    loop._decide_current_val_interval()
    return done > 0 and done >= loop.val_begin and (done % loop.val_interval == 0 or done == last)


def _counts(runner: HostRunner) -> List[Dict[str, Any]]:
    return [
        dict(monitor=hook.monitor, wait_count=hook.wait_count, best_score=hook.best_score)
        for hook in hooks_of_type(runner, EarlyStoppingHook)
    ]


def _schedulers(schedulers: Any) -> List[Any]:
    """Return the schedulers of all optimizers, built or as configs."""
    if isinstance(schedulers, dict):
        return [scheduler for group in schedulers.values() for scheduler in _schedulers(group)]
    return list(schedulers) if isinstance(schedulers, (list, tuple)) else []


def _states(schedulers: Any) -> Any:
    """Return ``param_schedulers`` of a checkpoint for the schedulers of a run."""
    if isinstance(schedulers, dict):
        return {name: _states(group) for name, group in schedulers.items()}
    return [scheduler.state_dict() for scheduler in schedulers]


def _settings(optim_wrapper: Any) -> Any:
    """Return a copy of the parameter groups that schedulers change, without their parameters."""
    if isinstance(optim_wrapper, OptimWrapperDict):
        return {name: _settings(wrapper) for name, wrapper in optim_wrapper.items()}
    return copy.deepcopy(
        [
            {name: value for name, value in group.items() if name != 'params'}
            for group in optim_wrapper.param_groups
        ]
    )


def _with_settings(state: Dict[str, Any], settings: Any) -> Dict[str, Any]:
    """Return ``optimizer`` of a checkpoint with the groups that :func:`_settings` has copied."""
    if isinstance(settings, dict):
        return {name: _with_settings(wrapper, settings[name]) for name, wrapper in state.items()}
    count = len(state['param_groups'])
    changed = dict(
        state,
        param_groups=[
            dict(group, **setting) for group, setting in zip(state['param_groups'], settings)
        ],
    )
    # With several groups, MMEngine keeps one more, whose rate is not scaled by any group's factor.
    if state.get('base_param_settings') is not None and len(settings) > count:
        changed['base_param_settings'] = dict(state['base_param_settings'], **settings[count])
    return changed
