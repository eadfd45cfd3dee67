"""tools/export_eomt.py: every number of a checkpoint, as transformers reads it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Dict, Tuple

import pytest
import torch
from mask_models import ARCH, build, eomt_config, images_of, samples_of
from mask_runs import config_of
from mmseg.datasets import LoveDADataset
from safetensors.torch import load_file

from mapsage.engine.env_cfg import ConfigError
from mapsage.extras.mask_transformers import export_eomt as command
from mapsage.extras.mask_transformers import huggingface_folder
from mapsage.models.backbones.dinov3_weights import WeightsError

ADAPTERS = dict(rank=4, targets=('q', 'v'))


def trained(folder: Path, kind: str = 'eomt', **backbone: Any) -> Tuple[Path, Path, Any]:
    """A config, a checkpoint, and the model with its weights."""
    cfg = config_of(kind, folder / 'data', folder)
    cfg.model.backbone.update(backbone)
    cfg.dump(str(folder / 'eomt.py'))
    model = build(cfg.model.to_dict())
    with torch.no_grad():
        for name, value in model.named_parameters():
            if '.lora_B.' in name:
                value.normal_(std=0.3)
    model.decode_head.attn_mask_probs.copy_(torch.tensor([0.3, 0.7]))
    torch.save(dict(state_dict=model.state_dict(), meta={}), str(folder / 'eomt.pth'))
    return folder / 'eomt.py', folder / 'eomt.pth', model.eval()


def run(*arguments: Any) -> int:
    return command.main([*map(str, arguments), '--accelerator', 'cpu'])


@pytest.mark.parametrize(
    'backbone',
    [dict(normalization='sat493m'), dict(normalization='web', lora=ADAPTERS)],
    ids=['sat', 'lora'],
)
def test_transformers_computes_what_the_checkpoint_does(
    backbone: Dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    config, checkpoint, model = trained(tmp_path, **backbone)
    assert run(config, checkpoint, tmp_path / 'out') == 0
    state = load_file(str(tmp_path / 'out' / 'model.safetensors'))
    said = capsys.readouterr().out
    assert f'{len(state)} tensors' in said and 'Images of 64x64 pixels' in said
    assert state['attn_mask_probs'].tolist() == [0, 1]
    pixels = json.loads((tmp_path / 'out' / 'preprocessor_config.json').read_text())
    assert pixels['size']['shortest_edge'] == 64
    assert pixels['image_mean'][0] == pytest.approx(
        0.43 if backbone['normalization'] == 'sat493m' else 0.485
    )
    own = {name: value for name, value in model.state_dict().items() if '.lora_' not in name}
    numbers = sum(value.numel() for value in own.values())
    left_out = ('pixel_mean', 'pixel_std', 'rope.periods')
    numbers -= sum(value.numel() for name, value in own.items() if name.endswith(left_out))
    assert numbers + 8 == sum(value.numel() for value in state.values())  # 8: of the loss
    if sys.version_info >= (3, 11):
        compare_with_transformers(tmp_path / 'out', model)


def compare_with_transformers(folder: Path, model: Any) -> None:
    transformers = pytest.importorskip('transformers')
    theirs, loading = transformers.EomtDinov3ForUniversalSegmentation.from_pretrained(
        str(folder), output_loading_info=True
    )
    assert not any(loading[name] for name in ('missing_keys', 'unexpected_keys', 'mismatched_keys'))
    assert theirs.config.id2label[1] == LoveDADataset.METAINFO['classes'][1]
    image = images_of(1, seed=4)[0]  # bands as OpenCV has them
    pixels = json.loads((folder / 'preprocessor_config.json').read_text())
    mean, std = (torch.tensor(pixels[f'image_{name}']).view(3, 1, 1) for name in ('mean', 'std'))
    x = (image.flip(0).float() * pixels['rescale_factor'] - mean) / std
    data = model.data_preprocessor(
        dict(inputs=[image], data_samples=samples_of(torch.zeros(1, 64, 64, dtype=torch.long))),
        False,
    )
    with torch.no_grad():
        expected = model(data['inputs'], mode='tensor')[-1]
        found = theirs.eval()(pixel_values=x[None])
    assert len(model(data['inputs'], mode='tensor')) == 2  # one block still has its masks
    assert float((found.masks_queries_logits - expected.masks).abs().max()) < 1e-5
    assert float((found.class_queries_logits - expected.classes).abs().max()) < 1e-5


def test_what_is_not_in_the_file_is_an_error(tmp_path: Path, monkeypatch: Any) -> None:
    """A tensor that is lost or changed on its way is named."""
    model = build(eomt_config(backbone=dict(normalization='web')))
    to_huggingface = huggingface_folder.published.to_huggingface

    def broken(state: Any) -> Any:
        theirs = to_huggingface(state)
        theirs['layers.1.attention.v_proj.weight'] += 1
        return theirs

    monkeypatch.setattr(huggingface_folder.published, 'to_huggingface', broken)
    with pytest.raises(WeightsError, match='blocks.1.attn.qkv.weight.* differ'):
        huggingface_folder.write_huggingface(model, tmp_path / 'a', 64, 'abcde')
    monkeypatch.setattr(
        huggingface_folder.published,
        'to_huggingface',
        lambda state: {
            key: value
            for key, value in to_huggingface(state).items()
            if key != 'embeddings.register_tokens'
        },
    )
    with pytest.raises(WeightsError, match='backbone.register_tokens.* are missing'):
        huggingface_folder.write_huggingface(model, tmp_path / 'b', 64, 'abcde')


def test_what_cannot_be_exported(tmp_path: Path) -> None:
    config, checkpoint, _ = trained(tmp_path)
    out = tmp_path / 'out'
    with pytest.raises(ConfigError, match='image_size=70, expected a multiple of 16'):
        run(config, checkpoint, out, '--size', 70)
    with pytest.raises(ConfigError, match='64x96: .*squares. Give --size'):
        run(config, checkpoint, out, '--cfg-options', 'crop_size=(64,96)')
    with pytest.raises(ConfigError, match='not in the order red, green, blue'):
        run(config, checkpoint, out, '--cfg-options', 'model.data_preprocessor.bgr_to_rgb=False')
    gated = config_of('eomt', tmp_path / 'data', tmp_path / 'gated')
    gated.model.backbone.arch = dict(ARCH, gated_mlp=True)
    gated.dump(str(tmp_path / 'gated.py'))
    torch.save(
        dict(state_dict=build(gated.model.to_dict()).state_dict()), str(tmp_path / 'gated.pth')
    )
    with pytest.raises(ConfigError, match='cannot be exported: .*one activation'):
        run(tmp_path / 'gated.py', tmp_path / 'gated.pth', out)
    config_of('pmt', tmp_path / 'data', tmp_path / 'pmt').dump(str(tmp_path / 'pmt.py'))
    with pytest.raises(ConfigError, match='EncoderDecoder: expected EoMT.*no class for PMT'):
        run(tmp_path / 'pmt.py', checkpoint, out)
    assert not out.exists()
    out.mkdir()
    with pytest.raises(ConfigError, match='exists already'):
        run(config, checkpoint, out)
