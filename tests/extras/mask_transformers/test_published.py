"""Published names of weights: every key accounted for, deltas added, errors that list keys."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Dict

import pytest
import torch
from dinov3_states import hub_state, huggingface_state
from mask_models import ARCH, CLASSES, build, eomt_config, pmt_config

from mapsage.extras.mask_transformers import published
from mapsage.models.backbones.dinov3_weights import WeightsError

State = Dict[str, torch.Tensor]
C = ARCH['embed_dims']


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape) * 0.3


def shared_head(classes: int = CLASSES) -> State:
    """The parts that the authors' EoMT and decoder of PMT have in common."""
    state = {
        'q.weight': draw(9, C),
        'class_head.weight': draw(classes + 1, C),
        'class_head.bias': draw(classes + 1),
        'attn_mask_probs': torch.zeros(2),
    }
    for layer in (0, 2, 4):
        state.update({f'mask_head.{layer}.weight': draw(C, C), f'mask_head.{layer}.bias': draw(C)})
    for block in (0, 1):
        state.update(
            {
                f'upscale.{block}.conv1.weight': draw(C, C, 2, 2),
                f'upscale.{block}.conv1.bias': draw(C),
                f'upscale.{block}.conv2.weight': draw(C, 1, 3, 3),
                f'upscale.{block}.norm.weight': draw(C),
                f'upscale.{block}.norm.bias': draw(C),
            }
        )
    return state


def eomt_state(classes: int = CLASSES) -> State:
    """A whole or a delta checkpoint by the names of tue-mps/eomt."""
    torch.manual_seed(1)
    state = {f'network.{key}': value for key, value in shared_head(classes).items()}
    for key, value in huggingface_state(hub_state(dict(ARCH))).items():
        if key == 'embeddings.mask_token':
            continue
        key = re.sub(r'^(model\.)?layer\.', 'blocks.', key)
        state['network.encoder.backbone.' + key.replace('embeddings.', 'patch_embed.', 1)] = (
            torch.randn_like(value) * 0.3
        )
    state.update(
        {
            'network.encoder.pixel_mean': torch.zeros(3, 1, 1),
            'network.encoder.pixel_std': torch.zeros(3, 1, 1),
            'criterion.empty_weight': torch.ones(classes + 1),
        }
    )
    return state


