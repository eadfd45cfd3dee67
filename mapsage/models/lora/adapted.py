"""Layers with low-rank adapters, which add ``scale * B A x`` to the output of the layer.

A layer gets its adapters in place: its class is replaced by a subclass, as by torch's
``nn.utils.parametrize``. So names in the state dict stay valid, ``isinstance`` still holds, other
modules that refer to the layer still find it, and the weights of a pretrained model load as before. The
layer gains two parameter dicts, ``lora_A`` and ``lora_B``, with one entry per adapted projection
(q, k, v), because one layer often computes all three.

Source: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, ICLR 2022.

Shapes: I inputs of a layer, O outputs of one projection, r rank, P number of projections that the
layer computes (1 or 3).

:class:`LoRASettings` checks the form and the range of the values of ``lora=dict(...)``. Whether the
targets match layers of the backbone is checked in ``inject.py``.
"""

from __future__ import annotations

import difflib
import functools
import math
import re
from dataclasses import dataclass, fields
from typing import Any, Dict, Mapping, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import nn

from mapsage.base.errors import UserError


class LoRAError(UserError, ValueError):
    """A config's ``lora`` has a wrong value or does not fit the backbone."""

    on_every_rank = True


@dataclass(frozen=True)
class LoRASettings:
    """Settings of the adapters of a backbone.

    Attributes:
        rank: Rank of each adapter: the number of rows of A and of columns of B.
        targets: Layers that get an adapter: ``'q'``, ``'k'``, ``'v'`` for the projections of the
            attention, even if one layer computes all three, or the end of a linear layer's name,
            such as ``'proj'`` or ``'mlp.fc1'``.
        alpha: Numerator of the scale ``alpha / rank`` of the adapters' output. None stands for
            ``rank``, so that the scale is 1.
        dropout: Probability (at least 0 and below 1) of dropping an input element of an adapter,
            in training only.
    """

    rank: int
    targets: Tuple[str, ...] = ('q', 'v')
    alpha: Optional[float] = None
    dropout: float = 0.0

    @property
    def scale(self) -> float:
        """Factor of the adapters' output."""
        return 1.0 if self.alpha is None else self.alpha / self.rank


def parse_lora(config: Any) -> LoRASettings:
    """Return the settings of ``lora=dict(...)``.

    Raises:
        LoRAError: If a setting is unknown, missing or out of its range.
    """
    if isinstance(config, LoRASettings):
        return config
    names = [field.name for field in fields(LoRASettings)]
    if not isinstance(config, Mapping) or 'rank' not in config:
        raise LoRAError(
            f"lora={config!r}: expected dict(rank=16, targets=('q', 'v')), with the "
            f'settings {", ".join(names)}'
        )
    for key in config:
        if key not in names:
            similar = difflib.get_close_matches(str(key), names, 1)
            raise LoRAError(
                f'lora has no setting {key!r}: expected {", ".join(names)}.'
                + (f' Did you mean {similar[0]!r}?' if similar else '')
            )
    targets = config.get('targets', LoRASettings.targets)
    settings = LoRASettings(
        config['rank'],
        (targets,) if isinstance(targets, str) else tuple(targets),
        config.get('alpha'),
        config.get('dropout', 0.0),
    )
    if not isinstance(settings.rank, int) or isinstance(settings.rank, bool) or settings.rank < 1:
        raise LoRAError(
            f'lora.rank={settings.rank!r}: expected an integer of at least 1, such as '
            f'16; leave lora out to train without adapters'
        )
    if not settings.targets or not all(
        target and isinstance(target, str) for target in settings.targets
    ):
        raise LoRAError(f"lora.targets={targets!r}: expected names of layers, such as ('q', 'v')")
    if settings.alpha is not None and not 0 < settings.alpha < float('inf'):
        raise LoRAError(
            f'lora.alpha={settings.alpha!r}: expected a number above 0, or None for '
            f'the value of the rank'
        )
    if not 0 <= settings.dropout < 1:
        raise LoRAError(
            f'lora.dropout={settings.dropout!r}: expected a probability of at least 0 and below 1'
        )
    return settings


_NAME = re.compile(r'(^|\.)lora_[AB]\.')
# Projections in the order of a fused layer's outputs.
PROJECTIONS = ('q', 'k', 'v')
# Name of the only adapter of a layer that is adapted as a whole.
WHOLE = 'all'

# Since torch 2.0.
_fused_attention = getattr(F, 'scaled_dot_product_attention', None)


