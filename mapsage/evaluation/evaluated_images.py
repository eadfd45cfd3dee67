"""How many images of a dataset the ranks have evaluated, and which of them the sampler repeats."""
from __future__ import annotations

import logging
from typing import Sequence

from mmengine.logging import print_log


def check_images(images: Sequence[int], size: int) -> None:
    """Check that the ranks together have evaluated a dataset; all of them raise, or none.

    Args:
        images: Number of images of each rank.
        size: Number of images in the dataset; a warning says if fewer were evaluated.

    Raises:
        ValueError: If there was no image, or a rank repeats more than its last one.
    """
    if not sum(images):
        raise ValueError(f'no image was evaluated, expected {size}; check the dataloader')
    if any(count > 1 and is_repeat(images, other, count - 2, size)
           for other, count in enumerate(images)):
        raise ValueError(
            f'the ranks have {list(images)} images of a dataset of {size}: a rank repeats more '
            'than one, expected at most its last. Use a sampler that deals images out in turns, as '
            'DefaultSampler(shuffle=False)')
    if sum(images) < size:
        print_log(f'{sum(images)} of {size} images were evaluated', logger='current',
                  level=logging.WARNING)


def is_repeat(images: Sequence[int], rank: int, number: int, size: int) -> bool:
    """Return whether an image is one that the sampler repeats. Pure.

    Images are dealt out in turns, beginning with rank 0; a rank without further images is skipped.
    This is the order of mmengine.dist.collect_results before it cuts at ``size``.

    Args:
        images: Number of images of each rank.
        rank: Rank of the image.
        number: Index of the image among those of the rank, from 0.
        size: Number of images in the dataset.
    """
    before = sum(min(count, number + (other < rank)) for other, count in enumerate(images))
    return before >= size
