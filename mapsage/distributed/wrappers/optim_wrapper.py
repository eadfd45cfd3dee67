"""MMEngine's optimizer wrappers with the accelerator's step, autocast and gradient scaler.

They replace MMEngine's classes under the same registry names, so configs need no change. Three
things differ from MMEngine: dropped gradients are None instead of zeros, a resumed accumulation
cycle continues with the gradients of the checkpoint, and lazy devices are flushed before a norm is
read.
"""

from __future__ import annotations

import functools
import inspect
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, Optional, Union

import torch
from mmengine.optim import AmpOptimWrapper as _AmpOptimWrapper
from mmengine.optim import OptimWrapper as _OptimWrapper
from mmengine.registry import OPTIM_WRAPPERS
from torch import nn

from mapsage.accelerator import current_accelerator

_DTYPES = {'float16': torch.float16, 'bfloat16': torch.bfloat16}


def _initialize_counts(
    wrapper: _OptimWrapper, model: nn.Module, init_counts: int, max_counts: int
) -> None:
    """Do what MMEngine does, without its warning of lost gradients if the checkpoint had them."""
    has_gradients = any(parameter.grad is not None for parameter in model.parameters())
    # MMEngine does not warn at the beginning of an accumulation cycle.
    cycle_start = init_counts - init_counts % wrapper._accumulative_counts
    _OptimWrapper.initialize_count_status(
        wrapper, model, cycle_start if has_gradients else init_counts, max_counts
    )
    wrapper._inner_count = init_counts


def _zero_grad_options(
    optimizer: torch.optim.Optimizer, kwargs: Dict[str, object]
) -> Dict[str, object]:
    """Return the arguments of ``zero_grad`` that set gradients to None, updated with ``kwargs``.

    Zeros are not the same as no gradient: the optimizer would continue to decay a parameter that a
    step does not use, and adding to zeros turns -0.0 into 0.0.
    """
    accepts_none = _accepts_none(type(optimizer).zero_grad)
    return dict(dict(set_to_none=True) if accepts_none else {}, **kwargs)


@functools.lru_cache(maxsize=None)
def _accepts_none(zero_grad: Callable[..., object]) -> bool:
    # Reading a signature takes 30 microseconds, too many for every step.
    return 'set_to_none' in inspect.signature(zero_grad).parameters


@OPTIM_WRAPPERS.register_module(name='OptimWrapper', force=True)
class OptimWrapper(_OptimWrapper):
    """MMEngine's ``OptimWrapper``, whose step is the accelerator's. It replaces the original."""

    def step(self, **kwargs: Any) -> None:
        """Clip the gradients if asked to, then update the parameters."""
        if self.clip_grad_kwargs:
            self._clip_grad()
        current_accelerator().optimizer_step(self.optimizer, **kwargs)

    def zero_grad(self, **kwargs: Any) -> None:
        """Set the gradients to None, which torch 2 does by default and torch 1.10 on demand."""
        super().zero_grad(**_zero_grad_options(self.optimizer, kwargs))

    def initialize_count_status(self, model: nn.Module, init_counts: int, max_counts: int) -> None:
        """Start the count at a resumed iteration; see ``AccumulatedGradientsHook``."""
        _initialize_counts(self, model, init_counts, max_counts)

    def _clip_grad(self) -> None:
        # MMEngine reads the norm as a Python float. Without the flush, a lazy device would run the
        # forward and backward pass for this one number, and run them again at the step.
        current_accelerator().flush()
        super()._clip_grad()


