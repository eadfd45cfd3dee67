"""The names of ``torch.gcu`` that torch_gcu 2.10 has, and what they do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import no_simulated_cards
from test_simulator import run_python

from mapsage.accelerator import resolve_accelerator

reason = no_simulated_cards()
pytestmark = pytest.mark.skipif(reason is not None, reason=str(reason))


@pytest.fixture(scope='module', autouse=True)
def sim() -> Any:
    return resolve_accelerator('sim')


def test_streams_and_events() -> None:
    stream = torch.gcu.Stream(2, priority=-1)
    assert isinstance(stream, torch.Stream) and stream.device == torch.device('gcu:2')
    assert torch.gcu.current_stream(3).device.index == 3
    assert torch.gcu.default_stream() == torch.gcu.current_stream()
    with torch.gcu.stream(stream):
        assert torch.gcu.current_device() == 2
        assert torch.zeros(1, device='gcu').device.index == 2
    assert torch.gcu.current_device() == 0
    with torch.gcu.stream(None):
        assert torch.gcu.current_device() == 0
    begin, end = (torch.gcu.Event(enable_timing=True) for _ in range(2))
    begin.record(stream)
    stream.wait_event(begin)
    torch.ones(100, 100).sum()
    stream.record_event(end)
    end.synchronize()
    assert end.query() and stream.query() and 0 < begin.elapsed_time(end) < 60_000
    stream.wait_stream(torch.gcu.current_stream())
    stream.synchronize()


def test_a_tensor_chooses_the_current_device() -> None:
    with torch.gcu.device_of(torch.ones(1, device='gcu:4')):
        assert torch.gcu.current_device() == 4
        with torch.gcu.device_of(torch.ones(1)):
            assert torch.gcu.current_device() == 4
    torch.gcu.set_device(-1)
    assert torch.gcu.current_device() == 0


def test_memory_under_the_keys_of_cuda() -> None:
    kept = torch.ones(1000, device='gcu:5')
    stats = torch.gcu.memory_stats(5)
    assert stats['allocated_bytes.all.current'] == torch.gcu.memory_allocated(5) >= 4000
    assert stats['reserved_bytes.all.peak'] == torch.gcu.max_memory_reserved(5)
    assert torch.gcu.memory_reserved(5) == torch.gcu.memory_allocated(5)
    del kept


def test_properties_have_no_uuid() -> None:
    """Row 20."""
    properties = torch.gcu.get_device_properties(1)
    assert not hasattr(properties, 'uuid') and properties.name == torch.gcu.get_device_name(1)
    assert (properties.major, properties.minor) == torch.gcu.get_device_capability() == (3, 0)
    assert properties.total_memory == torch.gcu.mem_get_info(1)[1]
    assert torch.gcu.can_device_access_peer(0, 1) and not torch.gcu.can_device_access_peer(1, 1)
    assert torch.gcu.is_fp16_supported() and not torch.gcu.is_current_stream_capturing()


def test_efml_names_the_card_behind_a_mask(tmp_path: Path) -> None:
    """Row 20."""
    done = run_python(
        'print(torch.gcu._raw_device_uuid_efml(), torch.gcu._get_efml_device_index(1))',
        tmp_path,
        MAPSAGE_SIM_DEVICES='3',
        TOPS_VISIBLE_DEVICES='0,2',
    )
    assert done.stdout.strip() == "['SIM-0', 'SIM-1', 'SIM-2'] 2"


def test_generators_and_states_of_all_devices() -> None:
    states = torch.gcu.get_rng_state_all()
    assert len(states) == len(torch.gcu.default_generators) == 8
    generator = torch.gcu.default_generators[3].manual_seed(5)
    assert generator.initial_seed() == 5 and generator.device == torch.device('gcu:3')
    first = torch.rand(2, device='gcu:3').cpu()
    generator.manual_seed(5)
    state = generator.get_state()
    assert torch.equal(torch.rand(2, device='gcu:3').cpu(), first)
    generator.set_state(state)
    assert torch.equal(torch.rand(2, device='gcu:3').cpu(), first)
    torch.gcu.seed_all()
    assert torch.gcu.initial_seed() != 5
    before = torch.gcu.initial_seed()
    torch.gcu.seed()
    assert torch.gcu.initial_seed() != before
    torch.gcu.set_rng_state_all(states)
    assert torch.equal(torch.gcu.get_rng_state(7), states[7])
