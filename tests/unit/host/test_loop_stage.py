"""A stage between a loop and its loader."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any, Iterator, List

from mapsage.host.runner import LoopStage, insert_stage


def stage_of(name: str) -> LoopStage:
    """Return a stage that marks what it sees."""

    def wrap_iterator(batches: Iterator[Any], discarded: int) -> Iterator[Any]:
        return itertools.chain([None] * discarded, (f'{name}({batch})' for batch in batches))

    def wrap_loader(loader: List[Any]) -> List[Any]:
        return [f'{name}({batch})' for batch in loader]

    return LoopStage(wrap_iterator, wrap_loader)


def test_an_iteration_based_loop_gets_another_iterator() -> None:
    loop = SimpleNamespace(dataloader_iterator=iter('ab'), dataloader='untouched')
    insert_stage(loop, stage_of('first'))
    insert_stage(loop, stage_of('second'))
    assert list(loop.dataloader_iterator) == ['second(first(a))', 'second(first(b))']
    assert loop.dataloader == 'untouched'


def test_a_loop_that_discards_items_says_how_many() -> None:
    loop = SimpleNamespace(dataloader_iterator=iter('a'), num_discarded=2)
    insert_stage(loop, stage_of('stage'))
    assert list(loop.dataloader_iterator) == [None, None, 'stage(a)']


def test_an_epoch_based_loop_gets_another_loader() -> None:
    loop = SimpleNamespace(dataloader=['a', 'b'])
    insert_stage(loop, stage_of('stage'))
    assert loop.dataloader == ['stage(a)', 'stage(b)'] and not hasattr(loop, 'dataloader_iterator')
