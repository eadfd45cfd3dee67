"""Compare MapSage's encoders for satellite images with the published code, on the same weights.

    python tests/compare_earth.py FOLDER ENCODER [ENCODER ...] [--bfloat16]

``scripts/test_packages.sh earth`` prints FOLDER; ENCODER is olmoearth, terramind, dofa or prithvi.
Prints one JSON object: for each case of each encoder, the largest difference of any value in any map, the
largest value, and a few numbers of the published maps, of which ``test_earth_golden.py`` has some.
With --bfloat16, both are also computed with autocast, and the object has the largest differences of
both from the published maps in float32.
It runs in a separate process, because it loads a stand-in for torchvision.
"""

import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Sequence, Tuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / 'tests')]

import torch  # noqa: E402
from earth_oracles import Oracles  # noqa: E402
from earth_states import fill, images, stack, summarize  # noqa: E402
from mmengine.logging import MMLogger  # noqa: E402

from mapsage.extras import earth  # noqa: E402

Maps = List[torch.Tensor]
Case = Tuple[str, Maps, Maps]

DATES = ((2023, 3, 15), (2023, 6, 1), (2024, 12, 31))
CENTER = dict(s2=2000.0, s1=-14.0, landsat=11000.0, dem=300.0, rgb=90.0, drone=120.0)
SPREAD = dict(s2=1900.0, s1=9.0, landsat=4000.0, dem=500.0, rgb=80.0, drone=110.0)


def build(kind: Any, state: Dict[str, torch.Tensor], **settings: Any) -> Any:
    """Return an encoder with the weights of a published state dict, read from a file."""
    with tempfile.TemporaryDirectory() as folder:
        path = f'{folder}/weights.pth'
        torch.save(state, path)
        encoder = kind(init_cfg=dict(type='Pretrained', checkpoint=path), **settings)
        encoder.init_weights()
    return encoder.eval()


def normalized(encoder: Any, x: torch.Tensor) -> Dict[str, torch.Tensor]:
    """Return the encoder's normalized images (N, T, C, H, W), by the name of its sensor."""
    prepared = [
        encoder._prepare(number, sensor, encoder._split(x).sensors[sensor.layout.name])
        for number, sensor in enumerate(encoder.sensors)
    ]
    return {sensor.name: sensor.pixels for sensor in prepared}


def olmoearth(oracles: Oracles) -> Iterator[Case]:
    model = fill(oracles.olmoearth('nano'))
    s2 = ('B02', 'B03', 'B04', 'B08', 'B05', 'B06', 'B07', 'B8A', 'B11', 'B12', 'B01', 'B09')
    landsat = ('B8', 'B1', 'B2', 'B3', 'B4', 'B5', 'B6', 'B7', 'B9', 'B10', 'B11')
    subset = ('B12', 'B8', 'B04', 'B3', 'B02')
    cases: Sequence[Tuple[str, Dict[str, Any], Tuple[int, int], int, float, Any]] = (
        ('S2, patch 8', dict(s2=s2), (32, 48), 8, 10.0, ()),
        ('S2 and S1, patch 4', dict(s2=s2, s1=('vv', 'vh')), (32, 48), 4, 10.0, ()),
        (
            'S2, S1 and Landsat, patch 2, 30 m',
            dict(s2=s2, s1=('vv', 'vh'), landsat=landsat),
            (16, 16),
            2,
            30.0,
            (),
        ),
        ('S2, patch 3', dict(s2=s2), (24, 30), 3, 10.0, ()),
        ('S2 with five bands in another order', dict(s2=subset), (16, 24), 4, 10.0, ()),
        ('a missing date of S1', dict(s2=s2, s1=('VH', 'VV')), (16, 24), 4, 10.0, [(0, 's1', 1)]),
        (
            'two missing dates',
            dict(s2=s2, s1=('VV', 'VH')),
            (16, 24),
            4,
            10.0,
            [(0, 's1', 1), (0, 's2', 2)],
        ),
    )
    for name, bands, shape, patch, resolution, missing in cases:
        encoder = build(
            earth.OlmoEarth,
            model.state_dict(),
            arch='nano',
            patch_size=patch,
            resolution=resolution,
            sensors={key: dict(bands=value, max_dates=3) for key, value in bands.items()},
        )
        # The published code attends to the padding of other samples, so one sample with gaps.
        pixels = images(encoder.layout, shape, CENTER, SPREAD, count=1 if missing else 2)
        x = stack(encoder.layout, pixels, dict.fromkeys(bands, DATES), missing)
        fields: Dict[str, torch.Tensor] = {}
        # Sensors are in the order of their names.
        for sensor, (published, values) in zip(sorted(bands), normalized(encoder, x).items()):
            fields[published] = values.permute(0, 3, 4, 1, 2)
            mask = torch.zeros(*fields[published].shape[:4], 1)
            for sample, key, date in missing:
                if key == sensor:
                    mask[sample, :, :, date] = 3
            fields[f'{published}_mask'] = mask
        timestamps = torch.tensor([[day, month - 1, year] for year, month, day in DATES])
        sample = oracles.olmoearth_sample(timestamps=timestamps.expand(len(x), 3, 3), **fields)
        outputs = model.encoder(
            sample, patch_size=patch, input_res=resolution, fast_pass=not missing
        )['tokens_and_masks']
        maps = []
        for published in normalized(encoder, x):
            tokens = getattr(outputs, published)[:, :, :, :, 0]
            mask = getattr(outputs, f'{published}_mask')[..., 0:1] != 3
            weights = mask.float() if mask.dim() == tokens.dim() else mask[..., None].float()
            maps.append((tokens * weights).sum(3) / weights.sum(3))
        yield name, [encoder(x)[-1]], [torch.stack(maps).mean(0).permute(0, 3, 1, 2)]


