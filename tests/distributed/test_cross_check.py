"""A rank that computes wrong numbers, or has other weights, ends the run; checks change no bit."""
from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Dict, List

import pytest
from checkpoint_bits import checkpoint_bits
from faulty_card import CardBreaksDown, flip_bit
from forked import fork_ranks, fork_scenarios
from mmengine.hooks import Hook
from mmengine.registry import MODELS
from scaled_on_cpu import HAS_SCALER
from support import launch, main_leg, no_simulated_cards, write_tiny_config
from test_moving_virtual_ranks import CountedToy
from toy_runs import ToyRegression, log_of, toy_train

from mapsage.engine.env_cfg import ConfigError
from mapsage.engine.guards import CrossCheckError

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

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None,
                         outputs: Any = None) -> None:
        if runner.rank == self.rank and runner.iter + 1 == self.iteration:
            flip_bit(next(runner.model.parameters()).data, 5, 3)


@MODELS.register_module(force=True)
class ForgetfulToy(ToyRegression):
    """Computes something else each time."""

    calls = 0

    def forward(self, inputs: Any, data_samples: Any = None, mode: str = 'tensor') -> Any:
        self.calls += 1
        return super().forward([value + self.calls for value in inputs], data_samples, mode)


EPOCHS: Dict[str, Any] = {
    'train_cfg': dict(by_epoch=True, max_epochs=2, val_interval=1),
    'train_dataloader.sampler.type': 'DefaultSampler', 'train_dataloader.dataset.length': 20,
    'default_hooks.checkpoint': dict(interval=1, by_epoch=True)}
# Ranks and changes of runs that are the same with and without checks.
SOUND: Dict[str, Any] = {
    'iterations': (3, {'custom_hooks': [dict(type='EMAHook', update_buffers=True)],
                       'optim_wrapper.accumulative_counts': 3}),
    'epochs': (2, dict(EPOCHS, **{'optim_wrapper.type': 'AmpOptimWrapper',
                                  'env_cfg.reduction': 'native'})),
    'loss scale': (2, {'optim_wrapper.type': 'ScaledOnCpu',
                       'optim_wrapper.accumulative_counts': 2}),
    'virtual ranks': (2, {'env_cfg.virtual_ranks': 5, 'optim_wrapper.accumulative_counts': 3}),
    'counts': (2, {'model.type': 'CountedToy', 'find_unused_parameters': True}),
    'counts of virtual ranks': (2, {'model.type': 'CountedToy', 'env_cfg.virtual_ranks': 3,
                                    'find_unused_parameters': True}),
    'one rank': (1, {}),
}
assert CountedToy and HAS_SCALER
# Ranks, hooks, changes of the config; ranks that are named, words of the error.
FAULTY: Dict[str, Any] = {
    'two ranks': (2, [CardBreaksDown(1, 4)], CALM, [0, 1], 'after iteration 6 failed'),
    'three ranks': (3, [CardBreaksDown(1, 4)], CALM, [1], 'rank 0 and rank 2, which agree'),
    'backward': (3, [CardBreaksDown(2, 5, 'backward')], CALM, [2], 'after iteration 6 failed'),
    'virtual ranks': (3, [CardBreaksDown(0, 2)], dict(CALM, **{'env_cfg.virtual_ranks': 7}), [0],
                      'rank 1 and rank 2, which agree'),
    'before a checkpoint': (3, [CardBreaksDown(1, 4)], {}, [1],
                            'the cross-check before a checkpoint, after iteration 4, failed'),
    'from the start': (3, [CardBreaksDown(1, 1)], CALM, [1], 'after iteration 1 failed'),
    'weights': (3, [FlipsWeight(2, 4)], CALM, [2], "parameter 'layers.0.weight' is not equal"),
    'weights of two': (2, [FlipsWeight(0, 4)], CALM, [0, 1], 'differs between the two ranks'),
    'weights and a checkpoint': (3, [FlipsWeight(2, 3)], {}, [2], 'before a checkpoint'),
    'no repetition': (2, [], dict(CALM, **{'model.type': 'ForgetfulToy'}), [],
                      'the first step, computed a second time'),
}


@pytest.fixture(scope='module')
def sound(tmp_path_factory: Any) -> Dict[str, Any]:
    folder = tmp_path_factory.mktemp('sound')
    scenarios = {}
    for name, (ranks, changes) in SOUND.items():
        for checked in (True, False):
            more = {'env_cfg.cross_check': CHECK} if checked else {}
            scenarios[name, checked] = (train, ranks, folder / f'{name} {checked}', [],
                                        dict(changes, **more))
    return dict(folder=folder, logs=fork_scenarios(scenarios, folder))


