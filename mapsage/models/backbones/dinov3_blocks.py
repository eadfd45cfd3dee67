"""The transformer block of DINOv3.

Drop-path factors are drawn outside of the block's ``forward`` (:meth:`Block.draw_drop_path`), so
gradient checkpointing recomputes the same block. The attention is in ``rope.py``.

Shapes: N images, T tokens (class and register tokens, then patches in row order).

Gradient checkpointing works on any device and with PyTorch 1.10. Its output is the same; memory is
traded for a second forward pass.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Callable, Dict, Optional

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from .dinov3_weights import Arch
from .rope import RotaryAttention, joins_kernels

# norm_layer='layernormbf16' of every model in dinov3/hub/backbones.py.
NORM_EPS = 1e-5


class Mlp(nn.Module):
    """Two-layer feed-forward network with an exact GELU, also of the encoders in `earth/`.

    Args:
        channels: Channels of the features.
        hidden: Channels between the two layers.
    """

    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(channels, hidden)
        self.fc2 = nn.Linear(hidden, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Transform features, (..., channels)."""
        return self.fc2(F.gelu(self.fc1(x)))


class GatedMlp(nn.Module):
    """SwiGLU network: ``w1`` gates ``w2``, as in dinov3/layers/ffn_layers.py."""

    def __init__(self, arch: Arch) -> None:
        super().__init__()
        self.w1 = nn.Linear(arch.embed_dims, arch.feedforward_channels)
        self.w2 = nn.Linear(arch.embed_dims, arch.feedforward_channels)
        self.w3 = nn.Linear(arch.feedforward_channels, arch.embed_dims)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Transform features, (..., embed_dims)."""
        return self.w3(F.silu(self.w1(x)) * self.w2(x))


class Block(nn.Module):
    """Pre-norm transformer block: attention and MLP, each followed by LayerScale.

    Args:
        arch: Structure of the backbone.
        drop_path: Probability (0..1) of dropping a branch of a sample, in training only.
    """

    def __init__(self, arch: Arch, drop_path: float = 0.0) -> None:
        super().__init__()
        self.drop_path = drop_path
        self.norm1 = nn.LayerNorm(arch.embed_dims, eps=NORM_EPS)
        self.attn = RotaryAttention(arch)
        self.gamma_1 = nn.Parameter(torch.full((arch.embed_dims,), 1e-5))
        self.norm2 = nn.LayerNorm(arch.embed_dims, eps=NORM_EPS)
        self.mlp = (
            GatedMlp(arch) if arch.gated_mlp else Mlp(arch.embed_dims, arch.feedforward_channels)
        )
        self.gamma_2 = nn.Parameter(torch.full((arch.embed_dims,), 1e-5))

    def forward(
        self,
        x: torch.Tensor,
        sine: torch.Tensor,
        cosine: torch.Tensor,
        branch_factors: Optional[torch.Tensor] = None,
        attn_mask: Optional[torch.Tensor] = None,
    ) -> torch.Tensor:
        """Transform tokens.

        Args:
            x: Tokens, (N, T, embed_dims).
            sine: Sine of the tokens' positions, (T, head_dims).
            cosine: Cosine of the same shape.
            branch_factors: Drop-path factors of attention and MLP, from :meth:`draw_drop_path`.
            attn_mask: Attention mask, as in :class:`RotaryAttention`.
        """
        factors = (None, None) if branch_factors is None else branch_factors
        x = _add_branch(
            x, self.gamma_1, self.attn(self.norm1(x), sine, cosine, attn_mask), factors[0]
        )
        return _add_branch(x, self.gamma_2, self.mlp(self.norm2(x)), factors[1])

    def draw_drop_path(self, x: torch.Tensor) -> Optional[torch.Tensor]:
        """Draw the drop-path factors of both branches, (2, N, 1, 1), 0 or 1 / (1 - drop_path).

        A recomputed ``forward`` would have to draw the same factors again, and old torch versions
        restore the random state on CUDA and the CPU only. So the factors are arguments of it.

        Returns:
            The factors, or None if no branch can be dropped.
        """
        if not self.training or not self.drop_path:
            return None
        keep = 1 - self.drop_path
        return torch.full((2, len(x), 1, 1), keep, device=x.device).bernoulli_(keep) / keep


def _add_branch(
    x: torch.Tensor, scale: torch.Tensor, branch: torch.Tensor, factor: Optional[torch.Tensor]
) -> torch.Tensor:
    """Return tokens plus a scaled branch, times the drop-path factor of each image if given."""
    if factor is None and joins_kernels(x):
        sums = torch.empty_like(x, dtype=torch.promote_types(x.dtype, scale.dtype))
        return torch.addcmul(x, scale, branch, out=sums)
    scaled = scale * branch
    return x + (scaled if factor is None else scaled * factor)


def sixteen_bit_copy(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a copy of a frozen block or patch embedding with its matrices in a 16-bit dtype.

    Autocast keeps its casts of trained weights until the step ends, but casts frozen weights again
    in every call. Norms and layer scales are shared with ``module``, since autocast leaves them in
    float32.
    """
    weights: Dict[int, object] = {}
    for layer in module.modules():
        cast = isinstance(layer, (nn.Linear, nn.Conv2d, RotaryAttention))
        for parameter in layer.parameters(recurse=False):
            weights[id(parameter)] = (
                nn.Parameter(parameter.detach().to(dtype), requires_grad=False)
                if cast
                else parameter
            )
    twin = copy.deepcopy(module, weights)
    for layer in twin.modules():
        if isinstance(layer, RotaryAttention):
            layer.joined_bias = layer.join_bias()
    return twin


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
