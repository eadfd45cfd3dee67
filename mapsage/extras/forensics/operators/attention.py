"""Reference for the attention operators of cards, which have no kernel on the CPU.

``scaled_dot_product_attention`` becomes another operator on every kind of device: flash, efficient
or the vendor's. All compute the same formula, which is written out here with its gradient.
Arguments are found by their names, since the operators order them differently.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Dict, List, Mapping, Optional, Tuple

import torch

from .dispatch import operator_name

if TYPE_CHECKING:
    # Operators are objects of this class since torch 1.12.
    from torch._ops import OpOverload


def has_formula(func: OpOverload) -> bool:
    """Return whether an operator is one of attention's, forward or backward."""
    return operator_name(func).startswith('_scaled_dot_product_') and any(
        argument.name == 'query' for argument in func._schema.arguments
    )


def attention_results(
    func: OpOverload, args: Tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Optional[List[torch.Tensor]]:
    """Return the results of an attention operator that its formula determines.

    Args:
        func: Operator for which :func:`has_formula` is true.
        args, kwargs: Its arguments on the CPU; query (B, H, L, E), key (B, H, S, E), value
            (B, H, S, V).

    Returns:
        The output (B, H, L, V), or the gradients of query, key and value. None with dropout, whose
        mask is inside the operator.
    """
    values: Dict[str, Any] = {
        argument.name: argument.default_value
        for argument in func._schema.arguments
        if argument.has_default_value()
    }
    values.update(zip((argument.name for argument in func._schema.arguments), args))
    values.update(kwargs)
    if values.get('dropout_p'):
        return None
    query, key, value = (values[name] for name in ('query', 'key', 'value'))
    scale = values.get('scale') or 1 / math.sqrt(query.shape[-1])
    scores = query @ key.transpose(-1, -2) * scale
    bias = values.get('attn_bias', values.get('attn_mask'))
    if bias is not None:
        scores = scores + bias
    if values.get('is_causal'):
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~visible, -math.inf)
    weights = scores.softmax(-1)
    gradient = next((values[name] for name in ('grad_out', 'grad_out_') if name in values), None)
    if gradient is None:
        return [weights @ value]
    # d softmax: y * (g - sum(g * y))
    weight_gradient = gradient @ value.transpose(-1, -2)
    score_gradient = weights * (weight_gradient - (weight_gradient * weights).sum(-1, True))
    return [
        score_gradient @ key * scale,
        score_gradient.transpose(-1, -2) @ query * scale,
        weights.transpose(-1, -2) @ gradient,
    ]