@pytest.mark.parametrize('name', SOUND)
def test_checks_change_no_bit(name: str, sound: Dict[str, Any]) -> None:
    folder, logs = sound['folder'], sound['logs']
    for checked in (True, False):
        assert isinstance(logs[name, checked], list), logs[name, checked]
        assert isinstance(logs[name, checked][0], str), logs[name, checked][0]
    assert '[CrossCheck] every 3 iteration(s)' in logs[name, True][0]
    assert ('this device computes' if name == 'one rank' else 'another of the'
            ) in logs[name, True][0]
    paths = sorted((folder / f'{name} True').glob('*.pth'))
    assert paths
    for path in paths:
        assert checkpoint_bits(path) == checkpoint_bits(folder / f'{name} False' / path.name)


@pytest.fixture(scope='module')
def faulty(tmp_path_factory: Any) -> Dict[str, Any]:
    folder = tmp_path_factory.mktemp('faulty')
    return fork_scenarios({
        name: (train, ranks, folder / name, hooks,
               dict(changes, **{'env_cfg.cross_check': CHECK}))
        for name, (ranks, hooks, changes, *_) in FAULTY.items()}, folder)


@pytest.mark.parametrize('name', FAULTY)
def test_a_fault_ends_the_run_on_every_rank(name: str, faulty: Dict[str, Any]) -> None:
    *_, named, words = FAULTY[name]
    assert isinstance(faulty[name], list), faulty[name]
    for answer in faulty[name]:
        assert not isinstance(answer, str), answer[-3000:]
        assert answer[0] == named and words in answer[1], answer
    # No checkpoint holds what a faulty card has computed.
    assert faulty[name][0][2] == []


def train_unlike(folder: Path, bit: int) -> Any:
    """Train on ranks that promise no bits; the card of rank 1 rounds a number otherwise from 4 on.
    """
    os.environ['NVIDIA_TF32_OVERRIDE'] = os.environ['RANK']
    return train(folder, [CardBreaksDown(1, 4, 'backward', bit)],
                 dict(CALM, **{'env_cfg.cross_check': CHECK}))


def test_a_bound_lets_rounding_pass(tmp_path: Path) -> None:
    told = fork_scenarios({bit: (train_unlike, 3, tmp_path / str(bit), bit) for bit in (0, 22)},
                          tmp_path)
    assert 'results may differ by rounding' in told[0][0], told[0]
    assert [answer[0] for answer in told[22]] == [[1]] * 3, told[22]
    assert 'of the size of the whole gradient' in told[22][0][1]


def test_a_resumed_run_has_the_bits_of_a_sound_one(tmp_path: Path) -> None:
    changes = {'train_cfg.val_interval': 100, 'default_hooks.checkpoint.interval': 2}
    checked = dict(changes, **{'env_cfg.cross_check': CHECK})
    (problems, message, saved), *_ = fork_ranks(
        train, 3, tmp_path / 'run', tmp_path / 'run', [CardBreaksDown(1, 5)], checked)
    # The check of iteration 6 is also the one before its checkpoint, which is not written.
    assert problems == [1] and saved == ['iter_2.pth', 'iter_4.pth']
    assert 'after iteration 6 failed' in message
    assert f'{tmp_path}/run/iter_4.pth was saved after a check: --resume' in message
    fork_ranks(train, 3, tmp_path / 'again', tmp_path / 'run', [], dict(checked, resume=True))
    fork_ranks(train, 3, tmp_path / 'sound', tmp_path / 'sound', [], changes)
    assert checkpoint_bits(tmp_path / 'run' / 'iter_8.pth') == \
        checkpoint_bits(tmp_path / 'sound' / 'iter_8.pth')


simulator_missing = no_simulated_cards()


@pytest.mark.skipif(simulator_missing is not None, reason=str(simulator_missing))
def test_a_launched_run_on_simulated_cards(tiny_data: Path, tmp_path: Path) -> None:
    config = write_tiny_config(tmp_path / 'tiny.py', tiny_data, '''
custom_imports = dict(imports=['mapsage', 'faulty_card'])
custom_hooks = [dict(type='CardBreaksDown', rank=2, iteration=4)]
env_cfg['cross_check'] = dict(interval=2)
''')
    finished = launch(config, '--work-dir', tmp_path / 'work', ranks=3, environ={
        'ACCELERATOR': 'sim', 'PYTHONPATH': str(Path(__file__).parents[1])})
    assert finished.status == 1, finished.output[-4000:]
    assert finished.left_running == []
    assert 'rank(s) [0, 1, 2] report:\nCrossCheckError: the cross-check after iteration 4 failed:' \
        in finished.final_error, finished.output[-6000:]
    assert 'rank 2: (' in finished.final_error and ', gcu:2) computes wrong' in finished.final_error
    assert 'rank 0 and rank 1, which agree. Take this card out' in finished.final_error
