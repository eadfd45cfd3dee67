"""Reading DINOv3 weights of every format, and refusing what does not fit."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from typing import Any, Dict, Optional

import pytest
import torch
from dinov3_states import FORMATS, State, hub_state, huggingface_state, timm_state

from mapsage.models import DINOv3ViT, WeightsError
from mapsage.models.backbones import dinov3_weights as weights
from mapsage.models.backbones.dinov3_weights import ARCHS, Arch

PLAIN = dict(embed_dims=16, num_layers=3, num_heads=2, feedforward_channels=24)
GATED = dict(PLAIN, gated_mlp=True)
SMALLEST = dict(PLAIN, num_registers=0, qkv_bias=False, gated_mlp=True)
ARCHITECTURES = pytest.mark.parametrize(
    'arch', [PLAIN, GATED, SMALLEST], ids=['plain', 'gated', 'no biases, no registers']
)


def loaded(
    path: Path,
    state: State,
    name: str = 'sat493m.pth',
    prefix: Optional[str] = None,
    **arguments: Any,
) -> DINOv3ViT:
    torch.save(state, str(path / name))
    cfg = dict(type='Pretrained', checkpoint=str(path / name), prefix=prefix)
    model = DINOv3ViT(init_cfg=cfg, **arguments)
    model.init_weights()
    return model


@ARCHITECTURES
@pytest.mark.parametrize('name', FORMATS)
def test_every_format_gives_the_same_model(arch: Dict[str, Any], name: str, tmp_path: Path) -> None:
    hub = hub_state(arch)
    state = FORMATS[name](hub)
    assert weights.detect_format(state) == name.split()[0]
    model = loaded(tmp_path, state, arch=arch)
    expected = loaded(tmp_path, hub, arch=arch).state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in model.state_dict().items())


@ARCHITECTURES
def test_tensors_of_the_file_arrive(arch: Dict[str, Any], tmp_path: Path) -> None:
    hub = hub_state(arch)
    own = loaded(tmp_path, hub, arch=arch).state_dict()
    assert torch.equal(own['blocks.2.attn.qkv.weight'], hub['blocks.2.attn.qkv.weight'])
    assert torch.equal(own['patch_embed.weight'], hub['patch_embed.proj.weight'])
    assert torch.equal(own['blocks.1.gamma_2'], hub['blocks.1.ls2.gamma'])
    if arch is PLAIN:
        assert torch.equal(own['blocks.0.attn.v_bias'], hub['blocks.0.attn.qkv.bias'][32:])
        assert torch.equal(own['register_tokens'], hub['storage_tokens'])


def official_features(hub: State, x: torch.Tensor, heads: int, registers: int) -> torch.Tensor:
    """Normed patches (N, patches, C) of the last block, written from the official source's text.

    One head and one patch at a time; ``x`` is normalized.
    """

    def norm(name: str, t: torch.Tensor) -> torch.Tensor:
        centered = t - t.mean(-1, keepdim=True)
        scaled = centered / (centered.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return scaled * hub[f'{name}.weight'] + hub[f'{name}.bias']

    def linear(name: str, t: torch.Tensor) -> torch.Tensor:
        bias = hub.get(f'{name}.bias', torch.zeros(1)) * hub.get(f'{name}.bias_mask', 1)
        return t @ hub[f'{name}.weight'].T + bias

    def turn(t: torch.Tensor, y: float, x: float) -> torch.Tensor:
        quarter, angles = t.shape[-1] // 4, []
        for place in (y, x):
            angles += [2 * math.pi * place / float(period) for period in hub['rope_embed.periods']]
        result = t.clone()
        for i, angle in enumerate(angles):
            first, second = t[..., i], t[..., i + 2 * quarter]
            result[..., i] = first * math.cos(angle) - second * math.sin(angle)
            result[..., i + 2 * quarter] = second * math.cos(angle) + first * math.sin(angle)
        return result

    count, _, height, width = x.shape
    rows, columns = height // 16, width // 16
    tokens = [hub['cls_token'].expand(count, -1, -1)]
    if registers:
        tokens.append(hub['storage_tokens'].expand(count, -1, -1))
    for patch in range(rows * columns):
        row, column = divmod(patch, columns)
        pixels = x[:, :, 16 * row : 16 * row + 16, 16 * column : 16 * column + 16].flatten(1)
        kernel = hub['patch_embed.proj.weight'].flatten(1)
        tokens.append((pixels @ kernel.T + hub['patch_embed.proj.bias'])[:, None])
    t = torch.cat(tokens, dim=1)
    for index in range(sum(key.endswith('ls1.gamma') for key in hub)):
        block = f'blocks.{index}'
        query, key, value = linear(f'{block}.attn.qkv', norm(f'{block}.norm1', t)).chunk(3, -1)
        heard = []
        for q, k, v in zip(query.chunk(heads, -1), key.chunk(heads, -1), value.chunk(heads, -1)):
            q, k = q.clone(), k.clone()
            for patch in range(rows * columns):
                row, column = divmod(patch, columns)
                y, across = 2 * (row + 0.5) / rows - 1, 2 * (column + 0.5) / columns - 1
                at = 1 + registers + patch
                q[:, at], k[:, at] = turn(q[:, at], y, across), turn(k[:, at], y, across)
            scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
            heard.append(scores.softmax(-1) @ v)
        t = t + hub[f'{block}.ls1.gamma'] * linear(f'{block}.attn.proj', torch.cat(heard, -1))
        hidden, mlp = norm(f'{block}.norm2', t), f'{block}.mlp'
        if f'{mlp}.w1.weight' in hub:
            gate = linear(f'{mlp}.w1', hidden)
            out = linear(f'{mlp}.w3', gate * gate.sigmoid() * linear(f'{mlp}.w2', hidden))
        else:
            wide = linear(f'{mlp}.fc1', hidden)
            out = linear(f'{mlp}.fc2', wide * (1 + torch.erf(wide / 2**0.5)) / 2)
        t = t + hub[f'{block}.ls2.gamma'] * out
    return norm('norm', t)[:, 1 + registers :]


@ARCHITECTURES
def test_features_are_the_official_ones(arch: Dict[str, Any], tmp_path: Path) -> None:
    hub = hub_state(arch)
    x = torch.randn(2, 3, 48, 32, generator=torch.Generator().manual_seed(1))
    model = loaded(tmp_path, hub, arch=arch, normalization=None).eval()
    expected = official_features(hub, x, 2, Arch(**arch).num_registers)
    with torch.no_grad():
        features = model(x)[-1].flatten(2).transpose(1, 2)
    assert float((features - expected).abs().max()) < 1e-5


def test_periods_of_the_file_are_used(tmp_path: Path) -> None:
    """The official ones are rounded to bfloat16."""
    hub = hub_state(PLAIN)
    hub['rope_embed.periods'] = torch.tensor([1.0, 10.0625])
    assert torch.equal(loaded(tmp_path, hub, arch=PLAIN).rope.periods, hub['rope_embed.periods'])


def test_own_checkpoint_and_prefix(tmp_path: Path) -> None:
    trained = loaded(tmp_path, hub_state(PLAIN), arch=PLAIN)
    state = {f'backbone.{key}': value for key, value in trained.state_dict().items()}
    state['decode_head.weight'] = torch.zeros(1)
    model = loaded(tmp_path, {'state_dict': state}, 'x.pth', prefix='backbone', arch=PLAIN)
    assert torch.equal(model.pixel_mean, trained.pixel_mean)  # no name tells, the buffers do
    assert torch.equal(model.blocks[0].attn.qkv.weight, trained.blocks[0].attn.qkv.weight)
    with pytest.raises(WeightsError, match=r"prefix='backbone\.'"):
        loaded(tmp_path, {'state_dict': state}, 'x.pth', arch=PLAIN)


def test_blocks_above_the_last_are_left_out(tmp_path: Path) -> None:
    model = loaded(tmp_path, hub_state(PLAIN), arch=PLAIN, out_indices=(0, 1), final_norm=False)
    assert len(model.blocks) == 2


@pytest.mark.parametrize(
    'name, key',
    [
        ('hub', 'blocks.1.mlp.fc1.weight'),
        ('hub', 'blocks.2.attn.qkv.bias'),
        ('hub', 'cls_token'),
        ('huggingface', 'layer.1.attention.k_proj.weight'),
        ('timm', 'blocks.2.attn.v_bias'),
        ('timm', 'norm.weight'),
    ],
)
def test_a_missing_key_is_listed(name: str, key: str, tmp_path: Path) -> None:
    state = FORMATS[name](hub_state(PLAIN))
    del state[key]
    with pytest.raises(WeightsError, match=r'missing \[.+\], left over') as error:
        loaded(tmp_path, state, arch=PLAIN)
    own = key.replace('layer.1.attention.k_proj', 'blocks.1.attn.qkv').replace('qkv.bias', 'q_bias')
    assert repr(own) in str(error.value)


@pytest.mark.parametrize('key', ['head.weight', 'blocks.0.attn.rel_pos', 'blocks.3.norm1.bias'])
@pytest.mark.parametrize('name', FORMATS)
def test_a_left_over_key_is_listed(name: str, key: str, tmp_path: Path) -> None:
    state = dict(FORMATS[name](hub_state(PLAIN)), **{key: torch.zeros(16)})
    with pytest.raises(WeightsError, match=rf"missing \[\], left over \['{key[:8]}"):
        loaded(tmp_path, state, arch=PLAIN)


def test_two_names_of_one_tensor_are_refused() -> None:
    hub = hub_state(PLAIN)
    with pytest.raises(
        WeightsError, match=r'two tensors for each of these names: .*blocks\.0\.norm1\.bias'
    ):
        weights.convert({**huggingface_state(hub), **huggingface_state(hub, 'model.layer')})


def test_another_shape_is_listed(tmp_path: Path) -> None:
    state = dict(hub_state(PLAIN), storage_tokens=torch.zeros(1, 5, 16))
    with pytest.raises(WeightsError, match=r'register_tokens \(1, 5, 16\) instead of \(1, 4, 16\)'):
        loaded(tmp_path, state, arch=PLAIN)


def test_timm_without_biases_means_zero(tmp_path: Path) -> None:
    state = {
        k: v
        for k, v in timm_state(hub_state(PLAIN)).items()
        if not k.endswith(('q_bias', 'v_bias'))
    }
    model = loaded(tmp_path, state, arch=PLAIN)
    assert bool((model.blocks[0].attn.q_bias == 0).all())
    assert bool((model.blocks[2].attn.v_bias == 0).all())


def test_weights_with_biases_do_not_fit_7b(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match='left over .*q_bias'):
        loaded(tmp_path, hub_state(PLAIN), arch=dict(PLAIN, qkv_bias=False))


def test_an_unset_bias_mask_is_refused(tmp_path: Path) -> None:
    state = hub_state(PLAIN)
    state['blocks.1.attn.qkv.bias_mask'].fill_(float('nan'))
    with pytest.raises(WeightsError, match=r"not finite: \['blocks.1.attn.qkv.bias_mask'\]"):
        loaded(tmp_path, state, arch=PLAIN)


def test_a_key_bias_is_refused_unless_zero(tmp_path: Path) -> None:
    state = huggingface_state(hub_state(PLAIN))
    state['layer.1.attention.k_proj.bias'] = torch.zeros(16)
    loaded(tmp_path, state, arch=PLAIN)
    state['layer.1.attention.k_proj.bias'][3] = 1
    with pytest.raises(WeightsError, match=r'blocks.1.attn.k_bias is not zero'):
        loaded(tmp_path, state, arch=PLAIN)
    state = hub_state(PLAIN)
    state['blocks.0.attn.qkv.bias_mask'].fill_(1)
    with pytest.raises(WeightsError, match=r'blocks.0.attn.k_bias is not zero'):
        loaded(tmp_path, state, arch=PLAIN)


@pytest.mark.parametrize('name', ARCHS)
def test_variants_are_recognized(name: str) -> None:
    """By shapes alone: the tensors have no memory of their own."""
    arch = ARCHS[name]
    mlp = 'w1' if arch.gated_mlp else 'fc1'
    state = {
        'cls_token': torch.empty(1).expand(1, 1, arch.embed_dims),
        f'blocks.{arch.num_layers - 1}.gamma_1': torch.empty(1),
        f'blocks.0.mlp.{mlp}.weight': torch.empty(1).expand(
            arch.feedforward_channels, arch.embed_dims
        ),
    }
    assert weights.looks_like(state) == repr(name)
    other = ARCHS['large' if name != 'large' else 'base']
    with pytest.raises(WeightsError, match=re.escape(f'weights look like {name!r}, but arch=')):
        weights.fit(state, {}, other)


def test_no_dinov3_at_all() -> None:
    with pytest.raises(
        WeightsError, match=r"not a DINOv3 ViT: the keys begin with \['stem.weight'\]"
    ):
        weights.convert({'stem.weight': torch.zeros(1)})


@pytest.mark.parametrize(
    'path, keys, name, expected',
    [
        ('a/dinov3_vitl16_pretrain_sat493m-eadcf0ff.pth', (), '7B', 'sat493m'),
        (
            'models--facebook--dinov3-vitl16-pretrain-lvd1689m/snapshots/1f/model.safetensors',
            (),
            '7B',
            'web',
        ),
        ('sat493m/vit_7b_patch16_dinov3.lvd1689m.pth', (), '7B', 'web'),  # the deepest name counts
        ('renamed.pth', ('local_cls_norm.weight',), 'large', 'sat493m'),
        ('renamed.pth', (), 'large', 'web'),
        ('renamed.pth', ('local_cls_norm.weight',), '7B', None),  # both 7B files have it
        ('renamed.pth', (), 'huge+', 'web'),  # has no satellite weights
    ],
)
def test_training_data(path: str, keys: Any, name: str, expected: Optional[str]) -> None:
    state = dict.fromkeys(('blocks.0.ls1.gamma', *keys), torch.zeros(1))
    assert weights.training_data(path, state, ARCHS[name])[0] == expected


def test_a_missing_or_cut_off_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match='no.pth do not exist.*MAPSAGE_DINOV3'):
        weights.read_checkpoint(str(tmp_path / 'no.pth'))
    whole = tmp_path / 'whole.pth'
    torch.save(hub_state(PLAIN), str(whole))
    cut = tmp_path / 'cut.pth'
    for length in (0, 5000, whole.stat().st_size - 100):
        cut.write_bytes(whole.read_bytes()[:length])
        with pytest.raises(WeightsError, match=rf'cut.pth cannot be read \({length:,} bytes\)'):
            weights.read_checkpoint(str(cut))


def test_a_cut_off_safetensors_file_is_named(tmp_path: Path) -> None:
    safetensors = pytest.importorskip('safetensors.torch')
    path = tmp_path / 'cut.safetensors'
    safetensors.save_file(timm_state(hub_state(PLAIN)), str(path))
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(WeightsError, match='cut.safetensors cannot be read'):
        weights.read_checkpoint(str(path))


def test_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(WeightsError, match='neither model.safetensors nor'):
        weights.read_checkpoint(str(tmp_path))
    index = tmp_path / 'model.safetensors.index.json'
    index.write_text(json.dumps({'weight_map': {'a': 'one.safetensors', 'b': 'two.safetensors'}}))
    (tmp_path / 'one.safetensors').touch()
    with pytest.raises(WeightsError, match=r"names \['two.safetensors'\]"):
        weights.read_checkpoint(str(tmp_path))
    (tmp_path / 'two.safetensors').touch()
    monkeypatch.setitem(sys.modules, 'safetensors.torch', None)
    with pytest.raises(ImportError, match='pip install safetensors'):
        weights.read_checkpoint(str(tmp_path))


def test_safetensors_file_folder_and_shards(tmp_path: Path) -> None:
    safetensors = pytest.importorskip('safetensors.torch')
    state = {k: v.contiguous() for k, v in huggingface_state(hub_state(PLAIN)).items()}
    expected = loaded(tmp_path, state, arch=PLAIN).state_dict()
    whole = tmp_path / 'sat493m-whole'
    shards = tmp_path / 'sat493m-shards'
    whole.mkdir()
    shards.mkdir()
    safetensors.save_file(state, str(whole / 'model.safetensors'))
    where = {key: f'{index % 2}.safetensors' for index, key in enumerate(state)}
    for name in set(where.values()):
        part = {key: value for key, value in state.items() if where[key] == name}
        safetensors.save_file(part, str(shards / name))
    (shards / 'model.safetensors.index.json').write_text(json.dumps({'weight_map': where}))
    for path in (whole / 'model.safetensors', whole, shards):
        cfg = dict(type='Pretrained', checkpoint=str(path))
        model = DINOv3ViT(PLAIN, init_cfg=cfg)
        model.init_weights()
        assert all(torch.equal(v, expected[k]) for k, v in model.state_dict().items())
