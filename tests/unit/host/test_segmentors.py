"""Parts and settings of a model, which may be a user's and lack them."""

from __future__ import annotations

import torch
from mmengine.model import BaseDataPreprocessor
from mmseg.models import SegDataPreProcessor
from torch import nn

from mapsage.host.segmentors import channel_means, child_module, padded_size


class Wrapped(nn.Module):
    """A user's model whose backbone is a property."""

    def __init__(self, preprocessor: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Conv2d(3, 4, 1))
        self.data_preprocessor = preprocessor
        self.depth = 1

    @property
    def backbone(self) -> nn.Module:
        return self.inner[0]


def test_a_part_may_be_a_property_and_a_number_is_no_part() -> None:
    model = Wrapped(BaseDataPreprocessor())
    assert child_module(model, 'backbone') is model.inner[0]
    assert child_module(model, 'depth') is None
    assert child_module(model, 'decode_head') is None


def test_a_preprocessor_may_have_neither_a_size_nor_means() -> None:
    padding = Wrapped(SegDataPreProcessor(mean=[1.0, 2.0, 3.0], std=[1.0, 1.0, 1.0], size=(8, 16)))
    assert padded_size(padding) == (8, 16)
    means = channel_means(padding.data_preprocessor)
    assert means is not None and torch.equal(means.flatten(), torch.tensor([1.0, 2.0, 3.0]))
    plain = Wrapped(BaseDataPreprocessor())
    assert padded_size(plain) is None and channel_means(plain.data_preprocessor) is None
    assert padded_size(nn.Identity()) is None
