"""The settings of ``lora=dict(...)``."""
from __future__ import annotations

import difflib
from dataclasses import dataclass, fields
from typing import Any, Mapping, Optional, Tuple

from mapsage.errors import UserError


class LoRAError(UserError, ValueError):
    """``lora`` of a config does not fit its backbone, or has a wrong value."""


@dataclass(frozen=True)
class LoRASettings:
    """Settings of the adapters of a backbone.

    Attributes:
        rank: Rank of each adapter, the number of rows of A and of columns of B.
        targets: Layers that get an adapter: ``'q'``, ``'k'``, ``'v'`` for the projections of the
            attention, also where one layer holds all three, or the end of the name of a linear
            layer, such as ``'proj'`` or ``'mlp.fc1'``.
        alpha: Numerator of the scale ``alpha / rank`` of what an adapter adds; ``rank`` if None,
            for a scale of 1.
        dropout: Probability (0 to below 1) with which an adapter does not see a channel of its
            input, in training only.
    """

    rank: int
    targets: Tuple[str, ...] = ('q', 'v')
    alpha: Optional[float] = None
    dropout: float = 0.

    @property
    def scale(self) -> float:
        """The factor of what an adapter adds."""
        return 1. if self.alpha is None else self.alpha / self.rank


def parse_lora(config: Any) -> LoRASettings:
    """Return the settings of ``lora=dict(...)``.

    Raises:
        LoRAError: If a setting is unknown, missing or out of its range.
    """
    if isinstance(config, LoRASettings):
        return config
    names = [each.name for each in fields(LoRASettings)]
    if not isinstance(config, Mapping) or 'rank' not in config:
        raise LoRAError(f"lora={config!r}: expected dict(rank=16, targets=('q', 'v')), with the "
                        f"settings {', '.join(names)}")
    for key in config:
        if key not in names:
            near = difflib.get_close_matches(str(key), names, 1)
            raise LoRAError(f"lora has no setting {key!r}: expected {', '.join(names)}."
                            + (f' Did you mean {near[0]!r}?' if near else ''))
    targets = config.get('targets', LoRASettings.targets)
    settings = LoRASettings(
        config['rank'], (targets, ) if isinstance(targets, str) else tuple(targets),
        config.get('alpha'), config.get('dropout', 0.))
    if not isinstance(settings.rank, int) or isinstance(settings.rank, bool) or settings.rank < 1:
        raise LoRAError(f'lora.rank={settings.rank!r}: expected an integer from 1 on, such as 16; '
                        f'leave lora out to train without adapters')
    if not settings.targets or not all(each and isinstance(each, str) for each in settings.targets):
        raise LoRAError(f"lora.targets={targets!r}: expected names of layers, such as ('q', 'v')")
    if settings.alpha is not None and not 0 < settings.alpha < float('inf'):
        raise LoRAError(f'lora.alpha={settings.alpha!r}: expected a number above 0, or None for '
                        f'that of the rank')
    if not 0 <= settings.dropout < 1:
        raise LoRAError(f'lora.dropout={settings.dropout!r}: expected a probability from 0 to '
                        f'below 1')
    return settings
