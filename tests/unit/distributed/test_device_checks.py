"""Each check finds the fault it is for, and nothing in what is sound."""

from __future__ import annotations

from typing import Any, Callable, Optional

import pytest
import torch
from mmengine.structures import BaseDataElement, PixelData
from support import no_simulated_cards
from torch import nn

from mapsage.accelerator import AcceleratorError, resolve_accelerator
from mapsage.accelerator.cpu import CpuAccelerator
from mapsage.distributed.device_checks import (
    card_identity,
    check_collectives,
    check_device,
    check_finite,
    check_placement,
    compare_batches,
    describe_batch,
    not_finite,
    shared_cards,
)

CPU = torch.device('cpu')


class Cards(CpuAccelerator):
    """CPU arithmetic under the name of a stack with ``count`` cards of their own."""

    name, device_type = 'cards', 'meta'
    masks = ('CUDA_VISIBLE_DEVICES',)

    def __init__(self, count: int = 2) -> None:
        self.count = count

    def device_count(self) -> int:
        return self.count

    def device(self, local_rank: int = 0) -> torch.device:
        return torch.device('meta', self._index(local_rank))


def test_a_sound_device_passes() -> None:
    state = torch.get_rng_state()
    assert check_device(CpuAccelerator(), 0) == []
    assert torch.equal(state, torch.get_rng_state()), 'a check must not change the loss curve'


def test_an_absent_device_is_named() -> None:
    (problem,) = check_device(Cards(2), 2)
    assert 'device of local rank 2 cannot allocate' in problem
    assert AcceleratorError.__name__ in problem


def test_a_device_that_computes_nothing_is_named() -> None:
    (problem,) = check_device(Cards(2), 1)  # meta tensors have no numbers to copy back
    assert 'cards device of local rank 1 cannot allocate and compute' in problem


def test_wrong_numbers_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    multiply = torch.Tensor.__matmul__
    answers = iter([1.0, 0.0, 0.0, 0.0])
    monkeypatch.setattr(torch.Tensor, '__matmul__', lambda a, b: multiply(a, b) + next(answers))
    (problem,) = check_device(CpuAccelerator(), 0)
    assert 'cpu computes wrong numbers' in problem and 'off by 1, expected 0' in problem


def module() -> nn.Module:
    made = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    halves = torch.full((4,), 60000.0).half()  # its sum overflows float16
    made.halves = nn.Parameter(halves, requires_grad=False)
    made.register_buffer('empty', torch.empty(0))
    made.register_buffer('count', torch.tensor(2**40))
    return made


def test_a_tensor_elsewhere_is_named() -> None:
    made = module()
    assert check_placement(made, [CPU]) == []
    made[1].register_buffer('late', torch.empty(1, device='meta'))
    (problem,) = check_placement(made, [CPU])
    assert problem.startswith("buffer '1.late' is on meta, expected cpu.")
    assert check_placement(made, [CPU, torch.device('meta')]) == []
    made.to('meta')
    assert len(check_placement(made, [CPU])) == 4
    assert check_placement(made, [CPU])[-1] == '8 more tensor(s) are elsewhere'


@pytest.mark.parametrize('value', [float('nan'), float('inf'), -float('inf')])
@pytest.mark.parametrize('name', ['0.weight', '1.running_var', 'halves'])
def test_a_number_that_is_none_is_named(name: str, value: float) -> None:
    made = module()
    assert not_finite(made) == set() and check_finite(made) == []
    made.state_dict()[name].view(-1)[-1] = value
    assert not_finite(made) == {name}
    (problem,) = check_finite(made)
    assert f'{name!r} holds NaN or infinity' in problem
    assert check_finite(made, known=[name]) == []


def test_halves_on_a_gcu_are_checked() -> None:
    """Its kernel refuses the sum of a half-precision tensor in float32."""
    reason = no_simulated_cards()
    if reason is not None:
        pytest.skip(reason)
    resolve_accelerator('sim')
    made = module().to('gcu:0')
    assert not_finite(made) == set()
    made.state_dict()['halves'].view(-1)[-1] = float('inf')
    assert not_finite(made) == {'halves'}


def test_a_mask_is_infinite_on_purpose() -> None:
    made = module()
    made.register_buffer('mask', torch.tensor([0, -float('inf')]))
    assert not_finite(made) == set() and check_finite(made) == []


def test_opposite_infinities_do_not_hide_each_other() -> None:
    made = module()
    made[0].weight.data[0] = torch.tensor([float('inf'), -float('inf')])
    assert not_finite(made) == {'0.weight'}


def test_large_finite_numbers_are_finite() -> None:
    made = nn.Linear(2, 1)
    made.weight.data.fill_(3e38)  # the float32 sum is infinite, the numbers are not
    assert check_finite(made) == []


