"""Items as the rank that receives their data sees them, for the tests next to this file."""

from __future__ import annotations

import dataclasses
from typing import Any, List, Optional

import torch

from mapsage.extras.streaming import StreamingError
from mapsage.extras.streaming.remote.state import State
from mapsage.extras.streaming.wire.payload import Layout, pack_levels


@dataclasses.dataclass
class Item:
    """An item as the rank that holds it sees it."""

    number: int = 0
    attempt: int = 0
    state: State = State.READY
    total: Optional[int] = None
    arrived: int = 0
    error: Optional[str] = None
    layout: Optional[Layout] = None
    data: Optional[torch.Tensor] = None

    def read(self, start: int, stop: int) -> torch.Tensor:
        assert self.data is not None
        return self.data[start:stop]

    def wait(self, timeout: float) -> None:
        raise StreamingError('the source was closed')


def ready(levels: List[torch.Tensor], **other: Any) -> Item:
    layout, data = pack_levels(levels)
    return Item(total=len(data), arrived=len(data), layout=layout, data=data, **other)
