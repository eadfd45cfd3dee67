"""A linear decode head, the usual one for evaluating frozen features.

Its norm makes one learning rate suit backbones with features of very different scale.

Shapes: N images, C channels of the concatenated features, H x W cells of the feature map.
"""

from __future__ import annotations

from typing import Any, Sequence

import torch
from mmcv.cnn import build_norm_layer
from mmengine.registry import MODELS
from mmseg.models.decode_heads.decode_head import BaseDecodeHead


@MODELS.register_module()
class LinearHead(BaseDecodeHead):
    """Decode head with dropout, a norm and one 1x1 convolution.

    Without the norm, the right learning rate would depend on the scale of the features; MMSeg's
    ``FCNHead(num_convs=0)`` lacks it.

    Source: dinov3/eval/segmentation/models/heads/linear_head.py of facebookresearch/dinov3@6876159.

    Args:
        **kwargs: Arguments of MMSeg's ``BaseDecodeHead``; ``norm_cfg`` is required, and
            ``channels`` must be the sum of ``in_channels``.

    Raises:
        ValueError: If ``channels`` has another value or ``norm_cfg`` is missing.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        inputs = self.in_channels if isinstance(self.in_channels, int) else sum(self.in_channels)
        if self.channels != inputs or self.norm_cfg is None:
            raise ValueError(
                f'LinearHead: channels={self.channels} and norm_cfg={self.norm_cfg}, '
                f'expected channels={inputs} (of the input) and a norm_cfg'
            )
        self.norm = build_norm_layer(self.norm_cfg, self.channels)[1]

    def forward(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return logits, float (N, num_classes, H, W), for the backbone's feature maps."""
        x = self._transform_inputs(inputs)
        if self.dropout is not None:
            x = self.dropout(x)
        return self.conv_seg(self.norm(x))
