"""Learning rates that shrink from the head of a segmentor down to DINOv3's first block."""
from __future__ import annotations

import re
from typing import Any, Dict, List

from mmengine.logging import print_log
from mmengine.optim import DefaultOptimWrapperConstructor
from mmengine.registry import OPTIM_WRAPPER_CONSTRUCTORS
from torch import nn

from .backbones.dinov3 import DINOv3ViT


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class DINOv3LayerDecayConstructor(DefaultOptimWrapperConstructor):
    """Layer-wise learning-rate decay for models with a :class:`DINOv3ViT`.

    A layer's learning rate is ``lr * decay_rate**k``, where k counts down from the head (0) over
    the backbone's final norm (0) and last block (1) to its first block (number of blocks) and its
    embedding (one more). The blocks are those of the model itself, so no number has to be
    configured and none can be wrong. Biases, norms, LayerScale and tokens get no weight decay;
    frozen parameters are left out.

    MMSeg's ``LearningRateDecayOptimizerConstructor`` cannot be used: it recognizes its backbones by
    class name and ``layers.N`` only, and gives any other parameter the highest rate.

    Args:
        optim_wrapper_cfg: Config of the optimizer wrapper, as in MMEngine; the optimizer needs
            ``lr``.
        paramwise_cfg: Decay rate, as ``dict(decay_rate=...)``, greater than 0 and at most 1.

    Raises:
        ValueError: If ``paramwise_cfg`` is anything else, the optimizer has no ``lr``, or the model
            has no DINOv3ViT.
    """

    def _validate_cfg(self) -> None:
        super()._validate_cfg()
        rate = self.paramwise_cfg.get('decay_rate')
        if set(self.paramwise_cfg) != {'decay_rate'} or not 0 < rate <= 1:
            raise ValueError(f'paramwise_cfg={self.paramwise_cfg} must be dict(decay_rate=...), in '
                             '0 .. 1, 0 excluded')
        if self.base_lr is None:
            raise ValueError(f'optimizer={self.optimizer_cfg} has no lr to scale; set it')

    def add_params(self, params: List[Dict[str, Any]], module: nn.Module, prefix: str = '',
                   is_dcn_module: Any = None) -> None:
        """Append one group for each depth and kind of weight decay, deepest first.

        Args:
            params: List that is extended in place by groups with ``lr`` and ``group_name``.
            module: Model whose parameters are grouped.
            prefix: Unused argument of the base class.
            is_dcn_module: Unused argument of the base class.
        """
        backbones = {name: part for name, part in module.named_modules()
                     if isinstance(part, DINOv3ViT)}
        if not backbones:
            raise ValueError(f'{type(module).__name__} has no DINOv3ViT; use MMEngine\'s '
                             'DefaultOptimWrapperConstructor')
        groups: Dict[Any, Dict[str, Any]] = {}
        for name, parameter in module.named_parameters():
            if not parameter.requires_grad:
                continue
            depth = _depth_of(name, backbones)
            flat = parameter.ndim == 1 or name.endswith(('cls_token', 'register_tokens'))
            scale = self.paramwise_cfg['decay_rate']**depth
            group = groups.setdefault((-depth, flat), dict(
                params=[], lr=self.base_lr * scale,
                group_name=f'depth_{depth}_{"no_decay" if flat else "decay"}'))
            if flat:
                group['weight_decay'] = 0.
            group['params'].append(parameter)
        ordered = [groups[key] for key in sorted(groups)]
        print_log('Learning rates: ' + ', '.join(
            f'{group["group_name"]} {group["lr"]:.3g} ({len(group["params"])} tensors)'
            for group in ordered), logger='current')
        params.extend(ordered)


def _depth_of(name: str, backbones: Dict[str, DINOv3ViT]) -> int:
    """Return the number of layers between a parameter and the head, 0 outside the backbone."""
    for prefix, backbone in backbones.items():
        if prefix and not name.startswith(f'{prefix}.'):
            continue
        inner = name[len(prefix) + 1:] if prefix else name  # name within the backbone
        block = re.match(r'blocks\.(\d+)\.', inner)
        if block:
            return len(backbone.blocks) - int(block.group(1))
        if inner.startswith(('patch_embed.', 'cls_token', 'register_tokens')):
            return len(backbone.blocks) + 1
    return 0
