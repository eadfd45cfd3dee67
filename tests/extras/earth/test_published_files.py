"""Files with published names: every tensor is used, or belongs to a part that a map does not need.

The names are those of the published files; tests/compare_earth.py loads whole files of the
published code where it can be downloaded.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Sequence, Tuple

import pytest
import torch
from earth_states import OLMOEARTH, TERRAMIND, fill, images, rename
from mmengine.config import Config
from mmengine.registry import MODELS
from support import ROOT

from mapsage.extras.earth import DOFA, OlmoEarth, PrithviEO, TerraMind
from mapsage.extras.earth import encoder as encoder_module
from mapsage.models.backbones import WeightsError

ARCH: Dict[str, Any] = dict(embed_dims=48, num_layers=2, num_heads=4)
S2: Dict[str, Any] = dict(s2=dict(bands=('B02', 'B03', 'B04', 'B8A')))
STATISTICS: Dict[str, Any] = dict(mean=dict(s2=[2000.0] * 4), std=dict(s2=[1500.0] * 4))
_SENSOR = 'encoder.patch_embeddings.per_modality_embeddings.{0}.{0}__0.'


class PublishedFile(NamedTuple):
    """A kind of published file.

    Attributes:
        encoder: Class of the encoder.
        settings: Arguments of a small one.
        names: Patterns of this package's names, and their replacements in the file.
        unused: Names of tensors in the file that no map needs.
        summary: What the log says of them.
    """

    encoder: Any
    settings: Dict[str, Any]
    names: Sequence[Tuple[str, str]]
    unused: Sequence[str]
    summary: str


FILES = {
    'olmoearth': PublishedFile(
        OlmoEarth,
        dict(arch=dict(ARCH, pixel_channels=4), patch_size=8),
        OLMOEARTH,
        (
            'encoder.composite_encodings.month_embed.weight',
            'encoder.composite_encodings.per_modality_channel_embeddings.landsat',
            _SENSOR.format('landsat') + 'pixel_proj.0.weight',
            _SENSOR.format('landsat') + 'proj.bias',
            'encoder.project_and_aggregate.projection.0.weight',
            'decoder.encoder_to_decoder_embed.weight',
            'target_encoder.blocks.0.norm1.weight',
        ),
        '1 of fixed encodings, 3 of sensors not in the config, 1 of the pooled embedding, 2 of '
        'decoder and target encoder',
    ),
    'terramind': PublishedFile(
        TerraMind,
        dict(arch=ARCH),
        TERRAMIND,
        (
            'encoder_embeddings.untok_sen1grd@224.proj.weight',
            'mask_token',
            'encoder_embeddings.tok_lulc@224.token_emb.weight',
            'decoder.0.norm1.weight',
            'decoder_embeddings.tok_dem@224.to_logits.weight',
            'decoder_proj_context.weight',
        ),
        '2 of sensors not in the config, 4 of the decoder',
    ),
    'prithvi': PublishedFile(
        PrithviEO,
        dict(arch=ARCH),
        ((r'^', 'encoder.'),),
        (
            'encoder.pos_embed',
            'decoder.mask_token',
            'decoder.decoder_blocks.0.norm1.weight',
            'decoder.temporal_embed_dec.scale',
        ),
        '1 of fixed positions, 3 of the decoder',
    ),
    'dofa v1': PublishedFile(
        DOFA,
        dict(arch=ARCH, **STATISTICS),
        (),
        ('mask_token', 'norm.weight', 'norm.bias', 'projector.weight'),
        '2 of the training, 2 of the classification',
    ),
    'dofa v2': PublishedFile(
        DOFA,
        dict(arch=dict(ARCH, version=2, patch_size=14), **STATISTICS),
        ((r'^(cls_token|pos_embed|blocks\.)', r'model.\1'),),
        ('model.norm.weight', 'model.norm.bias', 'norm.weight', 'norm.bias'),
        '4 of the classification',
    ),
}


def published_state(file: PublishedFile) -> Tuple[Any, Dict[str, torch.Tensor]]:
    """Return an encoder with weights, and the tensors of a file with them under published names."""
    encoder = fill(file.encoder(S2, **file.settings))
    state = {
        rename(key, file.names): value
        for key, value in encoder.state_dict().items()
        if key != 'saved_by_mapsage'
    }
    assert not set(state) & set(file.unused)
    return encoder, state


def load(file: PublishedFile, state: Dict[str, torch.Tensor], path: Path) -> Any:
    torch.save(state, str(path))
    encoder = file.encoder(
        S2, init_cfg=dict(type='Pretrained', checkpoint=str(path)), **file.settings
    )
    encoder.init_weights()
    return encoder.eval()


@pytest.mark.parametrize('name', FILES)
def test_a_published_file_gives_the_weights_and_the_log_counts_the_rest(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: List[str] = []
    monkeypatch.setattr(encoder_module, 'print_log', lambda text, **settings: lines.append(text))
    file = FILES[name]
    encoder, state = published_state(file)
    unused = {key: torch.zeros(2) for key in file.unused}
    loaded = load(file, {**unused, **state}, tmp_path / 'a.pth')
    assert all(
        torch.equal(value, encoder.state_dict()[key]) for key, value in loaded.state_dict().items()
    )
    side = 2 * encoder.stride
    x = images(encoder.layout, (side, side), dict(s2=2000.0), dict(s2=1900.0))
    assert all(torch.equal(one, other) for one, other in zip(encoder(x), loaded(x)))
    assert len(lines) == 1 and f'not used: {file.summary}. ' in lines[0]


@pytest.mark.parametrize('name', FILES)
def test_no_published_tensor_may_be_missing_and_none_is_guessed(name: str, tmp_path: Path) -> None:
    file = FILES[name]
    _, state = published_state(file)
    if name == 'dofa v1':
        state['projector.weight'] = torch.zeros(2)
    # The first file has an unknown tensor, and the others lack one each.
    path = tmp_path / 'a.pth'
    with pytest.raises(WeightsError, match=r"missing \[\], left over \['encoder.gate'\]"):
        load(file, dict(state, **{'encoder.gate': torch.zeros(2)}), path)
    for key in [key for key in state if not key.startswith('projector.')][::7]:
        if key.endswith('rope_mixed_freqs'):
            continue
        with pytest.raises(WeightsError, match=r"missing \['.*left over \[\]"):
            load(file, {other: value for other, value in state.items() if other != key}, path)


@pytest.mark.parametrize(
    'path',
    [
        path
        for path in sorted((ROOT / 'configs/earth').glob('*.py'))
        if 'Pretrained' in path.read_text(encoding='utf-8')
    ],
    ids=lambda path: path.stem,
)
def test_a_recipe_says_what_to_download_and_under_which_license(path):
    text, backbone = path.read_text(encoding='utf-8'), Config.fromfile(str(path)).model.backbone
    lines = dict(re.findall(r'^(Data|Weights|License): +(.+)$', text, re.M))
    assert {'Data', 'Weights', 'License'} <= set(lines)
    assert lines['License'].startswith(MODELS.get(backbone.type).weights_license.name)
    assert Path(backbone.init_cfg.checkpoint).name in text.split('Command:')[0]
