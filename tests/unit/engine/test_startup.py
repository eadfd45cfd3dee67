"""The steps that every process starts with."""

from __future__ import annotations

import os
from typing import Any, Dict

import mmengine.device.utils
import pytest
import torch
import torch.distributed as dist
from mmengine.device import get_device
from support import no_simulated_cards

from mapsage.accelerator import (
    AcceleratorError,
    current_accelerator,
    resolve_accelerator,
    set_current_accelerator,
)
from mapsage.distributed import LauncherError, StrategyError, local_rank
from mapsage.distributed.groups.process_group import select_device
from mapsage.distributed.strategy import LAUNCHER_VARIABLES
from mapsage.engine.startup import choose_accelerator, identify_process, join_ranks

simulated = pytest.mark.skipif(no_simulated_cards() is not None, reason=str(no_simulated_cards()))
LEFTOVERS = dict(RANK='3', WORLD_SIZE='8', LOCAL_RANK='3', MASTER_ADDR='10.255.255.1')
MPI = dict(
    OMPI_COMM_WORLD_RANK='5',
    OMPI_COMM_WORLD_SIZE='8',
    OMPI_COMM_WORLD_LOCAL_RANK='1',
    OMPI_COMM_WORLD_LOCAL_SIZE='4',
    MASTER_ADDR='10.255.255.1',
)
# Port 0 lets the system choose a free one: a single rank is the only one that needs to know it.
ALONE = dict(
    RANK='0',
    WORLD_SIZE='1',
    LOCAL_RANK='0',
    LOCAL_WORLD_SIZE='1',
    MASTER_ADDR='127.0.0.1',
    MASTER_PORT='0',
)


@pytest.fixture(autouse=True)
def _process_as_before(monkeypatch: pytest.MonkeyPatch) -> Any:
    before = dict(os.environ)
    for name in (*LAUNCHER_VARIABLES, *MPI):
        os.environ.pop(name, None)
    monkeypatch.setattr(mmengine.device.utils, 'DEVICE', mmengine.device.utils.DEVICE)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)
    set_current_accelerator(resolve_accelerator('cpu'))


def test_a_single_process_clears_what_another_launcher_left() -> None:
    os.environ.update(LEFTOVERS)
    assert identify_process('none') == LEFTOVERS
    assert not set(LEFTOVERS) & set(os.environ)
    assert local_rank() == 0


@pytest.mark.parametrize('launcher, variables, rank', [('pytorch', ALONE, 0), ('mpi', MPI, 1)])
def test_a_launched_process_keeps_its_variables(
    launcher: str, variables: Dict[str, str], rank: int
) -> None:
    os.environ.update(variables)
    assert identify_process(launcher) == {}
    assert local_rank() == rank
    assert {name: os.environ[name] for name in variables} == variables


@pytest.mark.parametrize(
    'launcher, variables, want', [('mpi', MPI, '4321'), ('pytorch', ALONE, '0')]
)
def test_the_port_of_the_config_is_for_launchers_that_name_none(
    launcher: str, variables: Dict[str, str], want: str
) -> None:
    """As under MMEngine it comes before MASTER_PORT; torchrun's ranks meet where torchrun says."""
    os.environ.update({'MASTER_PORT': '77', **variables})
    identify_process(launcher, 4321)
    assert os.environ['MASTER_PORT'] == want


def test_mpi_is_translated_for_torch() -> None:
    os.environ.update(MPI)
    identify_process('mpi')
    assert (os.environ['RANK'], os.environ['WORLD_SIZE'], os.environ['LOCAL_WORLD_SIZE']) == (
        '5',
        '8',
        '4',
    )


@pytest.mark.parametrize(
    'launcher, variables, words',
    [
        ('pytorch', {}, 'RANK, WORLD_SIZE, LOCAL_RANK'),
        ('slurm', LEFTOVERS, 'SLURM_PROCID'),
        ('none', dict(LEFTOVERS, TORCHELASTIC_RUN_ID='1'), 'Add --launcher pytorch'),
    ],
)
def test_refused_without_a_change(launcher: str, variables: Dict[str, str], words: str) -> None:
    os.environ.update(variables)
    before = dict(os.environ)
    with pytest.raises((StrategyError, LauncherError), match=words):
        identify_process(launcher)
    assert dict(os.environ) == before


@simulated
def test_the_accelerator_is_in_force_for_mmengine_too() -> None:
    accelerator = choose_accelerator('sim')
    assert accelerator.name == 'sim' and current_accelerator() is accelerator
    assert get_device() == accelerator.device_type != 'cpu'
    assert choose_accelerator('cpu').name == 'cpu' and get_device() == 'cpu'


@simulated
def test_more_ranks_than_devices_are_refused() -> None:
    accelerator = choose_accelerator('sim')
    os.environ['LOCAL_WORLD_SIZE'] = str(accelerator.device_count() + 1)
    with pytest.raises(AcceleratorError, match='ranks were started on this node'):
        select_device(accelerator)


@simulated
def test_a_process_without_a_launcher_joins_nobody() -> None:
    accelerator = choose_accelerator('sim')
    accelerator.set_device(1)
    join_ranks('none', accelerator, 'auto', 30)
    assert not dist.is_initialized()
    assert accelerator.device(0).index == 0 == _current_device(accelerator)


def test_a_second_runner_keeps_the_process_group() -> None:
    os.environ.update(ALONE)
    identify_process('pytorch')
    accelerator = choose_accelerator('cpu')
    join_ranks('pytorch', accelerator, 'auto', 30)
    group = dist.group.WORLD
    join_ranks('pytorch', accelerator, 'auto', 30)
    assert dist.group.WORLD is group and dist.get_world_size() == 1


def _current_device(accelerator: Any) -> int:
    return torch.empty(0, device=accelerator.device_type).device.index
