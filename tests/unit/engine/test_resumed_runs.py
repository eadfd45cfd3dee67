"""A resumed run ends with the bits of one that was not interrupted, wherever it was cut."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Dict

import pytest
import torch
from mmengine.runner import Runner
from toy_runs import log_of, same_weights, toy_train

from mapsage.engine import MapSageRunner
from mapsage.engine.checkpoints import writer_lease
from mapsage.engine.extensions import resume
from mapsage_launcher.nodes.elastic import RESTART_VARIABLE
from mapsage_launcher.rank_notes import ELASTIC_VARIABLE

EPOCHS: Dict[str, Any] = {
    'train_cfg': dict(by_epoch=True, max_epochs=2, val_interval=1),
    'train_dataloader.sampler.type': 'DefaultSampler',
    'default_hooks.checkpoint.interval': 1,
}
ITERATIONS: Dict[str, Any] = {
    'train_cfg.max_iters': 16,
    'train_cfg.val_interval': 4,
    'default_hooks.checkpoint.interval': 1,
}
SCHEDULE = [
    dict(type='LinearLR', start_factor=0.1, begin=0, end=6, by_epoch=False),
    dict(type='PolyLR', eta_min=1e-4, begin=6, end=16, by_epoch=False),
    dict(type='MultiStepMomentum', milestones=[1], gamma=0.5, by_epoch=True),
]
EMA = [dict(type='EMAHook', update_buffers=True, momentum=0.3)]
LOAD = {'weights_only': False} if torch.__version__ >= '2' else {}
ACCUMULATED = {'optim_wrapper.accumulative_counts': 3}


def check_resumed(folder: Path, cut: int, **changes: Any) -> Any:
    """Train, resume a copy of the work dir from iteration ``cut``, and compare."""
    changes['default_hooks.checkpoint.interval'] = cut
    whole, seen = toy_train(folder / 'whole', param_scheduler=SCHEDULE, **changes)
    (folder / 'rest').mkdir()
    shutil.copy(str(folder / 'whole' / f'iter_{cut}.pth'), str(folder / 'rest'))
    rest, left = toy_train(folder / 'rest', param_scheduler=SCHEDULE, resume=True, **changes)
    assert (rest.iter, rest.epoch) == (whole.iter, whole.epoch)
    assert left.samples == seen.samples[cut:] and left.batch_idx == seen.batch_idx[cut:]
    assert left.losses == seen.losses[cut:] and left.rates == seen.rates[cut:]
    assert left.figures and left.figures == seen.figures[-len(left.figures) :]
    assert same_weights(whole.model.state_dict(), rest.model.state_dict())
    for one, other in zip(whole.param_schedulers, rest.param_schedulers):
        assert one.state_dict() == other.state_dict()
    return rest


@pytest.mark.parametrize('cut', [3, 8, 10, 15])
def test_iterations_saved_inside_an_epoch(cut: int, tmp_path: Path) -> None:
    """8 is the last iteration of the first epoch: its validation is still to come."""
    check_resumed(tmp_path, cut, **EPOCHS)


@pytest.mark.parametrize(
    'cut, changes',
    [
        # the last batch of an epoch has four samples
        (1, {'train_dataloader.batch_size': 6}),
        (3, {'train_dataloader.batch_size': 6}),
        (2, {'train_dataloader.batch_size': 5, 'train_dataloader.drop_last': True}),
        (3, {'train_dataloader.batch_size': 5, 'train_dataloader.drop_last': True}),
        (6, {'train_dataloader.num_workers': 1, 'train_dataloader.persistent_workers': True}),
        # torch's own sampler, which cannot skip
        (
            6,
            {
                'train_dataloader.sampler': None,
                'train_dataloader.shuffle': False,
                'train_dataloader.dataset.noise': 0.0,
            },
        ),
    ],
    ids=str,
)
def test_epochs_of_other_loaders(cut: int, changes: Dict[str, Any], tmp_path: Path) -> None:
    check_resumed(tmp_path, cut, **{**EPOCHS, **changes})


@pytest.mark.parametrize('cut', [4, 8, 11])
@pytest.mark.parametrize('loop', [EPOCHS, ITERATIONS], ids=['epochs', 'iterations'])
def test_inside_an_accumulation_cycle(cut: int, loop: Dict[str, Any], tmp_path: Path) -> None:
    rest = check_resumed(tmp_path, cut, **{**loop, **ACCUMULATED})
    assert 'gradient of some iterations is lost' not in log_of(rest)


def test_an_accumulation_cycle_with_ema(tmp_path: Path) -> None:
    check_resumed(tmp_path, 10, custom_hooks=EMA, **{**EPOCHS, **ACCUMULATED})


@pytest.mark.parametrize('cut', [4, 12])
def test_ema_and_validations_at_intervals(cut: int, tmp_path: Path) -> None:
    check_resumed(tmp_path, cut, custom_hooks=EMA, **ITERATIONS)


def test_gradients_are_saved_inside_a_cycle_only(tmp_path: Path) -> None:
    toy_train(tmp_path, **{**ITERATIONS, **ACCUMULATED})
    held = [
        'gradients' in torch.load(str(tmp_path / f'iter_{k}.pth'), **LOAD) for k in range(1, 17)
    ]
    # the last cycle has one iteration
    assert held == [k % 3 != 0 and k < 16 for k in range(1, 17)]


def test_an_epoch_of_another_length_starts_anew_and_says_so(tmp_path: Path) -> None:
    """Where the checkpoint's epoch had other batches, nobody can say which are left."""
    toy_train(tmp_path, **EPOCHS)
    for path in tmp_path.glob('iter_*.pth'):
        if path.name != 'iter_5.pth':
            path.unlink()
    (tmp_path / 'last_checkpoint').unlink()
    rest, record = toy_train(tmp_path, resume=True, **{**EPOCHS, 'train_dataloader.batch_size': 4})
    assert len(record.losses) == 2 * 4 and rest.epoch == 2
    assert '5 of 8 batches of epoch 1' in log_of(rest) and 'has 4' in log_of(rest)


