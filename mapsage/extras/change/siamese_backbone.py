"""Any backbone, applied to both dates of a pair, and their fused features.

The neck or decode head behind it sees one set of levels and needs no change. The simpler rival is
``StackBackbone(dates='channels')``, which sees both dates as bands of one image.
"""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional, Tuple

import torch
from mmengine.registry import MODELS

from mapsage.geo.stacks import StackLayoutError
from mapsage.models.backbones.stack_backbone import StackBackbone

# Channels of a fused level, as a multiple of the encoder's.
FUSIONS: Dict[str, int] = dict(concat=2, abs_diff=1, concat_abs_diff=3)


@MODELS.register_module()
class SiameseBackbone(StackBackbone):
    """Backbone that encodes two dates and fuses their features level by level.

    Args:
        sensors: One sensor with two dates, or two sensors with one date each (such as an optical
            image and radar), in the order of time; as in the data preprocessor.
        encoder: Config of a backbone for the bands of one date, with the same weights for both
            dates; or of one for each of two sensors, with the same channels of their levels.
        fusion: ``'concat'``: features of the first date, then of the second date;
            ``'abs_diff'``: their absolute difference, which does not depend on the order of the
            dates; ``'concat_abs_diff'``: both of them. The neck or head behind it has
            ``in_channels`` of 2, 1 or 3 times the encoder's.
        init_cfg: As in ``BaseModule``.

    Raises:
        StackLayoutError: If there are not two dates in all, or ``fusion`` is unknown.
    """

    def __init__(
        self,
        sensors: Mapping[str, Mapping[str, Any]],
        encoder: Dict[str, Any],
        fusion: str = 'concat',
        init_cfg: Optional[Dict[str, Any]] = None,
    ) -> None:
        super().__init__(sensors, encoder, init_cfg=init_cfg)
        if self.layout.dates != 2:
            raise StackLayoutError(
                f'{self.layout}, expected two dates in all: one sensor with '
                f'max_dates=2, or two sensors with one date.'
            )
        if fusion not in FUSIONS:
            raise StackLayoutError(f'fusion={fusion!r}, expected one of {", ".join(FUSIONS)}.')
        self.fusion, self.returns_facts = fusion, False

    def forward(self, inputs: torch.Tensor) -> Tuple[torch.Tensor, ...]:
        """Return the fused levels, (N, C, h, w) each.

        Args:
            inputs: Stacks, (N, layout.input_channels, H, W), float32.
        """
        *levels, _ = super().forward(inputs)
        fused: List[torch.Tensor] = []
        for level in levels:
            if self.fusion == 'concat':
                fused.append(level)
                continue
            first, second = level.chunk(2, 1)
            difference = (second - first).abs()
            fused.append(
                difference if self.fusion == 'abs_diff' else torch.cat([level, difference], 1)
            )
        return tuple(fused)
