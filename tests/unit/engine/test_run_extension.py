"""The runner calls every moment of its extensions, in their order and around the right calls."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import Any, Dict, Iterator, List, Tuple, Type

import pytest
from mmengine.config import Config
from toy_runs import toy_train

from mapsage.engine import MapSageRunner, runner
from mapsage.engine.extensions import EXTENSIONS
from mapsage.engine.run_extension import EngineRun, Phase, RunExtension

# A run of one process with one virtual rank has no wrapper, and advises no replay. The hook of the toy
# runs asks for no copies of its checkpoints (tests/unit/engine/checkpoints/test_saving.py), and only a
# cross-check asks what it cannot live with (tests/extras/forensics/test_cross_check_obstacles.py). Only
# a fast card asks who fixes the memory layout.
_ELSEWHERE = {
    'wrap_model',
    'prepare_replay',
    'copy_checkpoint',
    'cross_check_obstacle',
    'fixes_layout',
}
_NO_MOMENTS = {'acts_first'}
_MOMENTS = {name for name in vars(RunExtension) if not name.startswith('_')} - {
    *_ELSEWHERE,
    *_NO_MOMENTS,
}


def recording(label: str, calls: List[str]) -> Type[RunExtension]:
    """Return an extension that adds a line to ``calls`` at each of its moments."""

    def note(moment: str) -> None:
        calls.append(f'{label} {moment}')

    class Recording(RunExtension):
        def join(self, run: EngineRun) -> None:
            note('join')

        def startup_warning(self, run: EngineRun) -> str:
            note('startup_warning')
            return f'a warning of {label}'

        @classmethod
        def take_process(cls, cfg: Config) -> None:
            note('take_process')

        def needs_one_rank_each(self, cfg: Config) -> str:
            note('needs_one_rank_each')
            return ''

        def prepare_model(self, run: EngineRun, model: Any) -> None:
            note('prepare_model')

        def hook_configs(self, run: EngineRun) -> List[Dict[str, Any]]:
            note('hook_configs')
            return [dict(type='EmptyCacheHook')]

        def choose_checkpoint(self, run: EngineRun) -> None:
            note('choose_checkpoint')

        @contextmanager
        def building_train_loop(self, run: EngineRun, loop: Any) -> Iterator[None]:
            note('building_train_loop')
            yield
            note('built the train loop')

        def on_loop_built(self, run: EngineRun, phase: Phase, loop: Any) -> None:
            note(f'on_loop_built {phase.value}')

        @contextmanager
        def training(self, run: EngineRun) -> Iterator[None]:
            note('training')
            yield
            note('trained')

        @contextmanager
        def resuming(self, run: EngineRun) -> Iterator[None]:
            note('resuming')
            yield
            note('resumed')

        def after_load(self, run: EngineRun) -> None:
            note('after_load')

    return Recording


def train(
    calls: List[str], monkeypatch: pytest.MonkeyPatch, work_dir: Path, **changes: Any
) -> MapSageRunner:
    extensions = (*EXTENSIONS, recording('a', calls), recording('b', calls))
    monkeypatch.setattr(runner, 'EXTENSIONS', extensions)
    return toy_train(work_dir, **changes)[0]


def test_every_moment_comes_once_and_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: List[str] = []
    run = train(calls, monkeypatch, tmp_path)
    moments = [
        'take_process',
        'join',
        'startup_warning',
        'prepare_model',
        'needs_one_rank_each',
        'hook_configs',
        'training',
        'building_train_loop',
        'built the train loop',
        'on_loop_built training',
        'on_loop_built validation',
        'after_load',
        'trained',
    ]
    first = [call[2:] for call in calls if call.startswith('a ')]
    assert first == moments == [call[2:] for call in calls if call.startswith('b ')]
    # An extension acts before the next one, and a context that was entered last is left first.
    pairs: List[Tuple[str, str]] = list(zip(calls[::2], calls[1::2]))
    for one, other in pairs:
        leaving = one.endswith(('built the train loop', 'trained'))
        assert (one[0], other[0]) == (('b', 'a') if leaving else ('a', 'b'))
    assert sum(type(hook).__name__ == 'EmptyCacheHook' for hook in run.hooks) == 2


def test_a_resumed_run_has_one_more_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toy_train(tmp_path, **{'train_cfg.max_iters': 4})
    calls: List[str] = []
    train(calls, monkeypatch, tmp_path, resume=True)
    seen = {call[2:].split()[0] for call in calls}
    assert _MOMENTS <= seen
    order = [call[2:] for call in calls if call.startswith('a ')]
    assert (
        order.index('choose_checkpoint')
        < order.index('resuming')
        < order.index('resumed')
        < order.index('after_load')
    )


def test_extensions_keep_no_state_from_another_run(tmp_path: Path) -> None:
    runs = [toy_train(tmp_path / name)[0] for name in ('one', 'other')]
    assert not {id(extension) for extension in runs[0].extensions} & {
        id(extension) for extension in runs[1].extensions
    }
