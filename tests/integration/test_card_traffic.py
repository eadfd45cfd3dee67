"""No 64-bit number, gather, scatter or barrier of MapSage travels between cards in a training.

``tests/card_traffic.py`` runs all shipped configs; docs/reference/simulator.md has its result.
"""

from __future__ import annotations

from pathlib import Path
from typing import Iterator

import pytest
from card_traffic import traffic_of, unwanted
from small_configs import write_data
from support import main_leg, no_simulated_cards

reason = no_simulated_cards()
pytestmark = [main_leg, pytest.mark.skipif(reason is not None, reason=str(reason))]


@pytest.fixture(scope='module')
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in write_data(tmp_path_factory.mktemp('data')).items():
            patch.setenv(name, value)
        yield


# Virtual ranks with sampling; DDP; a teacher. Each with the hooks of its config.
@pytest.mark.parametrize(
    'name, profile',
    [
        ('configs/demo/efficientnet_lite0_fpn_demo_dynamic.py', '2.11'),
        ('configs/demo/pmt_tiny_frozen_demo.py', '2.10'),
        pytest.param(
            'configs/nwpu/efficientnet_lite0_fpn_nwpu_16_fixmatch.py',
            '2.11',
            marks=pytest.mark.long,
        ),
    ],
)
def test_what_travels_between_cards(name: str, profile: str, data: None, tmp_path: Path) -> None:
    traffic = traffic_of(name, profile, tmp_path)
    assert any(operation == 'ALLREDUCE' for operation, _, _ in traffic)
    assert not sorted(filter(unwanted, traffic))


@pytest.mark.parametrize(
    'entry',
    [
        ('ALLREDUCE', 'int64', 'torch.distributed.utils'),
        ('BROADCAST', 'int64', 'mapsage.engine'),
        ('GATHER', 'float32', 'autograd'),
        ('ALLREDUCE', 'uint8', 'mmengine.dist.dist'),
    ],
)
def test_what_may_not_travel(entry: tuple) -> None:
    assert unwanted(entry)
