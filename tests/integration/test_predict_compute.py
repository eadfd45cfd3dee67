"""tools/predict.py --amp and --batch-size: 16 bits, and batches that fit the memory."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, List, Tuple

import numpy as np
import pytest
import rasterio
import torch
from color_model import (
    NormBehindActivation,
    paint,
    write_checkpoint,
    write_config,
    write_scene,
)
from map_runs import read, run
from mmengine.config import Config
from support import ROOT, Launch, check_finished, main_leg
from warm_python import warm_python

from mapsage.accelerator import resolve_accelerator
from mapsage.accelerator.cpu import CpuAccelerator
from mapsage.commands.checkpoint_model import choose_batch, choose_precision
from mapsage.maps.errors import PredictError

TRANSFORM = rasterio.Affine(0.5, 0, 500000, 0, -0.5, 5000000)


def test_a_map_in_16_bits(model: Tuple[Path, Path], tmp_path: Path, capsys: Any) -> None:
    classes = paint(90, 150)
    scene = write_scene(tmp_path / 'field.tif', classes, transform=TRANSFORM)
    options = (scene, '--out', tmp_path / 'out', '--confidence')
    assert run(model, *options, '--amp') == 0
    assert 'bfloat16 where that serves' in capsys.readouterr().out
    np.testing.assert_array_equal(read(tmp_path / 'out' / 'field.tif'), classes)
    settings = json.loads((tmp_path / 'out' / 'field.json').read_text())['settings']
    assert settings['amp'] == 'bfloat16'
    # Maps of 16 and of 32 bits do not mix, whichever was first.
    assert run(model, *options, '--amp') == 0 and 'skipped' in capsys.readouterr().out
    with pytest.raises(PredictError, match='made with another amp'):
        run(model, *options)
    assert run(model, *options, '--overwrite') == 0
    with pytest.raises(PredictError, match='made with another amp'):
        run(model, *options, '--amp')


def test_float32_is_computed_as_in_the_training(
    model: Tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    received: List[Tuple[Any, ...]] = []
    monkeypatch.setattr(
        CpuAccelerator, 'set_float32_precision', lambda self, *settings: received.append(settings)
    )
    scene = write_scene(tmp_path / 'field.tif', paint(90, 150), transform=TRANSFORM)
    assert (
        run(
            model,
            scene,
            '--out',
            tmp_path / 'out',
            '--cfg-options',
            'env_cfg.float32_matmul_precision=medium',
        )
        == 0
    )
    assert received == [('medium', None)]


def test_ranks_fold_what_rank_0_has_proven(tmp_path: Path) -> None:
    config = write_config(tmp_path, "model['backbone'] = dict(type='NormBehindActivation')")
    weights = torch.load(write_checkpoint(tmp_path))
    weights['state_dict'].update(
        {f'backbone.{name}': tensor for name, tensor in NormBehindActivation().state_dict().items()}
    )
    torch.save(weights, tmp_path / 'color.pth')
    scene = write_scene(tmp_path / 'field.tif', paint(200, 150), transform=TRANSFORM)
    model = config, tmp_path / 'color.pth'
    assert run(model, scene, '--out', tmp_path / '1', '--confidence') == 0
    settings = json.loads((tmp_path / '1' / 'field.json').read_text())['settings']
    assert settings['unfolded_norms'] == ['backbone.blocks.1.bn']
    check_finished(
        Launch(
            *model,
            scene,
            '--out',
            tmp_path / '2',
            '--confidence',
            ranks=2,
            command=['bash', 'scripts/predict.sh'],
            environ={'PYTHONPATH': str(ROOT / 'tests'), 'ACCELERATOR': 'cpu'},
        ).finish()
    )
    for name in ('field.tif', 'field_confidence.tif', 'field.json'):
        assert (tmp_path / '1' / name).read_bytes() == (tmp_path / '2' / name).read_bytes()


@pytest.mark.parametrize(
    'kind, dtype, expected',
    [
        ('OptimWrapper', None, torch.bfloat16),
        ('AmpOptimWrapper', None, torch.bfloat16),
        ('AmpOptimWrapper', 'bfloat16', torch.bfloat16),
        ('AmpOptimWrapper', 'float16', torch.bfloat16),
    ],
)  # trained on cards, predicted on a CPU
def test_the_precision_is_that_of_the_training_where_the_device_has_it(
    kind: str, dtype: Any, expected: torch.dtype
) -> None:
    cfg = Config(dict(optim_wrapper=dict(type=kind, dtype=dtype)))
    assert choose_precision(cfg, resolve_accelerator('cpu')) == expected


@main_leg
def test_a_card_computes_in_the_dtype_of_the_training() -> None:
    card = resolve_accelerator('sim')
    for dtype in (torch.float16, torch.bfloat16):
        cfg = Config(dict(optim_wrapper=dict(type='AmpOptimWrapper', dtype=str(dtype)[6:])))
        assert choose_precision(cfg, card) == dtype


def test_the_batch_is_what_is_asked_for_or_what_a_budget_holds() -> None:
    cpu = resolve_accelerator('cpu')
    assert choose_batch(3, (9999, 9999), 7, cpu) == 3
    sizes = {side: choose_batch(None, (side, side), 7, cpu) for side in (16, 256, 512, 1024, 4096)}
    assert sizes == {16: 64, 256: 16, 512: 4, 1024: 1, 4096: 1}
    # 150 scores of 256 x 256 pixels take 39 MB, of which 128 MB hold three
    assert choose_batch(None, (256, 256), 150, cpu) == 3


@main_leg
def test_a_card_with_little_memory_gives_the_same_map(
    model: Tuple[Path, Path], tmp_path: Path
) -> None:
    classes = paint(90, 400)
    scene = write_scene(tmp_path / 'field.tif', classes, transform=TRANSFORM)
    maps = {}
    for memory, batch in (('1G', []), ('700K', ['--batch-size', '8'])):
        finished = Launch(
            *model,
            scene,
            '--out',
            tmp_path / memory,
            '--confidence',
            *batch,
            '--accelerator',
            'sim',
            command=[warm_python(), 'tools/predict.py'],
            environ={'PYTHONPATH': str(ROOT / 'tests'), 'MAPSAGE_SIM_MEMORY': memory},
        ).finish()
        check_finished(finished)
        maps[memory] = [
            (tmp_path / memory / name).read_bytes()
            for name in ('field.tif', 'field_confidence.tif', 'field.json')
        ]
        told = re.findall('out of memory with (\\d) windows .*goes on with (\\d)', finished.output)
        assert bool(told) == (memory == '700K'), finished.output
    assert maps['1G'] == maps['700K']
    np.testing.assert_array_equal(read(tmp_path / '1G' / 'field.tif'), classes)
