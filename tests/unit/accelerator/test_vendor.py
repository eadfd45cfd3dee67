"""The typed view of a vendor's module where the module lacks functions, on simulated cards."""

from __future__ import annotations

import types
from typing import Iterator

import pytest
import torch
from support import main_leg, why_no_make

from mapsage.accelerator import AcceleratorError, resolve_accelerator
from mapsage.accelerator._vendor import DeviceModule

pytestmark = [main_leg, pytest.mark.skipif(bool(why_no_make()), reason=why_no_make())]


@pytest.fixture
def bare() -> Iterator[DeviceModule]:
    """The module of the simulated cards as if it had no function at all."""
    resolve_accelerator('sim').set_device(0)
    module = DeviceModule('gcu', 'torch_gcu')
    module._module = types.SimpleNamespace()
    yield module
    resolve_accelerator('sim').set_device(0)


def test_torch_accelerator_takes_over(bare: DeviceModule) -> None:
    assert bare.device_count() == 8 and bare.current_device() == 0
    bare.set_device(3)
    bare.synchronize()
    assert bare.current_device() == 3 == torch.zeros(1, device='gcu').device.index


def test_what_nobody_tells_is_unknown(bare: DeviceModule) -> None:
    """For this allocator PyTorch's own memory functions raise an assertion."""
    with pytest.raises(RuntimeError):
        torch.accelerator.memory_allocated()
    assert (bare.memory_allocated(), bare.max_memory_allocated(), bare.memory_total()) == (
        None,
        None,
        None,
    )
    assert (bare.device_name(0), bare.uuid(0), bare.bfloat16()) == ('gcu', None, None)


def test_a_missing_function_without_replacement_is_named(bare: DeviceModule) -> None:
    with pytest.raises(AcceleratorError, match=r'torch_gcu has no torch.gcu.manual_seed, which'):
        bare.seed(1)


def test_one_seed_function_for_the_current_device_is_enough(bare: DeviceModule) -> None:
    seeded = []
    bare._module.manual_seed = lambda seed: seeded.append((bare.current_device(), seed))
    bare.set_device(2)
    bare.seed(7)
    assert seeded == [(index, 7) for index in range(8)] and bare.current_device() == 2


def test_efml_may_be_missing(bare: DeviceModule) -> None:
    bare._module._get_efml_device_index = lambda index: 1 - index
    bare._module._raw_device_uuid_efml = lambda: ['GCU-a', 'GCU-b']
    assert bare.uuid(0) == 'GCU-b'
    bare._module._raw_device_uuid_efml = lambda: None
    assert bare.uuid(0) is None

    def no_library() -> None:
        raise OSError('libefml.so')

    bare._module._raw_device_uuid_efml = no_library
    assert bare.uuid(0) is None
