"""The double's memory, copies, streams and events under PyTorch's own allocators."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict

import pytest
import torch
from ranks import run_ranks

CUDA = torch.device('cuda', 1)
MIB = 1 << 20


def test_the_caching_allocator_counts_what_is_allocated() -> None:
    torch.cuda.init()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(CUDA)
    before, free = torch.cuda.memory_allocated(CUDA), torch.cuda.mem_get_info(CUDA)[0]
    tensor = torch.empty(64 * MIB, dtype=torch.uint8, device=CUDA)
    assert torch.cuda.memory_allocated(CUDA) - before == 64 * MIB
    assert free - torch.cuda.mem_get_info(CUDA)[0] == 64 * MIB
    assert torch.cuda.memory_allocated(0) == 0
    del tensor
    assert torch.cuda.memory_allocated(CUDA) == before
    assert torch.cuda.max_memory_allocated(CUDA) - before == 64 * MIB
    # kept for the next tensor, until the cache is emptied
    assert free - torch.cuda.mem_get_info(CUDA)[0] == 64 * MIB
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info(CUDA)[0] == free


def allocate_beyond_the_limit() -> Dict[str, Any]:
    first = torch.empty(200 * MIB, dtype=torch.uint8, device='cuda:0')
    other = torch.empty(200 * MIB, dtype=torch.uint8, device='cuda:1')
    try:
        torch.empty(100 * MIB, dtype=torch.uint8, device='cuda:0')
    except torch.OutOfMemoryError as error:
        message = str(error)
    del first
    # the allocator gives cached memory back before it fails
    refilled = torch.empty(250 * MIB, dtype=torch.uint8, device='cuda:0')
    return dict(
        message=message,
        total=torch.cuda.get_device_properties(0).total_memory,
        devices={str(other.device), str(refilled.device)},
    )


def test_a_full_device_gives_pytorchs_out_of_memory_error(tmp_path: Path) -> None:
    [result] = run_ranks(
        allocate_beyond_the_limit,
        1,
        tmp_path,
        environ=dict(CUDA_DOUBLE_DEVICES='2', CUDA_DOUBLE_MEMORY='256'),
    )
    assert result['total'] == 256 * MIB
    assert (
        'CUDA out of memory. Tried to allocate 100.00 MiB. GPU 0 has a total capacity of '
        '256.00 MiB of which 56.00 MiB is free' in result['message']
    )
    assert result['devices'] == {'cuda:0', 'cuda:1'}


@pytest.mark.parametrize(
    'view',
    [
        lambda tensor: tensor,
        lambda tensor: tensor.t(),
        lambda tensor: tensor[:, 1:3],
        lambda tensor: tensor.half(),
        lambda tensor: tensor.expand(2, 3, 4),
    ],
)
def test_copies_between_devices_and_the_host_keep_values(view: Any) -> None:
    host = torch.arange(12.0).view(3, 4)
    expected = view(host)
    elsewhere = view(host.to('cuda:0')).to(CUDA)
    assert elsewhere.device == CUDA and elsewhere.dtype == expected.dtype
    assert torch.equal(elsewhere.cpu(), expected)
    assert torch.equal(
        torch.zeros(expected.shape, device=CUDA).copy_(elsewhere).cpu(), expected.float()
    )


def test_pinned_memory_is_known_as_such() -> None:
    pinned = torch.arange(6.0).pin_memory()
    assert pinned.is_pinned() and not torch.arange(6.0).is_pinned()
    assert not pinned.to(CUDA).is_pinned()
    assert pinned.to(CUDA, non_blocking=True).tolist() == list(range(6))


def copy_late() -> Dict[str, Any]:
    """Read and change memory before its copies are over, and afterwards."""
    device = torch.ones(1000, device='cuda')
    host = torch.zeros(1000).pin_memory()
    host.copy_(device, non_blocking=True)
    results = {'pinned, not waited for': host[0].item()}
    device.fill_(5)  # later in the stream, so the copy does not see it
    torch.cuda.synchronize()
    results['pinned, waited for'] = host[0].item()

    source = torch.full((1000,), 2.0).pin_memory()
    target = torch.zeros(1000, device='cuda')
    target.copy_(source, non_blocking=True)
    source.fill_(3)  # too early: the device may not have read it
    with torch.cuda.stream(torch.cuda.Stream()):  # which does not wait for the copy
        results['on another stream'] = target.cpu()[0].item()
    results['source changed before the copy was over'] = target[0].item()
    target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    source.fill_(4)
    results['source changed afterwards'] = target[0].item()

    pageable = torch.full((1000,), 6.0)
    target.copy_(pageable, non_blocking=True)
    pageable.fill_(7)
    results['pageable source changed'] = target[0].item()
    results['pageable target'] = target.cpu()[0].item()
    return results


def test_asynchronous_copies_of_pinned_memory_are_late_if_asked_for(tmp_path: Path) -> None:
    [late] = run_ranks(copy_late, 1, tmp_path / 'late', environ=dict(CUDA_DOUBLE_LATE_COPIES='500'))
    [in_time] = run_ranks(copy_late, 1, tmp_path / 'in time')
    garbage = torch.full((4,), 0xCB, dtype=torch.uint8).view(torch.float32).item()
    assert late.pop('pinned, not waited for') == garbage
    assert late.pop('on another stream') == garbage
    assert late.pop('source changed before the copy was over') == 3
    assert [
        in_time.pop(name)
        for name in (
            'pinned, not waited for',
            'on another stream',
            'source changed before the copy was over',
        )
    ] == [1, 2, 2]
    assert (
        late
        == in_time
        == {
            'pinned, waited for': 1,
            'source changed afterwards': 3,
            'pageable source changed': 6,
            'pageable target': 6,
        }
    )


def order_by_events() -> Dict[str, Any]:
    """Two streams whose order an event makes; the first has a late copy in it."""
    source, target = torch.full((9,), 2.0).pin_memory(), torch.zeros(9, device='cuda')
    producer, consumer = torch.cuda.Stream(), torch.cuda.Stream()
    start, copied = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(producer):
        start.record()
        target.copy_(source, non_blocking=True)
        copied.record()
    done_at_once = copied.query()
    with torch.cuda.stream(consumer):
        consumer.wait_event(copied)
        value = target.clone()[0].item()
    return dict(
        done_at_once=done_at_once,
        value=value,
        done=copied.query(),
        milliseconds=start.elapsed_time(copied),
    )


def test_an_event_is_done_when_its_stream_has_reached_it(tmp_path: Path) -> None:
    [result] = run_ranks(order_by_events, 1, tmp_path, environ=dict(CUDA_DOUBLE_LATE_COPIES='200'))
    assert not result['done_at_once'] and result['done']
    assert result['value'] == 2
    assert result['milliseconds'] >= 200


def look_at_devices() -> Dict[str, Any]:
    properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return dict(
        cards=[one.pci_bus_id - 0x10 for one in properties],
        uuids=[str(one.uuid) for one in properties],
        capability=torch.cuda.get_device_capability() if properties else None,
    )


@pytest.mark.parametrize(
    'mask, cards',
    [
        (None, [0, 1, 2, 3]),
        ('3,1', [3, 1]),
        ('', []),
        ('-1', []),
        ('2,9,1', [2]),
        ('GPU-5a5a5a5a-5a5a-5a5a-5a5a-5a5a5a5a5a02', [2]),
    ],
)
def test_cuda_visible_devices_masks_the_devices(tmp_path: Path, mask: Any, cards: Any) -> None:
    environ = dict(CUDA_DOUBLE_DEVICES='4', CUDA_DOUBLE_CAPABILITY='8.6')
    if mask is not None:
        environ['CUDA_VISIBLE_DEVICES'] = mask
    [result] = run_ranks(look_at_devices, 1, tmp_path, environ=environ)
    assert result['cards'] == cards
    assert [uuid[-2:] for uuid in result['uuids']] == [f'{card:02x}' for card in cards]
    assert result['capability'] == ((8, 6) if cards else None)
