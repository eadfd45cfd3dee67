"""What all encoders for satellite images do with stacks, weights, adapters and learning rates."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, Dict, List, Tuple

import pytest
import torch
from earth_states import fill, images, stack, waves
from mmengine.optim import OptimWrapper
from mmengine.registry import MODELS, OPTIM_WRAPPER_CONSTRUCTORS
from torch import nn

from mapsage.extras.earth import DOFA, OlmoEarth, PrithviEO, TerraMind
from mapsage.geo.stacks import StackLayout
from mapsage.models.backbones import WeightsError
from mapsage.models.lora import merge_lora

S2 = ('B02', 'B03', 'B04', 'B8A')
DATES = ((2023, 3, 15), (2023, 6, 1), (2024, 12, 31))
ARCH: Dict[str, Any] = dict(embed_dims=48, num_layers=4, num_heads=4)
KINDS = dict(
    olmoearth=(OlmoEarth, dict(arch=dict(ARCH, pixel_channels=4), patch_size=8), 8),
    terramind=(TerraMind, dict(arch=ARCH), 16),
    prithvi=(PrithviEO, dict(arch=ARCH), 16),
    dofa=(DOFA, dict(arch=ARCH, mean=dict(s2=[2000] * 4), std=dict(s2=[1500] * 4)), 16),
    dofa_v2=(
        DOFA,
        dict(
            arch=dict(ARCH, version=2, patch_size=14),
            mean=dict(s2=[2000] * 4),
            std=dict(s2=[1500] * 4),
        ),
        14,
    ),
)
CENTER, SPREAD = dict(s2=2000.0, s1=-14.0), dict(s2=1900.0, s1=9.0)


def settings_of(kind: str, max_dates: int = 3) -> Dict[str, Any]:
    encoder, settings, _ = KINDS[kind]
    return dict(
        settings, type=encoder.__name__, sensors=dict(s2=dict(bands=S2, max_dates=max_dates))
    )


def build(kind: str, max_dates: int = 3, **settings: Any) -> Any:
    return fill(MODELS.build(dict(settings_of(kind, max_dates), **settings)))


def a_stack(kind: str, missing: Any = (), count: int = 2, max_dates: int = 3) -> torch.Tensor:
    side = 2 * KINDS[kind][2]
    layout = StackLayout.of_config(dict(s2=dict(bands=S2, max_dates=max_dates)))
    pixels = images(layout, (side, 2 * side), CENTER, SPREAD, count)
    return stack(layout, pixels, dict(s2=DATES[:max_dates]), missing)


def difference(one: Any, other: Any) -> float:
    return max(float((a - b).detach().abs().max()) for a, b in zip(one, other))


every_kind = pytest.mark.parametrize('kind', KINDS)


@every_kind
def test_maps_have_the_shape_of_a_pyramid_neck(kind: str) -> None:
    encoder = build(kind)
    maps = encoder(a_stack(kind))
    assert [tuple(features.shape) for features in maps] == [(2, 48, 2, 4)] * 4
    assert encoder.out_channels == (48,) * 4
    assert all(features.is_contiguous() for features in maps)


@every_kind
def test_a_missing_date_is_no_date(kind: str) -> None:
    """A stack of three dates, the last missing, is that of two; pixels beneath do not matter."""
    three, two = build(kind), build(kind, max_dates=2)
    x = a_stack(kind, [(0, 's2', 2), (1, 's2', 2)])
    pixels = x[:, :8]
    shorter = stack(two.layout, pixels, dict(s2=DATES[:2]))
    assert difference(three(x), two(shorter)) < 1e-5
    x[:, 8:12] = 9000
    assert difference(three(x), two(shorter)) < 1e-5


@every_kind
def test_features_do_not_depend_on_the_batch(kind: str) -> None:
    """The published OlmoEarth differs here: it attends to the padding of other samples."""
    encoder = build(kind)
    x = a_stack(kind, [(0, 's2', 1)])
    assert (
        difference(encoder(x), [torch.cat(maps) for maps in zip(encoder(x[:1]), encoder(x[1:]))])
        < 1e-5
    )


@every_kind
def test_a_date_counts(kind: str) -> None:
    encoder = build(kind)
    assert difference(encoder(a_stack(kind)), encoder(a_stack(kind, [(0, 's2', 1)]))) > 0.01


@every_kind
def test_cells_without_a_valid_date_are_0(kind: str) -> None:
    encoder = build(kind)
    x = a_stack(kind)
    size = KINDS[kind][2]
    first = encoder.layout.pixel_channels
    x[0, first : first + 3, :size, :size] = 0
    for features in encoder(x):
        assert float(features[0, :, 0, 0].abs().max()) == 0
        assert float(features[0, :, 1, 1].abs().max()) > 0.1


@every_kind
def test_a_stack_of_clouds_is_finite_with_finite_gradients(kind: str) -> None:
    encoder = build(kind).train()
    x = a_stack(kind, [(0, 's2', 0), (0, 's2', 1), (0, 's2', 2)])
    maps = encoder(x)
    sum(features.square().sum() for features in maps).backward()
    assert float(maps[-1][0].abs().max()) == 0
    assert all(bool(torch.isfinite(parameter.grad).all()) for parameter in encoder.parameters())
    x[1] = x[0]
    assert all(bool(torch.isfinite(features).all()) for features in encoder(x))


@every_kind
def test_plain_images_are_stacks_of_one_date(kind: str) -> None:
    encoder = build(kind, max_dates=1)
    pixels = images(encoder.layout, (56 if kind == 'dofa_v2' else 64,) * 2, CENTER, SPREAD)
    days = torch.zeros(2, 1)
    with_planes = encoder.layout.add_planes(
        torch.cat([pixels, torch.ones(2, 1, *pixels.shape[2:])], 1), days
    )
    assert difference(encoder(pixels), encoder(with_planes)) < 1e-5


@every_kind
def test_no_parameter_is_without_a_gradient(kind: str) -> None:
    """DDP would wait for it. The last block is left out, so that its norm is not built either."""
    for indices in ((0, 2), (1, 3)):
        encoder = build(kind, out_indices=indices).train()
        x = a_stack(kind)
        sum((features * waves(features.shape)).sum() for features in encoder(x)).backward()
        assert [
            name for name, parameter in encoder.named_parameters() if parameter.grad is None
        ] == []


@every_kind
def test_frozen(kind: str) -> None:
    encoder = build(kind, frozen=True).train()
    assert not any(parameter.requires_grad for parameter in encoder.parameters())
    assert not any(module.training for module in encoder.modules())
    assert not any(features.requires_grad for features in encoder(a_stack(kind)))


@every_kind
def test_adapters(kind: str) -> None:
    """They train alone, start without effect, change features, and merge."""
    plain = build(kind)
    settings = dict(
        settings_of(kind),
        of=KINDS[kind][0].__name__,
        type='LoRABackbone',
        lora=dict(rank=2, targets=('q', 'v', 'mlp.fc1')),
    )
    adapted: Any = MODELS.build(settings)
    adapted.load_state_dict(plain.state_dict(), strict=False)
    x = a_stack(kind)
    # Features are near 5. The layers differ in shape, and some processors then round differently.
    assert difference(plain(x), adapted(x)) < 1e-5
    trained = [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]
    # OlmoEarth has a layer for q and one for v; the others have one for all three.
    assert len([name for name in trained if '.attn.' in name]) == 4 * 4
    assert all('lora_' in name and name.startswith('blocks.') for name in trained)
    adapted(x)[-1].square().sum().backward()
    optimizer = torch.optim.SGD(
        [parameter for parameter in adapted.parameters() if parameter.requires_grad], lr=0.1
    )
    for _ in range(2):
        optimizer.zero_grad()
        adapted(x)[-1].square().mean().backward()
        optimizer.step()
    features = adapted.eval()(x)
    assert difference(plain(x), features) > 1e-4
    merge_lora(adapted)
    assert difference(adapted(x), features) < 1e-4


@every_kind
def test_layer_decay(kind: str) -> None:
    model = nn.Module()
    model.backbone, model.decode_head = build(kind), nn.Linear(2, 2)
    constructor: Any = OPTIM_WRAPPER_CONSTRUCTORS.build(
        dict(
            type='LayerDecayConstructor',
            paramwise_cfg=dict(decay_rate=0.5),
            optim_wrapper_cfg=dict(type='OptimWrapper', optimizer=dict(type='SGD', lr=1.0)),
        )
    )
    wrapper: OptimWrapper = constructor(model)
    rates = {
        id(parameter): group['lr']
        for group in wrapper.optimizer.param_groups
        for parameter in group['params']
    }
    of_names = {name: rates[id(parameter)] for name, parameter in model.named_parameters()}
    assert of_names['decode_head.weight'] == 1
    for name, rate in of_names.items():
        if name.startswith('backbone.blocks.'):
            assert rate == 0.5 ** (4 - int(name.split('.')[2])), name
        elif name.startswith('backbone.norm.'):
            assert rate == 1, name
        elif name.startswith('backbone.'):
            assert rate == 0.5**5, name


def load(kind: str, state: Any, path: Path, **settings: Any) -> Any:
    torch.save(state, str(path))
    encoder: Any = MODELS.build(
        dict(settings_of(kind), init_cfg=dict(type='Pretrained', checkpoint=str(path)), **settings)
    )
    encoder.init_weights()
    return encoder.eval()


@every_kind
def test_a_file_of_ones_own_and_a_prefix(kind: str, tmp_path: Path) -> None:
    encoder = build(kind)
    x = a_stack(kind)
    state = encoder.state_dict()
    assert difference(load(kind, state, tmp_path / 'a.pth')(x), encoder(x)) == 0
    named = {f'backbone.{key}': value for key, value in state.items()}
    torch.save(
        dict(state_dict=dict(named, **{'decode_head.weight': torch.zeros(1)})),
        str(tmp_path / 'b.pth'),
    )
    other: Any = MODELS.build(
        dict(
            settings_of(kind),
            init_cfg=dict(
                type='Pretrained', checkpoint=str(tmp_path / 'b.pth'), prefix='backbone.'
            ),
        )
    )
    other.init_weights()
    assert difference(other.eval()(x), encoder(x)) == 0


@every_kind
def test_every_tensor_is_accounted_for(kind: str, tmp_path: Path) -> None:
    state = build(kind).state_dict()
    name = 'blocks.2.norm1.weight'
    with pytest.raises(WeightsError, match=rf"missing \['{name}'\].*left over \['extra.weight'\]"):
        load(
            kind,
            dict(
                {key: value for key, value in state.items() if key != name},
                **{'extra.weight': torch.zeros(3)},
            ),
            tmp_path / 'a.pth',
        )
    with pytest.raises(WeightsError, match=rf'{name} \(5,\) instead of \(48,\)'):
        load(kind, dict(state, **{name: torch.zeros(5)}), tmp_path / 'b.pth')
    with pytest.raises(WeightsError, match=rf"not finite: \['{name}'\]"):
        load(kind, dict(state, **{name: state[name] * float('nan')}), tmp_path / 'c.pth')
    with pytest.raises(WeightsError, match='left over .*blocks.7.norm1.weight'):
        load(kind, dict(state, **{'blocks.7.norm1.weight': state[name]}), tmp_path / 'd.pth')


@every_kind
def test_blocks_that_are_not_built_are_not_missed(kind: str, tmp_path: Path) -> None:
    encoder = build(kind)
    x = a_stack(kind)
    shorter = load(kind, encoder.state_dict(), tmp_path / 'a.pth', out_indices=(0, 2))
    assert len(shorter.blocks) == 3
    assert difference(shorter(x), [encoder(x)[0], encoder(x)[2]]) == 0


@every_kind
def test_a_missing_file_says_where_files_are(kind: str) -> None:
    with pytest.raises(WeightsError, match='no.pth do not exist. The published files are at http'):
        encoder: Any = MODELS.build(
            dict(settings_of(kind), init_cfg=dict(type='Pretrained', checkpoint='no.pth'))
        )
        encoder.init_weights()


@every_kind
def test_half_precision(kind: str) -> None:
    """Features in bfloat16 stay near those in float32; dates are not rounded."""
    if not hasattr(torch, 'get_autocast_dtype'):
        pytest.skip('autocast on the CPU of this version of PyTorch fails in LayerNorm')
    encoder = build(kind)
    x = a_stack(kind)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        half = encoder(x)
    assert difference(half, encoder(x)) < 0.06


def two_sensors() -> Tuple[StackLayout, Dict[str, Any]]:
    sensors = dict(s2=dict(bands=S2, max_dates=3), s1=dict(bands=('VV', 'VH'), max_dates=2))
    return StackLayout.of_config(sensors), sensors


def two_sensor_stack(layout: StackLayout, missing: Any = ()) -> torch.Tensor:
    pixels = images(layout, (32, 32), CENTER, SPREAD)
    return stack(layout, pixels, dict(s2=DATES, s1=((2024, 12, 30), (2023, 3, 1))), missing)


@pytest.mark.parametrize('kind', ['olmoearth', 'terramind'])
def test_a_missing_sensor_is_no_sensor(kind: str) -> None:
    layout, sensors = two_sensors()
    encoder, settings, _ = KINDS[kind]
    both = fill(encoder(sensors, **settings))
    alone = encoder(dict(s2=sensors['s2']), **settings).eval()
    # Names of parameters are the same, but those of Sentinel-1.
    alone.load_state_dict(
        {key: value for key, value in both.state_dict().items() if key in alone.state_dict()}
    )
    x = two_sensor_stack(layout, [(sample, 's1', date) for sample in (0, 1) for date in (0, 1)])
    # The channels of Sentinel-1 come first.
    only_s2 = stack(alone.layout, x[:, 4:16], dict(s2=DATES))
    assert difference(both(x), alone(only_s2)) < 1e-5
    assert difference(both(x), both(two_sensor_stack(layout))) > 0.01


def test_dates_of_terramind_meet_the_nearest_of_the_other_sensor() -> None:
    """Sentinel-1's first date is near the last of Sentinel-2, and its second near the others."""
    layout, sensors = two_sensors()
    settings = KINDS['terramind'][1]
    encoder = fill(TerraMind(sensors, **settings))
    x = two_sensor_stack(layout)
    one_date = {name: dict(sensor, max_dates=1) for name, sensor in sensors.items()}
    single = fill(TerraMind(one_date, **settings))
    parts: List[Any] = []
    for date, radar in ((0, 1), (1, 1), (2, 0)):
        s1, s2 = 2 * radar, 4 + 4 * date
        parts.append(single(torch.cat([x[:, s1 : s1 + 2], x[:, s2 : s2 + 4]], 1)))
    means = [torch.stack(maps).mean(0) for maps in zip(*parts)]
    assert difference(encoder(x), means) < 1e-5


