"""Every variant, from every weight format, computes what transformers' DINOv3 computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from dinov3_states import FORMATS, State, hub_state, huggingface_state

from mapsage.models import DINOv3ViT
from mapsage.models.backbones.dinov3_weights import ARCHS, Arch

transformers = pytest.importorskip('transformers', reason='no transformers for this Python')

# Of float32 features near 1. Processors add up in different orders: 1e-5 is exceeded on some.
TOLERANCE = 5e-5


def narrowed(name: str) -> Arch:
    """A variant with its true depth, heads, MLP and biases, eight channels a head."""
    whole = ARCHS[name]
    return whole._replace(embed_dims=8 * whole.num_heads, feedforward_channels=8 * whole.num_heads)


def reference_of(arch: Arch, hub: State) -> Any:
    model = transformers.DINOv3ViTModel(
        transformers.DINOv3ViTConfig(
            hidden_size=arch.embed_dims,
            num_hidden_layers=arch.num_layers,
            num_attention_heads=arch.num_heads,
            intermediate_size=arch.feedforward_channels,
            use_gated_mlp=arch.gated_mlp,
            hidden_act='silu' if arch.gated_mlp else 'gelu',
            num_register_tokens=arch.num_registers,
            query_bias=arch.qkv_bias,
            value_bias=arch.qkv_bias,
        )
    ).eval()
    state = huggingface_state(hub, 'model.layer')
    state['embeddings.mask_token'] = state['embeddings.mask_token'][None]
    model.load_state_dict(state)
    return model


@pytest.fixture(
    scope='module',
    params=[
        pytest.param(name, marks=pytest.mark.long) if name in ('huge+', '7B') else name
        for name in ARCHS
    ],
)
def case(request: pytest.FixtureRequest) -> Any:
    """The narrow variant, weights by the hub's names, an image, and the reference's states."""
    arch = narrowed(request.param)
    hub = hub_state(dict(arch._asdict()))
    for key in hub:  # values near 1, as in a trained model: the tolerance is absolute
        if key.endswith(('gamma', 'patch_embed.proj.weight')):
            hub[key] = hub[key] * 0.1
    x = torch.randn(2, 3, 48, 80, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        states = reference_of(arch, hub)(x, output_hidden_states=True)
    return arch, hub, x, states


@pytest.mark.parametrize('name', FORMATS)
def test_features_equal_those_of_transformers(case: Any, name: str, tmp_path: Path) -> None:
    """The patches of each layer, and the normed ones of the last, on an image not square."""
    arch, hub, x, states = case
    path = tmp_path / 'weights.pth'
    torch.save(FORMATS[name](hub), str(path))

    def patches(final_norm: bool) -> Any:
        model = DINOv3ViT(
            dict(arch._asdict()),
            out_indices=tuple(range(arch.num_layers)),
            final_norm=final_norm,
            normalization=None,
            init_cfg=dict(type='Pretrained', checkpoint=str(path)),
        )
        model.init_weights()
        with torch.no_grad():
            return [each.flatten(2).transpose(1, 2) for each in model.eval()(x)]

    tokens = 1 + arch.num_registers
    ours = [*patches(False)[:-1], patches(True)[-1]]
    theirs = [*states.hidden_states[1:-1], states.last_hidden_state]
    assert len(ours) == len(theirs) == arch.num_layers
    for own, state in zip(ours, theirs):
        assert float(state.std()) > 0.1
        assert float((own - state[:, tokens:]).abs().max()) < TOLERANCE


def test_prefix_tokens_equal_those_of_transformers(case: Any, tmp_path: Path) -> None:
    """They follow the maps, one for each of these, normed as they are."""
    arch, hub, x, states = case
    path = tmp_path / 'weights.pth'
    torch.save(hub, str(path))
    model = DINOv3ViT(
        dict(arch._asdict()),
        out_indices=(1, arch.num_layers - 1),
        prefix_tokens=True,
        normalization=None,
        frozen=True,
        init_cfg=dict(type='Pretrained', checkpoint=str(path)),
    )
    model.init_weights()
    first, last, first_prefix, last_prefix = model(x)
    assert first.shape[1:] == last.shape[1:] == (arch.embed_dims, 3, 5)
    tokens = 1 + arch.num_registers
    assert first_prefix.shape == last_prefix.shape == (2, arch.embed_dims, tokens, 1)
    expected = states.last_hidden_state[:, :tokens]
    assert float((last_prefix.flatten(2).transpose(1, 2) - expected).abs().max()) < TOLERANCE
    assert torch.equal(first, DINOv3ViT.forward(model, x)[0]) and not first.requires_grad


@pytest.mark.parametrize('registers', [0, 4])
def test_a_saved_folder_is_read(registers: int, tmp_path: Path) -> None:
    arch = narrowed('small+')._replace(num_registers=registers)
    hub = hub_state(dict(arch._asdict()))
    reference = reference_of(arch, hub)
    reference.save_pretrained(str(tmp_path / 'lvd1689m'))
    model = DINOv3ViT(
        dict(arch._asdict()),
        out_indices=(arch.num_layers - 1,),
        init_cfg=dict(type='Pretrained', checkpoint=str(tmp_path / 'lvd1689m')),
    )
    model.init_weights()
    x = torch.rand(1, 3, 32, 32) * 255
    with torch.no_grad():
        expected = reference((x - model.pixel_mean) / model.pixel_std).last_hidden_state
        own = model.eval()(x)[-1].flatten(2).transpose(1, 2)
    torch.testing.assert_close(own, expected[:, 1 + registers :], atol=TOLERANCE, rtol=1e-5)
