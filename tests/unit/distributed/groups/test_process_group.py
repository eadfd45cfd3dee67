"""Which backend carries what, and what is refused before any rank waits for another."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from mapsage.accelerator import ACCELERATORS, Accelerator, AcceleratorError, resolve_accelerator
from mapsage.distributed import BackendError, init_process_group, resolve_backend, usable_backends
from mapsage.distributed.groups.process_group import check_ranks_fit

# Building one touches no device, but that of the simulator loads it, and one needs a plugin.
KINDS = {
    kind.name: kind
    for kind in ACCELERATORS
    if kind.name not in ('sim', 'plugin') or kind.why_unavailable() is None
}


@pytest.mark.parametrize(
    'name, backend, want',
    [
        ('cpu', 'auto', 'gloo'),
        ('cpu', 'gloo', 'gloo'),
        ('cpu', 'cpu:gloo', 'gloo'),
        ('cuda', 'auto', 'cpu:gloo,cuda:nccl'),
        ('cuda', 'nccl', 'cpu:gloo,cuda:nccl'),
        ('cuda', 'gloo', 'cpu:gloo,cuda:staged'),
        ('cuda', 'staged', 'cpu:gloo,cuda:staged'),
        ('gcu', 'auto', 'cpu:gloo,gcu:eccl'),
        ('gcu', 'eccl', 'cpu:gloo,gcu:eccl'),
        ('gcu', 'gloo', 'cpu:gloo,gcu:staged'),
        ('gcu_t20', 'auto', 'cpu:gloo,xla:eccl'),
        ('xla', 'auto', 'cpu:gloo,xla:staged'),
        ('xla', 'staged', 'cpu:gloo,xla:staged'),
        ('xla', 'gloo', 'cpu:gloo,xla:staged'),
    ],
)
def test_backend_table(name: str, backend: str, want: str) -> None:
    assert resolve_backend(KINDS[name](), backend) == want


@pytest.mark.parametrize(
    'name, backend',
    [
        ('cpu', 'nccl'),
        ('cpu', 'staged'),
        ('cuda', 'eccl'),
        ('gcu', 'nccl'),
        ('gcu_t20', 'nccl'),
        ('xla', 'nccl'),
        ('xla', 'xla'),
        ('cuda', 'NCCL'),
        ('cuda', ''),
        ('cpu', None),
    ],
)
def test_unusable_backend(name: str, backend: Any) -> None:
    with pytest.raises(BackendError, match=f'{backend!r}.*{name!r}') as caught:
        resolve_backend(KINDS[name](), backend)
    assert all(usable in str(caught.value) for usable in usable_backends(KINDS[name]()))


@given(st.sampled_from(sorted(KINDS)), st.data())
def test_device_tensors_never_reach_gloo(name: str, data: Any) -> None:
    accelerator = KINDS[name]()
    backend = data.draw(st.sampled_from(usable_backends(accelerator)))
    resolved = resolve_backend(accelerator, backend)
    assert resolve_backend(accelerator, resolved) == resolved
    if name != 'cpu':
        parts = dict(part.split(':') for part in resolved.split(','))
        assert parts.pop('cpu') == 'gloo'
        assert parts[accelerator.device_type] in (accelerator.communication, 'staged')


@given(st.text(max_size=12))
def test_any_other_word_is_refused(backend: str) -> None:
    for kind in KINDS.values():
        if backend not in usable_backends(kind()):
            with pytest.raises(BackendError):
                resolve_backend(kind(), backend)


@pytest.mark.parametrize(
    'timeout', [0, -1, True, '1800', None, [5], float('nan'), float('inf'), 1e300]
)
def test_timeout_that_is_no_number_of_seconds(timeout: Any) -> None:
    with pytest.raises(ValueError, match='dist_cfg.timeout must be a positive number of seconds'):
        init_process_group(resolve_accelerator('cpu'), 'auto', timeout)
    assert not dist.is_initialized()


class Devices(KINDS['gcu']):  # type: ignore[misc]
    """A node with two devices."""

    def device_count(self) -> int:
        return 2


@pytest.mark.parametrize('ranks', [1, 2])
def test_as_many_ranks_as_devices_fit(ranks: int) -> None:
    check_ranks_fit(Devices(), ranks)


def test_more_ranks_than_devices() -> None:
    with pytest.raises(AcceleratorError, match=r'3 ranks .* 2 device\(s\) .*NPROC_PER_NODE=2'):
        check_ranks_fit(Devices(), 3)


@pytest.mark.parametrize('name', ['cpu', 'xla'])
def test_ranks_share_the_cpu_and_own_their_pjrt_client(name: str) -> None:
    accelerator: Accelerator = KINDS[name]()
    check_ranks_fit(accelerator, 64)
