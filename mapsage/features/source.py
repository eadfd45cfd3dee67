"""The one interface behind which the features of a frozen encoder come from anywhere."""
from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Callable, ClassVar, Dict, List, Tuple

import torch

# One (n, channels, height, width) a level, in the encoder's order.
Features = Tuple[torch.Tensor, ...]
Encode = Callable[[torch.Tensor], Features]


class StreamingError(RuntimeError):
    """Features did not come: which, why, and what to do."""


@dataclass(frozen=True)
class Item:
    """What is encoded together: the samples of one head replica in one step.

    Attributes:
        number: 0, 1, 2, ... over the run, in the order in which the head needs them.
        keys: One ``(dataset index, seed)`` a sample; a sample with random augmentation looks the
            same whenever its key is the same.
        images: What the encoder takes, float (n, 3, H, W), on the head's device; empty (n, 0, 0, 0)
            for a source without :attr:`FeatureSource.needs_images`.
    """

    number: int
    keys: Tuple[Tuple[int, Tuple[int, ...]], ...]
    images: torch.Tensor


class FeatureSource(abc.ABC):
    """Gives the features of the items it is asked for.

    An item is requested, once, in the order of their numbers; then its features are fetched, once,
    in the same order. Up to :attr:`ahead` further items may be requested before.

    Attributes:
        ahead: How many items are worth requesting before the first of them is needed.
        needs_images: Whether :attr:`Item.images` is looked at.
    """

    ahead: int = 0
    needs_images: ClassVar[bool] = True

    @abc.abstractmethod
    def request(self, item: Item) -> None:
        """Begin to get an item's features. Returns soon."""

    @abc.abstractmethod
    def features(self, item: Item) -> Features:
        """Return the features of an item that was requested, on the head's device, detached.

        Raises:
            StreamingError: If they cannot be had; on every rank of the head replica.
        """

    def report(self) -> Dict[str, float]:
        """Return what happened since the last report, for the log: seconds, bytes, counts."""
        return {}

    def close(self) -> None:
        """Let go of what the source holds. May be called twice."""
        return


class Local(FeatureSource):
    """Encodes an item when its features are fetched, as the model would: what others equal.

    Args:
        encode: The frozen encoder.
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
