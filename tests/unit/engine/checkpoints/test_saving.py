"""The checkpoint that makes way is removed after the new one was written, and not before."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path
from typing import Any, Dict, List

import mmengine.runner.runner
import pytest
import torch
from mmengine.evaluator import BaseMetric
from mmengine.hooks import CheckpointHook
from mmengine.registry import HOOKS
from mmengine.runner import Runner

from mapsage.compat.checkpoint_loading import load_from_local
from mapsage.engine.run_extension import EngineRun, RunExtension
from mapsage.engine.runner import MapSageRunner

TINY_RUN = Path(__file__).resolve().parents[3] / 'tiny_run.py'


class Rising(BaseMetric):
    """Scores each validation higher than the one before it."""

    default_prefix = ''

    def __init__(self) -> None:
        super().__init__()
        self.score = 0.0

    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.results.append(1)

    def compute_metrics(self, results: list) -> Dict[str, float]:
        self.score += 1
        return dict(mIoU=self.score, mAcc=self.score)


class OwnCheckpointHook(CheckpointHook):
    """A user's own kind of hook."""


class RemovesItself(CheckpointHook):
    """A user's hook that replaces how CheckpointHook saves, and calls nothing of it."""

    def _save_checkpoint_with_step(self, runner: Any, step: int, meta: dict) -> None:
        if self.last_ckpt is not None:
            self.file_backend.remove(self.last_ckpt)
        name = self.filename_tmpl.format(step)
        self.last_ckpt = self.file_backend.join_path(self.out_dir, name)
        runner.save_checkpoint(self.out_dir, name, meta=meta, by_epoch=self.by_epoch)


class OfTheRegistry(HOOKS.get('CheckpointHook')):  # type: ignore[misc]
    """A user's hook that derives from the registered class."""


def build(
    kind: Any, folder: Path, checkpoint: Any, monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> Any:
    spec: Any = importlib.util.spec_from_file_location('tiny_run', TINY_RUN)
    tiny_run = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, 'tiny_run', tiny_run)
    spec.loader.exec_module(tiny_run)
    tiny_run.Runner = kind
    monkeypatch.setattr(mmengine.runner.runner, 'collect_env', dict)
    settings.setdefault('train_cfg', dict(by_epoch=False, max_iters=6, val_interval=2))
    hooks = dict(checkpoint=checkpoint)
    if kind is MapSageRunner:
        settings['env_cfg'] = dict(accelerator='cpu')
        # They take most of the time of such a run.
        hooks.update(preview=None, report=None)
    return tiny_run.build_runner(
        str(folder),
        [],
        val_evaluator=[Rising()],
        default_hooks=hooks,
        **settings,
    )


def files(folder: Path) -> List[str]:
    return sorted(path.name for path in folder.glob('*.pth*'))


