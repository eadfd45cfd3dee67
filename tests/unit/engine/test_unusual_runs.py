"""What MMEngine's Runner trains, saves and resumes, if seldom asked to, this one does as well."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mmengine.dist import master_only
from mmengine.hooks import CheckpointHook, Hook
from mmengine.logging import HistoryBuffer
from mmengine.optim import LinearLR
from mmengine.registry import HOOKS, PARAM_SCHEDULERS
from mmengine.runner import Runner
from toy_runs import log_of, same_weights, toy_runner, toy_train

from mapsage.engine import MapSageRunner
from mapsage.engine.checkpoints.files import SaveError

OPTIM, COUNTS = 'default_hooks.checkpoint.save_optimizer', 'optim_wrapper.accumulative_counts'


@pytest.mark.parametrize('runner_class', [Runner, MapSageRunner])
def test_a_checkpoint_without_the_optimizer_is_resumed(runner_class: Any, tmp_path: Path) -> None:
    toy_train(tmp_path, runner_class, **{OPTIM: False, 'train_cfg.max_iters': 4})
    _, record = toy_train(tmp_path, runner_class, resume=True, **{OPTIM: False})
    assert len(record.losses) == 4


@pytest.mark.parametrize('runner_class', [Runner, MapSageRunner])
def test_a_checkpoint_in_another_folder_is_resumed_by_name(
    runner_class: Any, tmp_path: Path
) -> None:
    changes = {'default_hooks.checkpoint.out_dir': str(tmp_path / 'out')}
    toy_train(tmp_path / 'work', runner_class, **changes)
    (early,) = (tmp_path / 'out').rglob('iter_4.pth')
    _, record = toy_train(
        tmp_path / 'work', runner_class, resume=True, load_from=str(early), **changes
    )
    assert len(record.losses) == 4


def test_a_damaged_checkpoint_in_another_folder_is_passed_over(tmp_path: Path) -> None:
    changes = {'default_hooks.checkpoint.out_dir': str(tmp_path / 'out')}
    toy_train(tmp_path / 'work', **changes)
    next((tmp_path / 'out').rglob('iter_8.pth')).write_bytes(b'cut')
    _, record = toy_train(tmp_path / 'work', resume=True, **changes)
    assert len(record.losses) == 4


@PARAM_SCHEDULERS.register_module(force=True)
class TableLR(LinearLR):
    """A user's scheduler whose state holds an array."""

    def __init__(self, *args: Any, table: Any = (1.0, 2.0), **kwargs: Any) -> None:
        self.table = np.asarray(table)
        super().__init__(*args, **kwargs)


def test_a_scheduler_with_an_array_is_resumed(tmp_path: Path) -> None:
    changes: Any = {'param_scheduler': [dict(type='TableLR', begin=0, end=4, by_epoch=False)]}
    runner, _ = toy_train(tmp_path, **{'train_cfg.max_iters': 4}, **changes)
    # The rate of the config, not the third with which the warm-up begins.
    assert 'SGD with lr 0.05, ' in log_of(runner)
    _, record = toy_train(tmp_path, resume=True, **changes)
    assert len(record.losses) == 4


class Notes(Hook):
    """Writes values into the message hub, as users do."""

    def before_train(self, runner: Any) -> None:
        for name, value in dict(
            text=np.str_('a'),
            texts=np.array(['a', 'b']),
            wave=np.ones(2, np.complex64),
            long=np.longdouble(1.5),
        ).items():
            runner.message_hub.update_info(name, value)


def test_every_value_of_numpy_is_saved_and_read(tmp_path: Path) -> None:
    toy_train(tmp_path, hooks=[Notes()], **{'train_cfg.max_iters': 4})
    runner, record = toy_train(tmp_path, resume=True)
    assert len(record.losses) == 4
    assert runner.message_hub.get_info('texts').tolist() == ['a', 'b']


def test_a_statistic_of_the_users_does_not_prevent_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        HistoryBuffer, '_statistics_methods', dict(HistoryBuffer._statistics_methods)
    )

    @HistoryBuffer.register_statistics
    def spread(self: HistoryBuffer, *args: Any, **kwargs: Any) -> Any:
        return np.ptp(self._log_history)

    toy_train(tmp_path, **{'train_cfg.max_iters': 4})
    runner, record = toy_train(tmp_path, resume=True)
    assert len(record.losses) == 4
    assert runner.message_hub.get_scalar('train/loss').statistics('spread') > 0


class LateTeacher(Hook):
    """A user's hook that makes its average later."""

    ema_model = None


class OwnExplain(Hook):
    """A user's hook with a method that is called like one of ours, and a bug."""

    def explain(self, what: str, how: str) -> None:
        pass

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        raise ArithmeticError('the cause')


def test_hooks_that_share_names_with_ours(tmp_path: Path) -> None:
    toy_train(tmp_path / 'teacher', hooks=[LateTeacher()])
    with pytest.raises(ArithmeticError, match='the cause'):
        toy_train(tmp_path / 'explain', hooks=[OwnExplain()])


class Twice(Hook):
    """Saves two files at once."""

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        if runner.iter == 2:
            with runner.saving_together():
                for name in ('one.pth', 'two.pth'):
                    runner.save_checkpoint(runner.work_dir, name, by_epoch=False)


def test_every_checkpoint_of_a_save_holds_the_gradients(tmp_path: Path) -> None:
    toy_train(tmp_path, hooks=[Twice()], **{COUNTS: 2})
    one, two = (
        torch.load(tmp_path / name, map_location='cpu', **_whole) for name in ('one.pth', 'two.pth')
    )
    assert one['gradients'] and same_weights(one['gradients'], two['gradients'])


_whole: Any = dict(weights_only=False) if torch.__version__ >= '1.13' else {}


def test_gradients_of_another_cycle_are_left_out(tmp_path: Path) -> None:
    toy_train(tmp_path, **{COUNTS: 4, 'default_hooks.checkpoint.interval': 3})
    runner, _ = toy_train(tmp_path, resume=True, load_from=str(tmp_path / 'iter_6.pth'))
    assert 'accumulative_counts is [1] now: its gradients are left out' in log_of(runner)


@HOOKS.register_module(force=True)
class MainOnly(CheckpointHook):
    @master_only
    def after_train_iter(self, *args: Any, **kwargs: Any) -> None:
        super().after_train_iter(*args, **kwargs)


def test_a_save_that_not_all_ranks_would_enter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match='MainOnly.after_train_iter is wrapped in a decorator'):
        toy_runner(tmp_path, **{'default_hooks.checkpoint.type': 'MainOnly'})


def test_a_full_disk_is_said_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, 'disk_usage', lambda path: usage._replace(free=100))
    with pytest.raises(SaveError, match='has 0.0 MB of free disk, and the weights .*--work-dir'):
        toy_train(tmp_path)
    assert not list(tmp_path.rglob('*.pth'))