def terramind(oracles: Oracles) -> Iterator[Case]:
    s2 = ('B01', 'B02', 'B03', 'B04', 'B05', 'B06', 'B07', 'B08', 'B8A', 'B09', 'B11', 'B12')
    channels = {'untok_sen2l2a@224': 12, 'untok_sen1grd@224': 2, 'untok_dem@224': 1}
    names = {'S2L2A': 'untok_sen2l2a@224', 'S1GRD': 'untok_sen1grd@224', 'DEM': 'untok_dem@224'}
    model = fill(oracles.terramind(channels, dim=192, encoder_depth=4, num_heads=3))
    state = dict(model.state_dict(), **{'decoder.0.weight': torch.zeros(1)})
    radar = ('VV', 'VH')
    cases: Sequence[Tuple[str, Dict[str, Any], Tuple[int, int], int]] = (
        ('S2 and S1, 224', dict(s2=s2, s1=radar), (224, 224), 1),
        ('S2, S1 and DEM, 64', dict(s2=s2, s1=radar, dem=('dem',)), (64, 64), 1),
        ('S2, 256', dict(s2=s2), (256, 256), 1),
        ('S2 with four bands in another order', dict(s2=('B8', 'B04', 'B03', 'B02')), (96, 96), 1),
        ('S2 and S1, three dates', dict(s2=s2, s1=radar), (96, 96), 3),
    )
    for name, bands, shape, dates in cases:
        encoder = build(
            earth.TerraMind,
            state,
            out_indices=(1, 3),
            arch=dict(embed_dims=192, num_layers=4, num_heads=3),
            sensors={key: dict(bands=value, max_dates=dates) for key, value in bands.items()},
        )
        pixels = images(encoder.layout, shape, CENTER, SPREAD)
        x = pixels if dates == 1 else stack(encoder.layout, pixels, dict.fromkeys(bands, DATES))
        inputs = normalized(encoder, x)
        per_date = [
            model({names[key]: value[:, date] for key, value in inputs.items()})
            for date in range(dates)
        ]
        rows = shape[0] // 16
        maps = [
            torch.stack([outputs[index] for outputs in per_date])
            .mean(0)
            .transpose(1, 2)
            .reshape(len(x), -1, rows, rows)
            for index in (1, 3)
        ]
        yield name, list(encoder(x)), maps


