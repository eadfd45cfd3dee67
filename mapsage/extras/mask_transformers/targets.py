"""Labels as masks of all classes, on the grid of the predicted masks.

The published training samples points of full-size masks, with one mask per class in the image. Here
every image has a mask for every class of the dataset and a flag whether the class is present, and
the loss covers every cell of the mask grid. Shapes therefore never change, and lazy devices (XLA,
T20) compile only once.

Shapes: N images, C classes, H x W label pixels, P cells of the mask grid.
"""

from __future__ import annotations

from typing import NamedTuple, Tuple

import torch


class MaskTargets(NamedTuple):
    """Target masks of a batch.

    Attributes:
        masks: Share of each cell's pixels that belong to a class, float (N, C, P).
        valid: Share of each cell's pixels that have a label, float (N, 1, P).
        present: Whether an image contains a class, bool (N, C).
    """

    masks: torch.Tensor
    valid: torch.Tensor
    present: torch.Tensor


def build_mask_targets(
    labels: torch.Tensor, num_classes: int, size: Tuple[int, int]
) -> MaskTargets:
    """Return the target masks of label maps.

    A cell has the mean of its pixels, so its loss equals the mean loss of its pixels for the cell's
    one prediction. Pixels without a label contribute nothing.

    Args:
        labels: Class indices, integers (N, H, W); any other value, such as 255, means no label.
        num_classes: Number of classes, C.
        size: Rows and columns of the mask grid.

    Raises:
        ValueError: If a cell would not cover a whole number of pixels.
    """
    factor = labels.shape[-2] // size[0]
    if factor < 1 or tuple(labels.shape[-2:]) != (factor * size[0], factor * size[1]):
        raise ValueError(
            f'labels of {tuple(labels.shape[-2:])} pixels (H x W) for masks of {size} '
            'cells: expected a whole multiple. Let the data preprocessor bring images '
            'and labels to one size, a multiple of 16'
        )
    classes = torch.arange(num_classes, device=labels.device).view(1, -1, 1, 1)
    # Summed pixel by pixel of a cell, because masks of all classes at full size would be large.
    masks = (
        sum(
            (labels[:, None, row::factor, column::factor] == classes).float()
            for row in range(factor)
            for column in range(factor)
        )
        / factor**2
    )
    assert isinstance(masks, torch.Tensor)
    masks = masks.flatten(2)
    return MaskTargets(masks, masks.sum(1, keepdim=True), masks.sum(2) > 0)
