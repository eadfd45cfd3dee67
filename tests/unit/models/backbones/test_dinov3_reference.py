"""tools/check_weights.py, and the comparison with published features."""

from __future__ import annotations

import subprocess
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from dinov3_states import hub_state, huggingface_state
from support import ROOT
from warm_python import warm_python

from mapsage.models import DINOv3ViT, WeightsError
from mapsage.models.backbones import dinov3_reference as reference
from mapsage.models.backbones.dinov3_weights import ARCHS

pytestmark = pytest.mark.skipif(torch.__version__ < '1.11', reason='no antialiasing resize')


def picture() -> np.ndarray:
    return np.random.RandomState(0).randint(0, 256, (480, 640, 3), np.uint8)


def check(*arguments: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        [warm_python(), str(ROOT / 'tools' / 'check_weights.py'), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        universal_newlines=True,
        timeout=120,
    )


def test_the_command_names_what_a_file_is_and_judges_it(tmp_path: Path) -> None:
    path = tmp_path / 'renamed.pth'
    torch.save(hub_state(dict(ARCHS['small']._asdict())), str(path))
    cv2.imwrite(str(tmp_path / 'cats.png'), picture())
    told = check(path, '--image', tmp_path / 'cats.png')  # random weights are not the official ones
    assert told.returncode == 1
    assert 'hub, 190 keys, each accounted for' in told.stdout
    assert 'variant       small, 21.6 M parameters' in told.stdout
    assert 'trained on    web' in told.stdout and 'NOT as published' in told.stdout
    path.write_bytes(path.read_bytes()[:1000])
    told = check(path)
    assert told.returncode == 1 and 'cannot be read (1,000 bytes)' in told.stdout
    assert 'Traceback' not in told.stdout


@pytest.mark.parametrize('kind', ['web', 'sat493m'])
def test_equal_features_are_recognized(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The published side is computed by transformers, on pixels resized as its source does."""
    transformers = pytest.importorskip('transformers')
    hub = hub_state(dict(ARCHS['small']._asdict()))
    theirs = transformers.DINOv3ViTModel(
        transformers.DINOv3ViTConfig(
            hidden_size=384,
            num_hidden_layers=12,
            num_attention_heads=6,
            intermediate_size=1536,
            num_register_tokens=4,
        )
    ).eval()
    state = huggingface_state(hub, 'model.layer')
    state['embeddings.mask_token'] = state['embeddings.mask_token'][None]
    theirs.load_state_dict(state)
    mean, std = (torch.tensor(value).view(3, 1, 1) for value in reference.NORMALIZATION[kind])
    image = picture()
    small = F.interpolate(
        torch.from_numpy(image).permute(2, 0, 1)[None].float(),
        (224, 224),
        mode='bilinear',
        antialias=True,
    )
    with torch.no_grad():
        tokens = theirs((small - mean) / std).last_hidden_state[0]
    monkeypatch.setitem(
        reference.PUBLISHED,
        f'small {kind}',
        reference.ReferenceFeatures(tokens[0, :5].tolist(), tokens[5, :5].tolist()),
    )

    path = tmp_path / 'weights.pth'
    torch.save(hub, str(path))
    model = DINOv3ViT(
        'small', out_indices=(11,), init_cfg=dict(type='Pretrained', checkpoint=str(path))
    )
    model.init_weights()
    best, other = reference.compare(model, f'small {kind}', image)
    assert best.normalization == kind and best.difference < reference.TOLERANCE < other.difference
    with pytest.raises(WeightsError, match='expected http'):
        reference.compare(model, f'small {kind}', image[:200])
