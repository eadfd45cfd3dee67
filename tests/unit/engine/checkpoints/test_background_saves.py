"""A checkpoint is written while the training continues, and is what it was when it was saved."""

from __future__ import annotations

import errno
import os
import signal
import threading
from pathlib import Path
from typing import Any, Dict, List

import pytest
import torch
from mmengine.hooks import CheckpointHook, Hook
from mmengine.registry import HOOKS
from toy_runs import log_of, same_weights, toy_runner, toy_train

from mapsage.engine.checkpoints.background import BackgroundSaves, Save
from mapsage.engine.checkpoints.files import SaveError
from mapsage_launcher.stop_request import StoppedEarly

ADAM: Any = {'optim_wrapper.optimizer': dict(_delete_=True, type='Adam', lr=0.01)}
_whole: Any = dict(weights_only=False) if torch.__version__ >= '1.13' else {}


def load(path: Path) -> Dict[str, Any]:
    return torch.load(str(path), map_location='cpu', **_whole)


class SlowDisk(Hook):
    """Keeps the writing thread busy until the end of iteration ``until``; notes what is there."""

    priority = 'LOWEST'

    def __init__(self, until: int) -> None:
        self._until, self._free = until, threading.Event()
        self.files: List[List[str]] = []
        self.weights: Dict[int, Any] = {}

    def before_train(self, runner: Any) -> None:
        runner._background._worker.submit(self._free.wait)

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        self.files.append(
            sorted(
                path.name
                for path in Path(runner.work_dir).iterdir()
                if 'pth' in path.name or path.name == 'last_checkpoint'
            )
        )
        self.weights[runner.iter + 1] = {
            name: value.clone() for name, value in runner.model.state_dict().items()
        }
        if runner.iter + 1 == self._until:
            self._free.set()


def test_the_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    disk = SlowDisk(until=7)
    toy_train(tmp_path, hooks=[disk], **ADAM)
    assert disk.files[:7] == [[]] * 7  # nor does last_checkpoint name one
    first, last = load(tmp_path / 'iter_4.pth'), load(tmp_path / 'iter_8.pth')
    assert same_weights(first['state_dict'], disk.weights[4])
    assert not same_weights(first['state_dict'], disk.weights[5])
    assert same_weights(last['state_dict'], disk.weights[8])
    assert (tmp_path / 'last_checkpoint').read_text() == str(tmp_path / 'iter_8.pth')
    toy_train(tmp_path / 'waits', **ADAM, **{'default_hooks.checkpoint.background': False})
    for name in ('iter_4.pth', 'iter_8.pth'):
        one, other = load(tmp_path / name), load(tmp_path / 'waits' / name)
        assert list(one) == list(other) and same_weights(one['state_dict'], other['state_dict'])
        moments = [
            [value for state in each['optimizer']['state'].values() for value in state.values()]
            for each in (one, other)
        ]
        assert moments[0] and all(
            map(torch.equal, *[map(torch.as_tensor, each) for each in moments])
        )


class FreeOnceWaitedFor(SlowDisk):
    """Lets a save be written when the run waits for it; notes what is there when one begins."""

    def before_train(self, runner: Any) -> None:
        background = runner._background
        wait = background.wait

        def freeing(timeout: float) -> None:
            self._free.set()
            wait(timeout)

        background.wait = freeing

    def before_save_checkpoint(self, runner: Any, checkpoint: dict) -> None:
        self.files.append(sorted(path.name for path in Path(runner.work_dir).glob('*.pth')))
        self._free = threading.Event()
        runner._background._worker.submit(self._free.wait)


def test_the_next_save_waits_for_the_one_before(tmp_path: Path) -> None:
    disk = FreeOnceWaitedFor(until=0)
    toy_train(
        tmp_path,
        hooks=[disk],
        **{
            'default_hooks.checkpoint.interval': 2,
            'default_hooks.checkpoint.max_keep_ckpts': 1,
            'train_cfg.max_iters': 3,
        },
    )
    first = ['iter_2.pth', 'last_checkpoint']
    # Steps 1 and 2, with the first save before the end of step 2; the second save, and step 3.
    assert disk.files == [[], [], [], first[:1], first]
    assert [path.name for path in tmp_path.glob('*.pth')] == ['iter_3.pth']


@HOOKS.register_module(force=True)
class ReadsItsFile(CheckpointHook):
    """A user's hook that needs the file as soon as it has saved it."""

    def _save_checkpoint(self, runner: Any) -> None:
        super()._save_checkpoint(runner)
        load(Path(self.last_ckpt))


