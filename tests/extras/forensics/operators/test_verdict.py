"""The estimate of a step, its table and the answer to whether the card is of use."""

from __future__ import annotations

import pytest

from mapsage.extras.forensics.operators.placement import S60Table
from mapsage.extras.forensics.operators.recording import OperatorUse, Recording
from mapsage.extras.forensics.operators.verdict import estimate_step, format_rows

GFLOP, MB = 10**9, 10**6


def estimate(**uses: OperatorUse):
    return estimate_step(Recording(uses), S60Table())


def test_a_step_on_the_card_only() -> None:
    step = estimate(mm=OperatorUse(100, 1000 * GFLOP, 100 * MB))
    assert step.slowdown == 1 and step.cpu_share == 0 and step.is_useful
    assert step.answer.startswith('yes: 0.0% of the FLOPs')


def test_flops_on_the_cpu_decide() -> None:
    step = estimate(
        convolution=OperatorUse(10, 100 * GFLOP, 10 * MB),
        convolution_backward=OperatorUse(10, 200 * GFLOP, 20 * MB),
    )
    assert step.cpu_share == pytest.approx(2 / 3) and step.cpu_calls == 10
    assert step.answer.startswith('no: 66.7%') and step.slowdown > 10
    assert [row.name for row in step.rows] == ['convolution_backward', 'convolution']


def test_bytes_through_the_host_decide_where_no_flops_are_there() -> None:
    step = estimate(
        mm=OperatorUse(100, 1000 * GFLOP, 100 * MB), gelu_backward=OperatorUse(24, 0, 6000 * MB)
    )
    assert step.cpu_share == 0 and not step.is_useful
    assert step.answer.startswith('in part') and step.host_bytes == 6000 * MB


def test_views_share_a_line_of_the_table() -> None:
    lines = format_rows(
        estimate(
            mm=OperatorUse(2, GFLOP, MB),
            view=OperatorUse(5, computes=False),
            clone=OperatorUse(3, 0, MB),
        )
    )
    assert len(lines) == 3 and lines[1].split() == ['mm', '2', '100.0%', '1.00', 'card']
    assert lines[2].endswith(' 8')