@pytest.mark.parametrize(
    'checkpoint',
    [
        dict(interval=1, max_keep_ckpts=1),
        dict(interval=2, max_keep_ckpts=2, save_best='mIoU', rule='greater'),
        dict(interval=3, save_best=['mIoU', 'mAcc'], rule='greater'),
    ],
)
@pytest.mark.parametrize('by_epoch', [False, True])
def test_what_is_left_is_what_mmengine_leaves(
    checkpoint: dict, by_epoch: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = []
    for kind in (Runner, MapSageRunner):
        folder = tmp_path / kind.__name__
        settings: Dict[str, Any] = (
            dict(train_cfg=dict(by_epoch=True, max_epochs=3, val_interval=1)) if by_epoch else {}
        )
        build(
            kind,
            folder,
            dict(checkpoint, type='CheckpointHook', by_epoch=by_epoch),
            monkeypatch,
            **settings,
        ).train()
        left.append(files(folder))
    assert left[0] == left[1] and left[0]


@pytest.mark.parametrize(
    'checkpoint, kept',
    [
        (dict(interval=1, max_keep_ckpts=1), 'iter_3.pth'),
        (
            dict(interval=-1, save_last=False, save_best='mIoU', rule='greater'),
            'best_mIoU_iter_2.pth',
        ),
    ],
)
@pytest.mark.parametrize(
    'kind',
    ['CheckpointHook', CheckpointHook, OwnCheckpointHook, RemovesItself, OfTheRegistry],
)
def test_a_save_that_fails_leaves_the_last_good_one(
    checkpoint: dict, kept: str, kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / kept.replace('2', '4').replace('3', '4')).mkdir()  # in the way of the next one
    runner = build(
        MapSageRunner, tmp_path, dict(checkpoint, type=kind, by_epoch=False), monkeypatch
    )
    with pytest.raises(OSError):
        runner.train()
    assert kept in files(tmp_path) and (tmp_path / kept).is_file()


@pytest.mark.parametrize('kind', [CheckpointHook, OwnCheckpointHook])
def test_a_hook_that_the_user_built_is_protected_and_stays_the_same_object(
    kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook = kind(interval=1, max_keep_ckpts=1, by_epoch=False)
    (tmp_path / 'iter_4.pth').mkdir()  # in the way of the next one
    runner = build(MapSageRunner, tmp_path, hook, monkeypatch)
    assert any(hook is registered for registered in runner.hooks)
    assert isinstance(hook, kind) and type(hook).__name__ == kind.__name__
    with pytest.raises(OSError):
        runner.train()
    assert (tmp_path / 'iter_3.pth').is_file()


def test_a_checkpoint_saved_again_under_its_name_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = dict(
        type='CheckpointHook',
        by_epoch=False,
        interval=-1,
        save_last=False,
        save_best='mIoU',
        rule='greater',
        filename_tmpl='same.pth',
    )
    build(MapSageRunner, tmp_path, settings, monkeypatch).train()
    assert files(tmp_path) == ['best_mIoU_same.pth']


class Sent(RunExtension):
    """Notes what is on the disk when a checkpoint is to be copied."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.calls = folder, []  # type: Path, List[Any]

    def copy_checkpoint(self, run: EngineRun, path: str) -> None:
        self.calls.append(
            (
                Path(path).name,
                Path(path).is_file(),
                Path((self.folder / 'last_checkpoint').read_text()).name,
            )
        )


@pytest.mark.parametrize(
    'settings, steps',
    [
        (dict(neighbor_copy=False), []),
        (dict(neighbor_copy=True, background=False), [3, 6]),
        # after a new best, CheckpointHook saves the last one again
        (dict(neighbor_copy=True, save_best='mIoU', rule='greater', max_keep_ckpts=1), [3, 4, 6]),
    ],
)
def test_a_checkpoint_is_copied_once_it_is_whole(
    settings: dict, steps: List[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = build(
        MapSageRunner,
        tmp_path,
        dict(settings, type='CheckpointHook', by_epoch=False, interval=3),
        monkeypatch,
    )
    sent = Sent(tmp_path)
    runner.extensions.append(sent)
    runner.train()
    assert sorted(set(sent.calls)) == [
        (f'iter_{step}.pth', True, f'iter_{step}.pth') for step in steps
    ]


@pytest.mark.parametrize(
    'wrong, words',
    [
        (dict(neighbor_copy='yes'), "neighbor_copy='yes'.*True or False"),
        (dict(neighbor_copy=True, backend_args=dict(backend='local')), 'file backend'),
    ],
)
def test_a_copy_that_cannot_be_is_refused(
    wrong: dict, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=words):
        build(
            MapSageRunner, tmp_path, dict(wrong, type='CheckpointHook', by_epoch=False), monkeypatch
        )


@pytest.fixture(scope='module')
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the work dir of a run of two steps with a validation."""
    folder = tmp_path_factory.mktemp('two_steps')
    with pytest.MonkeyPatch.context() as patch:
        build(
            MapSageRunner,
            folder,
            dict(
                type='CheckpointHook', by_epoch=False, interval=2, save_best='mIoU', rule='greater'
            ),
            patch,
            train_cfg=dict(by_epoch=False, max_iters=2, val_interval=2),
        ).train()
    return folder


@pytest.fixture
def resumed_run(two_steps: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that resumes from a checkpoint with other run information.

    The resumed run validates two times, and both scores are better than the checkpoint's.
    """

    def resume(info: Dict[str, Any], **checkpoint: Any) -> Path:
        folder = tmp_path / 'work'
        shutil.copytree(str(two_steps), str(folder))
        state = load_from_local(str(folder / 'iter_2.pth'))
        state['message_hub']['runtime_info'].update(
            {
                key: value.replace('WORK', str(folder)) if isinstance(value, str) else value
                for key, value in info.items()
            },
            best_score=-1.0,
            best_score_mIoU=-1.0,
            best_score_mAcc=-1.0,
        )
        torch.save(state, str(folder / 'iter_2.pth'))
        (folder / 'thesis.txt').write_text('in the work dir')
        (folder / 'iter_1.pth').mkdir()
        (folder / 'iter_1.pth' / 'thesis.txt').write_text('in a folder')
        build(
            MapSageRunner,
            folder,
            dict(
                dict(
                    type='CheckpointHook',
                    by_epoch=False,
                    interval=2,
                    save_best='mIoU',
                    rule='greater',
                ),
                **checkpoint,
            ),
            monkeypatch,
            resume=True,
        ).train()
        assert (folder / 'thesis.txt').exists() and (folder / 'iter_1.pth/thesis.txt').exists()
        return folder

    return resume


BOTH = dict(save_best=['mIoU', 'mAcc'])


@pytest.mark.parametrize(
    'name, key, checkpoint',
    [
        ('USER/thesis.txt', 'best_ckpt', {}),
        ('USER', 'best_ckpt_mIoU', BOTH),
        ('USER/best_mIoU_iter_1.pth', 'best_ckpt_mAcc', BOTH),
        ('WORK/thesis.txt', 'best_ckpt', dict(background=False)),
        ('WORK/iter_1.pth', 'best_ckpt', {}),
        ('USER/best_mIoU_iter_1.pth', 'best_ckpt', dict(published_keys=['meta', 'state_dict'])),
    ],
)
def test_a_best_checkpoint_that_the_run_did_not_write_stays(
    name: str, key: str, checkpoint: Dict[str, Any], tmp_path: Path, resumed_run: Any
) -> None:
    user = tmp_path / 'user'
    user.mkdir()
    for file in ('thesis.txt', 'best_mIoU_iter_1.pth'):
        (user / file).write_text('years of work')
    folder = resumed_run({key: name.replace('USER', str(user))}, **checkpoint)
    assert (folder / 'best_mIoU_iter_6.pth').is_file()
    assert sorted(path.name for path in user.iterdir()) == ['best_mIoU_iter_1.pth', 'thesis.txt']


@pytest.mark.parametrize('best', [['a'], 7])
def test_a_best_checkpoint_that_is_no_path_is_ignored(best: Any, resumed_run: Any) -> None:
    resumed_run(dict(best_ckpt=best))


def test_a_moved_work_dir_replaces_its_own_best_checkpoint(resumed_run: Any) -> None:
    folder = resumed_run(dict(best_ckpt='/gone/best_mIoU_iter_2.pth'))
    assert files(folder) == [
        'best_mIoU_iter_6.pth',
        'iter_1.pth',
        'iter_2.pth',
        'iter_4.pth',
        'iter_6.pth',
    ]


@pytest.mark.parametrize('ids', [['../user/thesis', 2], ['iter_1.pth', 1, 2], 'ab'])
def test_only_checkpoints_of_the_folder_make_way(
    ids: Any, tmp_path: Path, resumed_run: Any
) -> None:
    (tmp_path / 'user').mkdir()
    (tmp_path / 'user' / 'thesis').write_text('years of work')
    folder = resumed_run(
        dict(keep_ckpt_ids=ids), max_keep_ckpts=1, filename_tmpl='{}', save_best=None
    )
    assert (tmp_path / 'user' / 'thesis').exists()
    assert '6' in [path.name for path in folder.iterdir()]
