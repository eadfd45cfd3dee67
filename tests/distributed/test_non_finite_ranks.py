"""A NaN of one rank ends all of them with one error, and the last good checkpoint stays."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any, Dict, List, Sequence

import mmengine.runner.runner
import pytest
import torch
from forked import fork_scenarios
from mmengine.hooks import EMAHook, Hook
from ranks import run_ranks
from scaled_on_cpu import HAS_SCALER
from support import chosen, rest_is_long
from torch import nn

from mapsage.accelerator import resolve_accelerator, set_current_accelerator
from mapsage.distributed.channels.group_channel import GroupChannel
from mapsage.engine.guards import NonFiniteLossError, non_finite_loss_hook
from mapsage.engine.runner import MapSageRunner

TINY_RUN = Path(__file__).resolve().parents[1] / 'tiny_run.py'
NAN = float('nan')


class BadBackward(torch.autograd.Function):
    """Returns its input, and the gradient times a number."""

    @staticmethod
    def forward(context: Any, value: torch.Tensor, factor: float) -> torch.Tensor:
        context.factor = factor
        return value.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        return gradient * context.factor, None


def load_tiny_run() -> Any:
    spec: Any = importlib.util.spec_from_file_location('tiny_run', TINY_RUN)
    tiny_run = importlib.util.module_from_spec(spec)
    sys.modules['tiny_run'] = tiny_run
    spec.loader.exec_module(tiny_run)
    tiny_run.Runner = MapSageRunner
    return tiny_run


class Fault(Hook):
    """Lets the model of one rank go wrong at an iteration, as the fault's name says."""

    priority = 'VERY_HIGH'

    def __init__(self, fault: str, rank: int, at: int) -> None:
        self.fault, self.at = (fault if os.environ['RANK'] == str(rank) else ''), at

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        model = runner.model.module
        model.loss_factor = NAN if self.fault == 'loss' and runner.iter == self.at else 1.0
        model.gradient_factor = (
            dict(gradient=NAN, overflow=float('inf')).get(self.fault, 1.0)
            if runner.iter == self.at
            else 1.0
        )
        model.detached = NAN if self.fault == 'detached' and runner.iter == self.at else 0.0

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        if runner.iter != self.at:
            return
        model = runner.model.module
        if self.fault == 'weights':
            model.tail.weight.data.fill_(NAN)
        if self.fault == 'buffers':
            model.norm.running_mean.fill_(NAN)
        if self.fault == 'ema':
            ema = next(hook for hook in runner.hooks if isinstance(hook, EMAHook))
            ema.ema_model.module.tail.weight.data.fill_(NAN)


def build_model(tiny_run: Any) -> Any:
    class Model(tiny_run.TinyModel):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.tail = nn.BatchNorm1d(3), nn.Linear(3, 2)
            self.loss_factor = self.gradient_factor = 1.0
            self.detached = 0.0
            # infinite by design: a mask from the first step on, and a value from the beginning
            self.register_buffer('mask', torch.zeros(2))
            self.register_buffer('running_var', torch.tensor(float('inf')))

        def forward(self, inputs: Any, data_samples: Any = None, mode: str = 'tensor') -> Any:
            if mode == 'predict':
                return super().forward(inputs, data_samples, mode)
            self.mask[1] = float('-inf')
            pixels = torch.stack([image.float().mean((1, 2)) for image in inputs])
            pixels = pixels.repeat(2, 1)  # the last batch of an epoch has one image
            found = self.tail(BadBackward.apply(self.norm(pixels), self.gradient_factor))
            loss = (found**2).mean() * self.loss_factor + self.weight.sum() * 0.1
            return dict(loss_ce=loss, loss_extra=torch.tensor(self.detached))

    return Model()


