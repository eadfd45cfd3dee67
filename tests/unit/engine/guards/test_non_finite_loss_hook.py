"""A loss that is no number ends the run with the facts, before a checkpoint is written."""

from __future__ import annotations

import glob
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from mmengine.optim import OptimWrapper
from mmengine.registry import OPTIM_WRAPPERS

from mapsage.engine.guards import NonFiniteLossError, NonFiniteLossHook


class Scaler:
    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled

    def is_enabled(self) -> bool:
        return self._enabled


@OPTIM_WRAPPERS.register_module(force=True)
class ScaledOptimWrapper(OptimWrapper):
    """An optim wrapper with a loss scaler that skips every step, as one does on overflow."""

    def __init__(self, enabled: bool = True, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.loss_scaler = Scaler(enabled)

    def update_params(self, loss: Any, *args: Any, **kwargs: Any) -> None:
        pass


def train(
    tiny_run: ModuleType, folder: Path, bad_from: Any, patience: int = 10, **kwargs: Any
) -> Any:
    kwargs.setdefault(
        'default_hooks',
        dict(
            logger=dict(type='LoggerHook', interval=1),
            checkpoint=dict(type='CheckpointHook', by_epoch=False, interval=1),
        ),
    )
    runner = tiny_run.build_runner(
        str(folder), [NonFiniteLossHook(patience)], tiny_run.TinyModel(bad_from=bad_from), **kwargs
    )
    runner.train()
    return runner


def scaled(enabled: bool = True) -> dict:
    return dict(type='ScaledOptimWrapper', enabled=enabled, optimizer=dict(type='SGD', lr=0.01))


def test_finite_losses_pass(tmp_path: Path, tiny_run: ModuleType) -> None:
    assert train(tiny_run, tmp_path, bad_from=None).iter == 4


def test_the_error_says_what_happened_where_and_what_next(
    tmp_path: Path, tiny_run: ModuleType
) -> None:
    with pytest.raises(NonFiniteLossError) as raised:
        train(tiny_run, tmp_path, bad_from=1)
    message = str(raised.value)
    assert 'the loss is nan at iteration 2, rank 0' in message
    # The auxiliary term is finite: the report shows which one is to blame.
    assert 'loss_ce=nan' in message and 'loss_aux=0.47' in message
    assert 'lr=1.000e-02' in message
    # Batches of two: the second iteration saw images 2 and 3.
    named = [line.strip() for line in message.splitlines() if line.strip().endswith('.png')]
    assert named == [str(tmp_path / 'images' / f'{index}.png') for index in (2, 3)]
    assert 'clip_grad' in message and 'iter_1.pth' in message


@pytest.mark.parametrize('value', ['inf', '-inf'])
def test_an_infinite_loss_is_an_error(value: str, tmp_path: Path, tiny_run: ModuleType) -> None:
    class Infinite(tiny_run.TinyModel):  # type: ignore[name-defined, misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            losses = super().forward(*args, **kwargs)
            return dict(losses, loss_ce=losses['loss_ce'] + float(value))

    runner = tiny_run.build_runner(str(tmp_path), [NonFiniteLossHook()], Infinite())
    with pytest.raises(NonFiniteLossError, match=f'the loss is {value} at iteration 1'):
        runner.train()


def test_no_checkpoint_is_written_from_a_bad_step(tmp_path: Path, tiny_run: ModuleType) -> None:
    with pytest.raises(NonFiniteLossError):
        train(tiny_run, tmp_path, bad_from=2)
    written = sorted(Path(path).name for path in glob.glob(str(tmp_path / '*.pth')))
    assert written == ['iter_1.pth', 'iter_2.pth']


def test_a_loss_scaler_is_allowed_overflows(tmp_path: Path, tiny_run: ModuleType) -> None:
    runner = train(tiny_run, tmp_path, bad_from=1, patience=3, optim_wrapper=scaled())
    assert runner.iter == 4
    (log,) = glob.glob(str(tmp_path / '*' / '*.log'))
    assert Path(log).read_text().count('the loss scaler skips the step') == 3


def test_patience_ends(tmp_path: Path, tiny_run: ModuleType) -> None:
    with pytest.raises(NonFiniteLossError, match=r'iteration 4.*3 in a row.*patience=2'):
        train(tiny_run, tmp_path, bad_from=1, patience=2, optim_wrapper=scaled())


def test_a_finite_loss_restores_patience(tmp_path: Path, tiny_run: ModuleType) -> None:
    class EverySecondBad(tiny_run.TinyModel):  # type: ignore[name-defined, misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            self.bad_from = 0 if self.iteration % 2 else None
            return super().forward(*args, **kwargs)

    runner = tiny_run.build_runner(
        str(tmp_path), [NonFiniteLossHook(patience=1)], EverySecondBad(), optim_wrapper=scaled()
    )
    runner.train()
    assert runner.iter == 4


def test_a_disabled_scaler_excuses_nothing(tmp_path: Path, tiny_run: ModuleType) -> None:
    with pytest.raises(NonFiniteLossError, match='iteration 1'):
        train(tiny_run, tmp_path, bad_from=0, optim_wrapper=scaled(enabled=False))


def test_negative_patience_is_refused() -> None:
    with pytest.raises(ValueError, match='patience=-1'):
        NonFiniteLossHook(patience=-1)
