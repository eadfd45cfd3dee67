"""Eight virtual ranks on any number of processes: the same bits, also in a run that moves."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any, Dict, List, Sequence

import pytest
import torch
from checkpoint_bits import checkpoint_bits
from forked import DIED, fork_ranks, fork_scenarios
from frozen_config import FROZEN
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.registry import DATA_SAMPLERS, MODELS, OPTIM_WRAPPERS
from sampling_ranks import Answers, answers_of
from support import chosen, main_leg, rest_is_long, write_tiny_config, write_tiny_data
from torch.utils.data import BatchSampler
from toy_runs import ToyRegression, log_of, toy_train

from mapsage.distributed.virtual_ranks import VirtualRanksError
from mapsage.distributed.wrappers import AmpOptimWrapper, OptimWrapper
from mapsage.engine import MapSageRunner

pytestmark = main_leg
DATA_SAMPLERS.register_module(name='TorchBatches', module=BatchSampler, force=True)
V = 8
SIZES = (1, 2, 3, 5, 8)
EMA = dict(type='EMAHook', update_buffers=True, momentum=0.3)
# A checkpoint after every iteration is in most places of the accumulation cycles of three.
ITERATIONS: Dict[str, Any] = {
    'train_dataloader.dataset.length': 40,
    'optim_wrapper.accumulative_counts': 3,
    'optim_wrapper.clip_grad': dict(max_norm=0.1),
    'custom_hooks': [EMA],
    'default_hooks.checkpoint.interval': 1,
    'train_cfg.val_interval': 4,
}
# 45 samples are rounded up to 6 on each virtual rank, and on 3 processes they would stay 45.
EPOCHS: Dict[str, Any] = {
    'train_cfg': dict(by_epoch=True, max_epochs=2, val_interval=1),
    'train_dataloader.sampler.type': 'DefaultSampler',
    'train_dataloader.dataset.length': 45,
    'train_dataloader.num_workers': 2,
    'train_dataloader.persistent_workers': True,
    'optim_wrapper.type': 'AmpOptimWrapper',
    'optim_wrapper.dtype': 'bfloat16',
    'custom_hooks': [],
    'auto_scale_lr': dict(enable=True, base_batch_size=24),
    'default_hooks.checkpoint': dict(interval=1, by_epoch=True),
}
# The processes that a run is killed on, and the iteration that it does not come to.
MOVES = ((8, 3), (3, 4), (1, 6), (5, None))
# By name: feature source, processes for five virtual ranks, and the run that has the same bits.
FIVE = 5
SOURCES: Dict[str, Any] = {
    'none 5': (None, 5, ''),
    'prefetched 3': ('Prefetched', 3, 'none 5'),
    'streamed 3': ('Streamed', 3, 'none 5'),
    'cached 3': ('Cached', 3, ''),
    'cached 1': ('Cached', 1, 'cached 3'),
}


class KilledBefore(Hook):
    def __init__(self, iteration: int) -> None:
        self.iteration = iteration

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        if runner.iter == self.iteration:
            os.kill(os.getpid(), signal.SIGKILL)


@MODELS.register_module(force=True)
class SeldomToy(ToyRegression):
    """Trains ``seldom`` on even samples alone."""

    def __init__(self) -> None:
        super().__init__()
        self.seldom = torch.nn.Parameter(torch.ones(1))

    def forward(self, inputs: Any, data_samples: Any = None, mode: str = 'tensor') -> Any:
        answer = super().forward(inputs, data_samples, mode)
        if mode == 'loss' and data_samples[0].number % 2 == 0:
            answer['loss'] = answer['loss'] * self.seldom.sum()
        return answer


@MODELS.register_module(force=True)
class LazyToy(ToyRegression):
    """Registers a buffer in its first forward pass, and reads it in the others."""

    def forward(self, inputs: Any, data_samples: Any = None, mode: str = 'tensor') -> Any:
        if mode == 'loss':
            now = torch.stack(list(inputs)).mean(0)
            if hasattr(self, 'past'):
                inputs = [each - self.past / 8 for each in inputs]
                self.past.copy_(now)
            else:
                self.register_buffer('past', now, persistent=False)
        return super().forward(inputs, data_samples, mode)


@MODELS.register_module(force=True)
class IdleToy(ToyRegression):
    """Has a parameter that takes no part in any loss."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = torch.nn.Parameter(torch.ones(1))


