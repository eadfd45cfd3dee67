"""What a model computes in other, equal ways while it is exported, and why.

All of them are exact but for the last bits, and end with :func:`rewritten`. The model and the host
packages are as before then.
"""
from __future__ import annotations

import math
from contextlib import ExitStack, contextmanager
from typing import Any, Dict, Iterator, Optional, Tuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from mapsage.models.backbones import rope
from mapsage.models.lora import adapted

_Base: Any = getattr(torch._C, 'TensorBase', None) or torch._C._TensorBase  # type: ignore


@contextmanager
def rewritten(module: nn.Module, example: torch.Tensor, any_batch: bool,
              constant_sides: bool = True) -> Iterator[None]:
    """Let ``module`` compute in the ways of this file within the ``with`` block.

    Args:
        module: Module to export, in evaluation mode.
        example: Input that it is traced with.
        any_batch: Whether the size of the batch stays open.
        constant_sides: Whether shapes are numbers; a model that has its batch in another side than
            the first cannot be traced so.
    """
    with ExitStack() as stack:
        stack.enter_context(_explicit_attention())
        stack.enter_context(_pooling_by_matrices())
        stack.enter_context(_constant_positions(module, example))
        if constant_sides:
            stack.enter_context(_constant_sides(any_batch))
        yield


@contextmanager
def _replaced(owner: Any, **new: Any) -> Iterator[None]:
    """Set attributes of an object or a module, and put back what was there."""
    before = {name: getattr(owner, name) for name in new if hasattr(owner, name)}
    for name in before:
        setattr(owner, name, new[name])
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


@contextmanager
def _explicit_attention() -> Iterator[None]:
    """Compute attention as two products around a softmax.

    The exporter knows PyTorch's fused attention from opset 14 on, and Enflame's runtimes are for
    13. The fast path of ``nn.MultiheadAttention`` has no ONNX form at all.
    """
    with ExitStack() as stack:
        for module in (rope, adapted):
            stack.enter_context(_replaced(module, _fused_attention=None))
        stack.enter_context(_replaced(functional, scaled_dot_product_attention=attend))
        mha = getattr(torch.backends, 'mha', None)
        if mha is not None:
            stack.callback(mha.set_fastpath_enabled, mha.get_fastpath_enabled())
            mha.set_fastpath_enabled(False)
        yield


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
           attn_mask: Optional[torch.Tensor] = None, dropout_p: float = 0.,
           is_causal: bool = False, scale: Optional[float] = None,
           enable_gqa: bool = False) -> torch.Tensor:
    """Return what ``scaled_dot_product_attention`` does in evaluation.

    Raises:
        NotImplementedError: If ``is_causal`` or ``enable_gqa`` is set, which no segmentor needs.
    """
    if is_causal or enable_gqa:
        raise NotImplementedError('attention with is_causal or enable_gqa is not exported')
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    weights = (query * scale) @ key.transpose(-2, -1)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        weights = weights.masked_fill(~attn_mask, float('-inf'))
    elif attn_mask is not None:
        weights = weights + attn_mask
    return weights.softmax(dim=-1) @ value


@contextmanager
def _pooling_by_matrices() -> Iterator[None]:
    """Compute adaptive average pooling as products with two constant matrices.

    ONNX has no such operator. The exporter refuses cells of unequal size, as of 16 rows in 6 cells,
    and what others put in its place, an average over ``16 // 6`` rows, is another model.
    """
    with _replaced(functional, adaptive_avg_pool2d=pool):
        yield


def pool(x: torch.Tensor, output_size: Any) -> torch.Tensor:
    """Return what ``adaptive_avg_pool2d`` does, for ``(N, C, H, W)``."""
    sizes = (output_size, ) * 2 if isinstance(output_size, int) else tuple(output_size)
    sides = [int(side) for side in x.shape[-2:]]
    rows, columns = (side if size is None else int(size) for size, side in zip(sizes, sides))
    if (rows, columns) == (1, 1):
        return x.mean((-2, -1), keepdim=True)
    down, across = (pooling_matrix(side, size).to(x)
                    for side, size in zip(sides, (rows, columns)))
    return down @ x @ across.t()


def pooling_matrix(side: int, cells: int) -> torch.Tensor:
    """Return the matrix, float (cells, side), that averages a side over cells.

    Cell ``i`` has the pixels from ``floor(i * side / cells)`` to ``ceil((i + 1) * side / cells)``,
    as in PyTorch's AdaptiveAveragePooling.cpp.
    """
    # By NumPy, so that a trace sees a constant and not how it is made.
    matrix = np.zeros((cells, side), np.float32)
    for cell in range(cells):
        first, last = cell * side // cells, -(-(cell + 1) * side // cells)
        matrix[cell, first:last] = 1 / (last - first)
    return torch.from_numpy(matrix)


@contextmanager
def _constant_positions(module: nn.Module, example: torch.Tensor) -> Iterator[None]:
    """Put the sine and cosine of rotary positions into the file as constants.

    They depend on the size of the image only, which is fixed. Computed in the graph, their
    ``tile`` becomes an ``If``, which TensorRT rejects or computes wrongly.
    """
    found: Dict[nn.Module, Tuple[torch.Tensor, torch.Tensor]] = {}
    layers = [each for each in module.modules() if isinstance(each, rope.RotaryPositions)]
    hooks = [layer.register_forward_hook(
        lambda layer, inputs, output: found.update({layer: output})) for layer in layers]
    try:
        with torch.no_grad():
            module(example)  # also the first look of backbones at the values of their input
    finally:
        for hook in hooks:
            hook.remove()
    try:
        for layer, (sine, cosine) in found.items():
            layer.forward = _Constants(sine.clone(), cosine.clone())  # type: ignore
        yield
    finally:
        for layer in found:
            layer.__dict__.pop('forward', None)


class _Constants:
    """Returns the same tensors at every call."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._tensors = tensors

    def __call__(self, *_: Any) -> Tuple[torch.Tensor, ...]:
        return self._tensors


@contextmanager
def _constant_sides(any_batch: bool) -> Iterator[None]:
    """Let the shapes of tensors be numbers, all but the first side where the batch is open.

    A trace follows every use of a shape, as in the padding of EfficientNet, with a dozen nodes that
    a runtime cannot fold while the batch is open: 1,319 nodes in place of 123, and 18 % more time.
    """
    def shape(tensor: torch.Tensor) -> _Shape:
        traced = _Base.shape.__get__(tensor)
        kept = 1 if any_batch else 0
        return _Shape((*traced[:kept], *(int(side) for side in traced[kept:])))

    def size(tensor: torch.Tensor, dim: Optional[int] = None) -> Any:
        return shape(tensor) if dim is None else shape(tensor)[dim]

    torch.Tensor.shape = property(shape)  # type: ignore
    torch.Tensor.size = size  # type: ignore
    try:
        yield
    finally:
        del torch.Tensor.shape, torch.Tensor.size


class _Shape(tuple):
    """A shape whose sides may be traced tensors, which ``torch.Size`` cannot hold."""

    def numel(self) -> Any:
        """Return the product of the sides."""
        product: Any = 1
        for side in self:
            product = product * side
        return product
