"""CutMix: a box of each image is replaced by the same box of another image.

The same boxes are applied to images, features and pseudo-labels. Their edges therefore lie on the
grid of the coarsest of these maps.

Yun et al. 2019, https://arxiv.org/abs/1905.04899; size and shape of the boxes as in UniMatch V2,
Yang et al. 2024, https://arxiv.org/abs/2410.10777.

Shapes: N images, H x W cells of a map.
"""

from __future__ import annotations

from typing import Tuple

import torch

# Range of a box's area, as a share of the image.
_AREA = (0.02, 0.4)
# Range of a box's aspect ratio, height to width.
_RATIO = (0.3, 1 / 0.3)


def draw_boxes(images: int, probability: float, grid: Tuple[int, int]) -> torch.Tensor:
    """Draw one box per image from torch's CPU generator, float (N, 4) on the CPU.

    The columns are top, bottom, left and right, as shares of the image's sides. An image that stays
    unchanged gets an empty box. Edges lie between cells of ``grid``, so features and pixels are cut
    at the same positions.

    Args:
        images: Number of images.
        probability: Probability that an image has a box.
        grid: Number of rows and columns of the coarsest map that is cut.
    """
    drawn = torch.rand(images, 5)
    area = _AREA[0] + (_AREA[1] - _AREA[0]) * drawn[:, 1]
    ratio = _RATIO[0] + (_RATIO[1] - _RATIO[0]) * drawn[:, 2]
    sides = torch.stack([(area * ratio).sqrt(), (area / ratio).sqrt()], 1).clamp(max=1)
    cells = torch.tensor(grid, dtype=torch.float32)
    begin = ((1 - sides) * drawn[:, 3:] * cells).round() / cells
    end = begin + (sides * cells).round().clamp(min=1) / cells
    boxes = torch.stack([begin[:, 0], end[:, 0], begin[:, 1], end[:, 1]], 1).clamp(max=1)
    return boxes * (drawn[:, :1] < probability)


def box_masks(boxes: torch.Tensor, size: Tuple[int, int]) -> torch.Tensor:
    """Return the cells of a map inside the boxes, bool (N, H, W), on the device of ``boxes``."""
    inside = []
    for cells, begin, end in (
        (size[0], boxes[:, 0], boxes[:, 1]),
        (size[1], boxes[:, 2], boxes[:, 3]),
    ):
        centers = (torch.arange(cells, device=boxes.device, dtype=boxes.dtype) + 0.5) / cells
        inside.append((centers >= begin[:, None]) & (centers < end[:, None]))
    return inside[0][:, :, None] & inside[1][:, None]


def paste(values: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
    """Replace the box of each image by the same box of its partner.

    The partner of image i is image N - 1 - i.

    Args:
        values: Images, features or masks, (N, ..., H, W).
        boxes: Boxes of :func:`draw_boxes`, on the device of ``values``.
    """
    inside = box_masks(boxes, values.shape[-2:])  # type: ignore[arg-type]
    inside = inside.reshape(len(values), *[1] * (values.dim() - 3), *values.shape[-2:])
    return torch.where(inside, values.flip(0), values)