@MODELS.register_module(force=True)
class SteepToy(ToyRegression):
    """Its scaled loss overflows where sample 7 is in the batch, and its loss does not."""

    def forward(self, inputs: Any, data_samples: Any = None, mode: str = 'tensor') -> Any:
        answer = super().forward(inputs, data_samples, mode)
        if mode == 'loss' and any(each.number == 7 for each in data_samples):
            answer['loss'] = answer['loss'] * 1e24
        return answer


@OPTIM_WRAPPERS.register_module(force=True)
class ScalerAlone(AmpOptimWrapper):
    """The scaler of float16 without its autocast, which the CPU lacks."""

    def optim_context(self, model: Any) -> Any:
        return OptimWrapper.optim_context(self, model)


HAS_SCALER = hasattr(getattr(torch, 'amp', None), 'GradScaler')  # one that works on the CPU
# What three virtual ranks do in 1, 2 and 3 processes, with the wrapper and the hook of DDP.
VARIANTS: Dict[str, Any] = {
    'a late buffer': {'model.type': 'LazyToy'},
    'a sampler without seed': {'train_dataloader.sampler.seed': None},
}
if HAS_SCALER:
    VARIANTS['a scaler'] = {
        'model.type': 'SteepToy',
        'train_dataloader.dataset.length': 12,
        'optim_wrapper': dict(
            type='ScalerAlone',
            dtype='float16',
            clip_grad=dict(max_norm=1.0),
            loss_scale=dict(init_scale=2.0**64),
            optimizer=dict(type='SGD', lr=0.05),
        ),
    }
if torch.__version__ >= '2':
    VARIANTS['a static graph'] = {
        'model.type': 'IdleToy',
        'model_wrapper_cfg': dict(
            type='MMDistributedDataParallel', broadcast_buffers=False, static_graph=True
        ),
    }


def trained(folder: Path, processes: int, hooks: Any = (), **changes: Any) -> Any:
    if processes == 1:  # one process alone, without torch.distributed
        for name in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE'):
            os.environ.pop(name, None)
    torch.set_num_threads(1)
    return toy_train(folder, hooks=hooks, **{'env_cfg.virtual_ranks': V, **changes})


def whole_runs(folder: Path, processes: int) -> Any:
    """Return what one rank has seen of a run of iterations, and of one of epochs."""
    seen = {}
    for name, changes in (('iterations', ITERATIONS), ('epochs', EPOCHS)):
        _, record = trained(folder / name, processes, **changes)
        seen[name] = dict(losses=record.losses, figures=record.figures)
    return seen


def moved(folder: Path, processes: int, until: Any) -> Any:
    hooks = [] if until is None else [KilledBefore(until)]
    # Only the first start names the number of virtual ranks.
    known = {'env_cfg.virtual_ranks': V if processes == MOVES[0][0] else None}
    run, record = trained(folder, processes, hooks, resume='auto', **{**ITERATIONS, **known})
    return dict(losses=record.losses, log=log_of(run) if run.rank == 0 else '')


def seldom(folder: Path, processes: int) -> Any:
    changes = {
        'model.type': 'SeldomToy',
        'find_unused_parameters': True,
        'train_dataloader.batch_sampler': dict(type='TorchBatches', drop_last=False),
    }
    trained(folder, processes, **changes)
    try:
        trained(folder / 'refused', processes, **{**changes, 'find_unused_parameters': False})
    except VirtualRanksError as error:
        return str(error)
    return ''


def uneven(folder: Path) -> str:
    """Return what a process says whose own virtual ranks have equal numbers of batches."""
    with pytest.raises(VirtualRanksError) as raised:
        trained(
            folder,
            3,
            **{
                'env_cfg.virtual_ranks': 5,
                'train_dataloader.batch_size': 1,
                'train_dataloader.sampler': dict(type='DefaultSampler', round_up=False),
                'train_dataloader.dataset.length': 17,
            },
        )
    return str(raised.value)


def counted(folder: Path, processes: int, virtual_ranks: int = 4) -> Any:
    run, _ = trained(
        folder,
        processes,
        **{
            'model.type': 'CountedToy',
            'env_cfg.virtual_ranks': virtual_ranks,
            'train_dataloader.batch_size': 8 // virtual_ranks,
            'train_cfg.max_iters': 1,
            'train_cfg.val_interval': 9,
            'find_unused_parameters': True,
        },
    )
    return getattr(run.model, 'module', run.model).layers[0].weight.tolist()


