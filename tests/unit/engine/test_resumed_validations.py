"""A validation that was due when a run was interrupted is not lost, and neither are its effects."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, Dict, Sequence

import pytest
import torch
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from toy_runs import log_of, same_weights, toy_config, toy_train

from mapsage.extras.forensics.replay import ReplayError, replay

LOAD = {'weights_only': False} if torch.__version__ >= '2' else {}
ITERATIONS: Dict[str, Any] = {
    'train_cfg.max_iters': 14,
    'train_cfg.val_interval': 2,
    'default_hooks.checkpoint.interval': 2,
}
EPOCHS: Dict[str, Any] = {
    'train_cfg': dict(by_epoch=True, max_epochs=5, val_interval=1),
    'train_dataloader.sampler.type': 'DefaultSampler',
    'train_dataloader.dataset.length': 4,
    'default_hooks.checkpoint': dict(interval=1, by_epoch=True),
}
PLATEAU = [
    dict(
        type='ReduceOnPlateauLR',
        monitor='value',
        rule='greater',
        patience=0,
        factor=0.1,
        by_epoch=True,
    )
]
BEST = {'default_hooks.checkpoint.save_best': 'value', 'default_hooks.checkpoint.rule': 'greater'}
# Positions of the validations -> score.
SCORES = [0.5, 0.4, 0.6, 0.4, 0.4, 0.4, 0.4]


@HOOKS.register_module(force=True)
class PlantedScores(Hook):
    """Replaces the score of each validation by one that depends on its position only."""

    priority = 'VERY_HIGH'

    def __init__(self, scores: Sequence[float], interval: int = 2) -> None:
        self.scores, self.interval = scores, interval

    def after_val_epoch(self, runner: Any, metrics: Any = None) -> None:
        metrics['value'] = float(self.scores[runner.iter // self.interval - 1])


class Interrupted(Exception):
    pass


class Interrupt(Hook):
    """Ends a run at a hook point of an iteration, with its checkpoints on the disk."""

    def __init__(self, point: str, iteration: int, priority: str = 'LOWEST') -> None:
        def interrupt(runner: Any, *_: Any, **__: Any) -> None:
            if runner.iter == iteration:
                runner.finish_saves()
                raise Interrupted

        self.priority = priority
        setattr(self, point, interrupt)


@pytest.fixture(scope='module')
def train_whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that trains without interruption, once for the same changes."""
    runs: Dict[str, Any] = {}

    def train(changes: Dict[str, Any]) -> Any:
        key = repr(changes)
        if key not in runs:
            runs[key] = toy_train(tmp_path_factory.mktemp('whole'), **dict(changes))
        return runs[key]

    return train


@pytest.fixture
def cut_and_resumed(train_whole: Any, tmp_path: Path) -> Any:
    """Return a function that compares a run with one that is interrupted and resumed."""
    return lambda *arguments: _cut_and_resumed(train_whole, tmp_path, *arguments)


def _cut_and_resumed(
    train_whole: Any, tmp_path: Path, points: Sequence[Hook], changes: Dict[str, Any]
) -> Any:
    whole, seen = train_whole(changes)
    folder = tmp_path / f'cut{len(list(tmp_path.iterdir()))}'
    for number, hook in enumerate(points):
        with pytest.raises(Interrupted):
            toy_train(folder, hooks=[hook], resume=number > 0, **dict(changes))
    rest, left = toy_train(folder, resume='must', **dict(changes))
    assert (rest.iter, rest.epoch) == (whole.iter, whole.epoch)
    assert left.losses == seen.losses[len(seen.losses) - len(left.losses) :]
    assert left.rates == seen.rates[len(seen.rates) - len(left.rates) :]
    assert left.figures == seen.figures[len(seen.figures) - len(left.figures) :]
    assert same_weights(whole.model.state_dict(), rest.model.state_dict())
    for one, other in zip(whole.param_schedulers or [], rest.param_schedulers or []):
        assert one.state_dict() == other.state_dict()
    # Beyond its intervals, an uninterrupted run saves after a best score, as under MMEngine.
    paths = list(folder.glob('*.pth'))
    assert {path.name for path in paths} <= {path.name for path in Path(whole.work_dir).iterdir()}
    last = f'epoch_{whole.epoch}.pth' if whole.epoch else f'iter_{whole.iter}.pth'
    for path in paths:
        one, other = (torch.load(f'{run}/{path.name}', **LOAD) for run in (whole.work_dir, folder))
        assert same_weights(one['state_dict'], other['state_dict'])
        assert one['meta']['validations'] == other['meta']['validations']
        assert one.get('param_schedulers') == other.get('param_schedulers')
        infos = [
            {
                key: os.path.basename(str(value))
                for key, value in checkpoint['message_hub']['runtime_info'].items()
                if key in ('iter', 'epoch') or key.startswith('best') and path.name == last
            }
            for checkpoint in (one, other)
        ]
        assert infos[0] == infos[1]
    assert [path.name for path in Path(whole.work_dir).glob('best*')] == [
        path.name for path in paths if path.name.startswith('best')
    ]
    return whole, rest, left


