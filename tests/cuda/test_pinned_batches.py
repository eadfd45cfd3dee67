"""Batches of a loader with ``pin_memory=True`` reach the card while the host goes on."""
from __future__ import annotations

from typing import Any, List, Tuple

import pytest
import torch
from mmengine.dataset import pseudo_collate
from mmseg.registry import MODELS
from small_segmentors import SIDE, batch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader


class Transfers(TorchDispatchMode):
    """Lists the dtype of each copy from the host to a card, and whether the host waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: List[Tuple[torch.dtype, bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get('device')
        if func is torch.ops.aten._to_copy.default and device is not None \
                and torch.device(device).type == 'cuda' and args[0].is_cpu:
            self.copies.append((args[0].dtype, not kwargs.get('non_blocking', False)))
        return func(*args, **kwargs)


def preprocessed(pin_memory: bool) -> Tuple[List[Tuple[torch.dtype, bool]], Any]:
    samples = [dict(inputs=image, data_samples=sample) for image, sample in
               zip(*(batch()[name] for name in ('inputs', 'data_samples')))]
    loader: Any = DataLoader(samples, batch_size=2, collate_fn=pseudo_collate,  # type: ignore
                             pin_memory=pin_memory)
    preprocessor = MODELS.build(dict(type='SegDataPreProcessor', size=(SIDE, SIDE))).to('cuda')
    data = next(iter(loader))
    with Transfers() as transfers:
        return transfers.copies, preprocessor(data, True)


@pytest.mark.parametrize('pin_memory', [True, False])
def test_images_and_labels(pin_memory: bool) -> None:
    copies, moved = preprocessed(pin_memory)
    waits = not pin_memory
    assert copies == [(torch.uint8, waits)] * 2 + [(torch.int64, waits)] * 2
    torch.cuda.synchronize()
    expected = batch()
    assert torch.equal(moved['inputs'].cpu(), torch.stack(expected['inputs']).float())
    for sample, original in zip(moved['data_samples'], expected['data_samples']):
        assert sample.gt_sem_seg.data.is_cuda
        assert torch.equal(sample.gt_sem_seg.data.cpu(), original.gt_sem_seg.data)
        assert sample.img_shape == original.img_shape
