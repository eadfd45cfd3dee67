"""Environment variables that contradict the run, or that nothing reads."""

from __future__ import annotations

from typing import Any, Dict, List, Tuple

import pytest

from mapsage.accelerator import ACCELERATORS
from mapsage.accelerator.gcu import INT64_VARIABLE
from mapsage.commands.doctor.environment import check_environment
from mapsage.commands.doctor.finding import Finding
from mapsage.extras.simulator import read_settings

KINDS = {kind.name: kind for kind in ACCELERATORS}


def found(
    environ: Dict[str, str], accelerator: Any = 'cpu', launcher: str = 'none'
) -> List[Tuple[str, str]]:
    kind = KINDS.get(accelerator)
    # an instance without its devices: only its name is asked for
    instance: Any = None if kind is None else object.__new__(kind)
    if accelerator == 'sim':
        version = environ.get('MAPSAGE_SIM_GCU', '')
        instance.settings = read_settings(dict(MAPSAGE_SIM_GCU=version))
    return [
        (each.level, f'{each.text} -> {each.next_step}')
        for each in check_environment(environ, instance, launcher)
    ]


@pytest.mark.parametrize('accelerator', [None, *KINDS])
def test_nothing_to_say(accelerator: Any) -> None:
    assert (
        found(
            dict(HOME='/', OMP_NUM_THREADS='1', ACCELERATOR='', LOCAL_WORLD_SIZE='8'), accelerator
        )
        == []
    )


@pytest.mark.parametrize(
    'accelerator, name',
    [
        ('cuda', 'CUDA_VISIBLE_DEVICES'),
        ('cuda', 'HIP_VISIBLE_DEVICES'),
        ('gcu', 'TOPS_VISIBLE_DEVICES'),
        ('gcu_t20', 'TOPS_VISIBLE_DEVICES'),
        ('sim', 'TOPS_VISIBLE_DEVICES'),
    ],
)
@pytest.mark.parametrize(
    'value, launcher, level, words',
    [
        ('0,1', 'pytorch', 'ok', '=0,1'),
        ('0, 1,2', 'pytorch', 'ok', '=0, 1,2'),
        ('0', 'pytorch', 'ok', 'one card, which no other rank of this machine may have'),
        ('', 'pytorch', 'problem', 'shows 0 device(s)'),
        ('0', 'none', 'ok', '=0'),
        ('', 'none', 'problem', 'shows 0 device(s)'),
        ('1,1', 'pytorch', 'problem', '=1,1 names a device twice'),
    ],
)
def test_hidden_devices(
    accelerator: str, name: str, value: str, launcher: str, level: str, words: str
) -> None:
    (got,) = found({name: value, 'LOCAL_WORLD_SIZE': '2'}, accelerator, launcher)
    assert got[0] == level and name in got[1] and words in got[1]


@pytest.mark.parametrize('accelerator', [None, 'cpu', 'xla'])
def test_another_vendors_variable_is_no_matter(accelerator: Any) -> None:
    assert found(dict(CUDA_VISIBLE_DEVICES='', TOPS_VISIBLE_DEVICES='0,0'), accelerator) == []


@pytest.mark.parametrize(
    'name, instead',
    [
        ('GCU_VISIBLE_DEVICES', 'TOPS_VISIBLE_DEVICES'),
        ('GCU_DEVICE_COUNT', 'NPROC_PER_NODE'),
        ('GCU_DISABLE_AMP', '--amp'),
        ('GCU_MEMORY_FRACTION', 'batch'),
        ('ECCL_BACKEND', 'dist_cfg.backend'),
        ('ECCL_DEVICE_TYPE', 'env_cfg.accelerator'),
        ('PTEX_DDP_BACKEND', 'dist_cfg.backend'),
    ],
)
def test_variables_that_nothing_reads(name: str, instead: str) -> None:
    ((level, text),) = found({name: '5'})
    assert level == 'note' and instead in text
    assert f'{name}=5: no Enflame software that we know reads this' in text


def test_variables_that_others_read() -> None:
    ((level, text),) = found(dict(ENFLAME_VISIBLE_DEVICES='0'), 'gcu')
    assert level == 'note' and 'container runtime only' in text
    for name, option in (('ACCELERATOR', '--accelerator'), ('WORK_DIR', '--work-dir')):
        ((level, text),) = found({name: 'gcu'})
        assert level == 'note' and f'give {option} gcu here' in text
        assert found({name: 'gcu'}, launcher='pytorch') == []


def test_faults_are_the_simulators() -> None:
    ((level, text),) = found(dict(MAPSAGE_SIM_FAULTS='stall=1'), 'sim')
    assert level == 'note' and 'MAPSAGE_SIM_FAULTS=stall=1' in text
    assert found(dict(MAPSAGE_SIM_FAULTS='stall=1'), 'cpu') == []


def test_whole_int64_is_a_problem_of_the_gcus() -> None:
    ((level, text),) = found({INT64_VARIABLE: '1'}, 'gcu')
    assert level == 'problem' and f'{INT64_VARIABLE}=1' in text
    assert found({INT64_VARIABLE: '1'}, 'cuda') == []
    ((level, text),) = found(dict(MAPSAGE_SIM_GCU='2.10-int64'), 'sim')
    assert level == 'problem' and 'unset MAPSAGE_SIM_GCU' in text


def test_how_a_finding_prints() -> None:
    assert str(Finding('problem', 'it is late', 'hurry')) == (
        '  problem  it is late\n             -> hurry'
    )
    assert str(Finding('ok', 'fine')) == '  ok       fine'
