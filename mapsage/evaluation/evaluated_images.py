"""Checks of the images that the ranks evaluated: are any missing, and which ones are repeats?

Samplers pad the dataset so that every rank gets the same number of images. A metric that sums
counts must subtract the padding; `is_repeat` finds it from the numbers of images only.
"""

from __future__ import annotations

import logging
from typing import Sequence

from mmengine.logging import print_log


def check_images(images: Sequence[int], size: int) -> None:
    """Check that the ranks together evaluated the dataset; either all ranks raise or none.

    Args:
        images: Number of images by rank.
        size: Number of images in the dataset. Fewer evaluated images cause a warning.

    Raises:
        ValueError: If there was no image, or a rank repeats more than its last image.
    """
    if not sum(images):
        raise ValueError(f'no image was evaluated, expected {size}; check the dataloader')
    if any(
        count > 1 and is_repeat(images, rank, count - 2, size) for rank, count in enumerate(images)
    ):
        raise ValueError(
            f'the ranks have {list(images)} images of a dataset of {size}: a rank repeats more '
            'than one, expected at most its last. Use a sampler that assigns images to ranks '
            'round-robin, such as DefaultSampler(shuffle=False)'
        )
    if sum(images) < size:
        print_log(
            f'{sum(images)} of {size} images were evaluated',
            logger='current',
            level=logging.WARNING,
        )


def is_repeat(images: Sequence[int], rank: int, number: int, size: int) -> bool:
    """Return whether the sampler repeats an image. Pure.

    Images are assigned round-robin, starting with rank 0; a rank without further images is skipped.
    This is the order of mmengine.dist.collect_results before it cuts at ``size``.

    Args:
        images: Number of images by rank.
        rank: Rank of the image.
        number: Index of the image within its rank, from 0.
        size: Number of images in the dataset.
    """
    # Position of the image in the global order.
    position = sum(min(count, number + (peer < rank)) for peer, count in enumerate(images))
    return position >= size
