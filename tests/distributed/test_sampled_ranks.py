"""Ranks share a quantile that comes back on a resume, their weights make one gradient; and virtual
ranks sample the same on any number of processes."""

from __future__ import annotations

import copy
import functools
import os
import shutil
from pathlib import Path
from typing import Any, Dict, List, Sequence

import pytest
import torch
import torch.distributed as dist
from checkpoint_bits import checkpoint_bits
from forked import fork_ranks, fork_scenarios
from mmengine.config import Config
from mmengine.dataset import pseudo_collate
from mmengine.hooks import Hook
from sampling_ranks import Answers, answers_of
from support import chosen, main_leg, rest_is_long, write_tiny_config, write_tiny_data
from toy_runs import log_of, same_weights, toy_train

from mapsage.engine import MapSageRunner
from mapsage.sampling.hooks import DynamicSamplingHook
from mapsage.sampling.hooks.sample_weights import weigh_heads

pytestmark = main_leg
EPOCHS: Dict[str, Any] = {
    'train_cfg': dict(by_epoch=True, max_epochs=3, val_interval=9),
    'train_dataloader.sampler.type': 'DefaultSampler',
}
# name: ranks, changes of the run
RUNS: Dict[str, Any] = {
    'epochs': (3, EPOCHS),
    'accumulation': (2, {'optim_wrapper.accumulative_counts': 3}),
    'five ranks': (5, {}),
    'workers': (2, {'train_dataloader.num_workers': 1}),
}
CUT = 3


class StatefulScore:
    """Depends on the virtual rank's own buffers, random draws and history."""

    history = dict(momentum=0.5, recheck=3)

    def bind(self, model: Any, collate: Any) -> None:
        self.model = getattr(model, 'module', model)

    def __call__(self, samples: Sequence[dict]) -> List[float]:
        mean = float(self.model.layers[1].running_mean.sum())
        return [mean * float(each['inputs'].sum()) + float(torch.rand(())) for each in samples]


def quarters(samples: Sequence[dict]) -> List[float]:
    return [float(each['data_samples'].number % 4) for each in samples]


# Five virtual ranks on these numbers of processes; on two of them the runs of CUT continue.
FIVE, SIZES, REST = 5, (5, 3, 1), 2
VIRTUAL: Dict[str, Any] = {
    'quantile': (
        dict(validity=dict(quantile=0.6), local_target=2, max_age=2),
        {'train_dataloader.batch_size': 3, 'train_dataloader.num_workers': 1},
    ),
    'shrink': (
        dict(score=quarters, validity=dict(low=0.5), max_resample_times=0, shortfall='shrink'),
        {'train_dataloader.batch_size': 4, **EPOCHS},
    ),
    'stateful': (
        dict(
            score=StatefulScore(), validity=dict(quantile=0.4), shortfall='pad', keep_fraction=0.2
        ),
        {},
    ),
}


def sampling(**settings: Any) -> DynamicSamplingHook:
    return DynamicSamplingHook(
        **dict(
            dict(
                score=lambda samples: [float(each['inputs'].sum()) for each in samples],
                validity=dict(quantile=0.3),
            ),
            **settings,
        )
    )


def whole_and_resumed(folder: Path, changes: Dict[str, Any]) -> Any:
    changes = {
        **changes,
        'train_dataloader.dataset.length': 33,
        'default_hooks.checkpoint': dict(interval=1, by_epoch=False),
    }
    whole, seen = toy_train(folder / 'whole', hooks=[sampling()], **changes)
    if whole.rank == 0:
        (folder / 'rest').mkdir(exist_ok=True)
        shutil.copy(str(folder / 'whole' / f'iter_{CUT}.pth'), str(folder / 'rest'))
    rest, left = toy_train(folder / 'rest', hooks=[sampling()], resume='must', **changes)
    states = [
        torch.load(
            str(folder / run / f'iter_{whole.iter}.pth'),
            **({'weights_only': False} if torch.__version__ >= '2' else {}),
        )['dynamic_sampling']
        for run in ('whole', 'rest')
        if whole.rank == 0
    ]
    return dict(
        losses=(seen.losses[CUT:], left.losses),
        samples=(seen.samples[CUT:], left.samples),
        states=[str(each) for each in states],
        scores=sum(map(len, states[0]['scores'])) if states else 0,
        same=same_weights(
            dict(whole.model.module.named_parameters()), dict(rest.model.module.named_parameters())
        ),
    )


def virtual(folder: Path, processes: int, names: Sequence[str], **changes: Any) -> Any:
    """Return what this process logs in runs of five virtual ranks."""
    if processes == 1:  # one process alone, without torch.distributed
        for variable in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE'):
            os.environ.pop(variable)
    torch.set_num_threads(1)
    told = {}
    for name in names:
        settings, own = VIRTUAL[name]
        run, seen = toy_train(
            folder / name,
            hooks=[sampling(**settings)],
            **{
                'env_cfg.virtual_ranks': FIVE,
                'train_dataloader.dataset.length': 37,
                'default_hooks.checkpoint': dict(interval=1, by_epoch=False),
                **own,
                **changes,
            },
        )
        told[name] = seen.losses, seen.samples
        if run.rank == 0:  # it writes so if a sample was lost
            assert 'the account does not balance' not in log_of(run)
    return told


class First(Hook):
    """Keeps the weights that the training begins with."""

    def before_train(self, runner: Any) -> None:
        self.model = copy.deepcopy(runner.model.module)


def score(samples: Sequence[dict]) -> List[float]:
    """All tiles of rank 1 are valid, so that others need some of them."""
    return [float(os.environ['RANK'] == '1')] * len(samples)


