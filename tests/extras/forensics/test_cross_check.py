"""A rank that computes wrong numbers, or has other weights, ends the run; checks change no bit."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any, Dict, List

import pytest
import torch
from checkpoint_bits import checkpoint_bits
from faulty_card import CardBreaksDown, FaultyCard, flip_bit
from forked import fork_ranks, fork_scenarios
from mmengine.hooks import Hook
from mmengine.registry import HOOKS, MODELS
from sampling_ranks import Answers, answers_of
from scaled_on_cpu import ScaledOnCpu
from support import chosen, launch, main_leg, no_simulated_cards, rest_is_long, write_tiny_config
from torch.utils.checkpoint import checkpoint
from toy_runs import CountedToy, ToyRegression, log_of, toy_train

from mapsage.engine.env_cfg import ConfigError
from mapsage.extras.forensics.cross_check_hook import CrossCheckError

pytestmark = main_leg
CHECK = dict(interval=3)
CALM: Dict[str, Any] = {'default_hooks.checkpoint.interval': 100, 'train_cfg.val_interval': 100}


def train(folder: Path, hooks: List[Hook], changes: Dict[str, Any]) -> Any:
    """Return the log and the checkpoints of a run, or its error with the checkpoints."""
    try:
        runner, _ = toy_train(folder, hooks=hooks, **changes)
    except (CrossCheckError, ConfigError) as error:
        problems = sorted(error.problems) if isinstance(error, CrossCheckError) else []
        return problems, str(error), sorted(path.name for path in folder.glob('*.pth'))
    return log_of(runner) if runner.rank == 0 else ''


class FlipsWeight(Hook):
    """Flips a bit of a weight of one rank after an iteration, counted from 1."""

    priority = 'LOWEST'

    def __init__(self, rank: int, iteration: int) -> None:
        self.rank, self.iteration = rank, iteration

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        if runner.rank == self.rank and runner.iter + 1 == self.iteration:
            flip_bit(next(runner.model.parameters()).data, 5, 3)


@HOOKS.register_module(force=True)
class DrawsNumber(Hook):
    """Draws a random number after each iteration, and adds it to a buffer."""

    priority = 'LOWEST'

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        next(runner.model.buffers()).add_(torch.rand(1))


class FlipsOnce(Hook):
    """Flips one bit in the next checked step from an iteration on, counted from 1."""

    def __init__(self, iteration: int) -> None:
        self.iteration = iteration

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        if runner.iter + 1 >= self.iteration and (runner.iter + 1) % CHECK['interval'] == 0:
            FaultyCard().break_down('backward', 0, 15, once=True)


@MODELS.register_module(force=True)
class CheckpointedToy(ToyRegression):
    """Computes its activations again in the backward pass, as ``with_cp`` of backbones does."""

    def forward(self, inputs: Any, data_samples: Any = None, mode: str = 'tensor') -> Any:
        if mode != 'loss':
            return super().forward(inputs, data_samples, mode)
        values = torch.stack(list(inputs)).requires_grad_()
        hidden = checkpoint(lambda first: self.layers[:4](first), values, use_reentrant=True)
        target = torch.cat([sample.target for sample in data_samples])
        return dict(loss=((self.layers[4](hidden)[:, 0] - target) ** 2).mean() / 100)


@MODELS.register_module(force=True)
class ForgetfulToy(ToyRegression):
    """Computes something else each time."""

    calls = 0

    def forward(self, inputs: Any, data_samples: Any = None, mode: str = 'tensor') -> Any:
        self.calls += 1
        return super().forward([value + self.calls for value in inputs], data_samples, mode)


EPOCHS: Dict[str, Any] = {
    'train_cfg': dict(by_epoch=True, max_epochs=2, val_interval=1),
    'train_dataloader.sampler.type': 'DefaultSampler',
    'train_dataloader.dataset.length': 20,
    'default_hooks.checkpoint': dict(interval=1, by_epoch=True),
}
# Ranks and changes of runs that are the same with and without checks.
SOUND: Dict[str, Any] = {
    'iterations': (
        2,
        {
            'custom_hooks': [dict(type='EMAHook', update_buffers=True)],
            'optim_wrapper.accumulative_counts': 3,
        },
    ),
    'epochs': (
        2,
        dict(
            EPOCHS,
            **{
                'custom_hooks': [dict(type='DrawsNumber')],
                'optim_wrapper.type': 'AmpOptimWrapper',
                'env_cfg.reduction': 'native',
            },
        ),
    ),
    'loss scale and counts': (
        2,
        {
            'optim_wrapper.type': ScaledOnCpu.__name__,
            'optim_wrapper.accumulative_counts': 2,
            'model.type': CountedToy.__name__,
            'find_unused_parameters': True,
        },
    ),
    'virtual ranks': (2, {'env_cfg.virtual_ranks': 5, 'optim_wrapper.accumulative_counts': 3}),
    'counts of virtual ranks': (
        2,
        {
            'model.type': CountedToy.__name__,
            'env_cfg.virtual_ranks': 3,
            'find_unused_parameters': True,
        },
    ),
    'one rank, activations computed again': (1, {'model.type': 'CheckpointedToy'}),
}
# Ranks, hooks, changes of the config; ranks that are named, words of the error.
FAULTY: Dict[str, Any] = {
    'two ranks': (2, [CardBreaksDown(1, 4)], CALM, [0, 1], 'after iteration 6 failed'),
    'virtual ranks': (
        3,
        [CardBreaksDown(0, 1)],
        dict(CALM, **{'env_cfg.virtual_ranks': 7}),
        [0],
        'rank 1 and rank 2, which agree',
    ),
    'before a checkpoint': (
        3,
        [CardBreaksDown(1, 4)],
        {},
        [1],
        'the cross-check before a checkpoint, after iteration 4, failed',
    ),
    'weights of two': (2, [FlipsWeight(0, 4)], CALM, [0, 1], 'differs between the two ranks'),
    'weights and a checkpoint': (3, [FlipsWeight(2, 3)], {}, [2], 'before a checkpoint'),
    'one rank': (1, [FlipsOnce(4)], CALM, [0], 'twice from the same numbers'),
    'no repetition': (
        1,
        [],
        dict(CALM, **{'model.type': 'ForgetfulToy'}),
        [],
        'the first step, computed a second time',
    ),
}


RESUMED = {'train_cfg.val_interval': 100, 'default_hooks.checkpoint.interval': 2}
# Number of the lowest and of a high bit of the part of a float32 behind its point.
BITS = (0, 22)


def with_checks(changes: Dict[str, Any], **more: Any) -> Dict[str, Any]:
    return dict(changes, **{'env_cfg.cross_check': CHECK}, **more)


def train_unlike(folder: Path, bit: int) -> Any:
    """Train on ranks that promise no bits; the card of rank 1 rounds a number otherwise from 4 on."""
    os.environ['NVIDIA_TF32_OVERRIDE'] = os.environ['RANK']
    return train(folder, [CardBreaksDown(1, 4, 'backward', bit)], with_checks(CALM))


def run_benchmark(folder: Path) -> Dict[str, List[int]]:
    """Return the table of tools/benchmarks/cross_check.py for a few faults."""
    path = Path(__file__).parents[3] / 'tools' / 'benchmarks' / 'cross_check.py'
    spec: Any = importlib.util.spec_from_file_location('cross_check_benchmark', path)
    benchmark: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    return {
        kind: [*counts, bool(benchmark.KINDS[kind])]
        for kind, counts in benchmark.run_faults(
            folder, 3, benchmark.draw_faults(9, 3, seed=5)
        ).items()
    }


def run_scenarios(folder: Path, names: List[str]) -> Dict[Any, Any]:
    """Train sound and faulty runs, in a process without threads, several at a time."""
    scenarios: Dict[Any, Any] = {}
    for name in set(SOUND).intersection(names):
        ranks, changes = SOUND[name]
        scenarios[name, 'checked'] = (
            train,
            ranks,
            folder / name / 'checked',
            [],
            with_checks(changes),
        )
        scenarios[name, 'plain'] = train, ranks, folder / name / 'plain', [], changes
    for name in set(FAULTY).intersection(names):
        ranks, hooks, changes, _, _ = FAULTY[name]
        scenarios[name] = train, ranks, folder / name, hooks, with_checks(changes)
    return fork_scenarios(scenarios, folder / 'ranks')


def run_others(folder: Path) -> Dict[Any, Any]:
    """Train what is compared with a bound or resumed, and a sample of the benchmark."""
    scenarios: Dict[Any, Any] = {
        ('unlike', bit): (train_unlike, 2, folder / f'unlike {bit}', bit) for bit in BITS
    }
    scenarios['faulty'] = (
        train,
        2,
        folder / 'faulty',
        [CardBreaksDown(1, 5)],
        with_checks(RESUMED),
    )
    scenarios['sound'] = train, 2, folder / 'sound', [], RESUMED
    answers = fork_scenarios(scenarios, folder / 'ranks')
    answers['resumed'] = fork_ranks(
        train,
        2,
        folder / 'ranks' / 'resumed',
        folder / 'faulty',
        [],
        with_checks(RESUMED, resume=True),
    )
    answers['benchmark'] = [run_benchmark(folder / 'benchmark')]
    return answers


@pytest.fixture(scope='module')
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp('cross-check')


@pytest.fixture(scope='module')
def answers(request: pytest.FixtureRequest, folder: Path) -> Answers:
    return answers_of(run_scenarios, folder, chosen(request, 'name'))


@pytest.fixture(scope='module')
def others(folder: Path) -> Answers:
    return answers_of(run_others, folder)


@pytest.mark.parametrize(
    'name', rest_is_long(SOUND, 'iterations', 'epochs', 'loss scale and counts')
)
def test_checks_change_no_bit(name: str, answers: Answers, folder: Path) -> None:
    ranks, _ = SOUND[name]
    log, plain_log = answers.of((name, 'checked'))[0], answers.of((name, 'plain'))[0]
    assert isinstance(log, str) and isinstance(plain_log, str), (log, plain_log)
    assert '[CrossCheck] every 3 iteration(s)' in log
    assert (
        'this device computes' if ranks == 1 else f'another of the {ranks} ranks computes'
    ) in log
    paths = sorted((folder / name / 'checked').glob('*.pth'))
    assert len(paths) >= 2
    for path in paths:
        assert checkpoint_bits(path) == checkpoint_bits(folder / name / 'plain' / path.name)


@pytest.mark.parametrize('name', rest_is_long(FAULTY, 'before a checkpoint', 'weights of two'))
def test_a_fault_ends_the_run_on_every_rank(name: str, answers: Answers) -> None:
    *_, named, words = FAULTY[name]
    for answer in answers.of(name):
        assert not isinstance(answer, str), answer[-3000:]
        assert answer[0] == named and words in answer[1], answer
    # No checkpoint holds what a faulty card has computed.
    assert answers.of(name)[0][2] == []


@pytest.mark.long
def test_a_sample_of_the_benchmark(others: Answers) -> None:
    (table,) = others.of('benchmark')
    for count, found, named, always in table.values():
        assert not always or count == found == named, table
    # The benchmark can tell: a step that is not checked hides a single fault.
    assert table['one bit in the forward pass of a step that is not checked'][:3] == [1, 0, 0]


@pytest.mark.long
def test_a_bound_lets_rounding_pass(others: Answers) -> None:
    lowest, high = (others.of(('unlike', bit)) for bit in BITS)
    assert 'results may differ by rounding' in lowest[0], lowest
    assert [answer[0] for answer in high] == [[0, 1]] * 2, high
    assert 'of the size of the whole gradient' in high[0][1]


@pytest.mark.long
def test_a_resumed_run_has_the_bits_of_a_sound_one(others: Answers, folder: Path) -> None:
    (problems, message, saved), *_ = others.of('faulty')
    # The check of iteration 6 is also the one before its checkpoint, which is not written.
    assert problems == [0, 1] and saved == ['iter_2.pth', 'iter_4.pth']
    assert 'after iteration 6 failed' in message
    assert f'{folder}/faulty/iter_4.pth was saved after a check: --resume' in message
    assert isinstance(others.of('resumed')[0], str), others.of('resumed')
    assert checkpoint_bits(folder / 'faulty' / 'iter_8.pth') == checkpoint_bits(
        folder / 'sound' / 'iter_8.pth'
    )


simulator_missing = no_simulated_cards()


@pytest.mark.skipif(simulator_missing is not None, reason=str(simulator_missing))
def test_a_launched_run_on_simulated_cards(tiny_data: Path, tmp_path: Path) -> None:
    config = write_tiny_config(
        tmp_path / 'tiny.py',
        tiny_data,
        """
custom_imports = dict(imports=['mapsage', 'faulty_card'])
custom_hooks = [dict(type='CardBreaksDown', rank=2, iteration=4)]
env_cfg['cross_check'] = dict(interval=2)
""",
    )
    finished = launch(
        config,
        '--work-dir',
        tmp_path / 'work',
        ranks=3,
        environ={'ACCELERATOR': 'sim', 'PYTHONPATH': str(Path(__file__).parents[2])},
    )
    assert finished.status == 1, finished.output[-4000:]
    assert finished.left_running == []
    assert (
        'rank(s) [0, 1, 2] report:\nCrossCheckError: the cross-check after iteration 4 failed:'
        in finished.final_error
    ), finished.output[-6000:]
    assert 'rank 2: (' in finished.final_error and ', gcu:2) computes wrong' in finished.final_error
    assert 'rank 0 and rank 1, which agree. Take this card out' in finished.final_error