def pmt_state() -> State:
    """A checkpoint of the decoder by the names of tue-mps/pmt."""
    torch.manual_seed(2)
    state = {f'decoder.{key}': value for key, value in shared_head().items()}
    state.update({'decoder.decoder_norm.weight': draw(C), 'decoder.decoder_norm.bias': draw(C)})
    for level in range(4):
        mlp = f'decoder.lateral_projections.{level}'
        state.update(
            {
                f'{mlp}.0.weight': draw(C // 2, C),
                f'{mlp}.0.bias': draw(C // 2),
                f'{mlp}.2.weight': draw(C, C // 2),
                f'{mlp}.2.bias': draw(C),
                f'decoder.scalers.{level}': draw(C),
            }
        )
        state.update(
            {
                f'bn.{level}.{name}': draw(C).abs()
                for name in ('weight', 'bias', 'running_mean', 'running_var')
            }
        )
        state[f'bn.{level}.num_batches_tracked'] = torch.tensor(7)
    for block in range(2):
        for name in ('q', 'k', 'v', 'o'):
            state[f'decoder.blocks.{block}.attention.{name}_proj.weight'] = draw(C, C)
            if name != 'k':
                state[f'decoder.blocks.{block}.attention.{name}_proj.bias'] = draw(C)
        for name in ('norm1', 'norm2', 'mlp.up_proj', 'mlp.down_proj'):
            shape = (C, C) if 'mlp' in name else (C,)
            state[f'decoder.blocks.{block}.{name}.weight'] = draw(*shape)
            state[f'decoder.blocks.{block}.{name}.bias'] = draw(C)
        for scale in (1, 2):
            state[f'decoder.blocks.{block}.layer_scale{scale}.lambda1'] = draw(C)
    return {f'network.{key}': value for key, value in state.items()}


def saved(state: Any, folder: Path, name: str = 'published.pth') -> str:
    torch.save(state, str(folder / name))
    return str(folder / name)


def loaded(config: Dict[str, Any]) -> Any:
    model = build(config)
    model.init_weights()
    return model


@pytest.mark.parametrize('wrapped', [False, True])
def test_a_delta_is_added_to_its_base(wrapped: bool, tmp_path: Path) -> None:
    """Also of a compiled model in a Lightning checkpoint, whose names have a part more."""
    state = eomt_state()
    written = (
        {key.replace('network.', 'network._orig_mod.', 1): value for key, value in state.items()}
        if wrapped
        else state
    )
    base = saved(hub_state(dict(ARCH)), tmp_path, 'base_lvd1689m.pth')
    config = eomt_config(backbone=dict(init_cfg=dict(type='Pretrained', checkpoint=base)))
    encoder = loaded(config).backbone.state_dict()
    model = loaded(
        dict(
            config,
            init_cfg=dict(type='Pretrained', checkpoint=saved(dict(state_dict=written), tmp_path)),
        )
    )
    own = model.backbone.state_dict()
    inner = 'network.encoder.backbone.'
    pairs = {
        'norm.weight': 'norm.weight',
        'cls_token': 'patch_embed.cls_token',
        'patch_embed.weight': 'patch_embed.patch_embeddings.weight',
        'blocks.3.gamma_2': 'blocks.3.layer_scale2.lambda1',
        'blocks.0.mlp.fc1.bias': 'blocks.0.mlp.up_proj.bias',
        'blocks.1.attn.v_bias': 'blocks.1.attention.v_proj.bias',
    }
    for ours, theirs in pairs.items():
        torch.testing.assert_allclose(own[ours], encoder[ours] + state[inner + theirs])
    qkv = torch.cat([state[f'{inner}blocks.2.attention.{name}_proj.weight'] for name in 'qkv'])
    torch.testing.assert_allclose(
        own['blocks.2.attn.qkv.weight'], encoder['blocks.2.attn.qkv.weight'] + qkv
    )
    assert torch.equal(own['pixel_mean'], encoder['pixel_mean'])
    assert torch.equal(own['rope.periods'], encoder['rope.periods'])
    head = model.decode_head.state_dict()
    assert torch.equal(head['queries.weight'], state['network.q.weight'])
    assert torch.equal(head['upscale.1.norm.bias'], state['network.upscale.1.norm.bias'])


def test_every_tensor_arrives_once(tmp_path: Path) -> None:
    """No number of a checkpoint is lost, none is left as it was."""
    state = eomt_state()
    model = loaded(
        dict(
            eomt_config(),
            init_cfg=dict(type='Pretrained', checkpoint=saved(state, tmp_path), delta=False),
        )
    )
    skipped = ('pixel_mean', 'pixel_std', 'empty_weight')
    given = sum(value.double().sum() for key, value in state.items() if not key.endswith(skipped))
    ours = model.state_dict()
    got = sum(
        value.double().sum()
        for key, value in ours.items()
        if not key.endswith(('pixel_mean', 'pixel_std', 'rope.periods'))
    )
    assert float(got) == pytest.approx(float(given), rel=1e-6)


def test_names_of_transformers_and_back(tmp_path: Path) -> None:
    source = build(eomt_config())
    source.decode_head.attn_mask_probs.zero_()
    theirs = published.to_huggingface(source.state_dict())
    assert 'layers.3.attention.k_proj.weight' in theirs and 'class_predictor.bias' in theirs
    theirs['criterion.empty_weight'] = torch.ones(CLASSES + 1)
    model = loaded(
        dict(eomt_config(), init_cfg=dict(type='Pretrained', checkpoint=saved(theirs, tmp_path)))
    )
    for key, value in source.state_dict().items():
        assert torch.equal(value, model.state_dict()[key]), key


@pytest.mark.parametrize('value, expected', [(0.0, 0.0), (-1.0, 0.0), (1.0, 1.0), (-0.25, 0.75)])
def test_mask_probabilities_of_deltas(value: float, expected: float, tmp_path: Path) -> None:
    state = dict(eomt_state(), **{'network.attn_mask_probs': torch.full((2,), value)})
    model = loaded(
        dict(
            eomt_config(),
            init_cfg=dict(type='Pretrained', checkpoint=saved(state, tmp_path), delta=False),
        )
    )
    assert model.decode_head.attn_mask_probs.tolist() == [expected] * 2


def test_another_number_of_classes(tmp_path: Path) -> None:
    path = saved(eomt_state(150), tmp_path)
    init = dict(type='Pretrained', checkpoint=path, delta=False)
    with pytest.raises(
        WeightsError,
        match=r'class_head.weight \(151, 32\) instead of \(6, 32\)'
        r'.*class_head=False',
    ):
        loaded(dict(eomt_config(), init_cfg=init))
    own = build(eomt_config()).decode_head.class_head.weight.clone()
    model = loaded(dict(eomt_config(), init_cfg=dict(init, class_head=False)))
    assert torch.equal(model.decode_head.class_head.weight, own)


def test_pmt_checkpoints(tmp_path: Path) -> None:
    state = pmt_state()
    model = loaded(
        pmt_config(
            init_cfg=dict(type='Pretrained', checkpoint=saved(dict(state_dict=state), tmp_path))
        )
    )
    head = model.decode_head.state_dict()
    given = sum(value.double().sum() for value in state.values())
    got = sum(value.double().sum() for key, value in head.items() if key != 'rope.periods')
    assert float(got) == pytest.approx(float(given), rel=1e-6)
    for ours, theirs in {
        'laterals.2.mlp.2.bias': 'decoder.lateral_projections.2.2.bias',
        'laterals.3.norm.running_var': 'bn.3.running_var',
        'laterals.0.scale': 'decoder.scalers.0',
        'norm.weight': 'decoder.decoder_norm.weight',
        'blocks.1.attn.proj.bias': 'decoder.blocks.1.attention.o_proj.bias',
        'blocks.0.attn.q_bias': 'decoder.blocks.0.attention.q_proj.bias',
        'blocks.1.gamma_1': 'decoder.blocks.1.layer_scale1.lambda1',
    }.items():
        assert torch.equal(head[ours], state[f'network.{theirs}']), ours


def test_a_delta_without_its_base(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match='differences from an encoder.*backbone.init_cfg'):
        loaded(
            dict(
                eomt_config(),
                init_cfg=dict(type='Pretrained', checkpoint=saved(eomt_state(), tmp_path)),
            )
        )


@pytest.mark.parametrize(
    'change, message',
    [
        (('network.mask_head.2.bias', None), r"missing \['mask_head.2.bias'\]"),
        (('network.extra.weight', torch.zeros(1)), r"left over \['network.extra.weight'\]"),
        (
            ('network.q.weight', torch.zeros(100, C)),
            r'queries.weight \(100, 32\) instead of \(9, 32\)',
        ),
        (
            ('network.encoder.backbone.blocks.2.norm1.bias', None),
            r"missing \['blocks.2.norm1.bias'\]",
        ),
    ],
)
def test_keys_that_do_not_fit(change: Any, message: str, tmp_path: Path) -> None:
    state = eomt_state()
    key, value = change
    if value is None:
        del state[key]
    else:
        state[key] = value
    with pytest.raises(WeightsError, match=message):
        loaded(
            dict(
                eomt_config(),
                init_cfg=dict(type='Pretrained', checkpoint=saved(state, tmp_path), delta=False),
            )
        )


def test_checkpoints_of_another_kind(tmp_path: Path) -> None:
    pmt, eomt = saved(pmt_state(), tmp_path, 'pmt.pth'), saved(eomt_state(), tmp_path, 'eomt.pth')
    with pytest.raises(WeightsError, match='no encoder: it is a PMT checkpoint'):
        loaded(dict(eomt_config(), init_cfg=dict(type='Pretrained', checkpoint=pmt)))
    with pytest.raises(WeightsError, match="format 'eomt', expected a checkpoint of PMT"):
        loaded(pmt_config(init_cfg=dict(type='Pretrained', checkpoint=eomt)))
    with pytest.raises(WeightsError, match='not an EoMT or PMT.*load_from'):
        published.split_checkpoint({'decode_head.conv_seg.weight': torch.zeros(1)})
    with pytest.raises(WeightsError, match='not the weights of an EoMT'):
        published.to_huggingface(build(pmt_config()).state_dict())