def test_a_checkpoint_of_an_epoch_resumes_with_another_length(tmp_path: Path) -> None:
    changes = {**EPOCHS, 'default_hooks.checkpoint': dict(by_epoch=True, interval=1)}
    toy_train(tmp_path, **changes)
    (tmp_path / 'epoch_2.pth').unlink()
    rest, record = toy_train(tmp_path, resume=True, **{**changes, 'train_dataloader.batch_size': 4})
    assert len(record.losses) == 4 and 'batches of epoch' not in log_of(rest)


STAGE_2 = {'train_cfg.max_iters': 6, 'default_hooks.checkpoint.interval': 2}


@pytest.fixture
def stage_1(tmp_path: Path) -> str:
    toy_train(tmp_path / 'stage 1', **{'train_cfg.max_iters': 8, 'randomness.seed': 5})
    return str(tmp_path / 'stage 1' / 'iter_8.pth')


def test_resume_goes_on_with_the_run_and_not_with_its_load_from(
    stage_1: str, tmp_path: Path
) -> None:
    whole, seen = toy_train(tmp_path / 'whole', load_from=stage_1, **STAGE_2)
    (tmp_path / 'cut').mkdir()
    shutil.copy(str(tmp_path / 'whole' / 'iter_4.pth'), str(tmp_path / 'cut'))
    for mode in ('must', 'auto', True):
        rest, left = toy_train(tmp_path / 'cut', load_from=stage_1, resume=mode, **STAGE_2)
        assert left.losses == seen.losses[4:]
        assert same_weights(whole.model.state_dict(), rest.model.state_dict())
        assert 'is not read again' in log_of(rest)
        (tmp_path / 'cut' / 'last_checkpoint').unlink()
        (tmp_path / 'cut' / 'iter_6.pth').unlink()


