"""Colors change, nothing moves."""

from __future__ import annotations

import colorsys
from typing import Any

import pytest
import torch

from mapsage.extras.labels.fixmatch.strong_view import StrongView, _color_matrix

OFF = dict(brightness=0.0, contrast=0.0, saturation=0.0, hue=0.0, jitter=0.0, gray=0.0, blur=0.0)


def view(**changes: float) -> StrongView:
    return StrongView(**{**OFF, **changes})


def images(bands: int = 3) -> torch.Tensor:
    return torch.rand(6, bands, 20, 24, generator=torch.Generator().manual_seed(1))


def test_without_strength_images_stay() -> None:
    given = images()
    mean, std = (
        torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1),
        torch.tensor([2.0, 3.0, 4.0]).view(3, 1, 1),
    )
    for values in (view()(given), view()(given, mean, std), view(jitter=1.0)(given)):
        assert torch.allclose(values, given, atol=1e-5)


def test_brightness_scales_values_before_normalization() -> None:
    torch.manual_seed(2)
    given, mean, std = images(4), torch.full((4, 1, 1), 5.0), torch.full((4, 1, 1), 2.0)
    ratio = (view(jitter=1.0, brightness=0.5)(given, mean, std) * std + mean) / (given * std + mean)
    factors = ratio.flatten(1)
    assert torch.allclose(factors, factors[:, :1].expand_as(factors), atol=1e-4)
    assert len(set(factors[:, 0].tolist())) == 6 and ((factors >= 0.5) & (factors <= 1.5)).all()


def test_gray_images_have_equal_bands_and_their_brightness() -> None:
    given = images()
    values = view(gray=1.0)(given)
    assert torch.allclose(values, given.mean(1, keepdim=True).expand_as(given), atol=1e-6)
    assert torch.allclose(view(gray=1.0)(images(5)), images(5), atol=1e-6)


def test_a_third_of_a_turn_exchanges_the_colors() -> None:
    matrix = _color_matrix(torch.ones(1), torch.full((1,), 1 / 3))[0]
    red = matrix @ torch.tensor([1.0, 0.0, 0.0])
    hue = colorsys.rgb_to_hsv(*red.clamp(0, 1).tolist())[0]
    assert torch.allclose(red, torch.tensor([0.0, 1.0, 0.0]), atol=1e-6)
    assert hue == pytest.approx(1 / 3)
    assert torch.allclose(matrix @ torch.ones(3), torch.ones(3), atol=1e-6)


def test_blur_keeps_flat_images_and_smooths_others() -> None:
    torch.manual_seed(0)
    flat = torch.full((2, 4, 12, 12), 3.0)
    assert torch.allclose(view(blur=1.0)(flat), flat, atol=1e-5)  # also at the edges
    given = images()
    values = view(blur=1.0)(given)
    assert (values.flatten(2).std(2) < 0.8 * given.flatten(2).std(2)).all()


def test_the_draws_are_those_of_the_cpu_generator() -> None:
    given = images()
    torch.manual_seed(9)
    first = StrongView()(given)
    torch.manual_seed(9)
    assert torch.equal(StrongView()(given), first) and not torch.allclose(first, given)
    assert not torch.equal(StrongView()(given), first)


def test_autocast_rounds_nothing() -> None:
    """Values of scenes with 16 bits are beyond what bfloat16 tells apart."""
    given, mean, std = images(), torch.full((3, 1, 1), 5000.0), torch.full((3, 1, 1), 900.0)
    torch.manual_seed(9)
    plain = StrongView(jitter=1.0, blur=1.0)(given, mean, std)
    torch.manual_seed(9)
    with torch.autocast('cpu', torch.bfloat16):
        assert torch.equal(StrongView(jitter=1.0, blur=1.0)(given, mean, std), plain)


@pytest.mark.parametrize('name, value', [('blur', 1.5), ('hue', -0.1), ('gray', float('nan'))])
def test_numbers_out_of_range(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f'strong.{name}=.*expected a number from 0 to 1'):
        StrongView(**{name: value})
