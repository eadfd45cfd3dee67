"""Whether a training step of the config's model is faster in float32 or in bfloat16 here.

The two dtypes alternate step by step, so that a slow moment of the machine affects both. On the CPU
the batch is made smaller to stay within a budget of time; the result compares the dtypes, it does
not predict the time of a training step.
"""
from __future__ import annotations

import copy
import statistics
import time
import warnings
from typing import Any, Dict, List, Mapping, Sequence, Union

import torch
from mmengine.config import Config
from mmengine.dataset import pseudo_collate
from mmengine.model import revert_sync_batchnorm
from mmengine.registry import DefaultScope
from torch import nn

from mapsage.accelerator import Accelerator
from mapsage.distributed import error_text
from mapsage.wrappers import place_module

from .finding import Finding

# Seconds that the comparison may take on the CPU. On other devices no step begins after this time.
BUDGET = 20.0
_PAIRS = 5
# A step takes about as long as four forward passes without gradients, and two steps warm up.
_FORWARDS, _LEAST_STEPS = 4, 6
# A difference smaller than this share counts as no difference.
_SAME = 0.05


def compare_precisions(cfg: Config, model: nn.Module, samples: Sequence[object], seconds: float,
                       accelerator: Accelerator, budget: float = BUDGET) -> List[Finding]:
    """Time training steps in float32 and in bfloat16, alternating, and tell which is faster.

    Args:
        cfg: Complete config.
        model: Model of the config on the CPU; a copy of it is used.
        samples: Samples of the training data, repeated for a batch of the config's size.
        seconds: Time of a forward pass of one sample on the CPU.
        accelerator: Accelerator of the run, whose first device is used.
        budget: Time in seconds that this may take. On the CPU the batch is made smaller for it.

    Returns:
        One finding, never of the level ``problem``.
    """
    if accelerator.lazy or accelerator.simulated:
        reason = 'it compiles its first steps' if accelerator.lazy else 'it is simulated'
        return [Finding('no', f'float32 and bfloat16 were not timed on {accelerator.name}: '
                              f'{reason}')]
    configured_size = (cfg.get('train_dataloader') or {}).get('batch_size') or 1
    size = configured_size
    if accelerator.device_type == 'cpu':
        size = min(configured_size,
                   int(budget / _LEAST_STEPS / (_FORWARDS * max(seconds, 1e-6))))
    # BatchNorm may need two samples.
    least = min(configured_size, 2)
    if size < least:
        return [Finding('no', f'float32 and bfloat16 were not timed: a step of {least} image(s) '
                              f'would take about {_FORWARDS * seconds * least:.0f} s here, and the '
                              f'doctor takes {budget:g} s for all of them')]
    batch = [samples[number % len(samples)] for number in range(size)]
    scope = DefaultScope.overwrite_default_scope(cfg.get('default_scope', 'mmengine'))
    with scope, warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        # The run shows these warnings.
        warnings.simplefilter('ignore')
        step_seconds = _Steps(model, batch, accelerator).time_alternating(budget)
    if isinstance(step_seconds, Finding):
        return [step_seconds]
    return [judge(step_seconds, size, configured_size, accelerator,
                  _trains_in_bfloat16(cfg, accelerator))]


class _Steps:
    def __init__(self, model: nn.Module, batch: List[object], accelerator: Accelerator) -> None:
        self._model, self._batch, self._accelerator = model, batch, accelerator

    def time_alternating(self, budget: float) -> Union[Finding, Dict[torch.dtype, List[float]]]:
        """Return the seconds of each step by dtype, or a finding if a step fails."""
        step_seconds: Dict[torch.dtype, List[float]] = {torch.float32: [], torch.bfloat16: []}
        dtype, start = torch.float32, time.perf_counter()
        try:
            self._model = place_module(revert_sync_batchnorm(copy.deepcopy(self._model)),
                                       self._accelerator, 0).train()
            for pair in range(_PAIRS + 1):
                for dtype, measured in step_seconds.items():
                    seconds = self._time_step(dtype)
                    # The first pair warms up.
                    if pair:
                        measured.append(seconds)
                if step_seconds[torch.bfloat16] and time.perf_counter() - start > budget:
                    break
        # A user's model may raise anything. A failure in one dtype does not keep a training in the
        # other one from starting, so it is only a note.
        except Exception as error:
            name = str(dtype).split('.')[1]
            return Finding('note', f'a training step in {name} on {self._accelerator.name} fails: '
                                   f'{error_text(error)}',
                           'train without --amp' if dtype == torch.bfloat16 else
                           'a smaller batch or crop, if it is for memory')
        return step_seconds

    def _time_step(self, dtype: torch.dtype) -> float:
        model: Any = self._model
        for parameter in model.parameters():
            parameter.grad = None
        self._accelerator.synchronize()
        start = time.perf_counter()
        data = model.data_preprocessor(pseudo_collate(copy.deepcopy(self._batch)), True)
        if dtype == torch.bfloat16:
            with self._accelerator.autocast(dtype):
                losses = model(**data, mode='loss')
        else:
            losses = model(**data, mode='loss')
        loss, _ = model.parse_losses(losses)
        if loss.requires_grad:
            loss.backward()
        self._accelerator.synchronize()
        return time.perf_counter() - start


def judge(step_seconds: Mapping[torch.dtype, Sequence[float]], size: int, configured_size: int,
          accelerator: Accelerator, in_bfloat16: bool) -> Finding:
    """Return a finding that tells which dtype is faster, and by how much. Pure.

    Args:
        step_seconds: Seconds of each step by dtype; step i of both dtypes ran one after the other.
        size: Number of images of these steps.
        configured_size: Number of images of a step of the config.
        accelerator: Accelerator on which the steps ran.
        in_bfloat16: Whether the config trains in bfloat16.
    """
    wide, narrow = step_seconds[torch.float32], step_seconds[torch.bfloat16]
    ratio = statistics.median(a / b for a, b in zip(wide, narrow))
    images = f'{size} image(s)' + (f' of the {configured_size}' if size < configured_size else '')
    text = (f'a training step of {images} on {accelerator.name}, without the optimizer, takes '
            f'{1000 * statistics.median(wide):.0f} ms in float32 and '
            f'{1000 * statistics.median(narrow):.0f} ms in bfloat16 (median of {len(wide)}): ')
    emulated = '' if accelerator.native_bfloat16() is not False else (
        '; it has no bfloat16 in hardware, and computes it by way of float32')
    if abs(ratio - 1) < _SAME:
        return Finding('ok', f'{text}no difference here{emulated}')
    if ratio > 1:
        advice = '' if in_bfloat16 else '--amp --cfg-options optim_wrapper.dtype=bfloat16'
        return Finding('ok', f'{text}bfloat16 is {ratio:.2f} times as fast here{emulated}', advice)
    return Finding('note' if in_bfloat16 else 'ok',
                   f'{text}bfloat16 loses here, at {ratio:.2f} of the speed{emulated}',
                   'train in float32: without --amp, with OptimWrapper' if in_bfloat16 else '')


def _trains_in_bfloat16(cfg: Config, accelerator: Accelerator) -> bool:
    wrapper: Any = cfg.get('optim_wrapper') or {}
    kind: Any = wrapper.get('type')
    if getattr(kind, '__name__', kind) != 'AmpOptimWrapper':
        return False
    return str(wrapper.get('dtype') or accelerator.amp_dtype).endswith('bfloat16')
