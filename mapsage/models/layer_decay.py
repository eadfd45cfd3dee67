"""Layer-wise learning-rate decay for segmentors with a vision transformer of MapSage.

The rate shrinks from the head down to the backbone's first block, which keeps the features of the
early blocks close to their pretrained values. EoMT has another schedule
(extras/mask_transformers/two_stages.py).
"""

from __future__ import annotations

import re
from typing import Any, Dict, List, Protocol, Tuple, runtime_checkable

from mmengine.logging import print_log
from mmengine.optim import DefaultOptimWrapperConstructor
from mmengine.registry import OPTIM_WRAPPER_CONSTRUCTORS
from torch import nn

# Ends of the names of parameters with several axes that get no weight decay.
_TOKENS = ('cls_token', 'register_tokens', 'pos_embed', 'mod_emb', '.channel')


@runtime_checkable
class LayeredBackbone(Protocol):
    """A vision transformer: an embedding, then blocks.

    Attributes:
        blocks: Blocks from the first to the last.
        embedding_names: Beginnings of the names of the parameters before the first block.
    """

    blocks: nn.ModuleList
    embedding_names: Tuple[str, ...]


@OPTIM_WRAPPER_CONSTRUCTORS.register_module(
    name=['LayerDecayConstructor', 'DINOv3LayerDecayConstructor']
)
class DINOv3LayerDecayConstructor(DefaultOptimWrapperConstructor):
    """Layer-wise learning-rate decay for models with a :class:`LayeredBackbone`.

    DINOv3ViT is one, and so are OlmoEarth, TerraMind, DOFA and PrithviEO. Configs name this class
    ``LayerDecayConstructor``.

    A layer's learning rate is ``lr * decay_rate**k``. The depth k is 0 for the head and the
    backbone's final norm, 1 for its last block, n for the first of n blocks, and n + 1 for the
    embedding. The constructor counts the blocks of the model, so the config names no number that
    could be wrong. Biases, norms, LayerScale and tokens get no weight decay; frozen parameters are
    skipped.

    MMSeg's ``LearningRateDecayOptimizerConstructor`` does not fit: it recognizes its backbones by
    class name and the parameter names ``layers.N``, and gives every other parameter the full rate.

    Args:
        optim_wrapper_cfg: Config of the optimizer wrapper, as in MMEngine; the optimizer needs
            ``lr``.
        paramwise_cfg: Decay rate, as ``dict(decay_rate=...)``, greater than 0 and at most 1.

    Raises:
        ValueError: If ``paramwise_cfg`` has another form, the optimizer has no ``lr``, or the model
            has no such backbone.
    """

    def _validate_cfg(self) -> None:
        super()._validate_cfg()
        rate = self.paramwise_cfg.get('decay_rate')
        if set(self.paramwise_cfg) != {'decay_rate'} or not 0 < rate <= 1:
            raise ValueError(
                f'paramwise_cfg={self.paramwise_cfg} must be dict(decay_rate=...), '
                'with a rate above 0 and at most 1'
            )
        if self.base_lr is None:
            raise ValueError(f'optimizer={self.optimizer_cfg} has no lr to scale; set it')

    def add_params(
        self,
        params: List[Dict[str, Any]],
        module: nn.Module,
        prefix: str = '',
        is_dcn_module: Any = None,
    ) -> None:
        """Append one parameter group per depth, with and without weight decay, deepest first.

        Args:
            params: List to which groups with ``lr`` and ``group_name`` are appended.
            module: Model whose parameters are grouped.
            prefix: Unused argument of the base class.
            is_dcn_module: Unused argument of the base class.
        """
        backbones = {
            name: submodule
            for name, submodule in module.named_modules()
            if isinstance(submodule, LayeredBackbone)
        }
        if not backbones:
            raise ValueError(
                f'{type(module).__name__} has no DINOv3ViT or other vision '
                'transformer of MapSage; use DefaultOptimWrapperConstructor'
            )
        groups: Dict[Any, Dict[str, Any]] = {}
        for name, parameter in module.named_parameters():
            if not parameter.requires_grad:
                continue
            depth = _layer_depth(name, backbones)
            no_decay = parameter.ndim == 1 or name.endswith(_TOKENS)
            scale = self.paramwise_cfg['decay_rate'] ** depth
            group = groups.setdefault(
                (-depth, no_decay),
                dict(
                    params=[],
                    lr=self.base_lr * scale,
                    group_name=f'depth_{depth}_{"no_decay" if no_decay else "decay"}',
                ),
            )
            if no_decay:
                group['weight_decay'] = 0.0
            group['params'].append(parameter)
        ordered = [groups[key] for key in sorted(groups)]
        print_log(
            'Learning rates: '
            + ', '.join(
                f'{group["group_name"]} {group["lr"]:.3g} ({len(group["params"])} tensors)'
                for group in ordered
            ),
            logger='current',
        )
        params.extend(ordered)


def _layer_depth(name: str, backbones: Dict[str, LayeredBackbone]) -> int:
    """Return the number of layers between a parameter and the head; 0 outside the backbones."""
    for prefix, backbone in backbones.items():
        if prefix and not name.startswith(f'{prefix}.'):
            continue
        name_in_backbone = name[len(prefix) + 1 :] if prefix else name
        block = re.match(r'blocks\.(\d+)\.', name_in_backbone)
        if block:
            return len(backbone.blocks) - int(block.group(1))
        if name_in_backbone.startswith(backbone.embedding_names):
            return len(backbone.blocks) + 1
    return 0
