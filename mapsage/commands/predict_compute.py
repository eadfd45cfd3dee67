"""How a prediction computes: in which precision, and how many windows at a time."""
from __future__ import annotations

from typing import Optional, Tuple

import torch
from mmengine.config import Config

from mapsage.accelerator import Accelerator, AcceleratorError
from mapsage.wrappers.optim_wrapper import parse_dtype

# What a batch may hold if nobody says: four windows of 512 pixels, sixteen of them on a card whose
# memory is known, and scores that take at most so many bytes of host memory, where a few batches
# wait to be blended.
_PIXELS, _PIXELS_ON_A_CARD = 4 * 512**2, 16 * 512**2
_SCORE_BYTES = 128 << 20
_MOST_WINDOWS = 64


def choose_precision(cfg: Config, accelerator: Accelerator) -> torch.dtype:
    """Return the data type of autocast: that of the training, else that of the accelerator.

    The training's is the ``dtype`` of the config's ``AmpOptimWrapper``. Where the accelerator
    cannot compute in it, as a CPU in float16, its own counts.
    """
    wrapper = cfg.get('optim_wrapper') or {}
    if str(wrapper.get('type')).rsplit('.', 1)[-1].strip("'>") == 'AmpOptimWrapper':
        named = parse_dtype(wrapper.get('dtype'))
        try:
            if named is not None:
                accelerator.autocast(named)
                return named
        except (AcceleratorError, RuntimeError):
            pass
    return accelerator.amp_dtype


def choose_batch(asked: Optional[int], window: Tuple[int, int], scores: int,
                 accelerator: Accelerator) -> int:
    """Return the number of windows that are predicted at a time.

    Args:
        asked: Number that the user asks for, or None.
        window: Height and width of a window in pixels.
        scores: Number of scores of a pixel.
        accelerator: Accelerator that computes.
    """
    if asked is not None:
        return asked
    pixels = window[0] * window[1]
    budget = _PIXELS if accelerator.memory_total() is None else _PIXELS_ON_A_CARD
    held = 4 * scores * pixels  # bytes, float32
    return max(1, min(budget // pixels, _SCORE_BYTES // held, _MOST_WINDOWS))