def train(fault: str, rank: int, work_dir: Path, at: int = 2, **settings: Any) -> Dict[str, Any]:
    """Train with the fault, and return how it ended on this rank."""
    set_current_accelerator(resolve_accelerator('cpu'))
    non_finite_loss_hook._MEETING_SECONDS = settings.pop('meeting_seconds', 20.0)
    tiny_run = load_tiny_run()
    checkpoint = dict(type='CheckpointHook', by_epoch=False, interval=1, max_keep_ckpts=1)
    checkpoint.update(settings.pop('checkpoint', {}))
    hooks: List[Any] = [Fault(fault, rank, at), *settings.pop('hooks', [])]
    torch.manual_seed(0)
    runner = tiny_run.build_runner(
        str(work_dir),
        hooks,
        build_model(tiny_run),
        launcher='pytorch',
        experiment_name='test',
        env_cfg=dict(accelerator='cpu', dist_cfg=dict(timeout=30)),
        default_hooks=dict(checkpoint=checkpoint),
        **settings,
    )
    error: Any = None
    maximum, calls = GroupChannel.max, []

    def counted(channel: GroupChannel, *args: Any, **kwargs: Any) -> None:
        calls.append(channel)
        maximum(channel, *args, **kwargs)

    GroupChannel.max = counted  # type: ignore[method-assign]
    try:
        runner.train()
    except NonFiniteLossError as raised:
        error = raised
    return dict(message=str(error or ''), iteration=runner.iter, agreements=len(calls))


EPOCHS = dict(
    train_cfg=dict(by_epoch=True, max_epochs=3, val_interval=9), checkpoint=dict(by_epoch=True)
)
BEST = dict(
    train_cfg=dict(by_epoch=False, max_iters=4, val_interval=1),
    checkpoint=dict(interval=-1, save_last=False, save_best='mIoU', rule='greater'),
)
NO_SAVE = dict(checkpoint=dict(interval=-1, save_last=False))

# name: ranks, fault, rank, settings, words of the error, files that must be left
SCENARIOS: Dict[str, Any] = {
    'none': (2, '', 0, {}, [], ['iter_4.pth']),
    'more steps': (
        2,
        '',
        0,
        dict(NO_SAVE, train_cfg=dict(by_epoch=False, max_iters=12, val_interval=20)),
        [],
        [],
    ),
    'fewer steps': (
        2,
        '',
        0,
        dict(NO_SAVE, train_cfg=dict(by_epoch=False, max_iters=2, val_interval=20)),
        [],
        [],
    ),
    'loss': (
        3,
        'loss',
        1,
        {},
        [
            'the loss is nan at iteration 3, rank 1',
            'loss_ce=nan',
            'images of the batch:\n    /',
            'iter_2.pth',
        ],
        ['iter_2.pth'],
    ),
    'loss of the last rank': (2, 'loss', 1, dict(at=3), ['at iteration 4, rank 1'], ['iter_3.pth']),
    'loss, later save': (
        3,
        'loss',
        2,
        dict(checkpoint=dict(interval=2)),
        ['the loss is nan at iteration 3, rank 2'],
        ['iter_2.pth'],
    ),
    'loss, no save': (
        2,
        'loss',
        1,
        dict(NO_SAVE, at=1),
        ['the loss is nan at iteration 2, rank 1'],
        [],
    ),
    'loss in the last step, no save': (
        2,
        'loss',
        1,
        dict(NO_SAVE, at=3),
        ['the loss is nan at iteration 4, rank 1'],
        [],
    ),
    'loss while gradients accumulate': (
        2,
        'loss',
        1,
        dict(
            NO_SAVE,
            at=1,
            train_cfg=dict(by_epoch=False, max_iters=12, val_interval=20),
            optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.01), accumulative_counts=4),
        ),
        ['the loss is nan at iteration 2, rank 1'],
        [],
    ),
    'loss by epoch': (
        2,
        'loss',
        1,
        dict(EPOCHS, at=3),
        ['the loss is nan at iteration 4, rank 1'],
        ['epoch_1.pth'],
    ),
    'gradient': (
        3,
        'gradient',
        1,
        {},
        ["gradient of 'norm.", 'is not finite at iteration 3, rank 1, before'],
        ['iter_2.pth'],
    ),
    'gradient, no save': (
        2,
        'gradient',
        1,
        dict(NO_SAVE, at=1),
        ["gradient of 'norm.", 'is not finite at iteration 2, rank 1, before'],
        [],
    ),
    'gradient, best': (
        2,
        'gradient',
        1,
        dict(BEST, at=2),
        ["gradient of 'norm.", 'is not finite at iteration 3, rank 1, before'],
        ['best_mIoU_iter_1.pth'],
    ),
    'weights': (
        2,
        'weights',
        1,
        {},
        ["'tail.weight' (of 1 tensor(s)) holds NaN", 'iteration 3', 'rank 1'],
        ['iter_2.pth'],
    ),
    'buffers': (
        2,
        'buffers',
        0,
        {},
        ["'norm.running_mean' (of 1 tensor(s)) holds NaN or infinity after iteration 3, rank 0"],
        ['iter_2.pth'],
    ),
    'buffers that are not written': (2, 'buffers', 1, {}, [], ['iter_4.pth']),
    'buffers that are averaged': (
        2,
        'buffers',
        1,
        dict(hooks=[dict(type='SyncBuffersHook')]),
        ["'norm.running_mean' (of 1 tensor(s)) holds NaN or infinity after iteration 3, rank 1"],
        ['iter_2.pth'],
    ),
    'gradient that is saved in a cycle': (
        2,
        'gradient',
        1,
        dict(optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.01), accumulative_counts=4)),
        ["gradient of 'norm.", 'is not finite at iteration 3, rank 1, before'],
        ['iter_2.pth'],
    ),
    'averages': (
        2,
        'ema',
        0,
        dict(hooks=[dict(type='EMAHook')]),
        ["'ema.module.tail.weight' (of 1 tensor(s)) holds NaN"],
        ['iter_2.pth'],
    ),
    'a loss that trains nothing': (
        2,
        'detached',
        1,
        dict(NO_SAVE, at=1, meeting_seconds=0.5),
        ['the loss is nan at iteration 2, rank 1', 'loss_extra=nan'],
        [],
    ),
}
if HAS_SCALER:
    SCALED: Dict[str, Any] = dict(
        optim_wrapper=dict(type='ScaledOnCpu', optimizer=dict(type='SGD', lr=0.01))
    )
    SCENARIOS.update(
        {
            'a gradient that the scaler skips': (2, 'overflow', 1, SCALED, [], ['iter_4.pth']),
            'a loss that the scaler skips': (2, 'loss', 1, SCALED, [], ['iter_4.pth']),
        }
    )


