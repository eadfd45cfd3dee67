"""Equal weights pass; one differing tensor is named on every rank."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, Dict, List

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn

from mapsage.accelerator import resolve_accelerator, set_current_accelerator
from mapsage.distributed import (
    WeightsDifferError,
    broadcast_tensors,
    check_equal_weights,
    init_process_group,
    weights,
)
from mapsage.distributed.weights import (
    LARGEST_DRIFT,
    first_difference,
    largest_drift,
    weight_samples,
)

KINDS = {
    'float32': torch.linspace(-1, 1, 7),
    'bfloat16': torch.linspace(-1, 1, 7).bfloat16(),
    'float16': torch.linspace(-1, 1, 7).half(),
    'bool': torch.tensor([True, False]),
    'int64': torch.arange(5),
    'empty': torch.empty(0, 3),
    'scalar': torch.tensor(3.0),
    'nan': torch.tensor([float('nan'), 1.0]),
    'complex': torch.ones(2, dtype=torch.complex64),
    'transposed': torch.arange(6.0).reshape(2, 3).t(),
}


def holder(**changes: torch.Tensor) -> nn.Module:
    module = nn.Module()
    for name, tensor in {**KINDS, **changes}.items():
        module.register_buffer(f'{name}_', tensor.clone())
    return module


def compare(rank_1_changes: Dict[str, Dict[str, torch.Tensor]]) -> Dict[str, str]:
    """Return, for every case, the error of this rank; empty when there was none."""
    init_process_group(resolve_accelerator('cpu'), timeout=20)
    messages = {}
    for case, changes in rank_1_changes.items():
        module = holder(**(changes if dist.get_rank() == 1 else {}))
        try:
            check_equal_weights(module, 'after a test')
            messages[case] = ''
        except WeightsDifferError as error:
            messages[case] = str(error)
    return messages


CHANGES = {
    'float32': torch.linspace(-1, 1, 7) + torch.tensor([0] * 6 + [1e-7]),
    'bfloat16': torch.linspace(-1, 1.01, 7).bfloat16(),
    'bool': torch.tensor([True, True]),
    'int64': torch.arange(5) + 1,
    'nan': torch.tensor([float('nan'), 2.0]),
    'scalar': torch.tensor(3.5),
}


@pytest.fixture(scope='module')
def messages(tmp_path_factory: pytest.TempPathFactory) -> list:
    cases: dict = {name: {name: value} for name, value in CHANGES.items()}
    cases['equal'], cases['missing'] = {}, {'more': torch.ones(1)}
    return run_ranks(compare, 2, tmp_path_factory.mktemp('weights'), cases)


def test_equal_weights_of_every_kind_pass(messages: list) -> None:
    assert [each['equal'] for each in messages] == ['', '']


@pytest.mark.parametrize('name', CHANGES)
def test_differing_tensor_is_named_on_every_rank(messages: list, name: str) -> None:
    for each in messages:
        assert f"after a test, '{name}_' on rank(s) [1] is not equal to rank 0" in each[name]


@pytest.mark.parametrize(
    'values, odd, usual',
    [
        ([1, 2], [1], 0),
        ([2, 1, 1], [0], 1),
        ([1, 2, 1], [1], 0),
        ([1, 1, 2], [2], 0),
        ([1, 1, 2, 1, 3], [2, 4], 0),
        ([7, 1, 1, 1, 8], [0, 4], 1),
        ([None, 1, 1], [0], 1),
    ],
)
def test_what_most_ranks_have_is_right(values: list, odd: list, usual: int) -> None:
    digests = [dict(same=0) if value is None else dict(same=0, weight=value) for value in values]
    assert first_difference(digests) == ('weight', odd, usual)


def test_tensor_that_only_one_rank_has(messages: list) -> None:
    assert all("'more_' on rank(s) [1]" in each['missing'] for each in messages)


class Unsaved(nn.Module):
    """Holds a buffer that checkpoints leave out."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.register_buffer('table', torch.full((3,), value), persistent=False)


