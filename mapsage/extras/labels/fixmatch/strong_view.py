"""Strong views of images: color jitter, grayscale and blur, computed on the device.

No pixel moves, so pseudo-labels of the weak view stay valid. Random numbers come from the CPU
generator, so a run draws the same ones on any device.

Shapes: N images, C bands, H x W pixels, K cells of the blur kernel.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional

# Radius of the blur kernel in pixels: twice the largest standard deviation.
_RADIUS = 4
# Standard deviation in pixels that leaves an image unchanged.
_NO_BLUR = 0.01


class StrongView:
    """Changes the colors of images at random and blurs them.

    The default probabilities and strengths are from UniMatch V2, https://arxiv.org/abs/2410.10777.
    Hue and saturation are changed by a rotation around the gray axis, which does not depend on the
    order of red, green and blue. Images with another number of bands than three change in
    brightness and contrast only, the contrast band by band. Values are not clipped.

    Args:
        brightness: Largest deviation of the brightness factor from 1.
        contrast: Largest deviation from 1 of the factor on differences from the mean.
        saturation: Largest deviation from 1 of the factor on differences from gray.
        hue: Largest rotation around the gray axis, as a fraction of a full turn.
        jitter: Probability that the colors of an image change.
        gray: Probability that an image becomes gray.
        blur: Probability that an image is blurred, with a standard deviation of 0.1 to 2 pixels.

    Raises:
        ValueError: If a number is below 0 or above 1.
    """

    def __init__(
        self,
        brightness: float = 0.5,
        contrast: float = 0.5,
        saturation: float = 0.5,
        hue: float = 0.25,
        jitter: float = 0.8,
        gray: float = 0.2,
        blur: float = 0.5,
    ) -> None:
        settings = dict(
            brightness=brightness,
            contrast=contrast,
            saturation=saturation,
            hue=hue,
            jitter=jitter,
            gray=gray,
            blur=blur,
        )
        for name, value in settings.items():
            if not 0 <= value <= 1:
                raise ValueError(f'strong.{name}={value!r}, expected a number from 0 to 1.')
        self.__dict__.update(settings)

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
            mean: Mean that was subtracted from each band, (C, 1, 1); None if none was.
            std: Standard deviation that each band was divided by, (C, 1, 1); None if none was.
        """
        draws = torch.rand(len(images), 8)
        values = images.float()
        if mean is not None:
            values = values * std + mean
        values = self._jitter_colors(values, draws)
        values = self._blur(values, draws)
        if mean is not None:
            values = (values - mean) / std
        return values.to(images.dtype)

    def _jitter_colors(self, values: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
        jittered = draws[:, 0] < self.jitter
        spread = torch.tensor([self.brightness, self.contrast, self.saturation, self.hue])
        amount = (draws[:, 1:5] * 2 - 1) * spread * jittered[:, None]
        brightness, contrast = (
            (1 + amount[:, column]).to(values.device).view(-1, 1, 1, 1) for column in (0, 1)
        )
        values = values * brightness
        mean = values.mean((2, 3), keepdim=True)
        if values.shape[1] == 3:
            mean = mean.mean(1, keepdim=True)
        values = mean + (values - mean) * contrast
        if values.shape[1] != 3:
            return values
        saturation = (1 + amount[:, 2]) * (draws[:, 5] >= self.gray)
        matrix = _color_matrix(saturation, amount[:, 3]).to(values.device)
        # A sum of products instead of a matrix product, which autocast would round.
        return (matrix[..., None, None] * values[:, None]).sum(2)

    def _blur(self, values: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
        sigma = torch.where(
            draws[:, 6] < self.blur, 0.1 + 1.9 * draws[:, 7], torch.full_like(draws[:, 7], _NO_BLUR)
        )
        offsets = torch.arange(-_RADIUS, _RADIUS + 1.0)
        kernel = torch.exp(-(offsets**2) / (2 * sigma[:, None] ** 2))
        kernel = (kernel / kernel.sum(1, keepdim=True)).to(values.device)
        for dim in (2, 3):
            values = _blur_dimension(values, kernel, dim)
        return values


def _color_matrix(saturation: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Return matrices that rotate colors around the gray axis and scale their saturation.

    The rotation is Rodrigues' formula for the axis (1, 1, 1).

    Args:
        saturation: Factor on the distance from the gray axis, float (N,).
        turns: Rotation as a fraction of a full turn, float (N,).

    Returns:
        Float (N, 3, 3).
    """
    angle = 2 * math.pi * turns
    cosine = (saturation * angle.cos())[:, None, None]
    sine = (saturation * angle.sin())[:, None, None]
    gray = torch.full((3, 3), 1 / 3)
    across = torch.tensor([[0.0, -1.0, 1.0], [1.0, 0.0, -1.0], [-1.0, 1.0, 0.0]]) / math.sqrt(3)
    return gray + cosine * (torch.eye(3) - gray) + sine * across


def _blur_dimension(values: torch.Tensor, kernel: torch.Tensor, dim: int) -> torch.Tensor:
    """Blur along one dimension, each image with its row of ``kernel`` (N, K).

    At the edges, the weights of the existing pixels are renormalized. The blur is a sum of shifted
    images, because autocast would round a convolution, and XLA compiles a convolution with one
    kernel per image for minutes.
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
