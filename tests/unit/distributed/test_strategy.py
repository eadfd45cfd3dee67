"""Every row of the decision table of docs/reference/config.md, and what holds for all of them."""

from __future__ import annotations

from typing import Any, Dict, Optional

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mapsage.distributed import Strategy, StrategyError, resolve_strategy
from mapsage.distributed.strategy import LAUNCHER_VARIABLES, format_bytes

GIB = 2**30
SINGLE, DATA, MODEL = (
    'single_device',
    'distributed_data_parallel',
    'model_parallel_single_process',
)
FITS = dict(needed_bytes=3 * GIB, device_bytes=4 * GIB)
TOO_BIG = dict(needed_bytes=5 * GIB, device_bytes=4 * GIB)
JUST_FITS = dict(needed_bytes=4 * GIB, device_bytes=4 * GIB)
MODEL_UNKNOWN = dict(needed_bytes=None, device_bytes=4 * GIB)
DEVICE_UNKNOWN = dict(needed_bytes=5 * GIB, device_bytes=None)

RENDEZVOUS = dict(MASTER_ADDR='node1', MASTER_PORT='29')


def leftovers(world_size: str = '8') -> Dict[str, str]:
    return dict(RANK='3', WORLD_SIZE=world_size, LOCAL_RANK='3', **RENDEZVOUS)


def torchrun(world_size: str = '8') -> Dict[str, str]:
    return dict(
        leftovers(world_size),
        LOCAL_WORLD_SIZE=world_size,
        GROUP_RANK='0',
        TORCHELASTIC_RUN_ID='none',
        TORCHELASTIC_USE_AGENT_STORE='True',
    )


def slurm(world_size: str = '8') -> Dict[str, str]:
    return dict(
        SLURM_PROCID='3', SLURM_NTASKS=world_size, SLURM_LOCALID='3', SLURM_NODELIST='node[1-2]'
    )


def mpi(world_size: str = '8') -> Dict[str, str]:
    return dict(
        OMPI_COMM_WORLD_RANK='3',
        OMPI_COMM_WORLD_SIZE=world_size,
        OMPI_COMM_WORLD_LOCAL_RANK='3',
        MASTER_ADDR='node1',
    )


@pytest.mark.parametrize(
    'wish, devices, memory, name, words',
    [
        (None, 1, {}, SINGLE, 'no launcher: one process on one device'),
        (None, 1, FITS, SINGLE, 'the model needs 3.00 GiB or more, a device has 4.00 GiB'),
        (
            None,
            1,
            TOO_BIG,
            SINGLE,
            'needs 5.00 GiB or more, a device has 4.00 GiB, so it will run out',
        ),
        (
            None,
            2,
            {},
            SINGLE,
            'one device of 2 (`bash scripts/start_8card_training.sh` trains on all)',
        ),
        (None, 2, FITS, SINGLE, 'one device of 2'),
        (None, 2, JUST_FITS, SINGLE, 'one device of 2'),
        (
            None,
            2,
            TOO_BIG,
            MODEL,
            '5.00 GiB or more, a device has 4.00 GiB; no launcher, so 2 devices',
        ),
        (None, 8, TOO_BIG, MODEL, '8 devices share it'),
        (None, 2, MODEL_UNKNOWN, SINGLE, 'one device of 2'),
        (None, 2, DEVICE_UNKNOWN, SINGLE, '5.00 GiB or more, memory of a device unknown'),
        (False, 1, {}, SINGLE, 'use_model_parallel=False: one process on one device'),
        (False, 2, FITS, SINGLE, 'use_model_parallel=False'),
        (False, 2, TOO_BIG, SINGLE, 'use_model_parallel=False.*so it will run out'),
        (True, 2, {}, MODEL, 'use_model_parallel=True: 2 devices share the model'),
        (True, 2, FITS, MODEL, 'use_model_parallel=True'),
        (True, 8, TOO_BIG, MODEL, 'use_model_parallel=True: 8 devices'),
        (True, 2, DEVICE_UNKNOWN, MODEL, 'use_model_parallel=True'),
    ],
)
def test_without_a_launcher(
    wish: Optional[bool], devices: int, memory: dict, name: str, words: str
) -> None:
    strategy = resolve_strategy(wish, {'HOME': '/'}, devices, **memory)
    assert (strategy.name, strategy.stale_variables) == (name, ())
    for part in words.split('.*'):
        assert part in strategy.reason


