"""Replacements of operations that ONNX or old runtimes lack, active while a model is exported.

Every replacement computes the same up to rounding. All of them patch the model or PyTorch inside
:func:`rewritten`, and are undone when its ``with`` block ends, also after an error.
"""

from __future__ import annotations

import math
from contextlib import ExitStack, contextmanager
from typing import Any, Dict, Iterator, Optional, Sequence, Tuple, Union

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from mapsage.base.stand_ins import replaced
from mapsage.models.backbones import attention, rope
from mapsage.models.lora import adapted

# The C++ base class of tensors owns `shape` and `size`. Older versions of PyTorch call it
# _TensorBase.
_Base: Any = getattr(torch._C, 'TensorBase', None) or torch._C._TensorBase  # type: ignore

_NO_LIMIT = 1 << 62


@contextmanager
def rewritten(
    module: nn.Module,
    example: Tuple[torch.Tensor, ...],
    any_batch: bool,
    constant_sides: bool = True,
) -> Iterator[None]:
    """Activate the replacements of this file within the ``with`` block.

    Args:
        module: Module to export, in evaluation mode.
        example: Inputs of the trace.
        any_batch: Whether the batch size stays open.
        constant_sides: Whether shapes become numbers. A model that moves its batch to another
            dimension than the first cannot be traced with constant sides.
    """
    with ExitStack() as stack:
        stack.enter_context(_explicit_attention())
        stack.enter_context(_pooling_by_matrices())
        stack.enter_context(_largest_by_dimension())
        stack.enter_context(_constant_positions(module, example))
        if constant_sides:
            stack.enter_context(_constant_sides(any_batch))
        yield