@pytest.mark.parametrize(
    'changes',
    [{'background': False}, {'type': 'ReadsItsFile'}, {'backend_args': dict(backend='local')}],
)
def test_where_the_training_waits(changes: dict, tmp_path: Path) -> None:
    disk = SlowDisk(until=8)
    toy_train(
        tmp_path,
        hooks=[disk],
        **{f'default_hooks.checkpoint.{name}': value for name, value in changes.items()},
    )
    assert disk.files[3] == ['iter_4.pth', 'last_checkpoint']


def test_a_hook_that_cannot_save_in_the_background(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match='overrides how CheckpointHook saves'):
        toy_runner(
            tmp_path,
            **{
                'default_hooks.checkpoint.type': 'ReadsItsFile',
                'default_hooks.checkpoint.background': True,
            },
        )


def test_an_error_ends_the_run_at_the_next_step(tmp_path: Path) -> None:
    (tmp_path / 'iter_4.pth').mkdir()  # in the way
    disk = SlowDisk(until=0)
    disk._free.set()
    runner, record = toy_runner(
        tmp_path,
        hooks=[disk],
        **{
            'train_cfg.max_iters': 10**6,
            'train_cfg.val_interval': 10**6,
            'default_hooks.checkpoint.interval': 4,
        },
    )
    with pytest.raises(SaveError, match='iter_4.pth was not written'):
        runner.train()
    assert 4 <= len(record.losses) <= 8  # at the latest at the next save
    assert not (tmp_path / 'last_checkpoint').exists()
    assert not list(tmp_path.glob('*.partial'))


def test_a_disk_that_hangs_is_waited_for_once(tmp_path: Path) -> None:
    disk = SlowDisk(until=10**6)
    runner, _ = toy_runner(tmp_path, hooks=[disk])
    assert runner.save_timeout < runner.env.timeout  # the other ranks learn why
    runner.save_timeout = 0.05
    wait, release = runner._background.wait, threading.Timer(30, disk._free.set)

    def wait_once(timeout: float) -> None:
        try:
            wait(timeout)
        except SaveError:  # from now on the test would wait for long
            runner.save_timeout = 1e5
            raise

    runner._background.wait = wait_once
    release.start()
    with pytest.raises(SaveError, match=r'has not taken .*iter_4.pth within 0.05 s'):
        runner.train()
    assert not disk._free.is_set()
    release.cancel()
    disk._free.set()


@pytest.mark.parametrize(
    'error',
    [TimeoutError(errno.ETIMEDOUT, 'the server is gone'), PermissionError(errno.EACCES, 'no')],
)
def test_what_the_disk_says_of_a_removal_is_raised_once(error: OSError) -> None:
    def remove() -> None:
        raise error

    saves = BackgroundSaves()
    saves.begin(Save(removals=[remove]))
    with pytest.raises(type(error)):
        saves.wait(60)
    saves.wait(60)
    saves.close()


def test_a_pointer_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / 'last_checkpoint').mkdir()
    with pytest.raises(SaveError, match='last_checkpoint was not written.*iter_4.pth.*is whole'):
        toy_train(tmp_path)
    assert load(tmp_path / 'iter_4.pth')['meta']['iter'] == 4