DAILY = rest_is_long(
    SCENARIOS,
    'none',
    'more steps',
    'fewer steps',
    'loss of the last rank',
    'loss, later save',
    'loss while gradients accumulate',
    'gradient, best',
    'weights',
    'buffers',
    'buffers that are not written',
    'a loss that trains nothing',
)


def train_all(folder: Path, names: Sequence[str]) -> Dict[str, Any]:
    mmengine.runner.runner.collect_env = dict  # it asks a compiler, seconds a run
    return fork_scenarios(
        {
            name: (run, world, fault, rank, folder / name, settings)
            for name, (world, fault, rank, settings, _, _) in SCENARIOS.items()
            if name in names
        },
        folder,
    )


def run(fault: str, rank: int, work_dir: Path, settings: Dict[str, Any]) -> Dict[str, Any]:
    return train(fault, rank, work_dir, **settings)


@pytest.fixture(scope='module')
def told(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Dict[str, Any]:
    folder = tmp_path_factory.mktemp('non_finite')
    names = [*chosen(request, 'name'), 'more steps', 'fewer steps']
    return dict(run_ranks(train_all, 1, folder, folder, names, timeout=600)[0], folder=folder)


@pytest.mark.parametrize('name', DAILY)
def test_all_ranks_end_and_name_where_it_began(name: str, told: Dict[str, Any]) -> None:
    world, _, _, _, words, files = SCENARIOS[name]
    every = told[name]
    assert isinstance(every, list), every
    assert len(every) == world and len({each['message'] for each in every}) == 1
    for word in words:
        assert word in every[0]['message']
    assert bool(words) == bool(every[0]['message'])
    if name == 'buffers that are averaged':  # by a hook that one process cannot have
        assert '--replay' not in every[0]['message']
    left = sorted((told['folder'] / name).glob('*.pth'))
    assert [path.name for path in left] == files
    for path in left:
        state = torch.load(
            str(path),
            map_location='cpu',
            **({'weights_only': False} if torch.__version__ >= '2' else {}),
        )['state_dict']
        assert all(
            tensor.isfinite().all()
            for key, tensor in state.items()
            if key not in ('mask', 'running_var')
        )


def test_a_healthy_step_costs_the_agreement_of_stop_hook_alone(told: Dict[str, Any]) -> None:
    more, fewer = told['more steps'][0], told['fewer steps'][0]
    assert more['iteration'] == 12
    assert more['agreements'] - fewer['agreements'] == 12 - 2 and fewer['agreements'] > 2