def compare_unsaved() -> str:
    init_process_group(resolve_accelerator('cpu'), timeout=20)
    try:
        check_equal_weights(Unsaved(dist.get_rank()), 'now')
    except WeightsDifferError as error:
        return str(error)
    return ''


def test_buffers_outside_the_state_dict_count(tmp_path: Path) -> None:
    assert all(
        "'table' on rank(s) [1, 2]" in text for text in run_ranks(compare_unsaved, 3, tmp_path)
    )


def test_the_drift_between_copies_of_a_model() -> None:
    model = nn.Sequential(nn.Linear(30, 4), nn.Linear(4, 1, bias=False))
    same, off = copy.deepcopy(model), copy.deepcopy(model)
    with torch.no_grad():
        off[1].weight.mul_(1 + 1e-4)
    samples = [weight_samples(each) for each in (model, same, off)]
    name, index, drift = largest_drift(samples)
    assert (name, index) == ('1.weight', 2) and 5e-5 < drift < 3e-4 < LARGEST_DRIFT
    assert largest_drift(samples[:2])[2] == 0.0
    with torch.no_grad():
        off[0].weight.view(-1)[5] += 1.0  # an element that is not among those sampled
    assert largest_drift([samples[0], weight_samples(off)])[0] == '0.weight'
    other = weight_samples(nn.Linear(2, 2))
    assert largest_drift([samples[0], other])[2] == float('inf')
    zero = {'bias': [0.0, 0.0, 0.0]}
    assert largest_drift([zero, zero])[2] == 0.0
    assert largest_drift([zero, {'bias': [1e-9, 1e-9, 1e-9]}])[2] == float('inf')


def receive(accelerator: str, message_bytes: int) -> Any:
    """Return whether all kinds of tensors came from rank 0, and the device of each broadcast."""
    current = set_current_accelerator(resolve_accelerator(accelerator))
    init_process_group(current, timeout=60)
    rank = dist.get_rank()
    device = current.device(rank)
    # Rank 0 has the values; views stay views, so that transposed tensors stay transposed.
    tensors = {name: value.to(device) for name, value in KINDS.items()}
    sent = {name: value.clone() for name, value in tensors.items()}
    if rank:
        for value in tensors.values():
            value.zero_()
    devices: List[str] = []
    broadcast = dist.broadcast

    def counted(tensor: torch.Tensor, src: int) -> Any:
        devices.append(tensor.device.type)
        return broadcast(tensor, src=src)

    weights._MESSAGE_BYTES, dist.broadcast = message_bytes, counted
    try:
        broadcast_tensors([*tensors.values(), torch.full((3,), float(rank))])
    finally:
        dist.broadcast = broadcast
    equal = {
        name: torch.equal(value.nan_to_num(), sent[name].nan_to_num())
        if value.is_floating_point()
        else torch.equal(value, sent[name])
        for name, value in tensors.items()
    }
    return equal, [value.is_contiguous() for value in tensors.values()], devices


@pytest.mark.parametrize('accelerator', ['cpu', 'cuda'])
# One message for each of the 6 dtypes, or one for each of the 9 tensors that are not empty.
@pytest.mark.parametrize('message_bytes, messages', [(64 << 20, 6), (1, 9)])
def test_tensors_of_every_kind_come_from_rank_0(
    accelerator: str, message_bytes: int, messages: int, tmp_path: Path
) -> None:
    if accelerator == 'cuda' and torch.cuda.device_count() < 2:
        pytest.skip('needs two cards')
    for equal, contiguous, devices in run_ranks(receive, 2, tmp_path, accelerator, message_bytes):
        assert all(equal.values()), equal
        assert contiguous.count(False) == 1
        # The tensor on the CPU travels over gloo: with the others, or next to those on the cards.
        on_cards = messages if accelerator == 'cuda' else 0
        assert devices.count('cuda') == on_cards
        assert devices.count('cpu') == (1 if on_cards else messages + (message_bytes == 1))