@pytest.mark.parametrize('mode', ['auto', True])
@pytest.mark.parametrize('kind', ['nothing', 'weights', 'ema'])
def test_resume_with_nothing_to_resume_starts_and_says_so(
    mode: Any, kind: str, stage_1: str, tmp_path: Path
) -> None:
    weights = tmp_path / 'weights.pth'
    torch.save(dict(state_dict=torch.load(stage_1, **LOAD)['state_dict']), str(weights))
    changes: Dict[str, Any] = dict(STAGE_2)
    if kind != 'nothing':
        changes['load_from'] = str(weights)
    if kind == 'ema':
        changes['custom_hooks'] = EMA
    _, seen = toy_train(tmp_path / 'plain', **changes)
    started, record = toy_train(tmp_path / 'new', resume=mode, **changes)
    assert record.losses == seen.losses and len(seen.losses) == 6
    assert 'WARNING - nothing to resume' in log_of(started)
    assert ('from scratch' if kind == 'nothing' else 'weights of load_from') in log_of(started)


def test_the_flag_takes_the_weights_of_a_first_stage(stage_1: str, tmp_path: Path) -> None:
    """A whole checkpoint in load_from: the flag starts the run, as the same command without it."""
    _, seen = toy_train(tmp_path / 'plain', load_from=stage_1, **STAGE_2)
    _, record = toy_train(tmp_path / 'new', load_from=stage_1, resume='auto', **STAGE_2)
    assert record.losses == seen.losses and len(seen.losses) == 6


def test_a_config_with_resume_and_load_from_resumes_that(stage_1: str, tmp_path: Path) -> None:
    """As under MMEngine's own Runner."""
    long = {'train_cfg.max_iters': 10, 'randomness.seed': 5}
    for runner_class in (MapSageRunner, Runner):
        changes = {'env_cfg': dict(_delete_=True)} if runner_class is Runner else {}
        runner, record = toy_train(
            tmp_path / runner_class.__name__,
            runner_class,
            resume=True,
            load_from=stage_1,
            **long,
            **changes,
        )
        assert (runner.iter, len(record.losses)) == (10, 2)


RATE = 'optim_wrapper.optimizer.lr'


@pytest.mark.parametrize('schedule', [None, SCHEDULE])
def test_another_rate_at_the_resume_is_not_used_and_that_is_said(
    schedule: Any, tmp_path: Path
) -> None:
    _, seen = toy_train(tmp_path, param_scheduler=schedule)
    (tmp_path / 'iter_8.pth').unlink()
    changed = {RATE: 0.001, 'optim_wrapper.optimizer.weight_decay': 0.1}
    runner, record = toy_train(tmp_path, param_scheduler=schedule, resume=True, **changed)
    assert record.rates == seen.rates[4:] and record.losses == seen.losses[4:]
    (line,) = [line for line in log_of(runner).splitlines() if "its checkpoint's" in line]
    assert 'WARNING' in line and 'lr 0.05 (not 0.001), weight_decay 0 (not 0.1):' in line


def test_another_schedule_at_the_resume_is_named(tmp_path: Path) -> None:
    toy_train(tmp_path, param_scheduler=SCHEDULE)
    (tmp_path / 'iter_8.pth').unlink()
    other = [dict(SCHEDULE[0]), dict(SCHEDULE[1], end=40, eta_min=0), dict(SCHEDULE[2])]
    runner, _ = toy_train(tmp_path, param_scheduler=other, resume=True)
    assert (
        "checkpoint's param_scheduler[1].end 16 (not 40), param_scheduler[1].eta_min 0.0001 "
        '(not 0):' in log_of(runner)
    )


@pytest.mark.parametrize(
    'optimizer',
    [dict(type='SGD', lr=0.05, momentum=0.9), dict(type='AdamW', lr=0.01, betas=(0.8, 0.99))],
)
def test_nothing_is_said_of_a_resume_with_the_same_config(optimizer: Any, tmp_path: Path) -> None:
    changes = {
        'param_scheduler': SCHEDULE,
        **EPOCHS,
        'optim_wrapper.optimizer': dict(_delete_=True, **optimizer),
    }
    toy_train(tmp_path, **changes)
    (tmp_path / 'iter_16.pth').unlink()
    runner, _ = toy_train(tmp_path, resume=True, **changes)
    assert "its checkpoint's" not in log_of(runner)