def prithvi(oracles: Oracles) -> Iterator[Case]:
    hls = ('B02', 'B03', 'B04', 'B8A', 'B11', 'B12')
    cases: Sequence[Tuple[str, Any, Tuple[int, int], int, int, bool]] = (
        ('224, three dates', hls, (224, 224), 3, 16, True),
        ('96 x 64, three dates', hls, (96, 64), 3, 16, True),
        ('512, one date', hls, (512, 512), 1, 16, True),
        ('patch 14, without date and site', hls, (112, 112), 2, 14, False),
        ('three bands in another order', ('B04', 'BLUE', 'B11'), (64, 64), 2, 16, True),
        ('an unknown site', hls, (64, 64), 2, 16, True),
    )
    for name, bands, shape, dates, patch, coords in cases:
        model = fill(
            oracles.prithvi(
                num_frames=dates,
                patch_size=(1, patch, patch),
                in_chans=6,
                embed_dim=192,
                depth=4,
                num_heads=3,
                coords_encoding=['time', 'location'] if coords else [],
                coords_scale_learn=True,
            )
        )
        state = {f'encoder.{key}': value for key, value in model.state_dict().items()}
        state['decoder.mask_token'] = torch.zeros(1)
        encoder = build(
            earth.PrithviEO,
            state,
            out_indices=(1, 3),
            arch=dict(embed_dims=192, num_layers=4, num_heads=3, patch_size=patch, coords=coords),
            sensors=dict(s2=dict(bands=bands, max_dates=dates)),
        )
        site = None if 'unknown' in name else (11.5, 48.1)
        x = stack(
            encoder.layout,
            images(encoder.layout, shape, CENTER, SPREAD),
            dict(s2=DATES[:dates]),
            site=site,
        )
        (pixels,) = normalized(encoder, x).values()
        when = torch.tensor([[2023.0, 74.0], [2023.0, 152.0], [2024.0, 366.0]])[:dates]
        outputs = model.forward_features(
            pixels.transpose(1, 2),
            when.expand(len(x), -1, -1) if coords else None,
            torch.tensor([[48.1, 11.5]]).expand(len(x), -1) if coords and site else None,
        )
        rows, columns = shape[0] // patch, shape[1] // patch
        maps = [
            outputs[index][:, 1:]
            .reshape(len(x), dates, rows, columns, -1)
            .mean(1)
            .permute(0, 3, 1, 2)
            for index in (1, 3)
        ]
        yield name, list(encoder(x)), maps


