"""EoMT's two-stage warm-up: first the new layers warm up, then the pretrained encoder.

The constructor groups the parameters, and the scheduler reads from each group whether it belongs to
the encoder. They work only together. Other models on a DINOv3ViT use layer_decay.py.
"""

from __future__ import annotations

import re
from typing import Any, Dict, List, Sequence

from mmengine.logging import print_log
from mmengine.optim import DefaultOptimWrapperConstructor
from mmengine.optim.scheduler.param_scheduler import _ParamScheduler
from mmengine.registry import OPTIM_WRAPPER_CONSTRUCTORS, PARAM_SCHEDULERS
from torch import nn

from .eomt import EoMT

# Key of a parameter group: whether its parameters belong to the encoder.
_ENCODER = 'encoder'


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class TwoStageConstructor(DefaultOptimWrapperConstructor):
    """Parameter groups of an :class:`EoMT` for :class:`TwoStagePolyLR`, with layer decay.

    Block i of n has the learning rate ``lr * decay_rate**(n - 1 - i)``, the embedding has the rate
    of block 0, and the final norm and all new layers have ``lr``. Weight decay applies to every
    parameter, as in the authors' code.

    Source: tue-mps/eomt@7bd19dd, ``training/lightning_module.py``.

    Args:
        optim_wrapper_cfg: Config of the optimizer wrapper, as in MMEngine; the optimizer needs
            ``lr``.
        paramwise_cfg: Decay rate of the encoder's layers, as ``dict(decay_rate=...)``, above 0 and
            at most 1. Optionally ``decay_joint_blocks=False``, for the full rate in the blocks that
            see the queries.

    Raises:
        ValueError: If ``paramwise_cfg`` has another form, the optimizer has no ``lr``, or the model
            is not an EoMT.
    """

    def _validate_cfg(self) -> None:
        super()._validate_cfg()
        rate = self.paramwise_cfg.get('decay_rate', 0)
        if (
            not {'decay_rate'} <= set(self.paramwise_cfg) <= {'decay_rate', 'decay_joint_blocks'}
            or not 0 < rate <= 1
        ):
            raise ValueError(
                f'paramwise_cfg={self.paramwise_cfg} must be dict(decay_rate=..., '
                'decay_joint_blocks=True or False), with a rate above 0 and at most 1'
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
        """Append the encoder's groups, lowest rate first, and the group of the new layers.

        Args:
            params: List to which groups with ``lr``, ``encoder`` and ``group_name`` are appended.
            module: Model whose parameters are grouped.
            prefix: Unused argument of the base class.
            is_dcn_module: Unused argument of the base class.
        """
        if not isinstance(module, EoMT):
            raise ValueError(
                f'TwoStageConstructor is for an EoMT, not {type(module).__name__}; '
                'for other models on a DINOv3ViT, use '
                "'DINOv3LayerDecayConstructor'"
            )
        groups: Dict[Any, Dict[str, Any]] = {}
        for name, parameter in module.named_parameters():
            if not parameter.requires_grad:
                continue
            encoder = name.startswith('backbone.')
            scale = self._scale(name[len('backbone.') :], module) if encoder else 1.0
            group = groups.setdefault(
                (not encoder, scale),
                dict(
                    params=[],
                    lr=self.base_lr * scale,
                    encoder=encoder,
                    group_name=f'{"encoder" if encoder else "new"}_{scale:.4g}',
                ),
            )
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

    def _scale(self, name: str, model: EoMT) -> float:
        """Return the learning-rate factor of an encoder parameter."""
        blocks = len(model.backbone.blocks)
        block = re.match(r'blocks\.(\d+)\.', name)
        index = int(block.group(1)) if block else blocks - 1 if name.startswith('norm.') else 0
        sees_queries = block and index >= blocks - len(model.decode_head.attn_mask_probs)
        if sees_queries and not self.paramwise_cfg.get('decay_joint_blocks', True):
            return 1.0
        return self.paramwise_cfg['decay_rate'] ** (blocks - 1 - index)


@PARAM_SCHEDULERS.register_module()
class TwoStagePolyLR(_ParamScheduler):
    """Learning rates that warm up in two stages and then decay by a polynomial.

    The rate of the new layers rises from 0 over the first ``warmup[0]`` steps, during which the
    encoder's rate is 0. Then the encoder's rate rises over ``warmup[1]`` steps. After its warm-up,
    a rate decays as ``(1 - t)**power``, where t goes from 0 at the end of that warm-up to 1 at
    ``end``.

    Source: tue-mps/eomt@7bd19dd, ``training/two_stage_warmup_poly_schedule.py``.

    Args:
        optimizer: Optimizer whose groups come from :class:`TwoStageConstructor`.
        warmup: Number of steps of each warm-up: of the new layers, of the encoder.
        power: Exponent of the decay.
        **kwargs: ``begin`` and ``end`` in steps, and other arguments of MMEngine's schedulers;
            ``param_name`` is 'lr'.

    Raises:
        ValueError: If no group is marked as the encoder's, the schedule is by epochs, or the
            warm-ups do not fit before its end.
    """

    def __init__(
        self, optimizer: Any, warmup: Sequence[int] = (500, 1000), power: float = 0.9, **kwargs: Any
    ) -> None:
        kwargs = dict(dict(param_name='lr', by_epoch=False), **kwargs)
        begin, end = kwargs.get('begin', 0), kwargs.get('end')
        if (
            kwargs['by_epoch']
            or end is None
            or len(warmup) != 2
            or min(warmup) < 0
            or sum(warmup) >= end - begin
        ):
            raise ValueError(
                f'TwoStagePolyLR: warmup={tuple(warmup)}, begin={begin}, end={end}, '
                f'by_epoch={kwargs["by_epoch"]}; expected steps (by_epoch=False), an '
                'end, and two warm-ups that are shorter together'
            )
        # any() instead of all(): MMEngine adds a group without parameters and without the key, to
        # show the config's rate.
        if not any(_ENCODER in group for group in optimizer.param_groups):
            raise ValueError(
                'TwoStagePolyLR: the parameter groups do not say which ones are the '
                "encoder's; set optim_wrapper.constructor='TwoStageConstructor'"
            )
        self.warmup, self.power, self.steps = tuple(warmup), power, end - begin
        super().__init__(optimizer, **kwargs)

    def _get_value(self) -> List[float]:
        return [
            base * self._factor(group.get(_ENCODER, False))
            for base, group in zip(self.base_values, self.optimizer.param_groups)
        ]

    def _factor(self, encoder: bool) -> float:
        first = self.warmup[0] if encoder else 0
        length = self.warmup[1] if encoder else self.warmup[0]
        step = self.last_step - first
        if step < 0:
            return 0.0
        if step < length:
            return step / length
        return (1 - (step - length) / (self.steps - first - length)) ** self.power
