"""Gradient checkpointing that works on any device and with PyTorch 1.10.

The output is the same as without it; memory is traded for a second forward pass.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Callable, Optional

import torch
from torch.utils.checkpoint import checkpoint

# Since torch 2.4 the autocast state of any device type can be read. Older versions use reentrant
# checkpointing.
_HAS_AUTOCAST_STATE = hasattr(torch, 'get_autocast_dtype')


def autocast_dtype(device: str) -> Optional[torch.dtype]:
    """Return the dtype in which autocast computes on a type of device; None where it is off.

    Before torch 2.4 the state cannot be read for every type of device; the answer is None there.
    """
    if not _HAS_AUTOCAST_STATE or not torch.amp.is_autocast_available(device):
        return None
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def run_recomputed(
    block: Callable[..., torch.Tensor], tokens: torch.Tensor, *inputs: Optional[torch.Tensor]
) -> torch.Tensor:
    """Run a block and recompute its activations in the backward pass.

    Args:
        block: Function or module that draws no random numbers.
        tokens: First argument of the block, of any shape.
        *inputs: Further arguments.

    Returns:
        Output of the block.
    """
    if not _HAS_AUTOCAST_STATE:
        # Reentrant checkpointing gives no gradients to the block unless an input requires some.
        if not tokens.requires_grad:
            tokens = tokens.detach().requires_grad_()
        return checkpoint(block, tokens, *inputs, preserve_rng_state=False)
    # If it gets tensors as arguments, checkpoint() looks for a module torch.<device>, which XLA
    # lacks. If it gets none, it restores the autocast state of CUDA and the CPU only. So run()
    # takes no arguments and restores autocast itself.
    device = tokens.device.type
    dtype = autocast_dtype(device)

    def run() -> torch.Tensor:
        with nullcontext() if dtype is None else torch.autocast(device, dtype=dtype):
            return block(tokens, *inputs)

    return checkpoint(run, use_reentrant=False, preserve_rng_state=False)
