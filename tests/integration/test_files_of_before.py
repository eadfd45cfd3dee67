"""Files that commit b5f4341 wrote are used: `tests/golden/b5f4341/`.

`iter_5.pth` is the checkpoint of the tiny run after 5 of its 10 steps (main leg), and
`tiny_iter_5.onnx` is what `tools/export.py` made of it.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from map_runs import read
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
