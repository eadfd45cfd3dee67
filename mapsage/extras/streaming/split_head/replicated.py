"""The feature source of a head that several ranks train together.

One rank of the replica receives the features from encoders (:class:`Streamed`) and passes them to
all ranks (:class:`ReplicaFeatures`); this class combines the two.
"""

from __future__ import annotations

from collections import deque
from typing import Deque, Dict, Optional

from mapsage.extras.streaming.remote.streamed import Streamed
from mapsage.extras.streaming.source import Features, FeatureSource, Item, StreamingError

from .replica_features import ReplicaFeatures


class Replicated(FeatureSource):
    """One rank of a head replica receives from the encoders, and all of its ranks get the features.

    All ranks of the replica make a ``Replicated``, request the same items and fetch them in the
    same order. The samples and their seeds must be the same on each of them.

    Args:
        replica: Object that delivers items to all ranks of this replica.
        source: Source that receives from the encoders, on the rank that talks to them; None on the
            others.
        ahead: Number of items worth requesting ahead, equal on all ranks of the replica.
    """

    def __init__(self, replica: ReplicaFeatures, source: Optional[Streamed], ahead: int) -> None:
        self.ahead = ahead
        self._replica, self._source = replica, source
        self._requested: Deque[int] = deque()

    def request(self, item: Item) -> None:
        """Ask the encoders for an item, on the rank that talks to them."""
        self._requested.append(item.number)
        if self._source is not None:
            self._source.request(item)

    def features(self, item: Item) -> Features:
        """Return the features of an item on every rank of the replica. Collective over them.

        Raises:
            StreamingError: On every rank with the same text, if the item failed on any of them.
            RankLostError: Naming the ranks of the replica that did not take part.
        """
        if not self._requested or self._requested[0] != item.number:
            raise StreamingError(
                f'item {item.number} was asked for, and of those requested '
                f'{list(self._requested)} the first is next.'
            )
        self._requested.popleft()
        if self._source is None:
            return self._replica.deliver()
        arriving = self._source.arriving(item.number)
        following = self._source.arriving(self._requested[0]) if self._requested else None
        try:
            return self._replica.deliver(arriving, following)
        finally:
            # The item may still be on its way here if another rank has failed.
            self._source.drop(item.number)

    def report(self) -> Dict[str, float]:
        """Return the reports of delivery and, where there is one, of the source."""
        counts = {} if self._source is None else self._source.report()
        return {**counts, **self._replica.report()}

    def close(self) -> None:
        """Close the source, where there is one, and check that all blocks were given back.

        Raises:
            BlockError: Naming the owner of a block that was not given back.
        """
        if self._source is not None:
            self._source.close()
        self._replica.close()
