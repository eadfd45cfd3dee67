"""What a user's dataset may lack, asked without errors; `innermost` is in test_data_checks."""

from __future__ import annotations

from typing import Any

import pytest
from mmengine.dataset import BaseDataset
from torch.utils.data import Dataset, TensorDataset

from mapsage.host.dataset_parts import ignored_label, lists_samples, metainfo_of


class Wrapper(Dataset):
    """A user's wrapper that passes on what it lacks."""

    def __init__(self, dataset: Any) -> None:
        self.wrapped = dataset

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__['wrapped'], name)


@pytest.fixture
def dataset() -> BaseDataset:
    return BaseDataset(metainfo=dict(classes=('a', 'b')), lazy_init=True)


def test_a_dataset_and_a_wrapper_that_passes_on_answer_alike(dataset: BaseDataset) -> None:
    for answer in (lists_samples(dataset), lists_samples(Wrapper(dataset))):
        assert answer is True
    assert metainfo_of(dataset) == metainfo_of(Wrapper(dataset)) == dict(classes=('a', 'b'))


def test_a_dataset_of_torch_has_no_facts() -> None:
    assert not lists_samples(TensorDataset())
    assert metainfo_of(TensorDataset()) == {}


def test_the_outer_dataset_decides_which_label_is_ignored(dataset: BaseDataset) -> None:
    assert ignored_label(Wrapper(dataset), dataset, 255) == 255
    dataset.ignore_index = 7
    outer = Wrapper(dataset)
    assert ignored_label(TensorDataset(), dataset, 255) == 7
    outer.ignore_index = 3
    assert ignored_label(outer, dataset, 255) == 3
