"""The strategy as a user meets it: what is cleared, what is refused, what is said."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support import check_finished, launch, no_simulated_cards, write_tiny_config, write_tiny_data

SHORT = ('--accelerator', 'cpu', '--cfg-options', 'train_cfg.max_iters=1')
LEFTOVERS = dict(
    RANK='3', WORLD_SIZE='8', LOCAL_RANK='3', MASTER_ADDR='10.255.255.1', MASTER_PORT='1'
)


def test_leftovers_are_cleared_and_named(tiny_config: Path, tmp_path: Path) -> None:
    finished = launch(
        tiny_config,
        '--work-dir',
        tmp_path / 'work',
        *SHORT,
        environ=LEFTOVERS,
        command=[sys.executable, 'tools/train.py'],
    )
    check_finished(finished)
    for name, value in LEFTOVERS.items():
        assert f'{name}={value}' in finished.output
    assert 'cleared the launcher variables RANK=3' in finished.output
    assert 'strategy single_device: no launcher: one process' in finished.output
    assert 'world size 1' in finished.output and (tmp_path / 'work' / 'iter_1.pth').exists()


def test_launched(tiny_config: Path, tmp_path: Path) -> None:
    finished = launch(tiny_config, '--work-dir', tmp_path / 'work', *SHORT)
    check_finished(finished)
    said = 'strategy distributed_data_parallel: launcher pytorch started 2 process(es)'
    assert finished.output.count(said) == 1
    assert 'cleared the launcher variables' not in finished.output


def test_a_forgotten_launcher_option(tiny_config: Path, tmp_path: Path) -> None:
    finished = launch(
        '--nproc_per_node',
        '2',
        '--rdzv_backend',
        'c10d',
        '--rdzv_endpoint',
        'localhost:0',
        'tools/train.py',
        tiny_config,
        '--work-dir',
        tmp_path / 'work',
        *SHORT,
        command=[sys.executable, 'tools/launch.py'],
    )
    assert finished.status == 1 and finished.left_running == []
    assert 'StrategyError: torchrun started 2 processes' in finished.final_error
    assert 'Add --launcher pytorch' in finished.final_error
    assert not list(tmp_path.glob('**/*.pth'))


# Weights, gradients and momentum take 36 MiB; activations of 32x32 pixels are small next to that.
FAT = """
model['backbone'].update(base_channels=128)
model['decode_head'].update(in_channels=128)
model['data_preprocessor'].update(size=(32, 32))
train_dataloader['batch_size'] = 1
"""


@pytest.mark.parametrize(
    'memory, options, strategy',
    [
        ('32M', [], 'model_parallel_single_process: the model needs'),
        (
            '2G',
            ['model_wrapper_cfg.type=MMModelParallel', 'model_wrapper_cfg.devices=[0,3]'],
            'model_parallel_single_process: use_model_parallel=True: 2 devices share the model',
        ),
    ],
    ids=['too big', 'wanted'],
)
def test_model_parallel_trains(memory: str, options: list, strategy: str, tmp_path: Path) -> None:
    reason = no_simulated_cards()
    if reason is not None:
        pytest.skip(reason)
    data = write_tiny_data(tmp_path / 'data', train=2, val=1, size=32)
    config = write_tiny_config(tmp_path / 'fat.py', data, FAT)
    finished = launch(
        config,
        '--work-dir',
        tmp_path / 'work',
        '--accelerator',
        'sim',
        '--cfg-options',
        'train_cfg.max_iters=1',
        *options,
        command=[sys.executable, 'tools/train.py'],
        environ=dict(MAPSAGE_SIM_DEVICES='4', MAPSAGE_SIM_MEMORY=memory),
    )
    check_finished(finished)
    assert finished.output.count(f'strategy {strategy}') == 1, finished.output[-4000:]
    assert (tmp_path / 'work' / 'iter_1.pth').exists()
