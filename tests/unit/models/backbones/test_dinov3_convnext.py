"""DINOv3 ConvNeXt on transformers' network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from mmengine.registry import MODELS

from mapsage.models import DINOv3ConvNeXt, WeightsError

transformers = pytest.importorskip('transformers', reason='no transformers for this Python')

ARCH = dict(hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 2, 1])


def saved(path: Path) -> Any:
    model = transformers.DINOv3ConvNextModel(transformers.DINOv3ConvNextConfig(**ARCH)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    model.save_pretrained(str(path))
    return model


def loaded(path: Path, arch: Any = ARCH, **arguments: Any) -> DINOv3ConvNeXt:
    model = MODELS.build(
        dict(
            type='DINOv3ConvNeXt',
            arch=arch,
            init_cfg=dict(type='Pretrained', checkpoint=str(path)),
            **arguments,
        )
    )
    model.init_weights()
    return model


def test_maps_are_those_of_the_saved_model(tmp_path: Path) -> None:
    reference = saved(tmp_path)
    model = loaded(tmp_path, out_indices=(1, 3)).eval()
    x = torch.rand(1, 3, 64, 96) * 255
    with torch.no_grad():
        eighth, last = model(x)
        normalized = (x - model.pixel_mean) / model.pixel_std
        tokens = reference(normalized).last_hidden_state[:, 1:]
    assert eighth.shape == (1, 16, 8, 12) and last.shape == (1, 32, 2, 3)
    assert model.out_channels == (16, 32)
    torch.testing.assert_close(last.flatten(2).transpose(1, 2), tokens)
    with torch.no_grad():
        torch.testing.assert_close(
            eighth, reference(normalized, output_hidden_states=True).hidden_states[-3]
        )


def test_every_parameter_learns_unless_frozen(tmp_path: Path) -> None:
    saved(tmp_path)
    x = torch.rand(2, 3, 32, 32) * 255
    model = loaded(tmp_path).train()
    sum(each.sum() for each in model(x)).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert model.model.layer_norm.weight.std() > 0.1  # that of the file, not ones
    frozen = loaded(tmp_path, frozen=True, drop_path_rate=0.5).train()
    assert not any(module.training for module in frozen.modules())
    assert not any(each.requires_grad for each in frozen(x))


def test_other_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match='contains no DINOv3 ConvNeXt'):
        loaded(tmp_path)
    saved(tmp_path)
    with pytest.raises(WeightsError, match='expected .*32.*, .*3'):
        loaded(tmp_path, dict(ARCH, depths=[1, 1, 3, 1]))
    with pytest.raises(ValueError, match="arch='huge', expected one of"):
        DINOv3ConvNeXt('huge')
    with pytest.raises(ValueError, match='ascending stage indices'):
        DINOv3ConvNeXt(ARCH, out_indices=(4,))


def test_compute_maps_lower_stages_leave_no_parameter_of_the_norm(tmp_path: Path) -> None:
    saved(tmp_path)
    model = loaded(tmp_path, out_indices=(0, 2))
    assert not [name for name, _ in model.named_parameters() if 'layer_norm' in name.split('.')[1]]
    assert [each.shape[1] for each in model(torch.rand(1, 3, 32, 32) * 255)] == [8, 24]


def test_official_sizes() -> None:
    """Millions of parameters: the model card of the official repository."""
    model = DINOv3ConvNeXt('tiny')
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(29, rel=0.06)
