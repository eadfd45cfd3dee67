"""A call computed by the CPU changes the card's tensors as the card's kernel would."""

from __future__ import annotations

from typing import Any, Callable

import pytest
import torch
from support import no_simulated_cards

from mapsage.extras.forensics.operators.host_calls import HostCall, run_on_host
from mapsage.extras.simulator.accelerator import SimAccelerator

aten = torch.ops.aten
pytestmark = pytest.mark.skipif(no_simulated_cards() is not None, reason='no simulated cards here')


@pytest.fixture
def on_card() -> Callable[[torch.Tensor], torch.Tensor]:
    SimAccelerator()
    return lambda tensor: tensor.to('gcu:0')


def test_results_come_back_and_arguments_keep_their_values(on_card: Any) -> None:
    left, right = on_card(torch.tensor([1.0, 2.0])), on_card(torch.tensor([3.0, 4.0]))
    result = run_on_host(aten.add.Tensor, (left, right), dict(alpha=2))
    assert result.device.type == 'gcu' and result.cpu().tolist() == [7, 10]
    assert left.cpu().tolist() == [1, 2]


def test_writes_reach_the_card(on_card: Any) -> None:
    tensor = on_card(torch.tensor([1.0, 2.0]))
    assert run_on_host(aten.add_.Tensor, (tensor, tensor), {}) is tensor
    assert tensor.cpu().tolist() == [2, 4]
    tensors = [on_card(torch.ones(2)), on_card(torch.ones(3))]
    run_on_host(aten._foreach_mul_.Scalar, (tensors, 3), {})
    assert [item.cpu().tolist() for item in tensors] == [[3, 3], [3, 3, 3]]


def test_an_output_that_is_passed_by_name_is_written(on_card: Any) -> None:
    output, source = on_card(torch.zeros(2)), on_card(torch.tensor([1.0, 4.0]))
    assert run_on_host(aten.sqrt.out, (source,), dict(out=output)) is output
    assert output.cpu().tolist() == [1, 2]
    values, indices = on_card(torch.zeros(())), on_card(torch.tensor(0))
    result = run_on_host(aten.max.dim_max, (source, 0), dict(max=values, max_values=indices))
    assert [tensor.cpu().tolist() for tensor in result] == [4, 1]


def test_batch_norm_writes_its_statistics_without_saying_so(on_card: Any) -> None:
    image = torch.randn(4, 3, 2, 2) + 5
    mean, variance = on_card(torch.zeros(3)), on_card(torch.ones(3))
    run_on_host(
        aten.native_batch_norm.default,
        (on_card(image), None, None, mean, variance, True, 1.0, 1e-5),
        {},
    )
    assert torch.allclose(mean.cpu(), image.mean((0, 2, 3)), atol=1e-5)


def test_views_and_copies_between_devices(on_card: Any) -> None:
    tensor = on_card(torch.arange(6.0).reshape(2, 3))
    view = run_on_host(aten.t.default, (tensor,), {})
    view.fill_(1)
    assert tensor.cpu().tolist() == [[1] * 3] * 2
    host = run_on_host(aten._to_copy.default, (tensor,), dict(device=torch.device('cpu')))
    assert host.device.type == 'cpu'
    assert (
        run_on_host(aten.zeros.default, ([2],), dict(device=torch.device('gcu:0'))).device.type
        == 'gcu'
    )


def test_a_call_is_repeated_with_the_arguments_of_its_beginning(on_card: Any) -> None:
    tensor = on_card(torch.tensor([1.0]))
    call = HostCall(aten.add_.Tensor, (tensor, 1), {})
    tensor.zero_()
    for _ in range(2):
        result, written = call.run()
        assert result.tolist() == written[0].tolist() == [2]
    assert call.run(torch.float64)[0].dtype == torch.float64
