"""A model over one card and the CPU computes what it computes on the card."""

from __future__ import annotations

import pytest
import torch
from mmengine.model import revert_sync_batchnorm
from small_segmentors import SMALL_SEGMENTORS, batch

from mapsage.accelerator import current_accelerator, resolve_accelerator, set_current_accelerator
from mapsage.distributed.wrappers import MMModelParallel

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA card')


@pytest.mark.parametrize('name', ['resnet_fcn', 'vit_upernet', 'segformer'])
def test_cuda_and_cpu_equal_one_card(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # In TF32, cuDNN's default, a card's convolutions round to 10 bits, and the CPU's half does not.
    monkeypatch.setattr(torch.backends.cudnn, 'allow_tf32', False)
    before = current_accelerator()
    set_current_accelerator(resolve_accelerator('cuda'))
    try:
        found = []
        for split in (False, True):
            model = SMALL_SEGMENTORS[name]()
            wrapped = (
                MMModelParallel(model, devices=['cuda:0', 'cpu'])
                if split
                else revert_sync_batchnorm(model).to('cuda:0')
            )
            data = (
                wrapped.module.data_preprocessor(batch(), True)
                if split
                else wrapped.data_preprocessor(batch(), True)
            )
            losses = wrapped(**data, mode='loss')
            total = sum(value for key, value in losses.items() if 'loss' in key)
            total.backward()
            found.append(
                (
                    float(total),
                    {
                        key: parameter.grad.cpu()
                        for key, parameter in model.named_parameters()
                        if parameter.grad is not None
                    },
                )
            )
        assert found[1][0] == pytest.approx(found[0][0], rel=1e-4)
        for key, gradient in found[0][1].items():
            torch.testing.assert_close(found[1][1][key], gradient, rtol=1e-2, atol=1e-3)
    finally:
        set_current_accelerator(before)
