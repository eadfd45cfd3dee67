"""FixMatch on ranks: one gradient, one teacher, and the same bits in a run that moves."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any, Dict, List

import pytest
import torch
from checkpoint_bits import checkpoint_bits
from forked import DIED, fork_ranks, fork_scenarios
from mmengine.hooks import Hook
from sampling_ranks import Answers, answers_of
from semi_runs import OF_FEATURES, semi_config, semi_train, write_semi_data
from support import no_simulated_cards, on_host

pytestmark = [on_host, pytest.mark.long]
V = 3
LOAD: Dict[str, Any] = {} if torch.__version__ < '2' else dict(weights_only=False)
NO_SIM = no_simulated_cards()
# A checkpoint after every iteration is also inside of the accumulation cycles of two.
ACCUMULATED: Dict[str, Any] = {
    'optim_wrapper.accumulative_counts': 2,
    'optim_wrapper.type': 'AmpOptimWrapper',
    'optim_wrapper.dtype': 'bfloat16',
    'env_cfg.virtual_ranks': V,
}
# torch 1.10 has no upsampling of bfloat16 on the CPU.
if torch.__version__ < '2':
    ACCUMULATED.update({'optim_wrapper.type': 'OptimWrapper', 'optim_wrapper.dtype': None})
DROPPED = "custom_hooks[0]['channel_dropout'] = True\n"
# Nothing random but what belongs to a sample, so that ranks do not matter.
EXACT = """
model['backbone']['norm_cfg'] = norm_cfg
model['decode_head']['dropout_ratio'] = 0.
custom_hooks[0].update(cut_mix=0., strong=dict(jitter=0., gray=0., blur=0.), threshold=0.1471)
"""


class KilledBefore(Hook):
    def __init__(self, iteration: int) -> None:
        self.iteration = iteration

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        if runner.iter == self.iteration:
            os.kill(os.getpid(), signal.SIGKILL)


def alone(processes: int) -> None:
    torch.set_num_threads(1)
    if processes == 1:
        for name in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE'):
            os.environ.pop(name, None)


def changes_of(changes: Dict[str, Any]) -> Dict[str, Any]:
    return {key: value for key, value in changes.items() if value is not None}


def whole(data: Path, folder: Path, processes: int) -> Any:
    alone(processes)
    runner, followed = semi_train(data, folder, extra=DROPPED, **changes_of(ACCUMULATED))
    return dict(
        losses=followed.losses,
        students=followed.students,
        figures=followed.figures,
        model={
            name: each.clone()
            for name, each in getattr(runner.model, 'module', runner.model).state_dict().items()
        },
    )


def moved(data: Path, folder: Path, processes: int, until: Any) -> Any:
    alone(processes)
    _, followed = semi_train(
        data,
        folder,
        [] if until is None else [KilledBefore(until)],
        extra=DROPPED,
        resume='auto',
        **changes_of(ACCUMULATED),
    )
    return followed.losses


def one_gradient(data: Path, folder: Path, processes: int) -> Any:
    alone(processes)
    share = V // processes
    runner, followed = semi_train(
        data,
        folder,
        extra=EXACT,
        **{
            'train_dataloader.batch_size': 3 * share,
            'train_dataloader.sampler.labeled': share,
            'train_dataloader.sampler.unlabeled': 2 * share,
            'train_cfg.max_iters': 2,
            'train_cfg.val_interval': 9,
        },
    )
    return followed.students[-1]


def carded(data: Path, folder: Path, accelerator: str) -> Any:
    alone(2)
    _, followed = semi_train(data, folder, extra=DROPPED, **{'env_cfg.accelerator': accelerator})
    return followed.losses, followed.figures


def fed(data: Path, folder: Path, source: Any, processes: int) -> Any:
    alone(processes)
    changes: Dict[str, Any] = {} if source is None else {'feature_source': source}
    runner, followed = semi_train(
        data, folder, extra=OF_FEATURES, **{'env_cfg.virtual_ranks': V, **changes}
    )
    return getattr(followed, 'losses', None)


def make_cache(data: Path, folder: Path) -> None:
    alone(1)
    semi_config(data, folder / 'cache', OF_FEATURES)
    from mapsage.extras.streaming import cache_features

    assert (
        cache_features.main(
            [
                str(folder / 'cache' / 'semi.py'),
                '--folder',
                str(folder / 'features'),
                '--views',
                '2',
                '--accelerator',
                'cpu',
                '--work-dir',
                str(folder / 'cache'),
            ]
        )
        == 0
    )


def run_scenarios(folder: Path) -> Dict[str, Any]:
    data = write_semi_data(folder / 'data')
    fork_ranks(make_cache, 1, folder / 'caching', data, folder)
    cached = dict(type='Cached', folder=str(folder / 'features'), views=2)
    scenarios: Dict[str, Any] = {
        'whole 3': (whole, 3, data, folder / 'whole 3', 3),
        'whole 1': (whole, 1, data, folder / 'whole 1', 1),
        'gradient 3': (one_gradient, 3, data, folder / 'gradient 3', 3),
        'gradient 1': (one_gradient, 1, data, folder / 'gradient 1', 1),
        'fed none': (fed, 3, data, folder / 'fed none', None, 3),
        'fed prefetched': (fed, 1, data, folder / 'fed prefetched', dict(type='Prefetched'), 1),
        'fed cached 3': (fed, 3, data, folder / 'fed cached 3', cached, 3),
        'fed cached 1': (fed, 1, data, folder / 'fed cached 1', cached, 1),
    }
    if NO_SIM is None:
        scenarios.update(
            {f'card {each}': (carded, 2, data, folder / each, each) for each in ('sim', 'cpu')}
        )
    told = fork_scenarios(scenarios, folder / 'forked')
    for processes, until in ((3, 1), (1, 5), (2, None)):
        told[f'moved {processes}'] = fork_ranks(
            moved,
            processes,
            folder / f'moving {processes}',
            data,
            folder / 'moved',
            processes,
            until,
        )
    return told


@pytest.fixture(scope='module')
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp('fixmatch')


@pytest.fixture(scope='module')
def answers(folder: Path) -> Answers:
    return answers_of(run_scenarios, folder)


def checkpoint(path: Path) -> Any:
    return torch.load(str(path), map_location='cpu', **LOAD)


def test_three_uneven_ranks_train_as_one_process(answers: Answers) -> None:
    three, one = answers.of('gradient 3'), answers.of('gradient 1')[0]
    for each in three:
        for name, value in one.items():
            assert torch.allclose(each[name], value, atol=2e-6), name


def test_the_teacher_is_the_average_of_the_first_rank(answers: Answers, folder: Path) -> None:
    """By hand, over the steps behind iterations 2, 4 and 6, buffers included."""
    students = answers.of('whole 3')[0]['students']
    for iteration in (2, 3, 6):
        kept = checkpoint(folder / 'whole 3' / f'iter_{iteration}.pth')
        steps = range(iteration // 2)
        assert kept['semi_supervised']['steps'] == len(steps)
        for name, value in kept['state_dict'].items():
            average = students[1][name].double()
            for step in steps[1:]:
                alpha = min(1 - 1 / (step + 1), 0.996)
                average = alpha * average + (1 - alpha) * students[2 * step + 1][name].double()
            if 'num_batches' in name:
                average = students[2 * len(steps) - 1][name].double()
            assert torch.allclose(value.double(), average, atol=1e-6), name
        student = kept['semi_supervised']['student']
        assert any('running_var' in name for name in student)
        for name, value in student.items():
            assert torch.equal(value, students[iteration - 1][name]), name
    last = checkpoint(folder / 'whole 3' / 'iter_6.pth')
    moving = last['semi_supervised']['student']
    assert not torch.equal(
        last['state_dict']['decode_head.conv_seg.weight'], moving['decode_head.conv_seg.weight']
    )


def test_the_model_is_the_student_again_behind_a_validation(answers: Answers) -> None:
    for each in answers.of('whole 3'):
        for name, value in each['students'][-1].items():
            assert torch.equal(each['model'][name], value), name


def test_one_process_has_the_bits_of_three(answers: Answers, folder: Path) -> None:
    one, three = answers.of('whole 1')[0], answers.of('whole 3')[0]
    assert one['losses'] == three['losses'] and len(set(one['losses'])) == 6
    for iteration in (1, 2, 4, 6):
        bits = [
            checkpoint_bits(folder / name / f'iter_{iteration}.pth')
            for name in ('whole 1', 'whole 3')
        ]
        assert bits[0] == bits[1]


def test_a_run_that_is_killed_goes_on_to_the_same_bits(answers: Answers, folder: Path) -> None:
    assert answers.of('moved 3') == [DIED] * 3 and answers.of('moved 1') == [DIED]
    losses = answers.of('whole 3')[0]['losses']
    for mine in answers.of('moved 2')[:1]:
        assert mine == losses[-len(mine) :] and mine
    assert checkpoint_bits(folder / 'moved' / 'iter_6.pth') == checkpoint_bits(
        folder / 'whole 3' / 'iter_6.pth'
    )


def test_features_from_elsewhere_give_the_same_bits(answers: Answers) -> None:
    losses: Dict[str, List[float]] = {
        name: answers.of(f'fed {name}')[0]
        for name in ('none', 'prefetched', 'cached 3', 'cached 1')
    }
    assert losses['none'] == losses['prefetched'] and len(set(losses['none'])) == 6
    assert losses['cached 3'] == losses['cached 1'] and len(set(losses['cached 1'])) == 6


@pytest.mark.skipif(NO_SIM is not None, reason=str(NO_SIM))
def test_simulated_cards_train_as_the_cpu(answers: Answers) -> None:
    (sim, figures), (cpu, _) = answers.of('card sim')[0], answers.of('card cpu')[0]
    assert sim == pytest.approx(cpu, rel=1e-4) and len(figures) == 1
