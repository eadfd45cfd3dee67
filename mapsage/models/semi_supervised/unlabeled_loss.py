"""The loss of unlabeled images, over the valid pixels of all ranks."""
from __future__ import annotations

from typing import Any, Sequence, Tuple

import torch
from torch import nn
from torch.nn import functional

from mapsage.datasets.semi_supervised.transforms import FIELD, MARK, OUTSIDE


class UnlabeledLoss(nn.Module):
    """Cross entropy against the teacher's classes where it is sure, divided by all valid pixels.

    ``sum CE(s, argmax t) [max t >= threshold] / #valid``: with few sure pixels the loss is small,
    and does not become that of these few. Valid are the pixels of unlabeled images of all ranks,
    before boxes are mixed; padding is not. Their number follows from the data samples, and the
    wrapper sums it over the ranks (mapsage/wrappers/batch_counts.py).

    Sohn et al. 2020 (FixMatch), https://arxiv.org/abs/2001.07685; the divisor as in UniMatch V2,
    Yang et al. 2024, https://arxiv.org/abs/2410.10777.

    Args:
        threshold: Least probability of the teacher's class that counts, 0 or more and below 1.

    Raises:
        ValueError: If ``threshold`` is out of its range.
    """

    def __init__(self, threshold: float = 0.95) -> None:
        super().__init__()
        if isinstance(threshold, bool) or not 0 <= threshold < 1:
            raise ValueError(f'threshold={threshold!r} of the teacher\'s probability, expected a '
                             'number of 0 or more and below 1, such as 0.95: nothing would pass '
                             '1.')
        self.threshold = threshold

    @staticmethod
    def sum_over_ranks(count: torch.Tensor) -> torch.Tensor:
        """Return a count summed over all ranks; the wrapper puts its own function here."""
        return count

    def count_batch(self, data_samples: Sequence[Any]) -> torch.Tensor:
        """Return the number of valid pixels of a rank's unlabeled images, and 1, float64 (2,)."""
        pixels = sum(int((getattr(sample, FIELD).data != OUTSIDE).sum())
                     for sample in data_samples if is_unlabeled(sample))
        return torch.tensor([float(pixels), 1.], dtype=torch.float64)

    def forward(self, logits: torch.Tensor, classes: torch.Tensor, sure: torch.Tensor,
                count: torch.Tensor, views: int = 1) -> torch.Tensor:
        """Return the loss, a scalar; of several views, the mean.

        Args:
            logits: Student's logits, float (V N, C, H, W), view by view.
            classes: Teacher's classes of each view, int64 (V N, H, W).
            sure: Pixels that count, bool (V N, H, W).
            count: ``count_batch`` of this rank's samples.
            views: Number of views of each image, V.
        """
        pixels, ranks = self.sum_over_ranks(count)
        losses = functional.cross_entropy(logits.float(), classes, reduction='none')
        return (losses * sure).sum() * (ranks / (pixels.clamp(min=1) * views)).to(losses.dtype)


def is_unlabeled(sample: Any) -> bool:
    """Return whether a data sample was packed by ``PackUnlabeledInputs``."""
    return bool(sample.metainfo.get(MARK))


def stacked_hidden(samples: Sequence[Any], size: Tuple[int, int]) -> torch.Tensor:
    """Return the hidden masks of samples as one tensor, int64 (N, H, W), 255 where images end.

    Args:
        samples: Unlabeled data samples, whose masks may be smaller than their padded images.
        size: Rows and columns of the batch.
    """
    masks = []
    for sample in samples:
        mask = getattr(sample, FIELD).data[0]
        below, right = size[0] - mask.shape[0], size[1] - mask.shape[1]
        masks.append(functional.pad(mask, (0, right, 0, below), value=OUTSIDE)
                     if below or right else mask)
    return torch.stack(masks).long()