def is_adapter(name: str) -> bool:
    """Return whether a key of a state dict belongs to an adapter."""
    return _NAME.search(name) is not None


class Adapted:
    """Mixin for a layer with adapters.

    Attributes:
        lora_A: Parameter A of each adapted projection, (r, I), initialized like a linear layer.
        lora_B: Parameter B of each adapted projection, (O, r), initialized with zeros.
        lora: Settings of the adapters.
        adapted_projections: Names of the adapted projections, in the order of the outputs.
        projection_count: Number of projections that the layer computes, P.
        original_class: Class of the layer without adapters.
        lora_used: Whether the adapters were ever computed.
    """

    # The names are from the paper and from peft.
    lora_A: nn.ParameterDict  # noqa: N815
    lora_B: nn.ParameterDict  # noqa: N815
    lora: LoRASettings
    adapted_projections: Tuple[str, ...]
    projection_count: int
    original_class: type
    lora_used: bool
    training: bool

    def delta(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the adapters add to the output, (..., P * O), for an input (..., I)."""
        self.lora_used = True
        down, up = self.join_matrices()
        if self.training and self.lora.dropout:
            x = F.dropout(x, self.lora.dropout)
        return F.linear(F.linear(x, down), up) * self.lora.scale

    def projection_delta(self, projection: str, x: torch.Tensor) -> Optional[torch.Tensor]:
        """Return what the adapter of one projection adds to it; None if it has no adapter."""
        self.lora_used = True
        if projection not in self.adapted_projections:
            return None
        if self.training and self.lora.dropout:
            x = F.dropout(x, self.lora.dropout)
        down, up = self.lora_A[projection], self.lora_B[projection]
        return F.linear(F.linear(x, down), up) * self.lora.scale

    def join_matrices(self) -> Tuple[torch.Tensor, torch.Tensor]:
        """Return A and B of all adapted projections, joined and without the scale.

        With n adapted projections, A is (n * r, I) and B is (P * O, n * r). B is block-diagonal:
        each adapter contributes to its own projection only. For q and v of a fused layer::

            [B_q  0 ]
            [ 0   0 ]
            [ 0  B_v]
        """
        names = self.adapted_projections
        if self.projection_count == 1:
            return self.lora_A[names[0]], self.lora_B[names[0]]
        rank = self.lora.rank
        outputs = len(self.lora_B[names[0]])
        rows = []
        for projection in PROJECTIONS:
            if projection in names:
                offset = names.index(projection) * rank
                rows.append(
                    F.pad(self.lora_B[projection], (offset, (len(names) - 1) * rank - offset))
                )
            else:
                rows.append(self.lora_B[names[0]].new_zeros(outputs, len(names) * rank))
        return torch.cat([self.lora_A[name] for name in names]), torch.cat(rows)

    def merged_weight(self, weight: torch.Tensor) -> torch.Tensor:
        """Return a weight (P * O, I) plus its adapters, in the dtype of the weight."""
        down, up = (matrix.detach().double() for matrix in self.join_matrices())
        return (weight.detach().double() + self.lora.scale * (up @ down)).to(weight.dtype)


class AdaptedLinear(Adapted):
    """Mixin for a linear layer whose ``forward`` is called."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Transform features, (..., I)."""
        return super().forward(x) + self.delta(x)  # type: ignore[misc]

    def merge(self) -> None:
        """Add the adapters to the weight."""
        layer: Any = self
        layer.weight.data = self.merged_weight(layer.weight)


class AdaptedBEiTLinear(AdaptedLinear):
    """Mixin for ``qkv`` of MMSegmentation's BEiTAttention.

    With ``bias='qv_bias'``, BEiTAttention reads the layer's weight instead of calling the layer,
    and holds the biases of queries and values itself. :func:`mapsage.models.lora.add_lora` changes
    that ``bias``, so that the attention calls the layer; the layer then adds the biases.
    """

    # In a tuple, so that torch does not register the parent as a submodule of its child.
    attention: Tuple[nn.Module]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Transform tokens, (N, tokens, I), to queries, keys and values."""
        query, value = self.attention[0].q_bias, self.attention[0].v_bias
        bias = torch.cat((query, torch.zeros_like(query), value))  # type: ignore[arg-type]
        layer: Any = self
        return F.linear(x, layer.weight, bias) + self.delta(x)


class AdaptedMultiheadAttention(Adapted):
    """Mixin for ``torch.nn.MultiheadAttention``, which never calls its projection layers.

    It computes the attention itself, without masks (a mask is an error) and without returning
    attention weights.
    """

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: Any = None,
        need_weights: bool = True,
        attn_mask: Any = None,
        **_: Any,
    ) -> Tuple[torch.Tensor, None]:
        """Return the attended tokens, in the layout of torch's ``MultiheadAttention``."""
        if key_padding_mask is not None or attn_mask is not None:
            raise NotImplementedError('MultiheadAttention with LoRA accepts no masks')
        module: Any = self
        biases = [None] * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
        inputs = zip(PROJECTIONS, (query, key, value), module.in_proj_weight.chunk(3), biases)
        # Queries, keys and values, each (N, heads, tokens, channels).
        heads = []
        for projection, x, weight, bias in inputs:
            y, delta = F.linear(x, weight, bias), self.projection_delta(projection, x)
            y = y if delta is None else y + delta
            y = y if module.batch_first else y.transpose(0, 1)
            heads.append(y.view(*y.shape[:2], module.num_heads, -1).transpose(1, 2))
        attended = _attend(heads[0], heads[1], heads[2], module.dropout if self.training else 0.0)
        attended = attended.transpose(1, 2).flatten(2)
        attended = attended if module.batch_first else attended.transpose(0, 1)
        return module.out_proj(attended), None

    def merge(self) -> None:
        """Add the adapters to the weight of queries, keys and values."""
        module: Any = self
        if self.adapted_projections:
            module.in_proj_weight.data = self.merged_weight(module.in_proj_weight)


def adapt(
    module: nn.Module,
    mixin: type,
    projections: Sequence[str],
    settings: LoRASettings,
    shape: Tuple[int, int],
) -> None:
    """Give a layer adapters by replacing its class with a subclass that has a mixin.

    Args:
        module: Layer, changed in place.
        mixin: One of the mixins above.
        projections: Names of the projections that get an adapter: some of :data:`PROJECTIONS`, or
            :data:`WHOLE`. Empty for an attention of which only the output layer has an adapter.
        settings: Settings of the adapters.
        shape: Outputs of one projection, O, and inputs, I.
    """
    outputs, inputs = shape
    layer: Any = module
    # mypy believes that module classes are not hashable, as lru_cache requires.
    make_class: Any = _make_adapted_class
    layer.__class__ = make_class(mixin, type(module))
    layer.lora, layer.lora_used = settings, False
    layer.adapted_projections = tuple(
        projection for projection in (*PROJECTIONS, WHOLE) if projection in projections
    )
    layer.projection_count = 1 if layer.adapted_projections == (WHOLE,) else len(PROJECTIONS)
    device = next(module.parameters()).device
    down: Dict[str, nn.Parameter] = {}
    for projection in layer.adapted_projections:
        down[projection] = nn.Parameter(torch.empty(settings.rank, inputs, device=device))
        # The initialization of nn.Linear, as in peft.
        nn.init.kaiming_uniform_(down[projection], a=math.sqrt(5))
    layer.lora_A = nn.ParameterDict(down)
    layer.lora_B = nn.ParameterDict(
        {
            projection: nn.Parameter(torch.zeros(outputs, settings.rank, device=device))
            for projection in down
        }
    )


def restore(module: nn.Module) -> None:
    """Merge the adapters of a layer into its weight, and give the layer its original class."""
    layer: Any = module
    layer.merge()
    if isinstance(layer, AdaptedBEiTLinear):
        layer.attention[0].bias = 'qv_bias'  # type: ignore[assignment]
        del layer.attention
    layer.__class__ = layer.original_class
    for name in (
        'lora_A',
        'lora_B',
        'lora',
        'lora_used',
        'adapted_projections',
        'projection_count',
    ):
        delattr(layer, name)


@functools.lru_cache(maxsize=None)
def _make_adapted_class(mixin: type, base: type) -> type:
    return type(
        f'LoRA{base.__name__}',
        (mixin, base),
        dict(__module__=__name__, __doc__=mixin.__doc__, original_class=base),
    )


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float
) -> torch.Tensor:
    if _fused_attention is not None:
        return _fused_attention(query, key, value, dropout_p=dropout)
    weights = ((query * query.shape[-1] ** -0.5) @ key.transpose(-2, -1)).softmax(dim=-1)
    return F.dropout(weights, dropout).to(value.dtype) @ value
