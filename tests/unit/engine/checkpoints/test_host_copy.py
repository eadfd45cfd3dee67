"""A copy of a checkpoint is equal to it, and stays so whatever happens to the original."""

from __future__ import annotations

import copy
import io
from collections import OrderedDict
from typing import Any, Dict

import torch
from mmengine.logging import HistoryBuffer

from mapsage.engine.checkpoints.host_copy import HostCopies


def contents() -> Dict[str, Any]:
    base = torch.arange(24.0)
    image = torch.randn(2, 3, 4, 5)
    return dict(
        state_dict=OrderedDict(
            weight=torch.randn(3, 4),
            tied=base.view(4, 6),
            also_tied=base[2:8],
            whole=base,
            step=torch.tensor(7),
            nothing=torch.zeros(0, 3),
            half=torch.randn(5).bfloat16(),
            transposed=torch.randn(3, 5).t(),
            wide=torch.randn(1, 3).expand(4, 3),
            last=image.contiguous(memory_format=torch.channels_last),
            flag=torch.tensor([True]),
        ),
        other=[
            torch.nn.Parameter(torch.randn(2)),
            torch.randn(2, dtype=torch.complex64),
            torch.eye(3).to_sparse(),
            (torch.randn(3, requires_grad=True) * 2),
        ],
        message_hub=dict(log_scalars=dict(loss=HistoryBuffer([1.0, 2.0], [1, 1]))),
        meta=dict(n=[1]),
    )


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        if one.layout is not torch.strided:
            one, other = one.to_dense(), other.to_dense()
        return (
            type(one) is type(other)
            and one.stride() == other.stride()
            and one.dtype == other.dtype
            and one.requires_grad == other.requires_grad
            and torch.equal(one, other)
        )
    if isinstance(one, dict):
        return (
            type(one) is type(other)
            and list(one) == list(other)
            and all(same(one[name], other[name]) for name in one)
        )
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return (
        vars(one).keys() == vars(other).keys() if isinstance(one, HistoryBuffer) else one == other
    )


def size(value: Any) -> int:
    file = io.BytesIO()
    torch.save(value, file)
    return len(file.getvalue())


def test_a_copy_has_the_bits_the_layout_and_the_size_of_the_original() -> None:
    original = contents()
    copied = HostCopies().copy(original)
    assert same(original, copied)
    assert size(copied) == size(original)  # tensors that share memory are written once


def test_a_copy_does_not_change_with_the_original() -> None:
    original = contents()
    wanted = dict(state_dict=copy.deepcopy(original['state_dict']))
    copied = HostCopies().copy(original)
    for tensor in original['state_dict'].values():
        if 0 not in tensor.stride():
            tensor.zero_()
    original['meta']['n'].append(2)
    assert same(wanted['state_dict'], copied['state_dict']) and copied['meta'] == dict(n=[1])


def test_buffers_are_used_again_once_they_are_released() -> None:
    def places(copied: Any) -> set:
        return {each.data_ptr() for each in copied['state_dict'].values() if each.numel()}

    copies, weights = HostCopies(), dict(state_dict=contents()['state_dict'])
    first = copies.copy(weights)
    copies.release()
    assert places(copies.copy(weights)) == places(first)


def test_the_copies_of_one_save_hold_what_is_equal_once() -> None:
    """The best checkpoint and the last one: together they take the memory of the last one."""

    def places(copied: Any) -> set:
        return {
            (each.data_ptr(), each.numel())
            for part in ('state_dict', 'optimizer')
            for each in copied.get(part, {}).values()
            if each.numel()
        }

    weights = contents()['state_dict']
    del weights['wide']
    weights['nan'] = torch.tensor([float('nan'), 0.0])
    copies = HostCopies()
    best = copies.copy(dict(state_dict=dict(weights)))
    # as MMEngine makes them of weights on a device: the same values in other memory
    moved = {name: each.clone() for name, each in weights.items()}
    last = copies.copy(dict(state_dict=moved, optimizer=dict(mean=torch.randn(7, 2))))
    assert places(best) < places(last) and len(places(last)) == len(places(best)) + 1
    moved['weight'][0, 0] += 1
    moved['nan'][1] = -0.0  # another bit
    other = copies.copy(dict(state_dict=moved))
    for name in ('weight', 'nan'):
        assert other['state_dict'][name].data_ptr() != last['state_dict'][name].data_ptr()
    assert same(
        {name: each for name, each in moved.items() if name != 'nan'},
        {name: each for name, each in other['state_dict'].items() if name != 'nan'},
    )
    assert [each['state_dict']['nan'].view(torch.int32)[1] for each in (last, other)] == [
        0,
        -(2**31),
    ]
    copies.release()
    assert not copies.copy(dict(state_dict=weights))['state_dict']['weight'].isnan().any()
