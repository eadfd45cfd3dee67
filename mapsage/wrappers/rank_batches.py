"""One object that carries the batches of all virtual ranks of a process.

MMEngine's loops and hooks hand a batch from the loader to the model, and may read it as the dict,
list or tuple that the collate function returned. The object is therefore the first virtual rank's
batch, and the batches of the other virtual ranks travel in one of its attributes. Code that needs
all of them calls :func:`unpack_rank_batches`; a copy of the first batch does not have them.
"""
from __future__ import annotations

from typing import Any, Dict, List, Sequence, Tuple, TypeVar, Union

from mapsage.distributed.virtual_ranks import VirtualRanksError

# A batch as MMEngine's loops hand it to a model.
Batch = Union[dict, tuple, list]
_AnyBatch = TypeVar('_AnyBatch')
_ATTRIBUTE = 'batches_of_other_virtual_ranks'
# Class of a batch -> its subclass whose instances have a __dict__ for the attribute.
_carrier_classes: Dict[type, type] = {}


def pack_rank_batches(batches: Sequence[_AnyBatch]) -> _AnyBatch:
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
    batches = [batch, *getattr(batch, _ATTRIBUTE, ())]
    if len(batches) != len(block):
        raise VirtualRanksError(
            f'a step of virtual ranks {block.start} to {block.stop - 1} was given '
            f'{len(batches)} batch(es) ({type(batch).__name__}): expected one for each of them. A '
            f'hook or loop that replaces the loader\'s batch loses the batches of the other '
            f'virtual ranks: change the batch in place, in a data transform, or start as many '
            f'processes as there are virtual ranks.')
    return batches


def _as_carrier(batch: _AnyBatch) -> _AnyBatch:
    """Return an equal batch of a subclass whose instances can have attributes."""
    kind = type(batch)
    try:
        if kind not in _carrier_classes:
            _carrier_classes[kind] = type(kind.__name__, (kind,), dict(__reduce__=_reduce))
        return _convert(_carrier_classes[kind], batch)
    except TypeError as error:
        raise VirtualRanksError(
            f'the collate function makes batches of type {kind.__name__}, which cannot carry the '
            f'batches of other virtual ranks: expected a dict, list, tuple or tensor.') from error


def _convert(kind: type, batch: Any) -> Any:
    # The constructor of a named tuple takes the fields one by one, tuple.__new__ a sequence.
    return tuple.__new__(kind, batch) if isinstance(batch, tuple) else kind(batch)


def _reduce(carrier: object) -> Tuple[object, ...]:
    """Pickle a carrier as its original type, because pickle cannot import the carrier class."""
    first = _convert(type(carrier).__mro__[1], carrier)
    return pack_rank_batches, ([first, *vars(carrier)[_ATTRIBUTE]],)