def leave_a_partial_file(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / 'iter_2.pth.0123abcd.partial'
    path.write_bytes(b'half')
    return path


class Stops(Hook):
    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        os.kill(os.getpid(), signal.SIGUSR1)


def test_a_run_resumes_from_out_dir_though_nothing_leads_there(tmp_path: Path) -> None:
    """As if it had been killed between its first checkpoint and last_checkpoint."""
    changes = {'default_hooks.checkpoint.out_dir': str(tmp_path / 'disk')}
    toy_train(tmp_path / 'work', **changes, **{'train_cfg.max_iters': 4})
    (tmp_path / 'work' / 'last_checkpoint').unlink()
    _, record = toy_train(tmp_path / 'work', resume=True, **changes)
    assert len(record.losses) == 4
    assert (tmp_path / 'work' / 'last_checkpoint').read_text().endswith('disk/work/iter_8.pth')


class SavesItself(Hook):
    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        if runner.iter == 0:  # out_dir may be a Path, as in MMEngine
            runner.save_checkpoint(Path(runner.work_dir), 'own.pth', by_epoch=False)
            assert not list(Path(runner.work_dir).glob('*.partial'))


@pytest.mark.usefixtures('signals_as_before')
def test_whoever_saves_removes_what_a_killed_process_left(tmp_path: Path) -> None:
    left = [leave_a_partial_file(tmp_path / name) for name in ('waits', 'stops', 'own')]
    toy_train(tmp_path / 'waits', **{'default_hooks.checkpoint.background': False})
    with pytest.raises(StoppedEarly):
        toy_train(tmp_path / 'stops', hooks=[Stops()])
    toy_train(tmp_path / 'own', hooks=[SavesItself()], **{'train_cfg.max_iters': 2})
    assert load(tmp_path / 'own' / 'own.pth')['meta']['iter'] == 1
    assert not any(path.exists() for path in left)


class Refuses(Hook):
    """Prevents the save that a hook has asked for, once its checkpoint was copied."""

    def __init__(self) -> None:
        self.held: List[int] = []

    def before_train(self, runner: Any) -> None:
        save = runner.save_checkpoint

        def save_and_fail(*args: Any, **kwargs: Any) -> None:
            save(*args, **kwargs)
            raise ArithmeticError

        runner.save_checkpoint = save_and_fail

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        checkpoints = next(each for each in runner.hooks if isinstance(each, CheckpointHook))
        with pytest.raises(ArithmeticError):
            checkpoints._save_checkpoint(runner)
        copies = runner._background.copies
        self.held.append(len(copies._used) + sum(map(len, copies._free.values())))


def test_a_save_that_is_not_begun_keeps_no_memory(tmp_path: Path) -> None:
    hook = Refuses()
    toy_train(
        tmp_path,
        hooks=[hook],
        **{'default_hooks.checkpoint.interval': -1, 'default_hooks.checkpoint.save_last': False},
    )
    assert len(set(hook.held)) == 1 and hook.held[0] > 0


@pytest.mark.parametrize('background', [True, False])
def test_the_log_says_what_is_there(background: bool, tmp_path: Path) -> None:
    """That the best checkpoint is saved, and the one before it removed, once it is so."""
    runner, _ = toy_runner(
        tmp_path,
        **{
            'default_hooks.checkpoint.save_best': 'value',
            'default_hooks.checkpoint.rule': 'greater',
            'default_hooks.checkpoint.background': background,
            'train_cfg.val_interval': 4,
        },
    )
    runner.message_hub.update_info('best_score', -1e9)
    told: List[str] = []
    info, scores = runner.logger.info, iter([1.0, 2.0])
    runner.val_evaluator.evaluate = lambda size: dict(value=next(scores))
    runner.val_loop.evaluator.evaluate = runner.val_evaluator.evaluate

    def check(text: Any, *args: Any, **kwargs: Any) -> None:
        text = str(text)
        if text.startswith('The best'):
            assert (tmp_path / text.split(' is saved to ')[1].rstrip('.')).is_file()
            told.append('saved')
        elif text.startswith('The previous best'):
            assert not Path(text.split()[4]).exists()
            told.append('removed')
        info(text, *args, **kwargs)

    runner.logger.info = check
    runner.train()
    del runner.logger.info
    assert sorted(told) == ['removed', 'saved', 'saved']


class Breaks(Hook):
    """Raises right after the first save has begun."""

    priority = 'LOWEST'

    def __init__(self, error: Any) -> None:
        self._error = error

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        if runner.iter + 1 == 4:
            raise self._error


@pytest.mark.parametrize('error', [ArithmeticError('the cause'), KeyboardInterrupt()])
def test_an_error_of_the_run_waits_for_the_disk(error: Any, tmp_path: Path) -> None:
    with pytest.raises(type(error)):
        toy_train(tmp_path, hooks=[Breaks(error)])
    assert load(tmp_path / 'iter_4.pth')['meta']['iter'] == 4
    (tmp_path / 'full' / 'iter_4.pth').mkdir(parents=True)
    runner, _ = toy_runner(tmp_path / 'full', hooks=[Breaks(error)])
    with pytest.raises(type(error)):  # its own error, and the other one in the log
        runner.train()
    assert 'SaveError: the checkpoint' in log_of(runner)


def test_finish_saves_and_loading_wait(tmp_path: Path) -> None:
    class Reads(Hook):
        priority = 'LOWEST'

        def after_train_iter(
            self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
        ) -> None:
            if runner.iter + 1 == 4:
                runner.load_checkpoint(str(tmp_path / 'iter_4.pth'))
            elif runner.iter + 1 == 8:
                runner.finish_saves()
                load(tmp_path / 'iter_8.pth')

    toy_train(tmp_path, hooks=[Reads()])
