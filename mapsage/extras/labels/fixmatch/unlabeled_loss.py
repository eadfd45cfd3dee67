"""The loss of unlabeled images, divided by the valid pixels of all ranks.

The divisor is the number of valid pixels, not of confident ones: with few confident pixels the loss
is small, instead of relying fully on these few.

Shapes: N images, V strong views of each image, C classes, H x W pixels.
"""

from __future__ import annotations

from typing import Any, Sequence, Tuple

import torch
from torch import nn
from torch.nn import functional

from mapsage.extras.labels.unlabeled.transforms import FIELD, MARK, OUTSIDE


class UnlabeledLoss(nn.Module):
    """Cross-entropy against the teacher's classes where the teacher is confident.

    ``sum CE(s, argmax t) [max t >= threshold] / #valid``. The valid pixels are the pixels of the
    unlabeled images of all ranks, except padding and no-data areas, before boxes are mixed. Their
    number depends on the data samples only, and the wrapper sums it over the ranks
    (mapsage/distributed/wrappers/batch_counts.py).

    Sohn et al. 2020 (FixMatch), https://arxiv.org/abs/2001.07685; the divisor as in UniMatch V2,
    Yang et al. 2024, https://arxiv.org/abs/2410.10777.

    Args:
        threshold: Smallest probability of the teacher's class that counts as confident, at least 0
            and below 1.

    Raises:
        ValueError: If ``threshold`` is out of its range.
    """

    def __init__(self, threshold: float = 0.95) -> None:
        super().__init__()
        if isinstance(threshold, bool) or not 0 <= threshold < 1:
            raise ValueError(
                f"threshold={threshold!r} for the teacher's probability, expected a "
                'number of 0 or more and below 1, such as 0.95: no pixel would reach '
                '1.'
            )
        self.threshold = threshold

    @staticmethod
    def sum_over_ranks(count: torch.Tensor) -> torch.Tensor:
        """Return a count summed over all ranks; the wrapper replaces this function."""
        return count

    def count_batch(self, data_samples: Sequence[Any]) -> torch.Tensor:
        """Return a rank's number of valid unlabeled pixels, and 1 to count ranks, float64 (2,)."""
        pixels = sum(
            int((_get_hidden_mask(sample) != OUTSIDE).sum())
            for sample in data_samples
            if is_unlabeled(sample)
        )
        return torch.tensor([float(pixels), 1.0], dtype=torch.float64)

    def forward(
        self,
        logits: torch.Tensor,
        classes: torch.Tensor,
        confident: torch.Tensor,
        count: torch.Tensor,
        views: int = 1,
    ) -> torch.Tensor:
        """Return the loss averaged over the views, a scalar.

        Args:
            logits: Student's logits, float (V * N, C, H, W), view by view.
            classes: Teacher's classes for each view, int64 (V * N, H, W).
            confident: Pixels where the teacher is confident, bool (V * N, H, W).
            count: ``count_batch`` of this rank's samples.
            views: Number of views of each image, V.
        """
        pixels, ranks = self.sum_over_ranks(count)
        losses = functional.cross_entropy(logits.float(), classes, reduction='none')
        return (losses * confident).sum() * (ranks / (pixels.clamp(min=1) * views)).to(losses.dtype)


def is_unlabeled(sample: Any) -> bool:
    """Return whether a data sample was packed by ``PackUnlabeledInputs``."""
    return bool(sample.metainfo.get(MARK))


def stack_hidden_masks(samples: Sequence[Any], size: Tuple[int, int]) -> torch.Tensor:
    """Return the hidden masks of samples, padded with 255 to one size, int64 (N, H, W).

    Args:
        samples: Unlabeled data samples, whose masks may be smaller than their padded images.
        size: Rows and columns of the batch.
    """
    masks = []
    for sample in samples:
        mask = _get_hidden_mask(sample)[0]
        below, right = size[0] - mask.shape[0], size[1] - mask.shape[1]
        masks.append(
            functional.pad(mask, (0, right, 0, below), value=OUTSIDE) if below or right else mask
        )
    return torch.stack(masks).long()


def _get_hidden_mask(sample: Any) -> torch.Tensor:
    """Return a sample's mask of known labels and padding, (1, H, W)."""
    return getattr(sample, FIELD).data
