"""An optimizer wrapper with a gradient scaler, which AmpOptimWrapper has on cards only."""

from __future__ import annotations

from typing import Any

import torch
from mmengine.optim import OptimWrapper
from mmengine.registry import OPTIM_WRAPPERS

HAS_SCALER = hasattr(getattr(torch, 'amp', None), 'GradScaler')  # older ones scale on cuda only


@OPTIM_WRAPPERS.register_module(force=True)
class ScaledOnCpu(OptimWrapper):
    """Scales the loss by 16 to begin with."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.loss_scaler = torch.amp.GradScaler('cpu', init_scale=16.0)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        super().backward(self.loss_scaler.scale(loss), **kwargs)

    def step(self, **kwargs: Any) -> None:
        self.loss_scaler.step(self.optimizer, **kwargs)
        self.loss_scaler.update()
