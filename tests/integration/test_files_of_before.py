"""Files that commit b5f4341 wrote are used: `tests/golden/b5f4341/`.

`iter_5.pth` is the checkpoint of the tiny run after 5 of its 10 steps (main leg), and
`tiny_iter_5.onnx` is what `tools/export.py` made of it. `strip000000` is the first of four strips of
the map of `test_a_half_finished_map_is_finished`, and `map_settings.json` what its key was made of,
without the input and the checkpoint, whose bytes depend on the machine.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio
from color_model import paint, write_checkpoint, write_config, write_scene
from map_runs import read, run
from support import ROOT, main_leg

from mapsage.commands import predict, train

pytestmark = main_leg

BEFORE = ROOT / 'tests' / 'golden' / 'b5f4341'


@pytest.mark.usefixtures('own_environment', 'signals_as_before')
def test_a_training_continues_with_the_golden_losses(tiny_config: Path, tmp_path: Path) -> None:
    train.main(
        [
            str(tiny_config),
            '--work-dir',
            str(tmp_path / 'work'),
            '--accelerator',
            'cpu',
            '--cfg-options',
            'resume=True',
            f'load_from={BEFORE / "iter_5.pth"}',
        ]
    )
    lines = next((tmp_path / 'work').glob('*/vis_data/scalars.json')).read_text().splitlines()
    losses = [line['loss'] for line in map(json.loads, lines) if 'loss' in line]
    golden = json.loads((ROOT / 'tests' / 'golden' / 'tiny_cpu_main.json').read_text())
    assert losses == pytest.approx(golden[5:], rel=1e-5)


@pytest.mark.usefixtures('own_environment')
def test_an_exported_file_makes_the_map_of_its_checkpoint(
    tiny_config: Path, tiny_data: Path, tmp_path: Path
) -> None:
    pytest.importorskip('onnxruntime')
    image = next((tiny_data / 'img_dir' / 'val').iterdir())
    assert (
        predict.main(
            [
                '--model',
                str(BEFORE / 'tiny_iter_5.onnx'),
                str(image),
                '--out',
                str(tmp_path / 'file'),
            ]
        )
        == 0
    )
    assert (
        predict.main(
            [
                str(tiny_config),
                str(BEFORE / 'iter_5.pth'),
                str(image),
                '--out',
                str(tmp_path / 'checkpoint'),
                '--accelerator',
                'cpu',
            ]
        )
        == 0
    )
    name = f'{image.stem}.tif'
    np.testing.assert_array_equal(
        read(tmp_path / 'file' / name), read(tmp_path / 'checkpoint' / name)
    )


@pytest.mark.usefixtures('own_environment')
def test_a_half_finished_map_is_finished(tmp_path: Path, capsys: Any) -> None:
    model = write_config(tmp_path), write_checkpoint(tmp_path)
    scene = write_scene(
        tmp_path / 'field.tif',
        paint(90, 150),
        'EPSG:32633',
        rasterio.Affine(0.5, 0, 500000, 0, -0.5, 5000000),
    )
    stat = scene.stat()
    settings = dict(
        json.loads((BEFORE / 'map_settings.json').read_text()),
        checkpoint=hashlib.sha256(model[1].read_bytes()).hexdigest(),
        input=[[str(scene), stat.st_size, stat.st_mtime_ns]],
    )
    key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
    maps = tmp_path / 'maps'
    strips = maps / f'.field.{key}'
    strips.mkdir(parents=True)
    shutil.copy(BEFORE / 'strip000000', strips)
    assert run(model, scene, '--out', maps, '--confidence', '--window', 32, '--batch-size', 2) == 0
    assert 'continues, 1 of 4 strips are finished' in capsys.readouterr().out
    np.testing.assert_array_equal(read(maps / 'field.tif'), paint(90, 150))
    assert not strips.exists()