@contextmanager
def _explicit_attention() -> Iterator[None]:
    """Compute attention as two matrix products around a softmax.

    The exporter supports PyTorch's fused attention from opset 14, but Enflame's runtimes read 13.
    The fast path of ``nn.MultiheadAttention`` has no ONNX form at all.
    """
    with ExitStack() as stack:
        for module in (rope, adapted, attention):
            stack.enter_context(replaced(module, _fused_attention=None))
        # Chunks of queries depend on the batch, which stays open.
        stack.enter_context(replaced(attention, SCORE_BYTES=_NO_LIMIT))
        stack.enter_context(replaced(functional, scaled_dot_product_attention=attend))
        mha = getattr(torch.backends, 'mha', None)
        if mha is not None:
            stack.callback(mha.set_fastpath_enabled, mha.get_fastpath_enabled())
            mha.set_fastpath_enabled(False)
        yield


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: Optional[torch.Tensor] = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Optional[float] = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Compute ``scaled_dot_product_attention`` in evaluation mode, without dropout.

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

    ONNX has no such operator, and the exporter refuses cells of unequal size, such as 6 cells of 16
    rows. A common workaround averages over ``16 // 6`` rows instead, which is a different model.
    """
    with replaced(functional, adaptive_avg_pool2d=pool):
        yield


def pool(x: torch.Tensor, output_size: Union[int, Sequence[Optional[int]]]) -> torch.Tensor:
    """Compute ``adaptive_avg_pool2d`` of ``(N, C, H, W)``."""
    sizes = (output_size,) * 2 if isinstance(output_size, int) else tuple(output_size)
    sides = [int(side) for side in x.shape[-2:]]
    rows, columns = (side if size is None else int(size) for size, side in zip(sizes, sides))
    if (rows, columns) == (1, 1):
        return x.mean((-2, -1), keepdim=True)
    down, across = (pooling_matrix(side, size).to(x) for side, size in zip(sides, (rows, columns)))
    return down @ x @ across.t()


def pooling_matrix(side: int, cells: int) -> torch.Tensor:
    """Return the matrix, float ``(cells, side)``, that averages ``side`` pixels over the cells.

    Cell ``i`` averages the pixels from ``floor(i * side / cells)`` up to, but not including,
    ``ceil((i + 1) * side / cells)``, as in PyTorch's AdaptiveAveragePooling.cpp.
    """
    # With NumPy, so that the trace contains a constant instead of the operations that compute it.
    matrix = np.zeros((cells, side), np.float32)
    for cell in range(cells):
        first, last = cell * side // cells, -(-(cell + 1) * side // cells)
        matrix[cell, first:last] = 1 / (last - first)
    return torch.from_numpy(matrix)


@contextmanager
def _largest_by_dimension() -> Iterator[None]:
    """Compute ``amax`` and ``any`` as the largest value of one dimension after the other.

    The exporter of PyTorch 1.10 lacks both operators.
    """

    def amax(
        tensor: torch.Tensor, dim: Union[int, Sequence[int]], keepdim: bool = False
    ) -> torch.Tensor:
        sides = tensor.dim()
        for number in sorted(
            (number % sides for number in ((dim,) if isinstance(dim, int) else dim)), reverse=True
        ):
            tensor = tensor.max(number, keepdim)[0]
        return tensor

    def any_(tensor: torch.Tensor, dim: int, keepdim: bool = False) -> torch.Tensor:
        return amax(tensor.float(), dim, keepdim) > 0

    # In the subclass, so that deleting them brings the originals back.
    torch.Tensor.amax, torch.Tensor.any = amax, any_  # type: ignore
    try:
        yield
    finally:
        del torch.Tensor.amax, torch.Tensor.any


@contextmanager
def _constant_positions(module: nn.Module, example: Tuple[torch.Tensor, ...]) -> Iterator[None]:
    """Put the sine and cosine of rotary positions into the file as constants.

    They depend only on the size of the image, which is fixed. If they were computed in the graph,
    their ``tile`` would become an ``If``, which TensorRT rejects or computes wrongly.
    """
    positions: Dict[nn.Module, Tuple[torch.Tensor, torch.Tensor]] = {}
    layers = [layer for layer in module.modules() if isinstance(layer, rope.RotaryPositions)]
    hooks = [
        layer.register_forward_hook(lambda layer, inputs, output: positions.update({layer: output}))
        for layer in layers
    ]
    try:
        with torch.no_grad():
            # Backbones also check the range of their first input, which must not be traced.
            module(*example)
    finally:
        for hook in hooks:
            hook.remove()
    try:
        for layer, (sine, cosine) in positions.items():
            layer.forward = _Constants(sine.clone(), cosine.clone())  # type: ignore
        yield
    finally:
        for layer in positions:
            layer.__dict__.pop('forward', None)


class _Constants:
    """Callable that returns the same tensors every time."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._tensors = tensors

    def __call__(self, *_: Any) -> Tuple[torch.Tensor, ...]:
        return self._tensors


@contextmanager
def _constant_sides(any_batch: bool) -> Iterator[None]:
    """Make the shapes of tensors numbers, except the first side if the batch size is open.

    A trace turns every use of a shape, for example in the padding of EfficientNet, into a dozen
    nodes that a runtime cannot fold while the batch size is open: 1,319 nodes instead of 123, and
    18 % more time.
    """

    def shape(tensor: torch.Tensor) -> _Shape:
        traced = _Base.shape.__get__(tensor)
        traced_sides = 1 if any_batch else 0
        return _Shape((*traced[:traced_sides], *(int(side) for side in traced[traced_sides:])))

    def size(tensor: torch.Tensor, dim: Optional[int] = None) -> Union[_Shape, int, torch.Tensor]:
        return shape(tensor) if dim is None else shape(tensor)[dim]

    torch.Tensor.shape = property(shape)  # type: ignore
    torch.Tensor.size = size  # type: ignore
    try:
        yield
    finally:
        del torch.Tensor.shape, torch.Tensor.size


class _Shape(tuple):
    """A shape with sides that may be traced tensors, which ``torch.Size`` cannot contain."""

    def numel(self) -> Union[int, torch.Tensor]:
        """Return the product of the sides."""
        product: Union[int, torch.Tensor] = 1
        for side in self:
            product = product * side
        return product
