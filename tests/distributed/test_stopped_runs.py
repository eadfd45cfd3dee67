"""Ranks that are asked to stop save together and leave, and continue with the bits of a whole run."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any, Callable, Dict, Sequence

import pytest
import torch
from forked import fork_scenarios
from mmengine.hooks import Hook
from sampling_ranks import Answers, answers_of
from support import chosen, on_host, rest_is_long
from toy_runs import same_weights, toy_runner, toy_train

from mapsage_launcher import stop_request
from mapsage_launcher.stop_request import STATUS, StoppedEarly, listening

pytestmark = on_host
LOAD = {'weights_only': False} if torch.__version__ >= '2' else {}
ITERATIONS: Dict[str, Any] = {'train_cfg.max_iters': 9, 'train_cfg.val_interval': 4}
EPOCHS: Dict[str, Any] = {
    'train_cfg': dict(by_epoch=True, max_epochs=3, val_interval=1),
    'train_dataloader.sampler.type': 'DefaultSampler',
    'default_hooks.checkpoint': dict(by_epoch=True, interval=1),
}
EMA = [dict(type='EMAHook', update_buffers=True, momentum=0.3)]
ACCUMULATED = {'optim_wrapper.accumulative_counts': 3}


class Ask(Hook):
    """Sends this rank signals, once, at a point of the training."""

    priority = 'VERY_HIGH'

    def __init__(
        self,
        ranks: Sequence[int],
        point: str,
        iteration: int,
        signals: Sequence[int] = (signal.SIGUSR1,),
        workers_too: bool = False,
    ) -> None:
        def ask(runner: Any, *_: Any, **__: Any) -> None:
            if runner.rank in ranks and runner.iter == iteration and not self.asked:
                self.asked = True
                children = multiprocessing.active_children() if workers_too else []
                for number in signals:
                    for pid in [*(child.pid for child in children), os.getpid()]:
                        os.kill(pid, number)

        self.asked = False
        setattr(self, point, ask)


def stopped_and_resumed(folder: Path, ask: Callable[[], Ask], changes: Dict[str, Any]) -> Any:
    """Compare a whole run with one that is asked to stop, and resumed."""
    whole, seen = toy_train(folder / 'whole', **changes)
    asking = ask()
    status, first = _train_until_stopped(folder / 'cut', asking, changes)
    rest, left = toy_train(folder / 'cut', resume=True, **changes)
    path = folder / 'cut' / 'stopped.pth'
    return dict(
        status=status,
        asked=asking.asked,
        done=len(first.losses),
        saved=torch.load(str(path), **LOAD)['meta']['iter'] if path.exists() else None,
        losses=(seen.losses, first.losses + left.losses),
        rates=(seen.rates, first.rates + left.rates),
        samples=(seen.samples, first.samples + left.samples),
        # The checkpoint of a complete run was written before its last validation.
        figures=(seen.figures, first.figures + (left.figures if status else left.figures[1:])),
        files=[
            sorted(path.name for path in (folder / name).glob('*_*.pth'))
            for name in ('whole', 'cut')
        ],
        same=same_weights(
            dict(_model(whole).named_parameters()), dict(_model(rest).named_parameters())
        ),
    )


def _train_until_stopped(folder: Path, asking: Hook, changes: Dict[str, Any]) -> Any:
    runner, record = toy_runner(folder, hooks=[asking], **changes)
    try:
        runner.train()
    except StoppedEarly as stopped:
        return stopped.code, record
    return None, record


def _model(runner: Any) -> Any:
    return getattr(runner.model, 'module', runner.model)


def full_disk(folder: Path) -> Any:
    """Return what every rank raises if the checkpoint cannot be written."""
    runner, _ = toy_runner(folder, hooks=[Ask([1], 'before_train_iter', 2)])
    if runner.rank == 0:
        (folder / 'stopped.pth' / 'full').mkdir(parents=True)  # no file can take its name
    try:
        runner.train()
    except Exception as error:
        return f'{type(error).__name__}: {error}', (folder / 'last_checkpoint').exists()


# name: (ranks, who is asked and where, changes of the config, iteration of the end)
CASES: Dict[str, Any] = {
    'iterations, one process': (1, lambda: Ask([0], 'before_train_iter', 2), ITERATIONS, 3),
    'iterations, SIGTERM, with EMA': (
        2,
        lambda: Ask([1], 'after_train_iter', 5, [signal.SIGTERM]),
        dict(ITERATIONS, custom_hooks=EMA),
        6,
    ),
    'both signals to all, twice in a moment': (
        3,
        lambda: Ask(
            [0, 1, 2], 'before_train_iter', 4, [signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM]
        ),
        ITERATIONS,
        5,
    ),
    'before the validation behind the step': (
        2,
        lambda: Ask([1], 'before_train_iter', 3),
        ITERATIONS,
        4,
    ),
    'before the validation behind an epoch': (
        2,
        lambda: Ask([0], 'before_train_iter', 7),
        EPOCHS,
        8,
    ),
    'during a validation': (2, lambda: Ask([1], 'before_val_iter', 4), ITERATIONS, 5),
    'during the first step': (2, lambda: Ask([1], 'before_train_iter', 0), ITERATIONS, 1),
    'before training': (2, lambda: Ask([1], 'before_run', 0), ITERATIONS, 0),
    'in the last step': (2, lambda: Ask([0, 1], 'before_train_iter', 8), ITERATIONS, None),
    'inside an epoch': (2, lambda: Ask([1], 'before_train_iter', 5), EPOCHS, 6),
    'in the last step of an epoch': (2, lambda: Ask([1], 'before_train_iter', 3), EPOCHS, 4),
    'inside an accumulation cycle': (
        2,
        lambda: Ask([1], 'before_train_iter', 3),
        {**EPOCHS, **ACCUMULATED},
        6,
    ),
    'virtual ranks': (
        3,
        lambda: Ask([2], 'before_train_iter', 3),
        {**ITERATIONS, 'env_cfg.virtual_ranks': 5},
        4,
    ),
    'workers are signaled too': (
        2,
        lambda: Ask([0, 1], 'before_train_iter', 2, [signal.SIGTERM, signal.SIGUSR1], True),
        {**ITERATIONS, 'train_dataloader.num_workers': 1},
        3,
    ),
}


DAILY = rest_is_long(
    CASES,
    'iterations, one process',
    'both signals to all, twice in a moment',
    'before the validation behind an epoch',
    'inside an accumulation cycle',
    'virtual ranks',
    'workers are signaled too',
)


def run_scenarios(folder: Path, names: Sequence[str]) -> Dict[str, Any]:
    scenarios: Dict[Any, Sequence[Any]] = {
        name: (stopped_and_resumed, ranks, folder / str(number), ask, changes)
        for number, (name, (ranks, ask, changes, _)) in enumerate(CASES.items())
        if name in names
    }
    scenarios['full disk'] = (full_disk, 2, folder / 'full')
    return fork_scenarios(scenarios, folder)


@pytest.fixture(scope='module')
def answers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    folder = tmp_path_factory.mktemp('stopped')
    return answers_of(run_scenarios, folder, chosen(request, 'name'))


@pytest.mark.parametrize('name', DAILY)
def test_a_run_that_was_stopped_goes_on_with_the_same_bits(name: str, answers: Answers) -> None:
    ranks, _, changes, end = CASES[name]
    every = answers.of(name)
    assert len(every) == ranks and any(told['asked'] for told in every)
    for told in every:
        assert told['status'] == (None if end is None else STATUS)
        assert told['done'] == (ITERATIONS['train_cfg.max_iters'] if end is None else end)
        assert told['saved'] == (end or None)
        for compared in ('losses', 'rates', 'samples', 'figures', 'files'):
            assert told[compared][0] == told[compared][1], compared
        assert told['same']


def test_an_error_while_saving_reaches_every_rank(answers: Answers) -> None:
    (own, last), (other, _) = answers.of('full disk')
    assert 'stopped.pth' in own and 'rank 0 failed in saving a checkpoint' in other
    assert own.split(':')[0] in other and not last


def end_of(signals: Sequence[int], seconds: float) -> int:
    """Return how a listening process ends that takes signals ``seconds`` apart for two."""
    pid = os.fork()
    if not pid:
        stop_request.REPEATED_SECONDS = seconds
        with listening():
            for number in signals:
                os.kill(os.getpid(), number)
        os._exit(0)
    return os.waitpid(pid, 0)[1]


@pytest.mark.parametrize(
    'signals, seconds, status',
    [
        ([signal.SIGTERM, signal.SIGTERM], 1e-7, signal.SIGTERM),
        ([signal.SIGUSR1, signal.SIGUSR1], 1e-7, signal.SIGUSR1),
        ([signal.SIGUSR1, signal.SIGTERM], 1e-7, 0),  # Slurm's warning, and then its time limit
        ([signal.SIGTERM, signal.SIGTERM], 60.0, 0),
    ],
)  # both of them of one `kill` to a group
def test_a_second_signal_ends_the_process(
    signals: Sequence[int], seconds: float, status: int
) -> None:
    assert end_of(signals, seconds) == status