def test_batches_of_a_mixed_dataset_are_alike() -> None:
    uint8, float32, deep = (
        f'torch.{kind} of shape (3, H, W)' for kind in ('uint8', 'float32', 'float64')
    )
    found = [{'inputs': f'2 x {kinds}'} for kinds in (f'{float32} / {uint8}', uint8, float32, deep)]
    assert [len(each) for each in compare_batches(found[:2] * 2)] == [0, 0, 0, 0]
    assert [len(each) for each in compare_batches([found[1], found[1], found[3]])] == [0, 0, 1]
    assert [
        len(each) for each in compare_batches([found[1], found[1], {'inputs': f'3 x {uint8}'}])
    ] == [0, 0, 1]
    assert [
        len(each)
        for each in compare_batches(
            [{'inputs': 'torch.uint8 of shape (2, 3)'}] * 2 + [{'inputs': 'int'}]
        )
    ] == [0, 0, 1]


def test_ranks_on_one_card() -> None:
    assert shared_cards(['a', 'b', 'a', None, None]) == {0: [2], 2: [0]}
    assert shared_cards([None, None]) == {}


def test_card_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = Cards(4)
    assert card_identity(cards, 1) == card_identity(cards, 1) != card_identity(cards, 2)
    assert card_identity(CpuAccelerator(), 0) is None
    seen = card_identity(cards, 0)
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '3')  # index 0 now is another card
    assert card_identity(cards, 0) != seen


@pytest.mark.parametrize(
    'error, advice',
    [
        ('CUDA out of memory. Tried to allocate 2 GiB', 'Free its memory'),
        ('to enable it you must set CUBLAS_WORKSPACE_CONFIG=:4096:8', 'The card is sound'),
        ('an illegal memory access was encountered', 'tool of its vendor'),
    ],
)
def test_the_advice_fits_the_error(
    error: str, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError(error)

    monkeypatch.setattr(torch.Tensor, '__matmul__', fail)
    (problem,) = check_device(CpuAccelerator(), 0)
    assert error in problem and advice in problem


def test_collectives_of_one_process() -> None:
    assert check_collectives(CpuAccelerator(), 0) == {}


def sample(height: int = 8, dtype: torch.dtype = torch.int64, **more: Any) -> BaseDataElement:
    made = BaseDataElement(metainfo=dict(img_path='x.png'))
    made.gt_sem_seg = PixelData(data=torch.zeros(1, height, 8, dtype=dtype))
    for name, value in more.items():
        setattr(made, name, value)
    return made


def batch(
    height: int = 8,
    channels: int = 3,
    count: int = 2,
    dtype: torch.dtype = torch.uint8,
    label: torch.dtype = torch.int64,
    **more: Any,
) -> dict:
    return dict(
        inputs=[torch.zeros(channels, height, 8, dtype=dtype)] * count,
        data_samples=[sample(height, label)] * count,
        **more,
    )


ODD = {
    'channels': (dict(channels=4), 'batch.inputs is 2 x torch.uint8 of shape (4, '),
    'dtype': (dict(dtype=torch.float32), 'batch.inputs is 2 x torch.float32'),
    'samples': (dict(count=1), 'batch.inputs is 1 x torch.uint8'),
    'key': (
        dict(edges=torch.zeros(2, 3)),
        'batch.edges is torch.float32 of shape (2, 3), expected missing as on rank 0',
    ),
    'label': (dict(label=torch.int32), 'gt_sem_seg torch.int32), expected 2 x '),
}


@pytest.mark.parametrize('size', [None, (8, 8)])
@pytest.mark.parametrize('case', ODD)
def test_the_odd_batch_is_named(case: str, size: Optional[tuple]) -> None:
    changes, words = ODD[case]
    every = [describe_batch(batch(**(changes if rank == 2 else {})), size) for rank in range(4)]
    problems = compare_batches(every)
    assert words in ' '.join(problems[2])
    assert not problems[0] and not problems[1] and not problems[3]


def test_image_sizes_count_where_the_preprocessor_does_not_pad_them() -> None:
    def problems(height: int, size: Optional[tuple], make: Callable = batch) -> list:
        return compare_batches([describe_batch(make(8), size), describe_batch(make(height), size)])

    assert problems(8, (8, 8)) == problems(6, (8, 8)) == problems(6, None) == [[], []]
    (_, (text,)) = problems(9, (8, 8))
    assert 'batch.inputs is 2 x torch.uint8 of shape (3, 9, 8), expected' in text
    # a batch that is stacked already is padded by nobody
    (_, (text,)) = problems(6, (8, 8), lambda height: dict(inputs=torch.zeros(2, 3, height, 8)))
    assert 'batch.inputs is torch.float32 of shape (2, 3, 6, 8)' in text
