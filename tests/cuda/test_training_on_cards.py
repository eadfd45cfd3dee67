"""Trainings on CUDA devices under the user's script, compared with those of CPU ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from cards import launch_on_cards, load, logged, write_start
from support import check_finished, rest_is_long, write_tiny_config

SHORT = """
custom_imports = dict(imports=['mapsage', 'fault_hooks'])
custom_hooks = [dict(type='ReportPlacement')]
train_cfg = dict(type='IterBasedTrainLoop', max_iters=3, val_interval=3)
default_hooks['preview'] = None
default_hooks['checkpoint']['interval'] = 3
"""


@pytest.mark.parametrize('cards', rest_is_long([1, 2, 8], 2))
def test_cards_train_like_cpu_ranks(cards: int, tiny_data: Path, tmp_path: Path) -> None:
    config = write_tiny_config(tmp_path / 'tiny.py', tiny_data, SHORT)
    start = f'load_from={write_start(config)}'
    for accelerator in ('cuda', 'cpu'):
        work = tmp_path / accelerator
        work.mkdir()
        # A user's ranks on CUDA devices are new processes; forks stand for them elsewhere.
        cold = accelerator == 'cuda' and cards == 2
        finished = launch_on_cards(
            config,
            '--work-dir',
            work,
            '--cfg-options',
            start,
            # The host's settings, for the host's bits.
            'env_cfg.fast=False',
            cards=cards,
            cold=cold,
            environ={'ACCELERATOR': accelerator, 'MAPSAGE_TEST_PLACEMENT': str(work)},
        )
        check_finished(finished)
        assert ('each started as a new process (cuda)' in finished.output) == cold
        if cards > 1 and accelerator == 'cuda':
            assert 'backend cpu:gloo,cuda:nccl' in finished.output
    placement = [
        json.loads((tmp_path / 'cuda' / f'{rank}.json').read_text()) for rank in range(cards)
    ]
    assert [rank['devices'] for rank in placement] == [[f'cuda:{n}'] for n in range(cards)]
    assert len({rank['digest'] for rank in placement}) == 1
    losses, expected = (logged(tmp_path / name) for name in ('cuda', 'cpu'))
    assert len(losses) == 3
    # Two summands have one sum; more are added in another order by NCCL than by gloo.
    assert losses == expected if cards < 3 else losses == pytest.approx(expected, rel=1e-5)
    assert logged(tmp_path / 'cuda', 'mIoU') == pytest.approx(logged(tmp_path / 'cpu', 'mIoU'))


IN_ORDER = (
    SHORT
    + """
del train_pipeline[2:4]
train_dataloader['sampler'] = dict(type='InfiniteSampler', shuffle=False)
train_cfg.update(max_iters=4, val_interval=9)
default_hooks['checkpoint']['interval'] = 4
for part in ('backbone', 'decode_head'):
    model[part]['norm_cfg'] = dict(type={norm!r})
optim_wrapper.update(accumulative_counts=2, clip_grad=dict(max_norm=1.0))
"""
)
# Cards are given what makes them fast, and it must not change the numbers.
FAST = """
env_cfg['channels_last'] = True
optim_wrapper['optimizer']['fused'] = True
"""
MIXED = (
    FAST
    + """
