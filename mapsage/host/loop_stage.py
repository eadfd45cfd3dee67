"""Stages between a training loop and its loader, for hooks that change where batches come from.

MMEngine's loops differ: an iteration-based loop holds one endless iterator, an epoch-based loop
iterates its loader once per epoch. A stage gives one function for each of the two.
"""

from __future__ import annotations

from typing import Any, Callable, Iterator, NamedTuple


class LoopStage(NamedTuple):
    """What a hook puts between a loop and its loader.

    Attributes:
        wrap_iterator: Takes the iterator of an iteration-based loop, and the number of items that
            the loop discards before it trains; returns the iterator to use instead. Discarded items
            may be None.
        wrap_loader: Takes the loader of an epoch-based loop and returns what the loop iterates
            instead.
    """

    wrap_iterator: Callable[[Iterator[Any], int], Iterator[Any]]
    wrap_loader: Callable[[Any], Any]


def insert_stage(loop: Any, stage: LoopStage) -> None:
    """Put a stage between a training loop and its loader.

    Later stages are nearer to the loop: a stage sees the batches of the stages inserted before it.

    Args:
        loop: Training loop of MMEngine, or of a user, before it runs.
        stage: Stage to insert.
    """
    if hasattr(loop, 'dataloader_iterator'):
        # A resumed loop of mmengine 0.10.7 discards items, see mapsage/compat/loop_resume.py.
        discarded = getattr(loop, 'num_discarded', 0)
        loop.dataloader_iterator = stage.wrap_iterator(loop.dataloader_iterator, discarded)
    else:
        loop.dataloader = stage.wrap_loader(loop.dataloader)
