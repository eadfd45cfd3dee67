"""One process's batches of all its virtual ranks, in one object that looks like the first of them.

Loops and hooks of MMEngine hand a batch from the loader to the model without a look inside, or
look at it as the dict, list or tuple that the collate function has made.
"""
from __future__ import annotations

from typing import Any, Dict, List, Sequence, Tuple

from mapsage.distributed.virtual_ranks import VirtualRanksError

_ATTRIBUTE = 'batches_of_other_virtual_ranks'
_carriers: Dict[type, type] = {}


def pack_rank_batches(batches: Sequence[Any]) -> Any:
    """Return the first batch, or an equal one of a subclass of its type, that carries the others.

    Args:
        batches: One batch for each virtual rank, at least one.

    Raises:
        VirtualRanksError: If a batch of this type cannot carry anything.
    """
    first = batches[0]
    if len(batches) == 1:
        return first
    if not hasattr(first, '__dict__'):
        first = _of_subclass(first)
    setattr(first, _ATTRIBUTE, list(batches[1:]))
    return first


def unpack_rank_batches(batch: Any, block: range) -> List[Any]:
    """Return one batch for each virtual rank of a block, from what the loader has handed out.

    Raises:
        VirtualRanksError: If ``batch`` does not carry those of the others.
    """
    batches = [batch, *getattr(batch, _ATTRIBUTE, ())]
    if len(batches) != len(block):
        raise VirtualRanksError(
            f'a step of virtual ranks {block.start} to {block.stop - 1} was given '
            f'{len(batches)} batch(es) ({type(batch).__name__}): expected one for each of them. A '
            f'hook or loop that puts another batch in place of the loader\'s leaves the others '
            f'behind: change the batch in place, in a data transform, or start as many processes '
            f'as there are virtual ranks.')
    return batches


def _of_subclass(batch: Any) -> Any:
    kind = type(batch)
    try:
        if kind not in _carriers:
            _carriers[kind] = type(kind.__name__, (kind,), dict(__reduce__=_reduce))
        return _made(_carriers[kind], batch)
    except TypeError as error:
        raise VirtualRanksError(
            f'the collate function makes batches of type {kind.__name__}, which cannot carry those '
            f'of further virtual ranks: expected a dict, list, tuple or tensor.') from error


def _made(kind: type, batch: Any) -> Any:
    # A named tuple takes its fields one by one, all other tuples take a sequence.
    return tuple.__new__(kind, batch) if isinstance(batch, tuple) else kind(batch)


def _reduce(carrier: Any) -> Tuple[Any, ...]:
    """Pickle a carrier as what it was made from, since pickle finds no class by its name."""
    first = _made(type(carrier).__mro__[1], carrier)
    return pack_rank_batches, ([first, *getattr(carrier, _ATTRIBUTE)],)
