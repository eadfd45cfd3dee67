"""Settings of low-rank adapters, ``lora=dict(...)`` in a config.

Only the form and the range of values are checked here. Whether the targets match layers of the
backbone is checked in ``inject.py``.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields
from typing import Any, Mapping, Optional, Tuple

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
