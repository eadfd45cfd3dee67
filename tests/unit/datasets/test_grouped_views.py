"""A sampler that draws a number of views of each tile."""

from __future__ import annotations

import numpy as np
import pytest
from mmengine.registry import DATA_SAMPLERS

import mapsage.datasets  # noqa: F401  (registers the sampler)


def test_views_of_a_tile_come_one_after_the_other() -> None:
    sampler = DATA_SAMPLERS.build(
        dict(
            type='GroupedViewsSampler',
            views=3,
            dataset=np.arange(4),
            seed=1,
            sampler=dict(type='DefaultSampler', shuffle=True),
        )
    )
    order = list(sampler)
    assert len(order) == len(sampler) == 12
    assert order[::3] == order[1::3] == order[2::3] and sorted(order[::3]) == [0, 1, 2, 3]
    sampler.set_epoch(1)
    assert list(sampler) != order and sampler.seed == 1
    with pytest.raises(ValueError, match='views=0'):
        DATA_SAMPLERS.build(dict(type='GroupedViewsSampler', views=0, dataset=[], sampler={}))
