"""Refuse to write a checkpoint that could not be read back.

Gap: the host pickles whatever a hook, a dataset's metainfo or a scheduler puts into a checkpoint,
and a loader with an allow-list refuses it, which shows only when a run is resumed.
Remove when: the host's ``save_checkpoint`` checks what it writes.
"""

from __future__ import annotations

import functools
import io
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Callable, FrozenSet, Iterable, Iterator, Optional, Tuple

import mmengine.runner
import numpy as np
import torch
from mmengine.logging.history_buffer import HistoryBuffer
from mmengine.runner import checkpoint as host
from mmengine.runner import runner

from .checkpoint_loading import UnsafeCheckpointError, read_checkpoint

# Beginning of an object's path in a checkpoint of MMEngine's Runner -> advice to the user.
_ADVICE = {
    "['meta']['dataset_meta']": 'It comes from the metainfo of the dataset.',
    "['message_hub']": 'MessageHub.update_info(..., resumed=False) leaves an entry out.',
    "['param_schedulers']": 'It comes from state_dict() of the scheduler.',
    "['optimizer']": 'It comes from state_dict() of the optimizer wrapper.',
    "['state_dict']": 'It comes from state_dict() of the model, which get_extra_state() adds to.',
}


def check_loadable(checkpoint: object) -> None:
    """Check that :func:`load_from_local` could read a checkpoint back.

    Everything but the contents of tensors and arrays is written to memory and read again.

    Args:
        checkpoint: Nested containers, as ``torch.save`` gets them. It is not changed.

    Raises:
        UnsafeCheckpointError: If the checkpoint contains an object that cannot be pickled, or that
            the loader refuses. The message has the object's path and type, and what to do.
    """
    skeleton = _without_data(checkpoint)
    reason = _refusal(skeleton)
    if reason is None:
        return
    path, problem = _find_refused(skeleton, '')
    advice = next((f' {text}' for start, text in _ADVICE.items() if path.startswith(start)), '')
    raise UnsafeCheckpointError(
        f'the checkpoint is not written, because it could not be read back: checkpoint{path} '
        f'{problem}. Only numbers, texts, lists, dicts, tensors, NumPy arrays and types of '
        f'MMEngine are read, since any other could run code. Store such values instead, or leave '
        f'it out.{advice} ({reason})'
    )


def apply() -> bool:
    """Make MMEngine check a checkpoint before it writes one."""
    save = host.save_checkpoint

    @functools.wraps(save)
    def check_and_save(
        checkpoint: object, *args: Any, write: Callable[..., None] = save, **kwargs: Any
    ) -> None:
        check_loadable(checkpoint)
        write(checkpoint, *args, **kwargs)

    for module in (host, runner, mmengine.runner):
        module.save_checkpoint = check_and_save  # type: ignore[attr-defined]
    return True


def _without_data(value: Any, ancestors: FrozenSet[int] = frozenset()) -> Any:
    """Return plain containers with None for tensors and with empty arrays.

    Plain tensors can always be read back, and thousands of empty ones would take as long as the
    full ones. Other objects are returned unchanged.

    Args:
        value: Value in a checkpoint.
        ancestors: Ids of the containers around ``value``, which may contain themselves.
    """
    kind = type(value)
    if (
        kind in (torch.Tensor, torch.nn.Parameter)
        and value.layout is torch.strided
        and not value.is_quantized
    ):
        return None
    if kind is np.ndarray and not value.dtype.hasobject:
        return np.empty(0, value.dtype)
    if kind is HistoryBuffer:
        short: Any = HistoryBuffer()
        vars(short).update(
            (name, content[:1] if isinstance(content, np.ndarray) else content)
            for name, content in vars(value).items()
        )
        return short
    if kind not in (dict, OrderedDict, list, tuple) or id(value) in ancestors:
        return value
    ancestors = ancestors | {id(value)}
    if kind in (list, tuple):
        return kind(_without_data(item, ancestors) for item in value)
    return kind((key, _without_data(item, ancestors)) for key, item in value.items())


def _refusal(value: object) -> Optional[str]:
    """Return why a value could not be read back from a file; None if it could."""
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        read_checkpoint(file, 'cpu')
    # All errors, because errors of pickle have no common class: __reduce__ of any object may run.
    except Exception as error:
        return f'{type(error).__name__}: {error}'.split('\n')[0]
    return None


def _find_refused(value: object, path: str) -> Tuple[str, str]:
    """Return the path of the innermost object that is refused, and the problem with it."""
    for key, child in _children(value):
        if _refusal(key) is not None:
            return path, f'has a key that is a {_type_name(key)}'
        if _refusal(child) is not None:
            return _find_refused(child, f'{path}[{key!r}]')
    return path, f'is a {_type_name(value)}'


def _children(value: object) -> Iterator[Tuple[object, object]]:
    """Yield the keys or indices of a container, with their values."""
    items: Iterable[Tuple[object, object]] = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    yield from items


def _type_name(value: object) -> str:
    kind = type(value)
    return (
        kind.__qualname__
        if kind.__module__ == 'builtins'
        else f'{kind.__module__}.{kind.__qualname__}'
    )