@pytest.mark.parametrize('wish', [None, False])
@pytest.mark.parametrize('devices, memory', [(1, {}), (2, {}), (2, TOO_BIG), (8, FITS)])
@pytest.mark.parametrize(
    'launcher, variables',
    [
        ('pytorch', torchrun()),
        ('pytorch', torchrun('1')),
        ('pytorch', leftovers()),
        ('slurm', slurm()),
        ('slurm', slurm('1')),
        ('mpi', mpi()),
        ('mpi', mpi('1')),
        # a launcher overrules what an earlier one left behind
        ('slurm', dict(leftovers(), **slurm())),
        ('mpi', dict(torchrun(), **mpi())),
    ],
)
def test_as_launched(
    wish: Optional[bool], devices: int, memory: dict, launcher: str, variables: dict
) -> None:
    strategy = resolve_strategy(wish, variables, devices, launcher=launcher, **memory)
    world_size = (
        variables.get('SLURM_NTASKS')
        or variables.get('OMPI_COMM_WORLD_SIZE')
        or variables['WORLD_SIZE']
    )
    assert strategy == Strategy(
        DATA,
        (),
        f'launcher {launcher} started {world_size} process(es): each trains the whole '
        f'model on a device of its own',
    )


@pytest.mark.parametrize(
    'launcher, variables', [('pytorch', torchrun('1')), ('slurm', slurm('1')), ('mpi', mpi('1'))]
)
def test_a_launcher_of_one_process_is_one_process(launcher: str, variables: dict) -> None:
    strategy = resolve_strategy(True, variables, 2, launcher=launcher)
    assert (strategy.name, strategy.stale_variables) == (MODEL, ())


@pytest.mark.parametrize(
    'variables, stale',
    [
        (leftovers(), ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'MASTER_ADDR', 'MASTER_PORT')),
        (leftovers('1'), ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'MASTER_ADDR', 'MASTER_PORT')),
        (dict(WORLD_SIZE='4'), ('WORLD_SIZE',)),
        (dict(RANK='0', LOCAL_RANK='0'), ('RANK', 'LOCAL_RANK')),
        (RENDEZVOUS, ('MASTER_ADDR', 'MASTER_PORT')),
        (dict(LOCAL_RANK='2'), ('LOCAL_RANK',)),
        (dict(LOCAL_RANK='0'), ()),  # MMSegmentation's tools/train.py sets it
        (dict(TORCHELASTIC_RUN_ID='none'), ('TORCHELASTIC_RUN_ID',)),
        (dict(TORCHELASTIC_RUN_ID='x', WORLD_SIZE='many'), ('WORLD_SIZE', 'TORCHELASTIC_RUN_ID')),
        (
            torchrun('1'),
            (
                'RANK',
                'WORLD_SIZE',
                'LOCAL_RANK',
                'LOCAL_WORLD_SIZE',
                'MASTER_ADDR',
                'MASTER_PORT',
                'GROUP_RANK',
                'TORCHELASTIC_RUN_ID',
                'TORCHELASTIC_USE_AGENT_STORE',
            ),
        ),
        (slurm(), ()),  # an interactive shell of an allocation; nothing of torch's reads these
        (dict(OMP_NUM_THREADS='4', NODE_RANK='0'), ()),
    ],
)
@pytest.mark.parametrize(
    'wish, devices, memory, name',
    [
        (None, 1, {}, SINGLE),
        (False, 2, {}, SINGLE),
        (True, 2, {}, MODEL),
        (None, 2, TOO_BIG, MODEL),
    ],
)
def test_leftovers_are_listed(
    variables: dict, stale: tuple, wish: Optional[bool], devices: int, memory: dict, name: str
) -> None:
    strategy = resolve_strategy(wish, variables, devices, **memory)
    assert (strategy.name, strategy.stale_variables) == (name, stale)