def frozen_config(folder: Path, name: str, source: Any, processes: int) -> Config:
    path = write_tiny_config(folder / f'{name}.py', folder / 'data', FROZEN)
    cfg = Config.fromfile(str(path))
    cfg.merge_from_dict(
        {
            'env_cfg.accelerator': 'cpu',
            'env_cfg.virtual_ranks': FIVE,
            'val_dataloader': None,
            'val_cfg': None,
            'val_evaluator': None,
            'train_cfg.max_iters': 3,
            'train_dataloader.num_workers': 1,
            'work_dir': str(folder / name),
            'experiment_name': name,
            'default_hooks.checkpoint.interval': 3,
            'launcher': 'none' if processes == 1 else 'pytorch',
        }
    )
    more = dict(
        Cached=dict(folder=str(folder / 'features'), views=2),
        Prefetched=dict(depth=4),
        Streamed=dict(encoders=1),
    )
    if source is not None:
        cfg.feature_source = dict(more.get(source, {}), type=source)
    return cfg


def fed(folder: Path, name: str, source: Any, processes: int) -> Any:
    """Return the losses of a head that one of the feature sources feeds."""
    if processes == 1:
        for variable in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE'):
            os.environ.pop(variable)
    torch.set_num_threads(1)
    losses: List[float] = []

    class Losses(Hook):
        def after_train_iter(
            self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
        ) -> None:
            losses.append(float(outputs['loss']))

    cfg = frozen_config(folder, f'{name}_{os.environ.get("RANK", 0)}', source, processes)
    cfg.work_dir = str(folder / name)
    runner: Any = MapSageRunner.from_cfg(cfg)
    if isinstance(runner, MapSageRunner):
        runner.register_hook(Losses())
    runner.train()
    return losses


def make_cache(folder: Path) -> None:
    torch.set_num_threads(1)
    frozen_config(folder, 'cache', None, 1)
    from mapsage.extras.streaming import cache_features

    assert (
        cache_features.main(
            [
                str(folder / 'cache.py'),
                '--folder',
                str(folder / 'features'),
                '--views',
                '2',
                '--accelerator',
                'cpu',
                '--work-dir',
                str(folder / 'w'),
            ]
        )
        == 0
    )


def not_counted(folder: Path) -> str:
    """Return the error of a wrapper of MMEngine's that gives a loss no counts."""
    try:
        trained(
            folder,
            3,
            **{
                'env_cfg.virtual_ranks': None,
                'model.type': 'CountedToy',
                'model_wrapper_cfg': dict(
                    type='MMSeparateDistributedDataParallel', find_unused_parameters=True
                ),
            },
        )
    except VirtualRanksError as error:
        return str(error)
    return ''


def variant(folder: Path, processes: int, name: str) -> Any:
    _, record = trained(folder, processes, **{'env_cfg.virtual_ranks': 3, **VARIANTS[name]})
    return record.losses


def run_scenarios(folder: Path, sizes: Sequence[int], names: Sequence[str]) -> Dict[str, Any]:
    write_tiny_data(folder / 'data', train=11, val=1, size=32)
    fork_ranks(make_cache, 1, folder / 'caching', folder, timeout=120)
    scenarios: Dict[str, Any] = {
        f'whole {each}': (whole_runs, each, folder / str(each), each) for each in (*sizes, V)
    }
    scenarios.update(
        {f'seldom {each}': (seldom, each, folder / 'seldom' / str(each), each) for each in (1, 3)}
    )
    scenarios.update(
        {
            f'counted {each}': (counted, each, folder / 'counted' / str(each), each)
            for each in (1, 2, 3, 4)
        }
    )
    scenarios.update(
        {
            f'{name} {each}': (variant, each, folder / name / str(each), each, name)
            for name in names
            for each in (1, 2, 3)
        }
    )
    scenarios['not counted'] = not_counted, 3, folder / 'not counted'
    scenarios['uneven'] = uneven, 3, folder / 'uneven'
    # The same eight samples as one batch of one rank.
    scenarios['one batch'] = counted, 1, folder / 'one batch', 1, 1
    scenarios.update(
        {
            f'fed {name}': (
                fed,
                processes + (source == 'Streamed'),
                folder,
                name.replace(' ', '_'),
                source,
                processes,
            )
            for name, (source, processes, _) in SOURCES.items()
        }
    )
    told = fork_scenarios(scenarios, folder / 'forked')
    for processes, until in MOVES:
        told[f'moved {processes}'] = fork_ranks(
            moved, processes, folder / f'moving {processes}', folder / 'moved', processes, until
        )
    return told


@pytest.fixture(scope='module')
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp('virtual')


@pytest.fixture(scope='module')
def answers(request: pytest.FixtureRequest, folder: Path) -> Answers:
    sizes, names = set(chosen(request, 'processes')), set(VARIANTS) & set(chosen(request, 'name'))
    return answers_of(run_scenarios, folder, sizes, names)


