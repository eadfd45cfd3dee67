"""The DINOv3 backbone: its mathematics, freezing, and against Hugging Face where installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, Iterator, Tuple

import pytest
import torch
from mmengine.logging import MMLogger
from mmengine.registry import MODELS
from torch import nn

from mapsage.models import DINOv3ViT
from mapsage.models.backbones import dinov3_weights as weights
from mapsage.models.backbones import rope

PLAIN = dict(embed_dims=16, num_layers=4, num_heads=2, feedforward_channels=24)
GATED = dict(PLAIN, gated_mlp=True, num_registers=0)
SEED = 0


def build(arch: Any = PLAIN, **arguments: Any) -> DINOv3ViT:
    """A backbone whose every parameter matters: LayerScale and biases are far from 0."""
    torch.manual_seed(SEED)
    model = DINOv3ViT(arch, **arguments)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


def image(count: int = 2, height: int = 48, width: int = 32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(count, 3, height, width, generator=generator) * 255


@pytest.fixture
def explicit(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(rope, '_fused_attention', None)
    yield


@pytest.mark.parametrize('size', [(16, 16), (48, 32), (16, 80)])
@pytest.mark.parametrize('arch', [PLAIN, GATED], ids=['plain', 'gated'])
def test_sizes(arch: Dict[str, Any], size: Tuple[int, int]) -> None:
    model = MODELS.build(dict(type='DINOv3ViT', arch=arch, out_indices=(1, 3)))
    maps = model(image(2, *size))
    assert [tuple(each.shape) for each in maps] == [(2, 16, size[0] // 16, size[1] // 16)] * 2
    assert model.out_channels == (16, 16)


@pytest.mark.parametrize(
    'name, dims, layers, millions',
    [
        ('small', 384, 12, 21),
        ('small+', 384, 12, 29),
        ('base', 768, 12, 86),
        ('large', 1024, 24, 300),
        ('huge+', 1280, 32, 840),
        ('7B', 4096, 40, 6716),
    ],
)
def test_official_sizes(name: str, dims: int, layers: int, millions: int) -> None:
    """Millions of parameters as in the official MODEL_CARD.md, which rounds them."""
    arch = weights.ARCHS[name]
    assert (arch.embed_dims, arch.num_layers) == (dims, layers)
    block = 4 * dims**2 + dims * (1 + 2 * arch.qkv_bias)  # attention
    matrices = 3 if arch.gated_mlp else 2
    block += matrices * dims * arch.feedforward_channels + dims
    block += (matrices - 1) * arch.feedforward_channels + 6 * dims
    total = layers * block + dims * (3 * 256 + 1) + dims * 5 + 2 * dims
    assert total / 1e6 == pytest.approx(millions, rel=0.03)
    if layers == 12 and dims == 384:
        built = DINOv3ViT(name, out_indices=(0,))
        assert sum(p.numel() for p in built.blocks.parameters()) == block


def test_model_without_fused_attention_trains(explicit: None) -> None:
    model = build()
    model(image())[-1].sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_keys_have_no_bias() -> None:
    """A query bias changes the result, and no parameter of the keys is there to."""
    attention = build().blocks[0].attn
    assert {name for name, _ in attention.named_parameters()} == {
        'qkv.weight',
        'q_bias',
        'v_bias',
        'proj.weight',
        'proj.bias',
    }


@pytest.mark.parametrize('arch', [PLAIN, GATED], ids=['plain', 'gated'])
@pytest.mark.parametrize('out_indices', [(0,), (1, 2)])
def test_every_parameter_gets_a_gradient(
    arch: Dict[str, Any], out_indices: Tuple[int, ...]
) -> None:
    """DDP fails on parameters without one."""
    model = build(arch, out_indices=out_indices)
    model(image())[-1].square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in model.parameters())


def test_final_norm_is_applied_to_each_output() -> None:
    model = build(out_indices=(0, 3))
    plain = build(out_indices=(0, 3), final_norm=False)
    plain.load_state_dict(
        {k: v for k, v in model.state_dict().items() if not k.startswith('norm.')}
    )
    for with_norm, without in zip(model(image()), plain(image())):
        normed = model.norm(without.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        torch.testing.assert_allclose(with_norm, normed)


@pytest.mark.parametrize('frozen_stages', [-1, 0, 2])
def test_recomputing_changes_no_gradient(frozen_stages: int) -> None:
    """With drop path, whose draws must be the same the second time."""
    gradients = []
    for with_cp in (False, True):
        model = build(with_cp=with_cp, drop_path_rate=0.6, frozen_stages=frozen_stages).train()
        torch.manual_seed(3)
        model(image(4))[-1].square().sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, expected in gradients[0].items():
        assert (expected is None) == (gradients[1][name] is None), name
        if expected is not None:
            torch.testing.assert_allclose(gradients[1][name], expected)
    assert any(g is not None for g in gradients[1].values())


@pytest.mark.skipif(not hasattr(torch, 'get_autocast_dtype'), reason='reentrant checkpointing')
def test_recomputing_has_the_same_precision() -> None:
    gradients = []
    for with_cp in (False, True):
        model = build(with_cp=with_cp)
        with torch.autocast('cpu', dtype=torch.bfloat16):
            output = model(image())[-1]
        output.float().square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    for expected, recomputed in zip(*gradients):
        assert torch.equal(expected, recomputed)


def saved_elements(model: nn.Module) -> int:
    """What a forward pass keeps for the backward pass."""
    count = [0]

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        count[0] += tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(image())
    return count[0]


def test_recomputing_keeps_fewer_tensors() -> None:
    assert saved_elements(build(with_cp=True)) < saved_elements(build()) / 2


def test_drop_path_acts_in_training_only_and_keeps_the_mean() -> None:
    model = build(drop_path_rate=0.5)
    assert [block.drop_path for block in model.blocks] == pytest.approx([0, 0.5 / 3, 1 / 3, 0.5])
    assert not torch.equal(model.train()(image())[-1], model(image())[-1])
    assert torch.equal(model.eval()(image())[-1], model(image())[-1])
    factors = model.train().blocks[3].draw_drop_path(torch.zeros(4000, 1, 1))
    assert set(factors.unique().tolist()) == {0, 2} and abs(factors.mean() - 1) < 0.1
    assert model.blocks[0].draw_drop_path(torch.zeros(4, 1, 1)) is None


@pytest.mark.parametrize('stages', [-1, 0, 2, 4])
def test_frozen_stages(stages: int) -> None:
    model = build(frozen_stages=stages, drop_path_rate=0.5).eval().train()
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    prefixes = ('patch_embed.', 'cls_token', 'register_tokens') if stages >= 0 else ()
    prefixes += tuple(f'blocks.{index}.' for index in range(stages))
    assert frozen == {name for name, _ in model.named_parameters() if name.startswith(prefixes)}
    assert [block.training for block in model.blocks] == [i >= stages for i in range(4)]
    outputs = model(image())
    assert [each.requires_grad for each in outputs] == [True] * 4  # by the final norm
    outputs[-1].sum().backward()
    assert {name for name, p in model.named_parameters() if p.grad is None} == frozen


def test_frozen_stays_in_eval_and_out_of_autograd() -> None:
    model = build(frozen=True, drop_path_rate=0.9)
    nn.Sequential(model).train()
    assert not any(module.training for module in model.modules())
    assert not any(p.requires_grad for p in model.parameters())
    # even for an input that requires a gradient, no graph is kept
    outputs = model(image().requires_grad_())
    assert not any(each.requires_grad for each in outputs)
    assert torch.equal(outputs[-1], model(image())[-1])
    model.requires_grad_(True)  # as a careless hook might
    assert saved_elements(model) == 0


def test_normalization_is_done_here_and_travels_with_the_weights() -> None:
    web, sat, bare = (build(normalization=kind) for kind in ('web', 'sat493m', None))
    for kind, model in (('web', web), ('sat493m', sat)):
        mean, std = (torch.tensor(x).view(3, 1, 1) for x in weights.NORMALIZATION[kind])
        torch.testing.assert_allclose(model(image())[-1], bare((image() - mean) / std)[-1])
    web.load_state_dict(sat.state_dict())
    assert torch.equal(web(image())[-1], sat(image())[-1])


def test_normalized_input_is_refused() -> None:
    with pytest.raises(ValueError, match='take mean and std out of the data preprocessor'):
        build()((image() - 120) / 58)
    build(normalization=None)((image() - 120) / 58)


def test_values_of_another_range_are_named_once_for_each_kind(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = build()
    black, scene, share = torch.zeros(1, 3, 32, 32), image() * 40, image() / 255
    logger = MMLogger.get_current_instance()
    logger.addHandler(caplog.handler)
    try:
        with torch.no_grad():
            for x in (*[black] * 9, image(), scene, share, scene, share, black):
                model(x)
            build(normalization=None)(scene)
    finally:
        logger.removeHandler(caplog.handler)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert 'up to 101' in messages[0] and '16-bit' in messages[0]
    assert 'up to 0.99' in messages[1] and '0..1' in messages[1]
    with pytest.raises(ValueError, match='take mean and std out'):
        model((image() - 120) / 58)


@pytest.mark.parametrize(
    'asked, name, mean, message',
    [
        ('weights', 'sat493m.pth', 109.65, "Normalization sat493m (the name 'sat493m.pth')"),
        ('weights', 'lvd1689m.pth', 123.675, "Normalization web (the name 'lvd1689m.pth')"),
        ('web', 'sat493m.pth', 123.675, 'Normalization web (set by the config; weights: sat493m)'),
        (None, 'sat493m.pth', 109.65, 'expected of the data preprocessor'),
    ],
)
def test_normalization_follows_the_weights(
    asked: Any, name: str, mean: float, message: str, tmp_path: Path, caplog: Any
) -> None:
    path = str(tmp_path / name)
    source = build()
    torch.save({k: v for k, v in source.state_dict().items() if not k.startswith('pixel')}, path)
    logger = MMLogger.get_current_instance()
    logger.addHandler(caplog.handler)
    try:
        model = DINOv3ViT(
            PLAIN, normalization=asked, init_cfg=dict(type='Pretrained', checkpoint=path)
        )
        model.init_weights()
    finally:
        logger.removeHandler(caplog.handler)
    assert model.pixel_mean[0].item() == pytest.approx(mean)
    assert message in caplog.text


def test_weights_that_do_not_tell_need_the_config(tmp_path: Path) -> None:
    path = str(tmp_path / 'renamed.pth')
    torch.save({k: v for k, v in build().state_dict().items() if not k.startswith('pixel')}, path)
    cfg = dict(type='Pretrained', checkpoint=path)
    with pytest.raises(ValueError, match=r"set it to one of \['sat493m', 'web'\]"):
        DINOv3ViT(PLAIN, init_cfg=cfg).init_weights()
    DINOv3ViT(PLAIN, init_cfg=cfg, normalization='web').init_weights()


def test_weights_come_with_init_weights_once(tmp_path: Path) -> None:
    path, source = str(tmp_path / 'x.pth'), build()
    torch.save(source.state_dict(), path)
    model = DINOv3ViT(PLAIN, init_cfg=dict(type='Pretrained', checkpoint=path))
    assert not torch.equal(model.cls_token, source.cls_token)
    model.init_weights()
    assert torch.equal(model.cls_token, source.cls_token)
    assert all(bool(torch.isfinite(value).all()) for value in model.state_dict().values())
    with torch.no_grad():
        model.cls_token.zero_()
    model.init_weights()  # as a wrapper calls it again
    assert bool((model.cls_token == 0).all())


def test_without_weights_nothing_is_uninitialized() -> None:
    model = DINOv3ViT(PLAIN)
    model.init_weights()
    assert all(bool(torch.isfinite(value).all()) for value in model.state_dict().values())
    assert bool(torch.isfinite(model(image())[-1]).all())


@pytest.mark.parametrize(
    'arguments, message',
    [
        (
            dict(arch='giant'),
            r"arch='giant', expected one of \['small', 'small\+', 'base', 'large'",
        ),
        (dict(arch=dict(embed_dims=16)), 'expected the keys .*num_heads'),
        (dict(arch=dict(PLAIN, depth=3)), r"'depth': 3.* and no others"),
        (
            dict(arch=dict(PLAIN, num_heads=3)),
            'embed_dims=16 must be a multiple of 4 x num_heads=12',
        ),
        (dict(out_indices=(2, 1)), r'out_indices=\(2, 1\)'),
        (dict(out_indices=(4,)), r'out_indices=\(4,\) must be ascending block indices in 0..3'),
        (dict(out_indices=()), r'out_indices=\(\)'),
        (dict(frozen_stages=5), 'frozen_stages=5'),
        (dict(drop_path_rate=1.0), 'drop_path_rate=1.0'),
        (dict(normalization='imagenet'), "normalization='imagenet' must be 'weights' or one of"),
    ],
)
def test_argument_errors(arguments: Dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DINOv3ViT(**{'arch': PLAIN, **arguments})


@pytest.mark.parametrize('size', [(40, 32), (32, 47)])
def test_sizes_that_do_not_divide(size: Tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=f'{size[0]} x {size[1]} .*multiples of 16; choose'):
        build()(image(1, *size))


def test_default_outputs_are_four_evenly_spaced() -> None:
    assert DINOv3ViT(dict(PLAIN, num_layers=24)).out_indices == (5, 11, 17, 23)
    assert DINOv3ViT(dict(PLAIN, num_layers=2)).out_indices == (0, 1)
