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
from typing import Any, Callable, Dict, FrozenSet, Iterator, Optional, Tuple

import mmengine.runner
import numpy as np
import torch
from mmengine.logging.history_buffer import HistoryBuffer
from mmengine.runner import checkpoint as host
from mmengine.runner import runner

from .checkpoint_loading import UnsafeCheckpointError, read_checkpoint

# What to do about an object, by the beginning of its place in a checkpoint of MMEngine's Runner.
_ADVICE = {
    "['meta']['dataset_meta']": 'It comes from the metainfo of the dataset.',
    "['message_hub']": 'MessageHub.update_info(..., resumed=False) leaves an entry out.',
    "['param_schedulers']": 'It comes from state_dict() of the scheduler.',
    "['optimizer']": 'It comes from state_dict() of the optimizer wrapper.',
    "['state_dict']": 'It comes from state_dict() of the model, which get_extra_state() adds to.',
}


def check_loadable(checkpoint: Any) -> None:
    """Check that :func:`load_from_local` could read a checkpoint back.

    Everything but the contents of tensors and arrays is written to memory and read again.

    Args:
        checkpoint: Nested containers, as ``torch.save`` gets them. It is not changed.

    Raises:
        UnsafeCheckpointError: If it holds an object that cannot be pickled, or that the loader
            refuses. The message gives the object's place and type, and what to do.
    """
    skeleton = _without_data(checkpoint)
    reason = _refusal(skeleton)
    if reason is None:
        return
    place, what = _find(skeleton, '')
    advice = next((f' {text}' for start, text in _ADVICE.items() if place.startswith(start)), '')
    raise UnsafeCheckpointError(
        f'the checkpoint is not written, because it could not be read back: checkpoint{place} '
        f'{what}. Only numbers, texts, lists, dicts, tensors, NumPy arrays and types of MMEngine '
        f'are read, since any other could run code. Store such values instead, or leave it out.'
        f'{advice} ({reason})')


def apply() -> bool:
    """Make MMEngine check a checkpoint before it writes one."""
    save = host.save_checkpoint

    @functools.wraps(save)
    def check_and_save(checkpoint: Any, *args: Any, write: Callable[..., Any] = save,
                       **kwargs: Any) -> Any:
        check_loadable(checkpoint)
        return write(checkpoint, *args, **kwargs)

    for module in (host, runner, mmengine.runner):
        module.save_checkpoint = check_and_save  # type: ignore[attr-defined]
    return True


def _without_data(value: Any, around: FrozenSet[int] = frozenset()) -> Any:
    """Return plain containers without tensors, with empty arrays; other objects stay as they are.

    Plain tensors always come back; thousands of empty ones would take as long as the whole ones.
    """
    kind = type(value)
    if kind in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided \
            and not value.is_quantized:
        return None
    if kind is np.ndarray and not value.dtype.hasobject:
        return np.empty(0, value.dtype)
    if kind is HistoryBuffer:
        short: Any = HistoryBuffer()
        vars(short).update((name, content[:1] if isinstance(content, np.ndarray) else content)
                           for name, content in vars(value).items())
        return short
    if kind not in (dict, OrderedDict, list, tuple) or id(value) in around:
        return value
    around = around | {id(value)}
    if kind in (list, tuple):
        return kind(_without_data(each, around) for each in value)
    return kind((key, _without_data(each, around)) for key, each in value.items())


def _refusal(value: Any) -> Optional[str]:
    """Return why a value would not come back from a file; None if it would."""
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        read_checkpoint(file, 'cpu')
    except Exception as error:  # errors of pickle have no common class
        return f'{type(error).__name__}: {error}'.split('\n')[0]
    return None


def _find(value: Any, place: str) -> Tuple[str, str]:
    """Return the place of the innermost object that is refused, and what it is."""
    for step, key, child in _children(value):
        if _refusal(key) is not None:
            return place, f'has a key that is a {_name(key)}'
        if _refusal(child) is not None:
            return _find(child, f'{place}{step}')
    return place, f'is a {_name(value)}'


def _children(value: Any) -> Iterator[Tuple[str, Any, Any]]:
    if isinstance(value, Mapping):
        parts: Dict[Any, Any] = dict(value.items())
    elif isinstance(value, (list, tuple)):
        parts = dict(enumerate(value))
    else:
        return
    for key, child in parts.items():
        yield f'[{key!r}]', key, child


def _name(value: Any) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == 'builtins' else \
        f'{kind.__module__}.{kind.__qualname__}'
