"""Places of operators, by the S60's list and by PyTorch's dispatch table."""

from __future__ import annotations

from typing import Iterator

import pytest
import torch

from mapsage.extras.forensics.operators.placement import DispatchTable, OperatorPlace, S60Table

ATTENTION = '_scaled_dot_product_flash_attention_for_cpu'


def test_the_s60_trains_attention_and_not_convolutions() -> None:
    table = S60Table()
    places = {
        name: table.locate(name).place
        for name in (
            'mm',
            'convolution',
            ATTENTION,
            ATTENTION + '_backward',
            'convolution_backward',
            'hardtanh_backward',
            'transpose.int',
            'scatter_reduce.two',
            'mmcv::nms',
        )
    }
    assert [name for name, place in places.items() if place is OperatorPlace.CPU] == [
        'convolution_backward',
        'hardtanh_backward',
        'mmcv::nms',
    ]
    assert places['transpose.int'] is OperatorPlace.COMPOSED
    assert table.locate('hardtanh_backward').reason == 'no kernel'
    assert 'list' in table.locate('convolution_backward').reason


@pytest.fixture
def kernels() -> Iterator[torch.library.Library]:
    """Kernels of a card, registered as a vendor's package registers its own."""
    # No leg of the tests has kernels for this device.
    library = torch.library.Library('aten', 'IMPL', 'HPU')
    for name in ('relu', 'mul.out', 'convolution_overrideable', 'gelu_backward'):
        library.impl(name, lambda *args, **kwargs: None)
    yield library
    library._destroy()


@pytest.mark.usefixtures('kernels')
def test_a_card_has_the_kernels_that_were_registered() -> None:
    table = DispatchTable('hpu')
    places = {
        name: table.locate(name).place
        for name in (
            'relu',
            'mul.Tensor',
            'mul_.Tensor',
            'convolution',
            'gelu_backward',
            'sinh',
            'add.Tensor',
            'convolution_backward',
            'zeros_like',
            'no_such_operator',
        )
    }
    # PyTorch calls mul.out for the other two forms.
    assert [name for name, place in places.items() if place is OperatorPlace.CARD] == [
        'relu',
        'mul.Tensor',
        'mul_.Tensor',
        'convolution',
        'gelu_backward',
    ]
    assert places['zeros_like'] is OperatorPlace.COMPOSED
    assert [name for name, place in places.items() if place is OperatorPlace.CPU] == [
        'sinh',
        'add.Tensor',
        'convolution_backward',
        'no_such_operator',
    ]


@pytest.mark.usefixtures('kernels')
def test_a_registered_kernel_on_the_vendors_list_is_on_the_cpu() -> None:
    assert DispatchTable('hpu', s60_list=True).locate('gelu_backward').place is OperatorPlace.CPU
    assert DispatchTable('hpu', s60_list=True).locate('relu').place is OperatorPlace.CARD


def test_the_cpu_itself_has_its_kernels() -> None:
    assert DispatchTable('cpu').locate('native_batch_norm_backward').place is OperatorPlace.CARD