@pytest.mark.parametrize(
    'wish, environ, devices, launcher, words',
    [
        (True, {}, 1, 'none', 'needs two or more devices in one process, and 1 is visible'),
        (True, torchrun('1'), 1, 'pytorch', 'needs two or more devices'),
        (True, torchrun(), 8, 'pytorch', "works in one process, and launcher 'pytorch' started 8"),
        (True, slurm(), 8, 'slurm', "launcher 'slurm' started 8.*use_model_parallel=None"),
        (True, mpi(), 8, 'mpi', "launcher 'mpi' started 8.*tools/train.py"),
        (
            None,
            torchrun(),
            8,
            'none',
            r'torchrun started 8 processes \(this is rank 3\) with '
            '--launcher none.*Add --launcher pytorch',
        ),
        (False, torchrun('2'), 8, 'none', 'torchrun started 2 processes'),
        (True, torchrun(), 8, 'none', 'Add --launcher pytorch'),
        (
            None,
            dict(KUBERNETES_SERVICE_HOST='10.0.0.1', WORLD_SIZE='2', RANK='1', **RENDEZVOUS),
            1,
            'none',
            'a job of Kubernetes started 2 processes .this is rank 1.*Add --launcher pytorch',
        ),
        (None, {}, 0, 'none', 'no device is visible'),
        (True, {}, 0, 'none', 'no device is visible'),
        (None, torchrun(), 0, 'pytorch', 'no device is visible'),
        (None, {}, 1, 'pytorch', 'RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT.*not set'),
        (None, {}, 1, 'slurm', 'SLURM_PROCID.*not set'),
        (None, {}, 1, 'mpi', 'OMPI_COMM_WORLD_RANK.*not set'),
        (None, torchrun('no'), 1, 'pytorch', "WORLD_SIZE='no' processes: expected 1 or more"),
        (None, torchrun('0'), 1, 'pytorch', "WORLD_SIZE='0' processes"),
        (None, {}, 1, 'horovod', "unknown launcher 'horovod'"),
        (1, {}, 2, 'none', 'must be True, False or None, got 1'),
        ('yes', {}, 2, 'none', "got 'yes'"),
    ],
)
def test_refused(wish: Any, environ: dict, devices: int, launcher: str, words: str) -> None:
    with pytest.raises(StrategyError, match=words):
        resolve_strategy(wish, environ, devices, launcher=launcher)


@pytest.mark.parametrize('missing', sorted(set(leftovers()) - {'LOCAL_RANK'}))
def test_every_partial_set_under_a_launcher_names_what_is_missing(missing: str) -> None:
    environ = {name: value for name, value in leftovers().items() if name != missing}
    with pytest.raises(StrategyError, match=rf'\b{missing}, which are not set'):
        resolve_strategy(None, environ, 8, launcher='pytorch')


NAMES = st.sampled_from([*LAUNCHER_VARIABLES, *slurm(), *mpi(), 'SLURM_JOB_ID', 'HOME'])
VALUES = st.one_of(st.sampled_from(['', '0', '1', '2', '8', '-1', ' 3', '٣', '²']), st.text())
SIZES = st.one_of(st.none(), st.integers(0, 2**45))


@given(
    wish=st.one_of(st.sampled_from([None, True, False]), st.integers(), st.text()),
    environ=st.dictionaries(NAMES, VALUES),
    base=st.sampled_from([{}, torchrun(), slurm(), mpi()]),
    devices=st.integers(-1, 16),
    launcher=st.sampled_from(['none', 'pytorch', 'slurm', 'mpi', 'x']),
    needed=SIZES,
    device=SIZES,
)
def test_always_an_answer_that_obeys_the_rules(
    wish: Any,
    environ: dict,
    base: dict,
    devices: int,
    launcher: str,
    needed: Optional[int],
    device: Optional[int],
) -> None:
    environ = {**base, **environ}
    before = dict(environ)
    try:
        strategy = resolve_strategy(
            wish, environ, devices, launcher=launcher, needed_bytes=needed, device_bytes=device
        )
    except StrategyError as error:
        assert '. ' in str(error) or 'must be' in str(error) or 'expected' in str(error)
        return
    finally:
        assert environ == before
    too_big = None not in (needed, device) and needed > device
    assert strategy.reason and '\n' not in strategy.reason
    assert strategy.name in (SINGLE, DATA, MODEL)
    assert set(strategy.stale_variables) <= set(environ) & set(LAUNCHER_VARIABLES)
    assert (strategy.name == MODEL) == (
        wish is True or (wish is None and launcher == 'none' and devices > 1 and too_big)
    )
    assert (strategy.name == DATA) == (launcher != 'none' and wish is not True)
    if strategy.name == MODEL:
        assert devices > 1
    if launcher != 'none':
        assert strategy.stale_variables == ()
    # Cleared of them, the same question has the same answer.
    rest = {name: value for name, value in environ.items() if name not in strategy.stale_variables}
    again = resolve_strategy(
        wish, rest, devices, launcher=launcher, needed_bytes=needed, device_bytes=device
    )
    assert (again.name, again.stale_variables, again.reason) == (strategy.name, (), strategy.reason)


@pytest.mark.parametrize(
    'count, text',
    [(0, '0.0 MiB'), (2**20, '1.0 MiB'), (GIB - 1, '1024.0 MiB'), (3 * GIB // 2, '1.50 GiB')],
)
def test_bytes_for_people(count: int, text: str) -> None:
    assert format_bytes(count) == text