@OPTIM_WRAPPERS.register_module(name='AmpOptimWrapper', force=True)
class AmpOptimWrapper(_AmpOptimWrapper):
    """Mixed precision on every accelerator. It replaces MMEngine's wrapper of the same name.

    float16 trains with a gradient scaler, bfloat16 without one.

    Args:
        loss_scale: Scale of the loss: ``'dynamic'``, a constant, or the arguments of the gradient
            scaler. It is used with float16 only.
        dtype: Data type ``'float16'`` or ``'bfloat16'``, as text or as torch's dtype. If None, the
            accelerator decides (float16 on cuda, bfloat16 on the others).
        use_fsdp: MMEngine's argument, which must be False.
        **kwargs: Arguments of ``OptimWrapper``.

    Raises:
        ValueError: If an argument has a value that is not allowed.
    """

    def __init__(
        self,
        loss_scale: Union[str, float, Dict[str, Any]] = 'dynamic',
        dtype: Optional[Union[str, torch.dtype]] = None,
        use_fsdp: bool = False,
        **kwargs: Any,
    ) -> None:
        if use_fsdp:
            raise ValueError('AmpOptimWrapper: use_fsdp=True is not supported; remove it.')
        # Not MMEngine's __init__ of this class, which asserts that the device is of one of four
        # vendors.
        _OptimWrapper.__init__(self, **kwargs)
        accelerator = current_accelerator()
        self.cast_dtype = parse_dtype(dtype) or accelerator.amp_dtype
        scaler_args = _scaler_args(loss_scale)
        # A constant scale is set again after every step.
        self._scale_update_param = (
            None if isinstance(loss_scale, dict) else scaler_args.get('init_scale')
        )
        self.loss_scaler = accelerator.grad_scaler(self.cast_dtype, **scaler_args)

    def step(self, **kwargs: Any) -> None:
        """Unscale and clip if asked to, then update the parameters."""
        if self.loss_scaler.is_enabled():
            super().step(**kwargs)
            return
        if self.clip_grad_kwargs:
            self._clip_grad()
        current_accelerator().optimizer_step(self.optimizer, **kwargs)

    def zero_grad(self, **kwargs: Any) -> None:
        """Set the gradients to None, which torch 2 does by default and torch 1.10 on demand."""
        super().zero_grad(**_zero_grad_options(self.optimizer, kwargs))

    def initialize_count_status(self, model: nn.Module, init_counts: int, max_counts: int) -> None:
        """Start the count at a resumed iteration; see ``AccumulatedGradientsHook``."""
        _initialize_counts(self, model, init_counts, max_counts)

    def _clip_grad(self) -> None:
        # For the reason in OptimWrapper._clip_grad.
        current_accelerator().flush()
        super()._clip_grad()

    def load_state_dict(self, state_dict: dict) -> None:
        """Load a state saved with or without a scaler, so that a run may change accelerators."""
        if not state_dict.get('loss_scaler'):
            state_dict.pop('loss_scaler', None)
        super().load_state_dict(state_dict)

    @contextmanager
    def optim_context(self, model: nn.Module) -> Iterator[None]:
        """Run the forward pass in :attr:`cast_dtype`; skip gradient sync while accumulating."""
        with _OptimWrapper.optim_context(self, model), current_accelerator().autocast(
            self.cast_dtype
        ):
            yield


def parse_dtype(dtype: Optional[Union[str, torch.dtype]]) -> Optional[torch.dtype]:
    """Return the dtype that ``optim_wrapper.dtype`` names; None for None.

    Raises:
        ValueError: If ``dtype`` names neither float16 nor bfloat16.
    """
    if dtype is None or dtype in _DTYPES.values():
        return dtype  # type: ignore[return-value]
    if dtype not in _DTYPES:
        raise ValueError(
            f'optim_wrapper.dtype is {dtype!r}: expected {" or ".join(map(repr, _DTYPES))}, or '
            f'no dtype, to let the accelerator decide.'
        )
    return _DTYPES[str(dtype)]


def _scaler_args(loss_scale: Union[str, float, Dict[str, Any]]) -> Dict[str, Any]:
    if loss_scale == 'dynamic':
        return {}
    if isinstance(loss_scale, dict):
        return loss_scale
    if isinstance(loss_scale, (int, float)) and not isinstance(loss_scale, bool):
        return {'init_scale': float(loss_scale)}
    raise ValueError(
        f"optim_wrapper.loss_scale is {loss_scale!r}: expected 'dynamic', a number, or a dict of "
        f'GradScaler arguments.'
    )
