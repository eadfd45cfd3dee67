"""Matrices of bicubic interpolation give what PyTorch's interpolation gives."""

from __future__ import annotations

import pytest
import torch.nn.functional as F
from earth_states import waves

from mapsage.extras.earth.resampling import enlarge, resize_table


@pytest.mark.parametrize('align_corners', [False, True])
@pytest.mark.parametrize('size', [(14, 14), (16, 9), (40, 32), (4, 6)])
def test_tables_of_positions(size: tuple, align_corners: bool) -> None:
    table = waves((1, 3, 14, 14))
    expected = F.interpolate(table, size, mode='bicubic', align_corners=align_corners)
    assert float((resize_table(table, *size, align_corners) - expected).abs().max()) < 2e-6


@pytest.mark.parametrize('patch', range(1, 9))
def test_enlarged_images(patch: int) -> None:
    images = waves((2, 3, 3 * patch, 5 * patch))
    try:
        expected = F.interpolate(images, (24, 40), mode='bicubic', antialias=True)
    except TypeError:
        pytest.skip('this version of PyTorch has no antialias, which the matrices replace')
    assert float((enlarge(images, 24, 40) - expected).abs().max()) < 2e-6


def test_gradients_pass_to_the_table() -> None:
    table = waves((3, 14, 14)).requires_grad_()
    resize_table(table, 7, 20, False).sum().backward()
    assert float(table.grad.sum()) == pytest.approx(3 * 7 * 20, rel=1e-4)