optim_wrapper.update(type='AmpOptimWrapper', dtype={dtype!r}, loss_scale={scale})
"""
)
WHOLE_BATCH = "train_dataloader['batch_size'] = 4\n"


def trained(
    folder: Path,
    name: str,
    config_text: str,
    start: Path,
    data: Path,
    accelerator: str = 'cuda',
    cards: int = 2,
    backend: str = 'nccl',
) -> dict:
    """Return the last checkpoint of a run from the weights in ``start``.

    Args:
        folder: Folder of the config and, by its name, of the run.
        name: Name of the run.
        config_text: Lines that follow the tiny config.
        start: Checkpoint with the weights at the start.
        data: Data set.
        accelerator: Accelerator of all ranks.
        cards: Devices, and ranks.
        backend: Backend of the devices' collectives.
    """
    config = write_tiny_config(folder / f'{name}.py', data, config_text)
    finished = launch_on_cards(
        config,
        '--work-dir',
        folder / name,
        '--cfg-options',
        f'load_from={start}',
        f'env_cfg.dist_cfg.backend={backend}',
        cards=cards,
        environ={'ACCELERATOR': accelerator, 'MAPSAGE_TEST_PLACEMENT': str(folder)},
    )
    check_finished(finished)
    assert cards == 1 or f'backend cpu:gloo,cuda:{backend}' in finished.output
    return load(folder / name / 'iter_4.pth')


@pytest.fixture(scope='module')
def in_order(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """Checkpoints of a model with batch statistics, by run; every run sees the same samples."""
    folder = tmp_path_factory.mktemp('in_order')
    together, alone = IN_ORDER.format(norm='SyncBN'), IN_ORDER.format(norm='BN')
    start = write_start(write_tiny_config(folder / 'start.py', tiny_data, alone))
    runs = {
        # one process on the CPU whose batch is those of both cards
        'whole': (alone + WHOLE_BATCH, 'cpu', 1, 'auto'),
        'cards': (together + FAST, 'cuda', 2),
        'plain': (together, 'cuda', 2),
        'staged': (together, 'cuda', 2, 'staged'),
        'bfloat16': (together + MIXED.format(dtype='bfloat16', scale="'dynamic'"), 'cuda', 2),
        'float16': (
            together
            + MIXED.format(dtype='float16', scale=dict(init_scale=2.0**10, growth_interval=1)),
            'cuda',
            2,
        ),
        'overflow': (
            together + MIXED.format(dtype='float16', scale=dict(init_scale=2.0**60)),
            'cuda',
            2,
        ),
    }
    checkpoints = {
        name: trained(folder, name, text, start, tiny_data, *arguments)
        for name, (text, *arguments) in runs.items()
    }
    return {'start': load(start), **checkpoints}


@pytest.mark.parametrize('name', ['plain', 'cards', 'staged'])
def test_statistics_and_gradients_are_those_of_the_whole_batch(name: str, in_order: dict) -> None:
    for key, value in in_order['whole']['state_dict'].items():
        torch.testing.assert_close(
            in_order[name]['state_dict'][key], value, rtol=1e-4, atol=1e-5, msg=key
        )
    steps = in_order['whole']['optimizer']['state']
    for number, state in in_order[name]['optimizer']['state'].items():
        torch.testing.assert_close(
            state['momentum_buffer'], steps[number]['momentum_buffer'], rtol=1e-3, atol=1e-5
        )


@pytest.mark.parametrize('name, error', [('bfloat16', 0.1), ('float16', 0.04)])
def test_mixed_precision_trains_nearly_the_same(name: str, error: float, in_order: dict) -> None:
    start, exact, mixed = (in_order[run]['state_dict'] for run in ('start', 'cards', name))
    for key, value in exact.items():
        if value.dtype != torch.float32 or 'running' in key:
            continue
        update, expected = mixed[key] - start[key], value - start[key]
        assert not torch.equal(update, expected), f'{key} was computed in 32 bits'
        assert torch.norm(update - expected) < error * torch.norm(expected), key


def test_the_scale_of_float16_grows_with_good_steps_and_shrinks_with_overflow(
    in_order: dict,
) -> None:
    scales = {
        name: in_order[name]['optimizer']['loss_scaler']['scale']
        for name in ('float16', 'overflow')
    }
    # Four iterations are two steps of the optimizer.
    assert scales == {'float16': 2.0**12, 'overflow': 2.0**58}
    assert (
        'loss_scaler' not in in_order['bfloat16']['optimizer']
        or not in_order['bfloat16']['optimizer']['loss_scaler']
    )
    start = in_order['start']['state_dict']
    for key, value in in_order['overflow']['state_dict'].items():
        if 'running' not in key and 'num_batches' not in key:
            assert torch.equal(value, start[key]), key


def test_what_cards_are_given_for_speed_is_in_force(in_order: dict) -> None:
    weights, optimizer = in_order['cards']['state_dict'], in_order['cards']['optimizer']
    convolutions = [value for value in weights.values() if value.dim() == 4 and value.shape[2] > 1]
    assert len(convolutions) > 5
    assert all(value.is_contiguous(memory_format=torch.channels_last) for value in convolutions)
    assert [group['fused'] for group in optimizer['param_groups']] == [True]


def test_nccl_and_the_staged_group_give_two_ranks_the_same_bits(in_order: dict) -> None:
    for key, value in in_order['plain']['state_dict'].items():
        assert torch.equal(value, in_order['staged']['state_dict'][key]), key
