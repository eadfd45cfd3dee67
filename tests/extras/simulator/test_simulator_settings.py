"""The simulator's settings are read or refused by name."""

from __future__ import annotations

import pytest

from mapsage.extras.simulator import (
    SimulatorError,
    SimulatorSettings,
    Wire64,
    read_settings,
)


def test_nothing_set_is_eight_devices_without_limits() -> None:
    assert read_settings({}) == SimulatorSettings()
    assert SimulatorSettings().devices == 8


def test_a_mask_chooses_and_orders_the_cards() -> None:
    seen = read_settings(
        {
            'TOPS_VISIBLE_DEVICES': '5, 2',
            'MAPSAGE_SIM_FAULTS': 'absent=2',
            'MAPSAGE_SIM_MODELS': 'A,A,B,A,A,C,A,A',
        }
    )
    assert (seen.devices, seen.cards, seen.models, seen.absent) == (2, (5, 2), ('C', 'B'), {1})
    assert read_settings({'MAPSAGE_SIM_MODELS': 'S60'}).models == ('S60',) * 8


@pytest.mark.parametrize(
    'text, expected',
    [('1048576', 2**20), ('64M', 64 * 2**20), ('2g', 2 * 2**30), ('3KB', 3 * 2**10)],
)
def test_memory(text: str, expected: int) -> None:
    assert read_settings({'MAPSAGE_SIM_MEMORY': text}).memory == expected


def test_faults_of_one_rank_and_of_all() -> None:
    faults = {'MAPSAGE_SIM_FAULTS': 'allocation=120@1, absent=3,absent=4@0,stall=5@2'}
    by_rank = [read_settings({**faults, 'RANK': str(rank)}) for rank in range(3)]
    assert [each.failing_allocation for each in by_rank] == [0, 120, 0]
    assert [each.absent for each in by_rank] == [{3, 4}, {3}, {3}]
    assert [each.stalled_collective for each in by_rank] == [0, 0, 5]
    assert read_settings(faults).absent == {3, 4}  # no launcher: rank 0


def test_the_profile_is_the_newest_with_public_source_or_the_one_named() -> None:
    assert read_settings({}).profile.name == '2.10'
    named = read_settings({'MAPSAGE_SIM_GCU': '2.11'}).profile
    assert named.name == '2.11' and named.wire_64 is Wire64.REDUCTIONS_REFUSED


def test_strictness() -> None:
    everything = read_settings({'MAPSAGE_SIM_STRICT': '1'})
    assert everything.refuse_float64 and everything.refuse_wide_int64
    assert 'aten::batch_norm_stats' in everything.refused_ops
    some = read_settings({'MAPSAGE_SIM_STRICT': 'float64,aten::bernoulli_'})
    assert some.refuse_float64 and not some.refuse_wide_int64
    assert some.refused_ops == ('aten::bernoulli_',)
    assert not some.needs_workspace_setting and not everything.needs_workspace_setting
    assert read_settings({'MAPSAGE_SIM_STRICT': 'cublas'}).needs_workspace_setting
    assert read_settings({'MAPSAGE_SIM_STRICT': '0'}) == SimulatorSettings()


@pytest.mark.parametrize(
    'name, value, words',
    [
        ('MAPSAGE_SIM_DEVICES', 'eight', ['eight', '1 to 64']),
        ('MAPSAGE_SIM_DEVICES', '0', ["'0'", '1 to 64']),
        ('MAPSAGE_SIM_MEMORY', '2T', ['2T', '64M']),
        ('MAPSAGE_SIM_MEMORY', '0', ["'0'", '64M']),
        ('MAPSAGE_SIM_FAULTS', 'alocation=3', ['alocation=3', 'Did you mean allocation']),
        ('MAPSAGE_SIM_FAULTS', 'stall', ["'stall'", 'stall=N']),
        ('MAPSAGE_SIM_STRICT', 'double', ['double', 'float64', 'cublas']),
        ('MAPSAGE_SIM_RANDOM', 'own', ["'own'", 'cpu or device']),
        ('MAPSAGE_SIM_GCU', '2.1', ["'2.1'", '2.10, 2.10-int64, 2.11', 'Did you mean 2.1']),
        ('MAPSAGE_SIM_MODELS', 'A,B', ["'A,B'", 'or 8']),
        ('TOPS_VISIBLE_DEVICES', '', ["''", '0 to 7']),
        ('TOPS_VISIBLE_DEVICES', '8', ["'8'", '0 to 7']),
        ('TOPS_VISIBLE_DEVICES', '1,1', ["'1,1'", 'different']),
    ],
)
def test_what_cannot_be_read(name: str, value: str, words: list) -> None:
    with pytest.raises(SimulatorError) as caught:
        read_settings({name: value})
    assert name in str(caught.value)
    for word in words:
        assert word in str(caught.value)