def test_a_warm_up_longer_than_the_run_is_named(tmp_path: Path) -> None:
    warm_up = [
        dict(type='LinearLR', start_factor=1e-6, by_epoch=False, begin=0, end=1500),
        dict(type='PolyLR', by_epoch=False, begin=1500, end=40000),
    ]
    runner, record = toy_train(tmp_path / 'short', param_scheduler=warm_up)
    (line,) = [line for line in log_of(runner).splitlines() if 'warms the' in line]
    assert 'WARNING - LinearLR warms the learning rate up until iteration 1500' in line
    assert f'iteration 8: its rate reaches {record.rates[-1]:.2g} and never the 0.05' in line
    runner, _ = toy_train(tmp_path / 'right', param_scheduler=SCHEDULE)
    assert 'warms the' not in log_of(runner)


@pytest.mark.parametrize(
    'scheduler, said',
    [
        (dict(type='LinearLR', start_factor=0.1, by_epoch=True, begin=0, end=5), 'epoch 5'),
        (dict(type='ConstantLR', factor=0.1, by_epoch=False, begin=0, end=500), 'iteration 500'),
        (
            dict(
                type='LinearLR',
                start_factor=0.1,
                by_epoch=True,
                begin=0,
                end=5,
                convert_to_iter_based=True,
            ),
            'iteration 40',
        ),
        (dict(type='LinearLR', start_factor=1.0, end_factor=0.1, by_epoch=False, end=500), ''),
        (dict(type='ConstantLR', factor=0.1, by_epoch=False), ''),
        (dict(type='LinearMomentum', start_factor=0.1, by_epoch=False, begin=0, end=500), ''),
    ],
)
def test_warm_ups_by_epoch_and_of_other_kinds(scheduler: Any, said: str, tmp_path: Path) -> None:
    runner, record = toy_train(tmp_path, param_scheduler=[scheduler], **EPOCHS)
    log = log_of(runner)
    assert ('warms the' in log) is bool(said)
    if said:
        assert f'until {said},' in log and f'its rate reaches {record.rates[-1]:.2g} ' in log


def test_nobody_else_writes_once_the_checkpoint_is_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that was frozen in a save and wakes up must not add one behind the choice."""
    toy_train(tmp_path, **{**ITERATIONS, 'train_cfg.max_iters': 1})
    assert not (tmp_path / '.writer').exists()  # a job whose machines stay has none
    held, choose = [], resume.choose_checkpoint

    def look(*args: Any) -> Any:
        held.append((tmp_path / '.writer').read_text())
        return choose(*args)

    monkeypatch.setattr(resume, 'choose_checkpoint', look)
    monkeypatch.setattr(writer_lease, '_lease', {})
    monkeypatch.setenv(ELASTIC_VARIABLE, '1:2')
    # Tests of agents in this process have restarts of their jobs.
    monkeypatch.delenv(RESTART_VARIABLE, raising=False)
    rest, _ = toy_train(tmp_path, resume=True, **{**ITERATIONS, 'train_cfg.max_iters': 2})
    assert rest.iter == 2 and held == [(tmp_path / '.writer').read_text()]


@pytest.mark.parametrize(
    ('entry', 'value'),
    [
        ('message_hub', 'text'),
        ('message_hub', {}),
        ('optimizer', [1]),
        ('optimizer', 'text'),
        ('param_schedulers', 7),
    ],
)
def test_a_state_of_a_wrong_form_is_named_with_its_file(
    entry: str, value: Any, tmp_path: Path
) -> None:
    toy_train(tmp_path, param_scheduler=SCHEDULE)
    path = tmp_path / 'iter_8.pth'
    checkpoint = torch.load(str(path), **LOAD)
    checkpoint[entry] = value
    torch.save(checkpoint, str(path))
    with pytest.raises(RuntimeError, match=r'iter_8\.pth cannot be resumed: .*load_from'):
        toy_train(tmp_path, param_scheduler=SCHEDULE, resume=True)