@pytest.mark.parametrize(
    'point, iteration',
    [
        ('before_val_epoch', 2),
        ('before_val_epoch', 4),
        ('before_train_iter', 5),
        ('after_val_epoch', 6),
        ('before_val_epoch', 10),
        ('after_train', 10),
    ],
)
@pytest.mark.parametrize('groups', [1, 2])
def test_a_rate_that_follows_the_score_at_epochs(
    groups: int, point: str, iteration: int, cut_and_resumed: Any
) -> None:
    paramwise = (
        {'optim_wrapper.paramwise_cfg': dict(custom_keys={'layers.0': dict(lr_mult=0.1)})}
        if groups > 1
        else {}
    )
    cut_and_resumed(
        [Interrupt(point, iteration)],
        {
            **EPOCHS,
            **BEST,
            **paramwise,
            'param_scheduler': PLATEAU,
            'custom_hooks': [dict(type='PlantedScores', scores=SCORES)],
        },
    )


@pytest.mark.parametrize(
    'points',
    [
        [('before_val_epoch', 6)],
        [('before_train_iter', 7)],
        [('after_val_epoch', 6)],
        [('before_train_iter', 5), ('before_val_epoch', 6), ('before_val_epoch', 8)],
        [('before_val_epoch', 10)],
        [('after_train', 12)],
    ],
    ids=str,
)
def test_a_run_that_stops_early_stops_after_the_same_iteration(
    points: Any, cut_and_resumed: Any
) -> None:
    stop = dict(
        type='EarlyStoppingHook', monitor='value', rule='greater', min_delta=0.01, patience=3
    )
    whole, _, _ = cut_and_resumed(
        [Interrupt(*point) for point in points],
        {**ITERATIONS, **BEST, 'custom_hooks': [dict(type='PlantedScores', scores=SCORES), stop]},
    )
    assert whole.iter == 12


def test_a_run_that_a_best_score_ends_does_not_go_on(cut_and_resumed: Any) -> None:
    stop = dict(type='EarlyStoppingHook', monitor='value', rule='greater', stopping_threshold=0.55)
    whole, _, left = cut_and_resumed(
        [Interrupt('after_train', 6)],
        {**ITERATIONS, **BEST, 'custom_hooks': [dict(type='PlantedScores', scores=SCORES), stop]},
    )
    assert whole.iter == 6 and not left.losses


@pytest.mark.parametrize(
    'changes',
    [
        {'train_cfg.val_begin': 5},
        {'train_cfg.dynamic_intervals': [(1, 2), (5, 3)]},
        {'train_cfg.val_interval': 100},
        {'env_cfg.virtual_ranks': 3},
    ],
    ids=str,
)
def test_only_validations_that_were_due_are_made_up_for(
    changes: Dict[str, Any], cut_and_resumed: Any
) -> None:
    for cut in (2, 4, 6, 14):
        cut_and_resumed(
            [Interrupt('after_train' if cut == 14 else 'before_train_iter', cut)],
            {**ITERATIONS, **changes},
        )


def test_a_validation_that_raised_runs_first_at_the_resume(cut_and_resumed: Any) -> None:
    _, rest, left = cut_and_resumed([Interrupt('after_val_iter', 4)], {**ITERATIONS, **BEST})
    assert len(left.figures) == 6
    assert 'the validation after iteration 4 was not completed and runs first' in log_of(rest)


def test_a_checkpoint_without_a_record_is_resumed_as_under_mmengine(tmp_path: Path) -> None:
    toy_train(tmp_path, **ITERATIONS)
    checkpoint = torch.load(str(tmp_path / 'iter_8.pth'), **LOAD)
    shutil.rmtree(str(tmp_path))
    tmp_path.mkdir()
    del checkpoint['meta']['validations']
    torch.save(checkpoint, str(tmp_path / 'iter_8.pth'))
    rest, left = toy_train(tmp_path, resume=True, **ITERATIONS)
    assert len(left.figures) == 3 and 'does not record its validations' in log_of(rest)


def test_a_replay_follows_the_rate_of_the_validations(tmp_path: Path) -> None:
    changes: Dict[str, Any] = {
        **EPOCHS,
        'param_scheduler': PLATEAU,
        'default_hooks.checkpoint.interval': 2,
        'custom_hooks': [dict(type='PlantedScores', scores=SCORES)],
    }
    _, seen = toy_train(tmp_path, **dict(changes))
    for iteration in (5, 8):
        folder = replay(
            toy_config(tmp_path, runner_type='MapSageRunner', **dict(changes)), iteration
        )
        step = torch.load(str(folder / 'rank_0.pth'), **LOAD)
        assert step['learning_rate']['lr'][0] == seen.rates[iteration - 1]
        assert float(step['losses']['loss']) == seen.losses[iteration - 1]


def test_a_replay_beyond_an_early_stop_is_an_error(tmp_path: Path) -> None:
    stop = dict(
        type='EarlyStoppingHook', monitor='value', rule='greater', min_delta=0.01, patience=1
    )
    changes: Dict[str, Any] = {
        **ITERATIONS,
        'custom_hooks': [dict(type='PlantedScores', scores=SCORES), stop],
    }
    whole, _ = toy_train(tmp_path, **dict(changes))
    assert whole.iter == 4
    with pytest.raises(ReplayError, match='ended after iteration 4'):
        replay(toy_config(tmp_path, runner_type='MapSageRunner', **dict(changes)), 6)
