"""What a config with head replicas may not ask for."""

from __future__ import annotations

from typing import Any, Dict

import pytest
import torch
from mmengine.config import Config
from support import main_leg

from mapsage.accelerator import resolve_accelerator
from mapsage.accelerator.cuda import CudaAccelerator
from mapsage.accelerator.xla import XlaAccelerator
from mapsage.extras.simulator.accelerator import SimAccelerator
from mapsage.extras.streaming import FeatureSourceError
from mapsage.extras.streaming.replica_settings import check_head_replicas, ranks_per_head

SOURCE = dict(type='Streamed', encoders=1, ranks_per_head=4)


def test_one_rank_a_head_unless_asked_for() -> None:
    assert (
        ranks_per_head(Config(dict()))
        == ranks_per_head(Config(dict(feature_source=dict(type='Local'))))
        == 1
    )
    assert ranks_per_head(Config(dict(feature_source=SOURCE))) == 4


@main_leg
@pytest.mark.parametrize(
    'setting, words',
    [
        (dict(model_wrapper_cfg=dict(type='MMModelParallel')), 'model_wrapper_cfg='),
        (dict(compile=True), 'compile=True'),
        (dict(auto_scale_lr=dict(enable=True, base_batch_size=16)), 'auto_scale_lr.enable=True'),
        (dict(randomness=dict(diff_rank_seed=True)), 'randomness.diff_rank_seed=True'),
    ],
    ids=lambda value: value if isinstance(value, str) else '',
)
def test_settings_that_take_a_rank_for_a_model(setting: Dict[str, Any], words: str) -> None:
    accelerator = resolve_accelerator('cpu')
    check_head_replicas(Config(dict(feature_source=SOURCE)), accelerator, 'auto')
    with pytest.raises(FeatureSourceError, match='ranks_per_head=4 with ' + words):
        check_head_replicas(Config(dict(setting, feature_source=SOURCE)), accelerator, 'auto')


@main_leg
@pytest.mark.parametrize(
    'kind, backend',
    [
        (XlaAccelerator, 'auto'),
        (SimAccelerator, 'auto'),
        (CudaAccelerator, 'staged'),
        (CudaAccelerator, 'gloo'),
    ],
)
def test_devices_and_backends_that_cannot_split_a_head(kind: Any, backend: str) -> None:
    with pytest.raises(
        FeatureSourceError, match=f"=4 on accelerator '{kind.name}' with backend '{backend}'"
    ):
        # as where such a device is
        check_head_replicas(Config(dict(feature_source=SOURCE)), kind.__new__(kind), backend)


@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split('.')[:2])) >= (2, 7),
    reason='this torch can split a head',
)
def test_a_torch_that_cannot_split_a_head() -> None:
    with pytest.raises(FeatureSourceError, match='this is torch .*ranks_per_head=1'):
        check_head_replicas(Config(dict(feature_source=SOURCE)), resolve_accelerator('cpu'), 'auto')
