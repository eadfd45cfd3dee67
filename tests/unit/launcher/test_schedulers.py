"""Which machine of how many this is: the user's variables, and those of each scheduler."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Dict

import pytest
from support import ROOT

from mapsage_launcher.schedulers import (
    Machines,
    SchedulerError,
    has_meeting_options,
    read_machines,
)

KUBEFLOW = dict(
    PET_NNODES='2',
    PET_NODE_RANK='1',
    PET_NPROC_PER_NODE='auto',
    PET_MASTER_ADDR='job-node-0-0.job',
    PET_MASTER_PORT='29400',
)
PYTORCH_JOB = dict(
    KUBERNETES_SERVICE_HOST='10.0.0.1',
    RANK='1',
    WORLD_SIZE='3',
    MASTER_ADDR='job-master-0',
    MASTER_PORT='23456',
)
SKYPILOT = dict(
    SKYPILOT_NUM_NODES='2',
    SKYPILOT_NODE_RANK='1',
    SKYPILOT_NODE_IPS='10.1.0.4\n10.1.0.5',
    SKYPILOT_NUM_GPUS_PER_NODE='8',
)
VOLCANO = dict(VC_WORKER_HOSTS='job-worker-0.job,job-worker-1.job', VC_TASK_INDEX='1')
SLURM = dict(SLURM_NNODES='2', SLURM_NODEID='1', SLURM_STEP_NUM_NODES='2')


@pytest.mark.parametrize(
    'environ, machines',
    [
        ({}, Machines()),
        (dict(NNODES=''), Machines()),
        (
            dict(NNODES='2', NODE_RANK='1', MASTER_ADDR='a'),
            Machines('2', '1', 'a', '29500'),
        ),
        (dict(NNODES='2:4'), Machines('2:4')),
        (KUBEFLOW, Machines('2', '1', 'job-node-0-0.job', '29400', 'PET_NNODES')),
        (dict(KUBEFLOW, PET_NNODES='1'), Machines()),
        # What the user sets wins, one by one.
        (
            dict(KUBEFLOW, MASTER_PORT='7'),
            Machines('2', '1', 'job-node-0-0.job', '7', 'PET_NNODES'),
        ),
        (
            dict(KUBEFLOW, NNODES='3', NODE_RANK='2', MASTER_ADDR='a'),
            Machines('3', '2', 'a', '29400'),
        ),
        (PYTORCH_JOB, Machines('3', '1', 'job-master-0', '23456', 'WORLD_SIZE')),
        # A shell in which torchrun has left its variables.
        (dict(RANK='1', WORLD_SIZE='3', MASTER_ADDR='a'), Machines()),
        (dict(PYTORCH_JOB, LOCAL_RANK='0'), Machines()),
        (SKYPILOT, Machines('2', '1', '10.1.0.4', '29500', 'SKYPILOT_NUM_NODES')),
        (VOLCANO, Machines('2', '1', 'job-worker-0.job', '29500', 'VC_WORKER_HOSTS')),
        (dict(VOLCANO, VC_WORKER_HOSTS='job-worker-0.job', VC_TASK_INDEX='0'), Machines()),
        (dict(SLURM_NNODES='1'), Machines()),
        (
            dict(SLURM, NNODES='2', MASTER_ADDR='node1'),
            Machines('2', '1', 'node1', '29500'),
        ),
    ],
)
def test_machines(environ: Dict[str, str], machines: Machines) -> None:
    assert read_machines(environ) == machines


@pytest.mark.parametrize(
    'environ, words',
    [
        (dict(KUBEFLOW, NNODES='1'), 'NNODES=1, and PET_NNODES says .* 2 machines'),
        (dict(SKYPILOT, NNODES='1'), 'SKYPILOT_NUM_NODES says'),
        (dict(VOLCANO, NNODES='1'), 'VC_WORKER_HOSTS says'),
        (dict(PYTORCH_JOB, NNODES='1'), 'WORLD_SIZE says'),
        (dict(SLURM, NNODES='1'), 'SLURM_STEP_NUM_NODES says'),
        (SLURM, 'SLURM_STEP_NUM_NODES=2, .* sbatch scripts/slurm_train.sh'),
        (dict(KUBEFLOW, PET_NNODES='two'), "PET_NNODES='two': expected a number"),
        (dict(KUBEFLOW, PET_NODE_RANK='٣'), "NODE_RANK='٣': expected the number"),
        (dict(KUBEFLOW, PET_NODE_RANK='2'), 'NODE_RANK=2 with 2 machines: expected 0 to 1'),
        (dict(SKYPILOT, SKYPILOT_NUM_NODES='-1'), "SKYPILOT_NUM_NODES='-1'"),
        (dict(SKYPILOT, SKYPILOT_NODE_IPS=''), 'needs MASTER_ADDR.* SKYPILOT_NUM_NODES does not'),
        (dict(PYTORCH_JOB, RANK='x'), "RANK='x': expected a number"),
        (dict(SLURM, SLURM_STEP_NUM_NODES='2(x3)'), 'SLURM_STEP_NUM_NODES='),
        (dict(VOLCANO, VC_MASTER_HOSTS='job-master-0.job'), 'VC_MASTER_HOSTS, VC_WORKER_HOSTS'),
        (dict(NNODES='2'), 'NNODES=2 needs MASTER_ADDR'),
        (dict(NNODES='0'), "NNODES='0': expected a number of machines"),
        (dict(NNODES='2', MASTER_ADDR='a', MASTER_PORT='b'), "MASTER_PORT='b': expected a port"),
    ],
)
def test_contradictions(environ: Dict[str, str], words: str) -> None:
    with pytest.raises(SchedulerError, match=words):
        read_machines(environ)


def test_options_of_torchrun_are_the_users_own_choice() -> None:
    assert has_meeting_options(['--nnodes=2', 'tools/train.py'])
    assert has_meeting_options(['--standalone', '--nproc_per_node', '2', 'tools/train.py'])
    assert not has_meeting_options(['--nproc_per_node', '2', 'tools/train.py', '--nnodes', '3'])


def test_no_pod_trains_alone() -> None:
    """The script of a pod reads the job's variables; the contradiction is said within the start."""
    done = subprocess.run(
        ['bash', 'scripts/start_8card_training.sh'],
        cwd=str(ROOT),
        timeout=60,
        env={**os.environ, **KUBEFLOW, 'NNODES': '1', 'MAPSAGE_PYTHON': sys.executable},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        universal_newlines=True,
    )
    assert done.returncode == 1
    assert done.stdout.startswith('error: NNODES=1, and PET_NNODES says that this job has 2')
