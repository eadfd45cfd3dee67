"""The bits of a checkpoint: a digest of every tensor and number that does not tell the time."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any, Dict

import numpy as np
import torch

# What differs between two equal runs: times, places and names, and which processes there were with
# what they read and sent.
_OWN = (
    'cfg',
    'time',
    'data_time',
    'eta',
    'experiment_name',
    'memory',
    'last_ckpt',
    'best_ckpt',
    'mmengine_version',
    'val',
    'reproducibility',
    'features',
    'seconds',
    'moved_bytes',
)


def checkpoint_bits(path: Path) -> Dict[str, Any]:
    """Return the numbers of a checkpoint by their place in it, tensors as CRC-32 of their bytes.

    What the bits depend on is left out.
    """
    kwargs: Dict[str, Any] = {} if torch.__version__ < '2' else dict(weights_only=False)
    found: Dict[str, Any] = {}
    _collect(torch.load(str(path), map_location='cpu', **kwargs), '', found)
    # It lists the processes themselves.
    return {place: each for place, each in found.items() if not place.startswith('/meta/repro')}


def _collect(value: Any, place: str, found: Dict[str, Any]) -> None:
    if isinstance(value, torch.Tensor):
        host = value.contiguous()
        host = host.view(torch.int16) if host.dtype == torch.bfloat16 else host
        value = host.numpy()
    if isinstance(value, np.ndarray):
        found[place] = (str(value.dtype), value.shape, zlib.crc32(value.tobytes()))
    elif isinstance(value, dict):
        for name, each in value.items():
            if str(name).split('/')[-1] not in _OWN and str(name).split('/')[0] not in _OWN:
                _collect(each, f'{place}/{name}', found)
    elif isinstance(value, (list, tuple)):
        for index, each in enumerate(value):
            _collect(each, f'{place}/{index}', found)
    elif hasattr(value, '__dict__') and not callable(value):
        _collect(vars(value), place, found)
    elif not callable(value):
        found[place] = value if value == value else 'not a number'  # which equals itself