def gradients(folder: Path, data: Path) -> Any:
    """Return the gradients of a step of several ranks, and those of all their tiles together."""
    config = write_tiny_config(data.parent / f'tiny{os.environ["RANK"]}.py', data)
    cfg = Config.fromfile(str(config))
    cfg.merge_from_dict(
        {
            'env_cfg.accelerator': 'cpu',
            'val_dataloader': None,
            'val_cfg': None,
            'val_evaluator': None,
            'work_dir': str(folder),
            'launcher': 'pytorch',
            'train_dataloader.batch_size': 4,
            'train_cfg.max_iters': 1,
            'experiment_name': 'weighed',
        }
    )
    hook, first = (
        DynamicSamplingHook(
            score=score,
            validity=dict(low=0.5),
            keep_fraction=0.4,
            unbiased=True,
            max_resample_times=9,
            max_refill_rounds=9,
        ),
        First(),
    )
    runner: Any = MapSageRunner.from_cfg(cfg)
    runner.register_hook(first)
    runner.register_hook(hook)
    runner.train()
    step: Any = hook._step.batches[0]
    every: List[Any] = [None] * runner.world_size
    dist.all_gather_object(
        every, ([each.sample for each in step.samples], step.weights, step.statistics.moved_samples)
    )
    samples = [sample for each, _, _ in every for sample in each]
    weights = [weight for _, each, _ in every for weight in each]
    model: Any = first.model.train()
    weigh_heads(model, lambda: weights)
    batch = model.data_preprocessor(pseudo_collate(samples), True)
    losses = model.loss(batch['inputs'], batch['data_samples'])
    sum(value for name, value in losses.items() if 'loss' in name).backward()
    moment = runner.optim_wrapper.optimizer.state  # of SGD: the gradient itself, after one step
    return dict(
        moved=every[0][2],
        weights=sorted(set(weights)),
        pairs=[
            (moment[one]['momentum_buffer'].numpy(), other.grad.numpy())
            for one, other in zip(runner.model.module.parameters(), model.parameters())
            if one in moment
        ],
    )


def run_scenarios(folder: Path, names: Sequence[str]) -> Dict[str, Any]:
    data = write_tiny_data(folder / 'data', train=16, val=1, size=32)
    told = fork_scenarios(
        {
            **{
                name: (whole_and_resumed, world, folder / name, changes)
                for name, (world, changes) in RUNS.items()
                if name in names
            },
            **{
                f'virtual {size}': (virtual, size, folder / f'virtual {size}', size, list(VIRTUAL))
                for size in SIZES
            },
            'gradients': (gradients, 3, folder / 'gradients', data),
        },
        folder,
    )
    # The score of 'stateful' reads running statistics, which no resume keeps.
    names = [name for name in VIRTUAL if name != 'stateful']
    for name in names:
        (folder / 'rest' / name).mkdir(parents=True)
        shutil.copy(
            str(folder / f'virtual {SIZES[0]}' / name / f'iter_{CUT}.pth'),
            str(folder / 'rest' / name),
        )
    told['rest'] = fork_ranks(
        functools.partial(virtual, resume='must'),
        REST,
        folder / 'forked',
        folder / 'rest',
        REST,
        names,
    )
    return told


@pytest.fixture(scope='module')
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp('sampled')


@pytest.fixture(scope='module')
def answers(request: pytest.FixtureRequest, folder: Path) -> Answers:
    return answers_of(run_scenarios, folder, chosen(request, 'name'))


@pytest.mark.parametrize('name', rest_is_long(RUNS, 'epochs', 'five ranks'))
def test_a_quantile_of_all_ranks_resumes_exactly(name: str, answers: Answers) -> None:
    every = answers.of(name)
    assert len(every) == RUNS[name][0]
    for told in every:
        assert told['samples'][0] == told['samples'][1] and told['losses'][1]
        # the sums of more than two ranks may have another order after a resume
        assert told['losses'][0] == pytest.approx(told['losses'][1], rel=1e-4)
        assert len(every) > 2 or told['losses'][0] == told['losses'][1] and told['same']
    assert every[0]['states'][0] == every[0]['states'][1]
    assert every[0]['scores'] >= 16


def test_weighed_tiles_of_ranks_have_the_gradient_of_one_process(answers: Answers) -> None:
    for told in answers.of('gradients'):
        assert told['moved'] and len(told['weights']) == 2 and told['pairs']
        for one, other in told['pairs']:
            assert one == pytest.approx(other, rel=1e-3, abs=1e-6)


def last_bits(folder: Path, name: str) -> Any:
    files = sorted((folder / name).glob('iter_*.pth'), key=lambda path: int(path.stem[5:]))
    return files[-1].name, checkpoint_bits(files[-1])


@pytest.mark.parametrize('name', VIRTUAL)
@pytest.mark.parametrize('size', SIZES[1:])
def test_virtual_ranks_sample_the_same_on_any_number_of_processes(
    name: str, size: int, answers: Answers, folder: Path
) -> None:
    one, other = (answers.of(f'virtual {each}')[0][name] for each in (SIZES[0], size))
    assert one == other and len(set(one[0])) > 5
    assert last_bits(folder / f'virtual {SIZES[0]}', name) == last_bits(
        folder / f'virtual {size}', name
    )


@pytest.mark.parametrize('name', [name for name in VIRTUAL if name != 'stateful'])
def test_a_pool_goes_on_on_other_processes(name: str, answers: Answers, folder: Path) -> None:
    losses, samples = answers.of(f'virtual {SIZES[0]}')[0][name]
    assert answers.of('rest')[0][name] == (losses[CUT:], samples[CUT:])
    assert last_bits(folder / f'virtual {SIZES[0]}', name) == last_bits(folder / 'rest', name)
