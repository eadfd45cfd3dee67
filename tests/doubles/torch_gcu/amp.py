"""``torch_gcu.amp``: autocast that sets CUDA's globals, a scaler with one broken path."""

from __future__ import annotations

from typing import Any, Dict, List, Optional

import torch


class autocast:  # noqa: N801
    """Autocast on the device.

    The real one sets the *cuda* autocast globals, which torch 1.10 reads for XLA tensors as well.
    Here they are set too, so that ``torch.is_autocast_enabled()`` answers as there; today's torch
    needs ``torch.autocast('xla')`` besides.
    """

    def __init__(
        self, enabled: bool = True, dtype: torch.dtype = torch.float16, cache_enabled: bool = True
    ) -> None:
        if dtype not in (torch.float16, torch.bfloat16):
            raise RuntimeError(
                f'Current GCU Device does not support {dtype}. Please switch dtype '
                f'to float16 && bfloat16.'
            )
        self._globals = enabled, dtype
        self._xla = torch.autocast('xla', dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)

    def __enter__(self) -> None:
        self._before = torch.is_autocast_enabled('cuda'), torch.get_autocast_dtype('cuda')
        self._set_globals(*self._globals)
        self._xla.__enter__()

    def __exit__(self, *error: Any) -> bool:
        self._xla.__exit__(*error)
        self._set_globals(*self._before)
        return False

    @staticmethod
    def _set_globals(enabled: bool, dtype: torch.dtype) -> None:
        torch.set_autocast_enabled('cuda', enabled)
        torch.set_autocast_dtype('cuda', dtype)


class GradScaler:
    """Gradient scaling on the device.

    Trap: with ``use_zero_grad=False``, the default, ``step`` calls ``unlazy`` with an argument that
    it does not have, which raises TypeError.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        use_zero_grad: bool = False,
    ) -> None:
        self._enabled, self._use_zero_grad = enabled, use_zero_grad
        self._init_scale = init_scale
        self._factors = dict(
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
        )
        self._init_growth_tracker = 0
        self._scale: Optional[torch.Tensor] = None
        self._growth_tracker: Optional[torch.Tensor] = None
        self._found_inf: Dict[int, torch.Tensor] = {}

    def is_enabled(self) -> bool:
        return self._enabled

    def scale(self, outputs: torch.Tensor) -> torch.Tensor:
        if not self._enabled:
            return outputs
        assert outputs.device.type == 'xla'
        if self._scale is None:
            self._scale = torch.full((1,), self._init_scale).to(outputs.device)
            self._growth_tracker = torch.full(
                (1,), self._init_growth_tracker, dtype=torch.int32
            ).to(outputs.device)
        return outputs * self._scale

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._enabled:
            return
        assert self._scale is not None, 'Attempted unscale_ but _scale is None.'
        if id(optimizer) in self._found_inf:
            raise RuntimeError(
                'unscale_() has already been called on this optimizer since the last update().'
            )
        found = torch.zeros(1).to(self._scale.device)
        torch._amp_foreach_non_finite_check_and_unscale_(
            _gradients(optimizer), found, self._scale.reciprocal()
        )
        self._found_inf[id(optimizer)] = found

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        from torch_gcu.core.model import unlazy

        if id(optimizer) not in self._found_inf:
            self.unscale_(optimizer)
        found = self._found_inf[id(optimizer)]
        if not self._use_zero_grad:
            unlazy([], device=str(found.device))  # type: ignore[call-arg]
        for gradient in _gradients(optimizer):
            gradient.nan_to_num_()
            gradient.mul_((found == 0).float())
        return optimizer.step(*args, **kwargs)

    def update(self, new_scale: Optional[float] = None) -> None:
        if not self._enabled:
            return
        if new_scale is not None:
            self._scale.fill_(new_scale)
        else:
            torch._amp_update_scale_(
                self._scale,
                self._growth_tracker,
                sum(self._found_inf.values()),
                *self._factors.values(),
            )
        self._found_inf = {}

    def get_scale(self) -> float:
        if not self._enabled:
            return 1.0
        return self._init_scale if self._scale is None else self._scale.item()

    def state_dict(self) -> Dict[str, Any]:
        if not self._enabled:
            return {}
        tracker = self._growth_tracker
        return dict(
            scale=self.get_scale(),
            **self._factors,
            _growth_tracker=(self._init_growth_tracker if tracker is None else tracker.item()),
        )

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        if not self._enabled:
            return
        if not state:
            raise RuntimeError(
                'The source state dict is empty, possibly because it was saved from '
                'a disabled instance of GradScaler.'
            )
        self._init_scale, self._init_growth_tracker = state['scale'], state['_growth_tracker']
        self._factors = {name: state[name] for name in self._factors}
        if self._scale is not None and self._growth_tracker is not None:
            self._scale.fill_(state['scale'])
            self._growth_tracker.fill_(state['_growth_tracker'])


def _gradients(optimizer: torch.optim.Optimizer) -> List[torch.Tensor]:
    return [
        parameter.grad
        for group in optimizer.param_groups
        for parameter in group['params']
        if parameter.grad is not None
    ]
