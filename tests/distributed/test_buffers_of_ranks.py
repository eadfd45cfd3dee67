"""What several ranks log of a validation is what their checkpoint gives in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List

import pytest
from forked import fork_scenarios
from sampling_ranks import Answers, answers_of
from support import chosen, main_leg, rest_is_long
from toy_runs import toy_runner, toy_train

pytestmark = main_leg
EMA = dict(type='EMAHook', update_buffers=True, momentum=0.3)
BY_EPOCH = dict(
    train_cfg=dict(by_epoch=True, max_epochs=3, val_interval=1),
    **{
        'train_dataloader.sampler.type': 'DefaultSampler',
        'default_hooks.checkpoint': dict(by_epoch=True, interval=1),
    },
)
HOOKS: Dict[str, List[dict]] = {
    'plain': [],
    'ema': [EMA],
    'ema of parameters': [dict(EMA, update_buffers=False)],
    'mean': [dict(type='SyncBuffersHook')],
    'ema and mean': [EMA, dict(type='SyncBuffersHook')],
}
LOOPS: Dict[str, dict] = {'iterations': {'train_cfg.val_interval': 4}, 'epochs': BY_EPOCH}
CHECKPOINTS = {
    'iterations': ('iter_4.pth', 'iter_8.pth'),
    'epochs': ('epoch_1.pth', 'epoch_2.pth', 'epoch_3.pth'),
}
SCENARIOS = [(hooks, 'iterations', world) for hooks in HOOKS for world in (2, 3)] + [
    ('ema', 'epochs', 2),
    ('ema and mean', 'epochs', 3),
]
DAILY = rest_is_long(
    SCENARIOS,
    ('plain', 'iterations', 3),
    ('mean', 'iterations', 3),
    ('ema', 'iterations', 2),
    ('ema and mean', 'epochs', 3),
)


def train_and_test(work_dir: Path, hooks: str, loop: str) -> Any:
    """Return the logged figures."""
    return toy_train(work_dir, custom_hooks=HOOKS[hooks], **LOOPS[loop])[1].figures


def run_scenarios(folder: Path, chosen_names: Any) -> Dict[str, Any]:
    return fork_scenarios(
        {
            str(names): (train_and_test, names[2], folder / str(number), *names[:2])
            for number, names in enumerate(SCENARIOS)
            if names in chosen_names
        },
        folder,
    )


@pytest.fixture(scope='module')
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp('buffers')


@pytest.fixture(scope='module')
def answers(request: pytest.FixtureRequest, folder: Path) -> Answers:
    compared = [
        (hooks, 'iterations', world)
        for hooks in ('plain', 'mean')
        for world in chosen(request, 'world')
    ]
    return answers_of(run_scenarios, folder, chosen(request, 'names') + compared)


@pytest.mark.parametrize('names', DAILY, ids=str)
def test_the_log_and_the_checkpoint_agree(
    names: Any, answers: Answers, folder: Path, tmp_path: Path
) -> None:
    figures = answers.of(str(names))
    assert all(each == figures[0] for each in figures)
    assert len(set(figures[0])) == len(figures[0]) == len(CHECKPOINTS[names[1]])
    for figure, name in zip(figures[0], CHECKPOINTS[names[1]]):
        path = folder / str(SCENARIOS.index(names)) / name
        runner, record = toy_runner(tmp_path / name, load_from=str(path))
        runner.test()
        assert record.figures[0] == pytest.approx(figure, rel=1e-6), name


@pytest.mark.parametrize('world', rest_is_long([2, 3], 3))
def test_a_hook_that_averages_is_obeyed(world: int, answers: Answers) -> None:
    """As under MMEngine the averaged statistics are evaluated, and not those of rank 0."""
    without, mean = (
        answers.of(str((hooks, 'iterations', world)))[0][0] for hooks in ('plain', 'mean')
    )
    assert without != pytest.approx(mean, rel=1e-4)
