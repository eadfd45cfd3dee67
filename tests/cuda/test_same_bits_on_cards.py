"""Equal bits on CUDA devices: of a run resumed after a kill, and of 1, 2 and 4 processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from cards import launch_on_cards, logged, start_on_cards
from checkpoint_bits import checkpoint_bits
from support import check_finished, write_tiny_config

# Dropout is drawn by the device's generator; flips and colors in a worker process.
STATEFUL = """
model['decode_head']['dropout_ratio'] = 0.5
train_dataloader['num_workers'] = 1
train_dataloader['persistent_workers'] = True
optim_wrapper.update(type='AmpOptimWrapper', dtype='float16', accumulative_counts=2)
default_hooks['preview'] = None
default_hooks['checkpoint']['interval'] = 3
train_cfg = dict(type='IterBasedTrainLoop', max_iters=6, val_interval=6)
"""
STOP = """
custom_imports = dict(imports=['mapsage', 'fault_hooks'])
custom_hooks = [dict(type='StopBeforeIteration', iteration=5)]
"""


def test_a_killed_rank_is_named_and_its_run_resumes_to_the_same_bits(
    tiny_data: Path, tmp_path: Path
) -> None:
    config = write_tiny_config(tmp_path / 'tiny.py', tiny_data, STATEFUL)
    check_finished(launch_on_cards(config, '--work-dir', tmp_path / 'whole'))
    waiting = write_tiny_config(tmp_path / 'waiting.py', tiny_data, STATEFUL + STOP)
    run = start_on_cards(
        waiting,
        '--work-dir',
        tmp_path / 'cut',
        environ={'MAPSAGE_TEST_REACHED': str(tmp_path / 'reached')},
    )
    run.wait_for(tmp_path / 'reached')
    os.kill(run.ranks()[1], signal.SIGKILL)
    killed = run.finish()
    assert killed.status != 0 and killed.left_running == []
    assert 'rank 1 failed first' in killed.final_error, killed.output[-4000:]
    assert 'killed by SIGKILL' in killed.final_error
    assert not (tmp_path / 'cut' / 'iter_6.pth').exists()

    check_finished(launch_on_cards(config, '--work-dir', tmp_path / 'cut', '--resume'))
    whole, cut = (checkpoint_bits(tmp_path / name / 'iter_6.pth') for name in ('whole', 'cut'))
    assert whole == cut
    # The checkpoint is inside a cycle of accumulation, and the steps behind it were made again.
    losses, expected = logged(tmp_path / 'cut'), logged(tmp_path / 'whole')
    first_start = losses[:-3]  # rank 0 may have been ended before it logged its last step
    assert len(first_start) >= 3 and first_start == expected[: len(first_start)]
    assert losses[-3:] == expected[3:]


@pytest.fixture(scope='module')
def by_processes(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """Work dirs of one run of four virtual ranks, by the number of processes, each with a card."""
    folder = tmp_path_factory.mktemp('virtual')
    config = write_tiny_config(folder / 'tiny.py', tiny_data, STATEFUL)
    for processes in (1, 2, 4):
        check_finished(
            launch_on_cards(
                config,
                '--work-dir',
                folder / str(processes),
                '--cfg-options',
                'env_cfg.virtual_ranks=4',
                'env_cfg.reduction=ordered',
                cards=processes,
            )
        )
    return {processes: folder / str(processes) for processes in (1, 2, 4)}


@pytest.mark.parametrize('processes', [1, 2])
@pytest.mark.parametrize('iteration', [3, 6])
def test_ordered_sums_over_nccl_do_not_depend_on_processes(
    processes: int, iteration: int, by_processes: dict
) -> None:
    one, four = (by_processes[number] for number in (processes, 4))
    assert logged(one) == logged(four) and len(set(logged(four))) == 6
    assert checkpoint_bits(one / f'iter_{iteration}.pth') == checkpoint_bits(
        four / f'iter_{iteration}.pth'
    )
