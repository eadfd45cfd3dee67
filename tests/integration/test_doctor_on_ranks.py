"""The doctor as a user starts it: on one process and through the launcher."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from support import ROOT, Finished, check_finished, launch, no_simulated_cards

MISSING_ON_RANK_1 = """
if __import__('os').environ['RANK'] == '1':
    train_dataloader['dataset']['data_root'] = 'no_such'
"""

UNKNOWN_HOOK_ON_RANK_1 = """
if __import__('os').environ['RANK'] == '1':
    custom_hooks = [dict(type='NoSuchHook')]
"""


def doctor(*arguments: Any, **settings: Any) -> Finished:
    command = ['bash', str(ROOT / 'scripts' / 'doctor.sh')]
    return launch(*arguments, command=command, **settings)


@pytest.fixture(scope='module')
def sim() -> None:
    reason = no_simulated_cards()
    if reason is not None:
        pytest.skip(reason)


def test_well(tiny_config: Path) -> None:
    finished = doctor(tiny_config, '--accelerator', 'cpu')
    check_finished(finished)
    assert finished.output.count('\ninstalled\n') == 1, 'one rank prints'
    for words in (
        'distributed_data_parallel: launcher pytorch started 2',
        'ok       rank 1 on ',
        'ok       2 ranks got the right answers over gloo',
        '\nrun\n  ok       it can be built',
        'result: training would start',
    ):
        assert words in finished.output


def test_one_process(tiny_config: Path) -> None:
    finished = launch(
        tiny_config, '--accelerator', 'cpu', command=[sys.executable, 'tools/doctor.py']
    )
    check_finished(finished)
    assert 'result: training would start' in finished.output
    assert '\nrun\n  ok       it can be built' in finished.output
    work_dir = tiny_config.with_name('work')
    finished = launch(
        tiny_config,
        '--work-dir',
        work_dir,
        '--cfg-options',
        'optim_wrapper.type=NoSuchWrapper',
        command=[sys.executable, 'tools/doctor.py'],
    )
    assert finished.status == 1 and 'the run cannot be built: ' in finished.output
    assert not work_dir.exists()


def test_a_run_that_cannot_be_built(tiny_config: Path) -> None:
    tiny_config.write_text(tiny_config.read_text() + UNKNOWN_HOOK_ON_RANK_1)
    finished = doctor(tiny_config, '--accelerator', 'cpu')
    assert finished.status == 1 and finished.left_running == []
    assert 'on rank(s) [1]: the run cannot be built there: ' in finished.output
    assert 'NoSuchHook' in finished.output
    assert 'training would not start, 1 problem(s)' in finished.output


def test_one_rank_lacks_its_data(tiny_config: Path) -> None:
    tiny_config.write_text(tiny_config.read_text() + MISSING_ON_RANK_1)
    finished = doctor(tiny_config, '--accelerator', 'cpu')
    assert finished.status == 1 and finished.left_running == []
    assert 'on rank(s) [1]: train_dataloader: no_such does not exist' in finished.output
    assert '2 ranks got the right answers' in finished.output, 'tested all the same'
    assert 'training would not start, 1 problem(s)' in finished.output
    assert 'doctor: 1 problem(s), see its report above' in finished.final_error


def test_bad_backend(tiny_config: Path) -> None:
    finished = doctor(
        tiny_config, '--accelerator', 'cpu', '--cfg-options', 'env_cfg.dist_cfg.backend=eccl'
    )
    assert finished.status == 1 and finished.left_running == []
    assert "problem  backend 'eccl' cannot be used" in finished.output
    assert 'not tested: not every rank has a device' in finished.output
    assert 'Traceback' not in finished.output.split('result:')[0]


@pytest.mark.parametrize(
    'environ, words',
    [
        (
            dict(MAPSAGE_SIM_FAULTS='absent=1@1'),
            ['no       rank 1 on', 'on rank(s) [1]: ', 'gcu:1 does not answer', 'not tested'],
        ),
        (dict(MAPSAGE_SIM_DEVICES='1'), ['2 ranks were started on this node and accelerator']),
        (dict(MAPSAGE_SIM_FAULTS='stall=2@1'), ['did not end within 5 s', 'on rank(s) [0, 1]: ']),
    ],
    ids=['absent', 'too few', 'stall'],
)
def test_simulated_faults(environ: dict, words: list, sim: None, tiny_config: Path) -> None:
    finished = doctor(
        tiny_config,
        '--cfg-options',
        'env_cfg.dist_cfg.timeout=5',
        environ={'ACCELERATOR': 'sim', **environ},
    )
    assert finished.status == 1 and finished.left_running == []
    for word in words:
        assert word in finished.output, finished.output[-4000:]
    assert 'training would not start, 1 problem(s)' in finished.output
