"""One object that carries the batches of all virtual ranks of a process.

MMEngine's loops and hooks hand a batch from the loader to the model, and may read it as the dict,
list or tuple that the collate function returned. The object is therefore the first virtual rank's
batch, and the batches of the other virtual ranks travel in one of its attributes. Code that needs
all of them calls :func:`unpack_rank_batches`; a copy of the first batch does not have them.
"""

from __future__ import annotations

from typing import Any, List, Sequence, Tuple, TypeVar, Union

from mapsage.base.stand_ins import Delegate
from mapsage.distributed.virtual_ranks import VirtualRanksError

# A batch as MMEngine's loops hand it to a model.
Batch = Union[dict, tuple, list]
_AnyBatch = TypeVar('_AnyBatch')
_ATTRIBUTE = 'batches_of_other_virtual_ranks'


class RankDict(dict):
    """A dict batch that can carry the batches of other virtual ranks in its ``__dict__``."""


class RankList(list):
    """A list batch that can carry the batches of other virtual ranks in its ``__dict__``."""


class RankTuple(tuple, Delegate):
    """A tuple batch that can carry the batches of other virtual ranks in its ``__dict__``.

    Args:
        original: Tuple, which may be a named tuple: its fields are attributes of this one too.

    Attributes:
        original: The argument of that name.
    """

    original: tuple

    def __new__(cls, original: tuple) -> RankTuple:  # noqa: D102
        carrier = super().__new__(cls, original)
        carrier.original = original
        return carrier

    def __getnewargs__(self) -> Tuple[tuple]:
        return (self.original,)


def pack_rank_batches(batches: Sequence[_AnyBatch]) -> _AnyBatch:
    """Return the first batch, or an equal carrier of it, with the batches of the other ranks.

    A dict, list or tuple has no place for an attribute and becomes a :class:`RankDict`,
    :class:`RankList` or :class:`RankTuple`.

    Args:
        batches: One batch for each virtual rank, at least one.

    Raises:
        VirtualRanksError: If a batch of this type cannot carry anything.
    """
    first = batches[0]
    if len(batches) == 1:
        return first
    if not hasattr(first, '__dict__'):
        first = _as_carrier(first)
    vars(first)[_ATTRIBUTE] = list(batches[1:])
    return first


def unpack_rank_batches(batch: _AnyBatch, block: range) -> List[_AnyBatch]:
    """Return one batch for each virtual rank of a block.

    Args:
        batch: Batch from the loader, as :func:`pack_rank_batches` returned it.
        block: Virtual ranks of this process.

    Raises:
        VirtualRanksError: If ``batch`` does not carry one batch for each virtual rank.
    """
    # The model gets the tuple itself, whose type it may need to build another one.
    first = batch.original if isinstance(batch, RankTuple) else batch
    batches = [first, *getattr(batch, _ATTRIBUTE, ())]
    if len(batches) != len(block):
        raise VirtualRanksError(
            f'a step of virtual ranks {block.start} to {block.stop - 1} was given '
            f'{len(batches)} batch(es) ({type(batch).__name__}): expected one for each of them. A '
            f"hook or loop that replaces the loader's batch loses the batches of the other "
            f'virtual ranks: change the batch in place, in a data transform, or start as many '
            f'processes as there are virtual ranks.'
        )
    return batches


def _as_carrier(batch: Any) -> Any:
    """Return an equal batch of a class whose instances can have attributes."""
    if isinstance(batch, dict):
        return RankDict(batch)
    if isinstance(batch, list):
        return RankList(batch)
    if isinstance(batch, tuple):
        return RankTuple(batch)
    raise VirtualRanksError(
        f'the collate function makes batches of type {type(batch).__name__}, which cannot carry '
        f'the batches of other virtual ranks: expected a dict, list, tuple or tensor.'
    )