def test_olmoearth_refuses_files_before_v1_2(tmp_path: Path) -> None:
    state = {
        f'encoder.{key}': value
        for key, value in build('olmoearth').state_dict().items()
        if not key.endswith('rope_mixed_freqs')
    }
    with pytest.raises(WeightsError, match=r'it is of OlmoEarth v1 or v1\.1, expected v1\.2'):
        load('olmoearth', state, tmp_path / 'a.pth')


def test_dofa_refuses_files_before_august_2024(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = build('dofa').state_dict()
    del state['saved_by_mapsage']
    path = tmp_path / 'dofa_base_patch16_224-7cc0f413.pth'
    with pytest.raises(WeightsError, match='not a file of DOFA v1 since August 2024'):
        load('dofa', state, path)
    from mapsage.extras.earth import dofa

    monkeypatch.setattr(dofa, '_CURRENT_FILES', (dofa._hash_of(str(path)),))
    load('dofa', state, path)
    load(
        'dofa',
        dict(state, **{'projector.weight': torch.zeros(1), 'mask_token': torch.zeros(1)}),
        tmp_path / 'DOFA_ViT_base_e100.pth',
    )


def test_the_license_is_printed_with_the_uses_that_it_forbids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: List[str] = []
    from mapsage.extras.earth import encoder as module

    monkeypatch.setattr(module, 'print_log', lambda text, **kwargs: lines.append(text))
    load('olmoearth', build('olmoearth').state_dict(), tmp_path / 'a.pth')
    assert len(lines) == 1
    assert 'OlmoEarth Artifact License' in lines[0]
    assert 'It forbids use by the military' in lines[0]


@functools.lru_cache(maxsize=None)
def dates_of(kind: str) -> float:
    """Return the change of features when the stack's dates move by a season."""
    encoder = build(kind)
    x = a_stack(kind)
    moved = stack(
        encoder.layout,
        x[:, :12],
        dict(s2=tuple((year, 1 + (month + 2) % 12, 15) for year, month, _ in DATES)),
    )
    return difference(encoder(x), encoder(moved))


@pytest.mark.parametrize('kind', ['olmoearth', 'prithvi'])
def test_the_season_matters_to_encoders_that_know_dates(kind: str) -> None:
    assert dates_of(kind) > 0.01


def test_the_site_matters_to_prithvi() -> None:
    encoder = build('prithvi')
    x = a_stack('prithvi')
    here, elsewhere, unknown = (
        stack(encoder.layout, x[:, :12], dict(s2=DATES), site=site)
        for site in ((11.5, 48.1), (-70.0, -30.0), None)
    )
    assert difference(encoder(here), encoder(elsewhere)) > 0.01
    assert difference(encoder(here), encoder(unknown)) > 0.01
