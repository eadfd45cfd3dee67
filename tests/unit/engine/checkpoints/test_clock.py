"""Checkpoints by the clock: when the ranks look at it, and what a run saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any, List

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy_runs import log_of, toy_runner, toy_train

from mapsage.engine.checkpoints.checkpoint_hook import steps_to_wait


@given(
    interval=st.floats(1, 1e4),
    step=st.floats(1e-3, 100),
    slow_down=st.floats(0.1, 10),
    at=st.integers(0, 1000),
)
def test_few_questions_and_a_save_in_time(
    interval: float, step: float, slow_down: float, at: int
) -> None:
    steps, elapsed, asked, wait = 0, 0.0, 0, 1
    while wait:
        assert elapsed < interval
        steps += wait
        elapsed = step * (min(steps, at) + slow_down * max(0, steps - at))
        asked += 1
        wait = steps_to_wait(interval - elapsed, elapsed, steps)
    longest = step * max(1, slow_down)
    # Where steps stay about as fast as they were, the save comes within one step.
    late = longest + (0 if slow_down <= 2 else slow_down * interval)
    assert interval <= elapsed <= interval + late * (1 + 1e-9)
    assert asked < 60


def saved(folder: Path) -> List[str]:
    return sorted(path.name for path in folder.glob('*.pth'))


@pytest.mark.parametrize('by_epoch', [False, True])
def test_a_run_saves_when_the_time_is_up(by_epoch: bool, tmp_path: Path) -> None:
    epochs: Any = dict(
        train_cfg=dict(by_epoch=True, max_epochs=1),
        **{'train_dataloader.sampler': dict(type='DefaultSampler', shuffle=True)},
    )
    runner, _ = toy_train(
        tmp_path,
        **{
            'default_hooks.checkpoint.interval': -1,
            'default_hooks.checkpoint.max_keep_ckpts': 3,
            'default_hooks.checkpoint.interval_minutes': 1e-9,
            **(epochs if by_epoch else {}),
        },
    )
    assert saved(tmp_path) == ['iter_6.pth', 'iter_7.pth', 'iter_8.pth']
    assert 'Saving checkpoint at 3 iterations, 1e-09 minutes after the last one' in log_of(runner)


def test_it_stands_beside_the_interval_and_save_begin(tmp_path: Path) -> None:
    keys = {'default_hooks.checkpoint.interval': 3}
    toy_train(tmp_path / 'long', **keys, **{'default_hooks.checkpoint.interval_minutes': 60})
    assert saved(tmp_path / 'long') == ['iter_3.pth', 'iter_6.pth', 'iter_8.pth']
    toy_train(
        tmp_path / 'late',
        **{
            'default_hooks.checkpoint.interval': -1,
            'default_hooks.checkpoint.save_begin': 6,
            'default_hooks.checkpoint.interval_minutes': 1e-9,
        },
    )
    assert saved(tmp_path / 'late') == ['iter_6.pth', 'iter_7.pth', 'iter_8.pth']


@pytest.mark.parametrize(
    'changes, text',
    [
        ({'interval_minutes': 0}, r'interval_minutes=0\): expected a number of minutes above 0'),
        ({'interval_minutes': True}, 'expected a number of minutes'),
        ({'interval_minutes': 5, 'by_epoch': True}, 'Set by_epoch=False'),
        ({'background': 'yes'}, r"background='yes'\): expected True or False"),
    ],
)
def test_what_cannot_be_meant(changes: dict, text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=text):
        toy_runner(
            tmp_path,
            **{f'default_hooks.checkpoint.{name}': value for name, value in changes.items()},
        )
