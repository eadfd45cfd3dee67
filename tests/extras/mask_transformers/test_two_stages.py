"""The phases of learning rates: EoMT's published numbers, and errors."""

from __future__ import annotations

from typing import Any, Dict, List

import pytest
import torch
from mask_models import build, eomt_config, pmt_config
from mmengine.optim import build_optim_wrapper
from mmengine.registry import PARAM_SCHEDULERS


def wrapper_of(model: Any, **paramwise: Any) -> Any:
    return build_optim_wrapper(
        model,
        dict(
            type='OptimWrapper',
            constructor='TwoStageConstructor',
            paramwise_cfg=paramwise,
            optimizer=dict(type='AdamW', lr=1.0, weight_decay=0.05),
        ),
    )


def rates_of(model: Any, **paramwise: Any) -> Dict[str, Any]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    optimizer = wrapper_of(model, **paramwise).optimizer
    return {
        names[id(parameter)]: group
        for group in optimizer.param_groups
        for parameter in group['params']
    }


def test_rates_of_layers() -> None:
    model = build(eomt_config())
    groups = rates_of(model, decay_rate=0.5)
    assert set(groups) == {name for name, _ in model.named_parameters()}
    for name, rate in {
        'backbone.blocks.3.gamma_1': 1,
        'backbone.blocks.1.norm1.bias': 0.25,
        'backbone.blocks.0.attn.q_bias': 0.125,
        'backbone.cls_token': 0.125,
        'backbone.patch_embed.weight': 0.125,
        'backbone.norm.bias': 1,
        'decode_head.queries.weight': 1,
    }.items():
        assert groups[name]['lr'] == rate, name
        assert groups[name]['encoder'] == name.startswith('backbone.')
    assert {group['weight_decay'] for group in groups.values()} == {0.05}
    full = rates_of(model, decay_rate=0.5, decay_joint_blocks=False)
    assert full['backbone.blocks.2.gamma_1']['lr'] == 1
    assert full['backbone.blocks.1.gamma_1']['lr'] == 0.25


def test_rates_over_a_training() -> None:
    """Compared with the authors' formulas, written out, for both kinds of groups."""
    wrapper = wrapper_of(build(eomt_config()), decay_rate=0.5)
    scheduler = PARAM_SCHEDULERS.build(
        dict(type='TwoStagePolyLR', optimizer=wrapper, warmup=(4, 6), end=30)
    )
    found: List[Any] = []
    for _ in range(30):
        found.append({group['group_name']: group['lr'] for group in wrapper.optimizer.param_groups})
        wrapper.optimizer.step()
        scheduler.step()
    for step, rates in enumerate(found):
        new = step / 4 if step < 4 else (1 - (step - 4) / 26) ** 0.9
        encoder = 0 if step < 4 else (step - 4) / 6 if step < 10 else (1 - (step - 10) / 20) ** 0.9
        assert rates['new_1'] == pytest.approx(new)
        assert rates['encoder_1'] == pytest.approx(encoder)
        assert rates['encoder_0.125'] == pytest.approx(encoder / 8)


def test_a_schedule_goes_on_where_it_was() -> None:
    def made() -> Any:
        wrapper = wrapper_of(build(eomt_config()), decay_rate=0.5)
        return wrapper, PARAM_SCHEDULERS.build(
            dict(type='TwoStagePolyLR', optimizer=wrapper, warmup=(4, 6), end=30)
        )

    def steps(wrapper: Any, scheduler: Any, count: int) -> List[Any]:
        rates = []
        for _ in range(count):
            wrapper.optimizer.step()
            scheduler.step()
            rates.append([group['lr'] for group in wrapper.param_groups])
        return rates

    one, two = made(), made()
    steps(*one, 7)
    two[0].load_state_dict(one[0].state_dict())
    two[1].load_state_dict(one[1].state_dict())
    assert steps(*one, 10) == steps(*two, 10)


@pytest.mark.parametrize(
    'paramwise',
    [dict(), dict(decay_rate=0), dict(decay_rate=1.1), dict(decay_rate=1, num_layers=3)],
)
def test_other_settings_of_rates(paramwise: Dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r'must be dict\(decay_rate'):
        wrapper_of(build(eomt_config()), **paramwise)


def test_models_and_groups_of_another_kind() -> None:
    with pytest.raises(ValueError, match='is for an EoMT, not EncoderDecoder'):
        wrapper_of(build(pmt_config()), decay_rate=1)
    plain = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    with pytest.raises(ValueError, match="constructor='TwoStageConstructor'"):
        PARAM_SCHEDULERS.build(dict(type='TwoStagePolyLR', optimizer=plain, end=5000))


@pytest.mark.parametrize(
    'settings', [dict(end=1500), dict(), dict(end=9000, by_epoch=True), dict(end=9000, warmup=(1,))]
)
def test_schedules_that_do_not_fit(settings: Dict[str, Any]) -> None:
    wrapper = wrapper_of(build(eomt_config()), decay_rate=1)
    with pytest.raises(ValueError, match='two warm-ups that are shorter together'):
        PARAM_SCHEDULERS.build(dict(type='TwoStagePolyLR', optimizer=wrapper, **settings))