def dofa(oracles: Oracles) -> Iterator[Case]:
    arch = dict(embed_dims=192, num_layers=4, num_heads=3)
    v1 = fill(oracles.dofa(embed_dim=192, depth=4, num_heads=3))
    v1_state = dict(v1.state_dict(), **{'projector.weight': torch.zeros(1)})
    v2 = fill(
        oracles.timm_vit(
            patch_size=14, embed_dim=192, depth=4, num_heads=3, init_values=1e-5, num_classes=0
        )
    )
    embedding = fill(oracles.dofa(embed_dim=192, depth=1, num_heads=3, patch_size=14)).patch_embed
    v2_state = {
        f'model.{key}': value
        for key, value in v2.state_dict().items()
        if not key.startswith('patch_embed.')
    }
    v2_state.update((f'patch_embed.{key}', value) for key, value in embedding.state_dict().items())
    v2_state['norm.weight'] = torch.zeros(192)

    def features_v1(pixels: torch.Tensor, waves: Any) -> Maps:
        outputs: Maps = []
        hooks = [
            block.register_forward_hook(lambda *call: outputs.append(call[2]))
            for block in v1.blocks
        ]
        v1.forward_features(pixels, waves)
        for hook in hooks:
            hook.remove()
        return [outputs[index][:, 1:] for index in (1, 3)]

    def features_v2(pixels: torch.Tensor, waves: Any) -> Maps:
        tokens, _ = embedding(pixels, torch.tensor(waves))
        outputs = []
        tokens = v2.norm_pre(v2._pos_embed(tokens))
        for block in v2.blocks:
            tokens = block(tokens)
            outputs.append(tokens[:, 1:])
        return [outputs[index] for index in (1, 3)]

    published = ('B04', 'B03', 'B02', 'B05', 'B06', 'B07', 'B08', 'B11', 'B12')
    drone = [0.475, 0.56, 0.668, 0.717, 0.84]
    cases: Sequence[Tuple[str, Dict[str, Any], int, int]] = (
        ('v1, nine bands of S2', dict(sensors=dict(s2=dict(bands=published))), 1, 1),
        (
            'v1, RGB, two dates',
            dict(sensors=dict(rgb=dict(bands=('R', 'G', 'B'), max_dates=2))),
            1,
            2,
        ),
        (
            'v1, five bands of a drone',
            dict(
                sensors=dict(drone=dict(bands=(1, 2, 3, 4, 5))),
                wavelengths=dict(drone=drone),
                mean=dict(drone=[110.0] * 5),
                std=dict(drone=[60.0] * 5),
            ),
            1,
            1,
        ),
        ('v2, nine bands of S2', dict(sensors=dict(s2=dict(bands=published))), 2, 1),
        ('v2, two bands in another order', dict(sensors=dict(s2=dict(bands=('B12', 'B02')))), 2, 1),
    )
    center = dict(CENTER, s2=120.0, rgb=120.0)
    spread = dict(SPREAD, s2=110.0, rgb=110.0)
    for name, settings, version, dates in cases:
        size = 16 if version == 1 else 14
        encoder = build(
            earth.DOFA,
            v1_state if version == 1 else v2_state,
            out_indices=(1, 3),
            arch=dict(arch, patch_size=size, version=version),
            **settings,
        )
        pixels = images(encoder.layout, (224, 224), center, spread)
        (key,) = settings['sensors']
        x = pixels if dates == 1 else stack(encoder.layout, pixels, {key: DATES[:dates]})
        (inputs,) = normalized(encoder, x).values()
        waves = list(encoder.sensors[0].published.wavelengths)
        features = features_v1 if version == 1 else features_v2
        per_date = [features(inputs[:, date], waves) for date in range(dates)]
        rows = 224 // size
        maps = [
            torch.stack([outputs[index] for outputs in per_date])
            .mean(0)
            .transpose(1, 2)
            .reshape(len(x), -1, rows, rows)
            for index in (0, 1)
        ]
        yield name, list(encoder(x)), maps


ENCODERS: Dict[str, Callable[[Oracles], Iterator[Case]]] = dict(
    olmoearth=olmoearth, terramind=terramind, prithvi=prithvi, dofa=dofa
)


def difference(one: Maps, other: Maps) -> float:
    """Return the largest difference of any value in any map."""
    return max(
        float((first.float() - second.float()).abs().max()) for first, second in zip(one, other)
    )


def main() -> None:
    torch.set_num_threads(1)
    MMLogger.get_instance('mmengine', log_level='ERROR')
    folder, *words = sys.argv[1:]
    oracles = Oracles(folder)
    with torch.no_grad():
        figures = {
            encoder: compare(partial(ENCODERS[encoder], oracles), '--bfloat16' in words)
            for encoder in words
            if encoder != '--bfloat16'
        }
    print(json.dumps(figures, indent=1))


def compare(cases: Callable[[], Iterator[Case]], bfloat16: bool) -> Dict[str, Dict[str, Any]]:
    """Return the figures of the cases of one encoder."""
    figures: Dict[str, Dict[str, Any]] = {}
    published: Dict[str, Maps] = {}
    for name, ours, theirs in cases():
        assert len(ours) == len(theirs) > 0, (len(ours), len(theirs))
        assert all(own.shape == other.shape for own, other in zip(ours, theirs)), name
        published[name] = theirs
        figures[name] = dict(
            difference=difference(ours, theirs),
            largest=max(float(other.abs().max()) for other in theirs),
            published=summarize(theirs),
        )
    if bfloat16:
        with torch.autocast('cpu', dtype=torch.bfloat16):
            for name, ours, theirs in cases():
                figures[name]['bfloat16'] = dict(
                    ours=difference(ours, published[name]),
                    theirs=difference(theirs, published[name]),
                )
    return figures


if __name__ == '__main__':
    main()
