"""Strong views of images: other colors, or none, and blur, computed on the device."""
from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional

_RADIUS = 4  # of the blur, in pixels: two of the largest deviation
_SHARPEST = 0.01  # deviation, in pixels, whose blur is none


class StrongView:
    """Changes the colors of images and blurs them; nothing moves.

    Probabilities and strengths are those of UniMatch V2, https://arxiv.org/abs/2410.10777. All is
    drawn from torch's CPU generator. Images of three bands are turned around the axis of gray, so
    that the order of red, green and blue does not matter. Of other bands, brightness and contrast
    change, band by band. Values are not clipped.

    Args:
        brightness: Most by which the factor of the values differs from 1.
        contrast: Most by which the factor of the differences from the mean differs from 1.
        saturation: Most by which the factor of the differences from gray differs from 1.
        hue: Most turns around the axis of gray, 0 to 0.5.
        jitter: Probability that colors change.
        gray: Probability that an image loses its colors.
        blur: Probability that an image is blurred, with a deviation of 0.1 to 2 pixels.

    Raises:
        ValueError: If a number is negative or, of a probability, above 1.
    """

    def __init__(self, brightness: float = 0.5, contrast: float = 0.5, saturation: float = 0.5,
                 hue: float = 0.25, jitter: float = 0.8, gray: float = 0.2, blur: float = 0.5
                 ) -> None:
        given = dict(brightness=brightness, contrast=contrast, saturation=saturation, hue=hue,
                     jitter=jitter, gray=gray, blur=blur)
        for name, value in given.items():
            if not 0 <= value <= 1:
                raise ValueError(f'strong.{name}={value!r}, expected a number from 0 to 1.')
        self.__dict__.update(given)

    brightness: float
    contrast: float
    saturation: float
    hue: float
    jitter: float
    gray: float
    blur: float

    def __call__(self, images: torch.Tensor, mean: Any = None, std: Any = None) -> torch.Tensor:
        """Return the strong views of images, float (N, C, H, W).

        Args:
            images: Normalized images, float (N, C, H, W).
            mean: What was subtracted from each band, (C, 1, 1); None for nothing.
            std: What each band was divided by, (C, 1, 1); None for 1.
        """
        draws = torch.rand(len(images), 8)
        values = images.float()
        if mean is not None:
            values = values * std + mean
        values = self._colored(values, draws)
        values = self._blurred(values, draws)
        if mean is not None:
            values = (values - mean) / std
        return values.to(images.dtype)

    def _colored(self, values: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
        jittered = draws[:, 0] < self.jitter
        spread = torch.tensor([self.brightness, self.contrast, self.saturation, self.hue])
        amount = (draws[:, 1:5] * 2 - 1) * spread * jittered[:, None]
        light, contrast = ((1 + amount[:, at]).to(values.device).view(-1, 1, 1, 1)
                           for at in (0, 1))
        values = values * light
        middle = values.mean((2, 3), keepdim=True)
        if values.shape[1] == 3:
            middle = middle.mean(1, keepdim=True)
        values = middle + (values - middle) * contrast
        if values.shape[1] != 3:
            return values
        factors = (1 + amount[:, 2]) * (draws[:, 5] >= self.gray)
        matrix = _color_matrix(factors, amount[:, 3]).to(values.device)
        # Not by a product of matrices, which autocast would round.
        return (matrix[..., None, None] * values[:, None]).sum(2)

    def _blurred(self, values: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
        sigma = torch.where(draws[:, 6] < self.blur, 0.1 + 1.9 * draws[:, 7],
                            torch.full_like(draws[:, 7], _SHARPEST))
        offsets = torch.arange(-_RADIUS, _RADIUS + 1.)
        kernel = torch.exp(-offsets**2 / (2 * sigma[:, None]**2))
        kernel = (kernel / kernel.sum(1, keepdim=True)).to(values.device)
        for dim in (2, 3):
            values = _convolved(values, kernel, dim)
        return values


def _color_matrix(saturation: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Return the matrices that turn colors around the axis of gray and scale their distance to it.

    By Rodrigues' formula, float (N, 3, 3), from two tensors (N,).
    """
    angle = 2 * math.pi * turns
    cosine, sine = (saturation * angle.cos())[:, None, None], (saturation * angle.sin())[
        :, None, None]
    gray = torch.full((3, 3), 1 / 3)
    across = torch.tensor([[0., -1., 1.], [1., 0., -1.], [-1., 1., 0.]]) / math.sqrt(3)
    return gray + cosine * (torch.eye(3) - gray) + sine * across


def _convolved(values: torch.Tensor, kernel: torch.Tensor, dim: int) -> torch.Tensor:
    """Blur along a side, each image with its row of ``kernel`` (N, K); edges weigh what is there.

    By sums of shifted images: autocast would round a convolution, and XLA compiles one with a
    kernel for each image for minutes.
    """
    edges = (0, 0, _RADIUS, _RADIUS) if dim == 2 else (_RADIUS, _RADIUS)
    padded = functional.pad(values, edges)
    inside = functional.pad(values.new_ones(1, 1, *values.shape[2:]), edges)
    total, weight = torch.zeros_like(values), values.new_zeros(len(values), 1, *values.shape[2:])
    for offset in range(kernel.shape[1]):
        factor = kernel[:, offset].view(-1, 1, 1, 1)
        total = total + padded.narrow(dim, offset, values.shape[dim]) * factor
        weight = weight + inside.narrow(dim, offset, values.shape[dim]) * factor
    return total / weight
