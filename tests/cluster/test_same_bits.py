"""Machines that are lost and join while a run trains leave no trace in its numbers."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any, Dict, List, Tuple

import pytest
import torch
from faults import Struck
from machines import Machines, why_not
from support import main_leg

pytestmark = [main_leg, pytest.mark.skipif(bool(why_not()), reason=why_not())]

STEPS = 100
FOUR = 'env_cfg.update(virtual_ranks=4)\n'


def kept(machines: Machines, folder: Path) -> Struck:
    """Return the job on four machines that nothing happens to."""
    job = Struck(machines, folder, steps=STEPS, pace=0, extra=FOUR)
    job.train(4, 2, 4)
    job.finish()
    return job


def struck(machines: Machines, folder: Path) -> Struck:
    """Return the job that loses a machine while it trains, and later gets one."""
    job = Struck(machines, folder, steps=STEPS, extra=FOUR)
    job.train(4, 2, 4)
    lost = job.node_of_rank(1)
    job.strike(lambda: os.kill(lost.launcher(), signal.SIGKILL))
    job.recovered('', 3)
    job.wait_for('step', 20, after=job.hit)
    job.strike(lambda: job.launch(lost, nodes=job.nodes))
    job.recovered('', 4)
    job.finish()
    return job


def logged(job: Struck) -> List[Tuple[int, str]]:
    """Return step and loss of each line of the runs' scalars.json, the digits as they stand there."""
    lines = [
        json.loads(line, parse_float=str)
        for path in sorted(job.work.glob('*/vis_data/scalars.json'))
        for line in path.read_text().splitlines()
    ]
    return [(line['step'], line['loss']) for line in lines if 'loss' in line]


def state(job: Struck) -> Dict[str, Any]:
    return torch.load(str(job.work / f'iter_{STEPS}.pth'), weights_only=False)


def assert_equal_bits(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_equal_bits(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for first, second in zip(one, other):
            assert_equal_bits(first, second)
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    else:
        assert one == other


def test_four_machines_three_and_four_again(tmp_path: Path) -> None:
    with Machines(4, tmp_path) as machines:
        whole = kept(machines, tmp_path / 'kept')
    with Machines(4, tmp_path / 'again') as machines:
        broken = struck(machines, tmp_path / 'struck')
    worlds = [each.world for each in broken.events('start') if each.rank == 0]
    assert worlds == [4, 3, 4]
    expected = {each.step: each.loss for each in whole.events() if each.rank == 0}
    assert sorted(expected) == list(range(1, STEPS + 1))
    steps = [each for each in broken.events() if each.rank == 0]
    assert {each.step for each in steps} == set(expected)
    assert len(steps) > STEPS  # some are trained twice, and come to the same
    assert [(each.step, each.loss) for each in steps] == [
        (each.step, expected[each.step]) for each in steps
    ]
    digits = dict(logged(whole))
    assert len(digits) == STEPS
    assert logged(broken) == [(step, digits[step]) for step, _ in logged(broken)]
    assert {step for step, _ in logged(broken)} == set(digits)
    for part in ('state_dict', 'optimizer'):
        assert_equal_bits(state(broken)[part], state(whole)[part])