@pytest.mark.parametrize('processes', rest_is_long(SIZES[:-1], 1, 3, 5))
@pytest.mark.parametrize(
    ('name', 'files'),
    [('iterations', [f'iter_{each}' for each in range(1, 9)]), ('epochs', ['epoch_1', 'epoch_2'])],
)
def test_any_number_of_processes_gives_the_same_bits(
    processes: int, name: str, files: List[str], answers: Answers, folder: Path
) -> None:
    one, other = answers.of(f'whole {V}')[0][name], answers.of(f'whole {processes}')[0][name]
    assert one['losses'] == other['losses'] and len(set(one['losses'])) > 5
    assert one['figures'] == pytest.approx(other['figures'])  # a sum of floats over the processes
    for file in files:
        assert checkpoint_bits(folder / str(V) / name / f'{file}.pth') == checkpoint_bits(
            folder / str(processes) / name / f'{file}.pth'
        ), file


def test_a_run_that_is_killed_goes_on_on_other_processes(answers: Answers, folder: Path) -> None:
    for processes, until in MOVES:
        told = answers.of(f'moved {processes}')
        assert until is None or told == [DIED] * processes
    last = told[0]
    # A checkpoint that was being written when the run was killed is not there.
    losses = answers.of(f'whole {V}')[0]['iterations']['losses']
    assert 2 <= len(last['losses']) <= 4
    assert last['losses'] == losses[-len(last['losses']) :]
    assert '8 virtual ranks in 5 process(es), 1 or 2 each' in last['log']
    assert checkpoint_bits(folder / 'moved' / 'iter_8.pth') == checkpoint_bits(
        folder / str(V) / 'iterations' / 'iter_8.pth'
    )


def test_a_parameter_without_gradient_counts_as_zeros_or_is_named(
    answers: Answers, folder: Path
) -> None:
    for processes in (1, 3):
        for text in answers.of(f'seldom {processes}'):
            assert '1 parameter(s) got no gradient in a virtual rank: seldom' in text
    bits = [checkpoint_bits(folder / 'seldom' / str(each) / 'iter_8.pth') for each in (1, 3)]
    assert bits[0] == bits[1]
    changed = torch.load(
        str(folder / 'seldom' / '1' / 'iter_8.pth'), map_location='cpu', **_TRUSTED
    )['state_dict']['seldom']
    assert changed.item() != 1.0


@pytest.mark.parametrize('name', rest_is_long(VARIANTS, 'a late buffer'))
def test_variants_have_the_same_bits(name: str, answers: Answers, folder: Path) -> None:
    losses = [answers.of(f'{name} {each}')[0] for each in (1, 2, 3)]
    assert losses[0] == losses[1] == losses[2] and len(set(losses[0])) == len(losses[0])
    last = [checkpoint_bits(max((folder / name / str(each)).glob('*.pth'))) for each in (1, 2, 3)]
    assert last[0] == last[1] == last[2]
    if name == 'a scaler':  # sample 7 came four times, and no rank made a step then
        assert last[0]['/optimizer/loss_scaler/scale'] == 2.0**60


def test_epochs_of_other_lengths_on_other_processes_are_refused(answers: Answers) -> None:
    for text in answers.of('uneven'):
        assert 'an epoch has 3 batches on one virtual rank and 4 on another' in text


def test_a_loss_that_counts_the_global_batch(answers: Answers) -> None:
    told = [weights for each in (1, 2, 3, 4) for weights in answers.of(f'counted {each}')]
    assert all(weights == told[0] for weights in told)
    assert torch.tensor(told[0]).numpy() == pytest.approx(
        torch.tensor(answers.of('one batch')[0]).numpy(), rel=1e-5
    )


@pytest.mark.parametrize('name', [name for name, (_, _, equal) in SOURCES.items() if equal])
def test_features_of_any_source_on_any_number_of_processes(
    name: str, answers: Answers, folder: Path
) -> None:
    equal = SOURCES[name][2]
    losses = answers.of(f'fed {equal}')[0]
    assert len(set(losses)) == 3 and answers.of(f'fed {name}')[0] == losses
    bits = [
        checkpoint_bits(folder / each.replace(' ', '_') / 'iter_3.pth') for each in (equal, name)
    ]
    assert bits[0] == bits[1]


def test_a_wrapper_that_gives_no_counts_is_refused(answers: Answers) -> None:
    for text in answers.of('not counted'):
        assert 'CountedToy counts over the global batch, and the model wrapper MMSep' in text


_TRUSTED: Dict[str, Any] = dict(weights_only=False) if torch.__version__ >= '2' else {}
