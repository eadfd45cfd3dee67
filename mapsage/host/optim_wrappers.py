"""The optimizer wrappers of a run, whether it has one optimizer or several.

``runner.optim_wrapper`` is an ``OptimWrapper``, an ``OptimWrapperDict`` of several, or still their
config before a training.
"""

from __future__ import annotations

from typing import Any, List, Optional, Union

import torch
from mmengine.optim import OptimWrapper, OptimWrapperDict

from mapsage.host.runner import OptimWrappers


def built_wrappers(optim_wrapper: Union[OptimWrappers, dict, None]) -> List[OptimWrapper]:
    """Return the wrapper of each optimizer; none before they are built."""
    wrappers = (
        optim_wrapper.values() if isinstance(optim_wrapper, OptimWrapperDict) else [optim_wrapper]
    )
    return [wrapper for wrapper in wrappers if isinstance(wrapper, OptimWrapper)]


def enabled_scaler(wrapper: OptimWrapper) -> Optional[Any]:
    """Return the wrapper's enabled loss scaler, or None.

    Only wrappers for mixed precision have one: torch's GradScaler, or an accelerator's.
    """
    scaler = getattr(wrapper, 'loss_scaler', None)
    return scaler if scaler is not None and scaler.is_enabled() else None


def cast_dtype(wrapper: object) -> Optional[torch.dtype]:
    """Return the dtype of mixed precision.

    None without mixed precision, and for several optimizers.
    """
    # Only wrappers for mixed precision have one.
    return getattr(wrapper, 'cast_dtype', None)


def inside_cycle(optim_wrapper: Union[OptimWrappers, dict, None]) -> bool:
    """Return whether an accumulation cycle is open: the last iteration did not update all weights."""
    return any(not wrapper.should_update() for wrapper in built_wrappers(optim_wrapper))
