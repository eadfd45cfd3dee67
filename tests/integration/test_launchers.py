"""Launchers beyond one torchrun on one machine, each with real processes on this one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Dict

import pytest
import torch
from ranks import free_port
from support import Launch, check_finished, on_host

pytestmark = on_host
LOAD = {'weights_only': False} if torch.__version__ >= '2' else {}


def check_both_trained(first: Launch, second: Launch, work: Path) -> None:
    outputs = [run.finish() for run in (first, second)]
    for finished in outputs:
        check_finished(finished)
    assert 'world size 2' in outputs[0].output
    assert torch.load(str(work / 'iter_2.pth'), **LOAD)['meta']['iter'] == 2


def test_two_nodes_by_torchrun(tiny_config: Path, tmp_path: Path) -> None:
    node = {'NNODES': '2', 'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': str(free_port())}
    options = ['--work-dir', tmp_path, '--cfg-options', 'train_cfg.max_iters=2']
    runs = [
        Launch(tiny_config, *options, ranks=1, environ={**node, 'NODE_RANK': str(rank)})
        for rank in range(2)
    ]
    check_both_trained(runs[0], runs[1], tmp_path)


def slurm(rank: int) -> Dict[str, str]:
    return {
        'SLURM_PROCID': str(rank),
        'SLURM_LOCALID': str(rank),
        'SLURM_NTASKS': '2',
        'SLURM_NODELIST': 'node[0-1]',
        'SLURM_JOB_ID': '77',
    }


def open_mpi(rank: int) -> Dict[str, str]:
    return {
        'OMPI_COMM_WORLD_RANK': str(rank),
        'OMPI_COMM_WORLD_SIZE': '2',
        'OMPI_COMM_WORLD_LOCAL_RANK': str(rank),
    }


@pytest.mark.parametrize('launcher, variables', [('slurm', slurm), ('mpi', open_mpi)])
def test_variables_of_other_launchers(
    launcher: str, variables, tiny_config: Path, tmp_path: Path
) -> None:
    rendezvous = {'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': str(free_port())}
    runs = [
        Launch(
            tiny_config,
            '--launcher',
            launcher,
            '--work-dir',
            tmp_path,
            '--cfg-options',
            'train_cfg.max_iters=2',
            command=[sys.executable, 'tools/train.py'],
            environ={**rendezvous, **variables(rank)},
        )
        for rank in range(2)
    ]
    check_both_trained(runs[0], runs[1], tmp_path)


def test_slurm_script_starts_a_rank(tiny_config: Path, tmp_path: Path) -> None:
    task = {
        **slurm(0),
        'SLURM_NTASKS': '1',
        'SLURM_STEP_ID': '0',
        'MASTER_ADDR': '127.0.0.1',
        'WORK_DIR': str(tmp_path),
    }
    finished = Launch(
        tiny_config,
        '--cfg-options',
        'train_cfg.max_iters=1',
        environ=task,
        command=['bash', 'scripts/slurm_train.sh'],
    ).finish()
    check_finished(finished)
    assert (tmp_path / 'iter_1.pth').exists()
