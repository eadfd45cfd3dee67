"""The interface of all feature sources, and the source that encodes locally.

Shapes: n samples of a head replica in one step, H and W of the images.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Callable, ClassVar, Dict, List, Sequence, Tuple

import torch

from mapsage.base.errors import UserError

# One tensor (n, channels, height, width) per level, in the encoder's order.
Features = Tuple[torch.Tensor, ...]
Encode = Callable[[torch.Tensor], Features]


class StackFeatures(Tuple[torch.Tensor, ...]):
    """Features whose last level has the facts of a stack: float32 in any precision."""


class StreamingError(UserError, RuntimeError):
    """Features did not arrive; the message says which, why, and what to do.

    Attributes:
        ranks: Global ranks of the encoders that failed, where it is their fault.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = list(ranks)


class NonFiniteFeaturesError(UserError, ValueError):
    """An encoder returned NaN or infinite values for images that are finite."""


def check_finite(features: Features, images: torch.Tensor) -> None:
    """Check that the features of finite images are finite, before others train on them.

    Features of images that are not finite pass: the data is at fault, not the encoder.

    Args:
        features: Levels of the encoder.
        images: Images that were encoded, float (n, 3, H, W).

    Raises:
        NonFiniteFeaturesError: If a level has a NaN or infinite value.
    """
    for number, level in enumerate(features):
        bad = int((~torch.isfinite(level)).sum())
        if bad and bool(torch.isfinite(images).all()):
            raise NonFiniteFeaturesError(
                f'level {number} of the features has {bad} of {level.numel()} values that are NaN '
                f'or infinite, expected finite features of finite images. Check the weights of the '
                f'encoder, and with mixed precision ({level.dtype}) whether its activations '
                f'overflow; a device that computes wrongly shows in `mapsage doctor`.'
            )


@dataclass(frozen=True)
class Item:
    """The samples that are encoded together: the batch of one head replica in one step.

    Attributes:
        number: 0, 1, 2, ... over the run, in the order in which the head needs the items.
        keys: Pair ``(dataset index, seed)`` of each sample; samples with equal keys are equal,
            random augmentation included.
        images: Input of the encoder, float (n, 3, H, W), on the head's device; empty (n, 0, 0, 0)
            for a source without :attr:`FeatureSource.needs_images`.
    """

    number: int
    keys: Tuple[Tuple[int, Tuple[int, ...]], ...]
    images: torch.Tensor


class FeatureSource(abc.ABC):
    """Provides the features of the items that are requested from it.

    Each item is requested once, in the order of the numbers, and then its features are fetched
    once, in the same order. Up to :attr:`ahead` later items may be requested before an item is
    fetched.

    Attributes:
        ahead: Number of items to request before the first of them is needed.
        needs_images: Whether the source reads :attr:`Item.images`.
        may_wait: Whether :attr:`ahead` may be set to 0 if items are known only in their step.
    """

    ahead: int = 0
    needs_images: ClassVar[bool] = True
    may_wait: ClassVar[bool] = False

    @abc.abstractmethod
    def request(self, item: Item) -> None:
        """Begin to compute or read an item's features; return without waiting for them."""

    @abc.abstractmethod
    def features(self, item: Item) -> Features:
        """Return the features of a requested item, on the head's device, detached.

        Raises:
            StreamingError: If they do not arrive; on every rank of the head replica.
        """

    def report(self) -> Dict[str, float]:
        """Return seconds, bytes and counts since the last report, by the names the log shows."""
        return {}

    def close(self) -> None:
        """Free memory, files and threads. May be called twice."""
        return


class Local(FeatureSource):
    """Encodes an item when its features are fetched, as the model would.

    Tests compare every other source with this one.

    Args:
        encode: Frozen encoder.
    """

    def __init__(self, encode: Encode) -> None:
        self._encode = encode
        self._requested: List[int] = []

    def request(self, item: Item) -> None:  # noqa: D102
        self._requested.append(item.number)

    def features(self, item: Item) -> Features:  # noqa: D102
        self._requested.remove(item.number)
        with torch.no_grad():
            return tuple(self._encode(item.images))
