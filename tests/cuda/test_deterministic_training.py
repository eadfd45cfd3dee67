"""``randomness.deterministic=True`` on cards: losses, models and metrics compute in that mode."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

import pytest
import torch
from mmengine.model import revert_sync_batchnorm
from ranks import run_ranks
from small_segmentors import SMALL_SEGMENTORS, batch
from support import check_finished, launch, write_tiny_config
from torch.nn import functional

from mapsage.models import JaccardLoss, SegDiceLoss, SegFocalLoss

WORKSPACE = {'CUBLAS_WORKSPACE_CONFIG': ':4096:8'}
LOSSES = dict(
    dice=SegDiceLoss,
    focal=SegFocalLoss,
    jaccard=lambda **options: JaccardLoss(0.5, 0.1, **options),
)
# Pools of 2, 3 and 6 pixels over 13 x 9: windows that overlap, of several sizes.
PYRAMID = """
env_cfg.update(accelerator='cuda')
randomness.update(deterministic=True)
model['decode_head'].update(type='PSPHead', pool_scales=(1, 2, 3, 6))
for name in ('num_convs', 'concat_input'):
    del model['decode_head'][name]
"""


def backward_passes() -> Dict[str, str]:
    """Return the error of each loss and model, or an empty text."""
    torch.use_deterministic_algorithms(True)
    errors = {}

    def attempt(name: str, compute: Any) -> None:
        try:
            compute().backward()
            errors[name] = ''
        except RuntimeError as error:
            errors[name] = str(error)

    def loss_of(kind: Any) -> torch.Tensor:
        logits = torch.randn(2, 4, 8, 8, device='cuda', requires_grad=True)
        labels = torch.randint(0, 4, (2, 8, 8), device='cuda')
        return kind(class_weight=[1, 2, 0.5, 1])(logits, labels)

    def loss_of_model(name: str) -> torch.Tensor:
        model = revert_sync_batchnorm(SMALL_SEGMENTORS[name]()).to('cuda')
        losses = model(**model.data_preprocessor(batch(), True), mode='loss')
        return sum(value for key, value in losses.items() if 'loss' in key)

    for name, kind in LOSSES.items():
        attempt(name, lambda kind=kind: loss_of(kind))
    for name in SMALL_SEGMENTORS:
        attempt(name, lambda name=name: loss_of_model(name))
    return errors


def test_losses_and_models(tmp_path: Path) -> None:
    [errors] = run_ranks(backward_passes, 1, tmp_path, environ=WORKSPACE)
    assert errors == dict.fromkeys([*LOSSES, *SMALL_SEGMENTORS], '')


def pooled(shape: Tuple[int, ...], size: Any, dtype: torch.dtype) -> List[torch.Tensor]:
    """Return output and gradient of a pool on the CPU, and of two on the card in order."""
    found = []
    torch.use_deterministic_algorithms(True)
    for device in ('cpu', 'cuda', 'cuda'):
        generator = torch.Generator().manual_seed(5)
        images = torch.randn(shape, generator=generator, dtype=dtype).to(device).requires_grad_()
        output = functional.adaptive_avg_pool2d(images, size)
        weights = torch.randn(output.shape, generator=generator, dtype=dtype).to(device)
        (output * weights).sum().backward()
        assert images.grad is not None
        found += [output.detach().cpu(), images.grad.cpu()]
    return found


@pytest.mark.parametrize(
    'shape, size',
    [
        ((2, 3, 13, 9), 2),
        ((2, 3, 13, 9), 3),
        ((2, 3, 13, 9), 6),
        ((2, 3, 13, 9), (1, 1)),
        ((2, 3, 13, 9), (None, 4)),
        ((3, 5, 5), (7, 2)),
        ((0, 3, 4, 4), 2),
        ((2, 3, 4, 4), 4),
    ],
)
def test_a_pool_gives_the_means_of_pytorchs_windows(
    shape: Tuple[int, ...], size: Any, tmp_path: Path
) -> None:
    [found] = run_ranks(pooled, 1, tmp_path, shape, size, torch.float64, environ=WORKSPACE)
    for one, other in ((0, 2), (1, 3)):
        torch.testing.assert_close(found[other], found[one], rtol=1e-12, atol=1e-12)
    assert torch.equal(found[2], found[4]) and torch.equal(found[3], found[5])


def test_a_pool_can_still_be_scripted() -> None:
    pool = torch.nn.AdaptiveAvgPool2d((2, 3))
    images = torch.randn(1, 2, 7, 9)
    assert torch.equal(torch.jit.script(pool)(images), pool(images))


def losses(folder: Path) -> List[Optional[float]]:
    log = next(folder.glob('*/vis_data/scalars.json'))
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return [line['loss'] for line in lines if 'loss' in line]


def test_a_run_repeats_its_losses(tmp_path: Path, tiny_data: Path) -> None:
    config = write_tiny_config(tmp_path / 'pyramid.py', tiny_data, PYRAMID)
    for name in ('one', 'other'):
        check_finished(
            launch(
                config,
                '--work-dir',
                tmp_path / name,
                '--cfg-options',
                'train_cfg.max_iters=3',
                'train_cfg.val_interval=3',
                command=[sys.executable, 'tools/train.py'],
            )
        )
    assert losses(tmp_path / 'one') == losses(tmp_path / 'other')
    assert len(losses(tmp_path / 'one')) == 3


REFUSED = """
import torch
from mmseg.models import FCNHead
from mmseg.registry import MODELS

@MODELS.register_module()
class MaxHead(FCNHead):
    def __init__(self, **options):
        super().__init__(**options)
        self.peaks = torch.nn.AdaptiveMaxPool2d(2)

    def forward(self, inputs):
        return super().forward(inputs) + self.peaks(inputs[0])[:, :7].mean((2, 3), keepdim=True)
"""
MAX_HEAD = (
    PYRAMID.split('model[')[0]
    + """
custom_imports['imports'].append('max_head')
model['decode_head'].update(type='MaxHead')
"""
)


def test_a_layer_without_such_a_pass_is_named_before_the_first_step(
    tmp_path: Path, tiny_data: Path
) -> None:
    (tmp_path / 'max_head.py').write_text(REFUSED)
    config = write_tiny_config(tmp_path / 'max.py', tiny_data, MAX_HEAD)
    finished = launch(
        config,
        '--work-dir',
        tmp_path / 'run',
        environ={'PYTHONPATH': str(tmp_path)},
        command=[sys.executable, 'tools/train.py'],
    )
    assert finished.status == 1
    warning, _, step = finished.output.partition('The first training step that reaches it')
    assert 'decode_head.peaks (AdaptiveMaxPool2d)' in warning
    assert 'adaptive_max_pool2d_backward_cuda does not have a determ' in step
