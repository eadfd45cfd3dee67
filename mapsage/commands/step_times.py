"""Whether a step of the config's own model is faster in float32 or in bfloat16 on this device."""
from __future__ import annotations

import copy
import statistics
import time
import warnings
from typing import Any, Dict, List, Optional, Sequence

import torch
from mmengine.config import Config
from mmengine.dataset import pseudo_collate
from mmengine.model import revert_sync_batchnorm
from mmengine.registry import DefaultScope
from torch import nn

from mapsage.accelerator import Accelerator
from mapsage.distributed import error_text
from mapsage.wrappers import place_module

from .environment_checks import Finding

# Seconds that the comparison may take on the CPU, and on other devices before the next step begins.
BUDGET = 20.0
_PAIRS = 5
# A step takes about as long as four forward passes without gradients, and two warm up.
_FORWARDS, _LEAST_STEPS = 4, 6
_SAME = 0.05  # a smaller difference is none


def compare_precisions(cfg: Config, model: nn.Module, samples: Sequence[Any], seconds: float,
                       accelerator: Accelerator, budget: float = BUDGET) -> List[Finding]:
    """Time forward and backward passes in float32 and in bfloat16, in turns; say which is faster.

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
        why = 'it compiles its first steps' if accelerator.lazy else 'it is simulated'
        return [Finding('no', f'float32 and bfloat16 were not timed on {accelerator.name}: {why}')]
    wanted = (cfg.get('train_dataloader') or {}).get('batch_size') or 1
    size = wanted
    if accelerator.device_type == 'cpu':
        size = min(wanted, int(budget / _LEAST_STEPS / (_FORWARDS * max(seconds, 1e-6))))
    if size < min(wanted, 2):  # BatchNorm may need two
        least = min(wanted, 2)
        return [Finding('no', f'float32 and bfloat16 were not timed: a step of {least} image(s) '
                              f'would take about {_FORWARDS * seconds * least:.0f} s here, and the '
                              f'doctor takes {budget:g} s for all of them')]
    batch = [samples[number % len(samples)] for number in range(size)]
    scope = DefaultScope.overwrite_default_scope(cfg.get('default_scope', 'mmengine'))
    with scope, warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter('ignore')  # the run shows them
        taken = _Steps(model, batch, accelerator).in_turns(budget)
    if isinstance(taken, Finding):
        return [taken]
    return [judge(taken, size, wanted, accelerator, _trains_in_bfloat16(cfg, accelerator))]


class _Steps:
    def __init__(self, model: nn.Module, batch: List[Any], accelerator: Accelerator) -> None:
        self._model, self._batch, self._accelerator = model, batch, accelerator

    def in_turns(self, budget: float) -> Any:
        """Return the seconds of each step by dtype, or a finding that says why there are none."""
        taken: Dict[torch.dtype, List[float]] = {torch.float32: [], torch.bfloat16: []}
        dtype, start = torch.float32, time.perf_counter()
        try:
            self._model = place_module(revert_sync_batchnorm(copy.deepcopy(self._model)),
                                       self._accelerator, 0).train()
            for number in range(_PAIRS + 1):
                for dtype, steps in taken.items():
                    spent = self._step(dtype)
                    if number:  # the first pair warms up
                        steps.append(spent)
                if taken[torch.bfloat16] and time.perf_counter() - start > budget:
                    break
        except Exception as error:  # any model may fail, which keeps no training in the other dtype
            name = str(dtype).split('.')[1]
            return Finding('note', f'a training step in {name} on {self._accelerator.name} fails: '
                                   f'{error_text(error)}',
                           'train without --amp' if dtype == torch.bfloat16 else
                           'a smaller batch or crop, if it is for memory')
        return taken

    def _step(self, dtype: torch.dtype) -> float:
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


def judge(taken: Dict[torch.dtype, List[float]], size: int, wanted: int, accelerator: Accelerator,
          in_bfloat16: bool) -> Finding:
    """Say which dtype is faster, and by how much. Pure.

    Args:
        taken: Seconds of each step by dtype, float32 and bfloat16 in turns.
        size: Number of images of these steps.
        wanted: Number of images of a step of the config.
        accelerator: Accelerator on which they ran.
        in_bfloat16: Whether the config trains in bfloat16.
    """
    wide, narrow = taken[torch.float32], taken[torch.bfloat16]
    ratio = statistics.median(a / b for a, b in zip(wide, narrow))
    images = f'{size} image(s)' + (f' of the {wanted}' if size < wanted else '')
    text = (f'a training step of {images} on {accelerator.name}, without the optimizer, takes '
            f'{1000 * statistics.median(wide):.0f} ms in float32 and '
            f'{1000 * statistics.median(narrow):.0f} ms in bfloat16 (median of {len(wide)}): ')
    native = accelerator.native_bfloat16()
    emulated = '; it has no bfloat16 of its own, and computes it by way of float32' \
        if native is False else ''
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
    kind: Optional[Any] = wrapper.get('type')
    if getattr(kind, '__name__', kind) != 'AmpOptimWrapper':
        return False
    return str(wrapper.get('dtype') or accelerator.amp_dtype).endswith('bfloat16')
