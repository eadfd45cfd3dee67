"""Labels as masks of all classes, on the grid of the predicted masks, whatever classes are there.

The published training draws points of full-size masks, one mask for each class of the image. Here
each image has a mask for every class of the dataset, with a flag whether it is present, and the
loss sees every cell of the masks' own grid: shapes never change, so that lazy devices compile once.
"""
from __future__ import annotations

from typing import NamedTuple, Tuple

import torch


class MaskTargets(NamedTuple):
    """Masks of a batch; P is the number of cells, each of which covers pixels of the labels.

    Attributes:
        masks: Share of each cell's pixels that are of a class, float (N, C, P).
        valid: Share of each cell's pixels that have a label, float (N, 1, P).
        present: Classes of which an image has any pixel, bool (N, C).
    """

    masks: torch.Tensor
    valid: torch.Tensor
    present: torch.Tensor


def mask_targets(labels: torch.Tensor, num_classes: int, size: Tuple[int, int]) -> MaskTargets:
    """Return the masks of label maps.

    A cell holds the mean of its pixels, so that the loss of a cell is that of its pixels under one
    prediction, and pixels without a label have no share in it.

    Args:
        labels: Class indices, integers (N, H, W); any other value, such as 255, is no label.
        num_classes: Number of classes, C.
        size: Rows and columns of the cells.

    Raises:
        ValueError: If a cell would not cover a whole number of pixels.
    """
    factor = labels.shape[-2] // size[0]
    if factor < 1 or tuple(labels.shape[-2:]) != (factor * size[0], factor * size[1]):
        raise ValueError(f'labels of {tuple(labels.shape[-2:])} pixels (H x W) for masks of {size} '
                         'cells: expected a whole multiple. Let the data preprocessor bring images '
                         'and labels to one size, a multiple of 16')
    classes = torch.arange(num_classes, device=labels.device).view(1, -1, 1, 1)
    # Pixel by pixel of a cell, since a mask of every class at full size would be large.
    masks = sum(
        (labels[:, None, row::factor, column::factor] == classes).float()
        for row in range(factor) for column in range(factor)) / factor**2
    assert isinstance(masks, torch.Tensor)
    masks = masks.flatten(2)
    return MaskTargets(masks, masks.sum(1, keepdim=True), masks.sum(2) > 0)
