"""Shipped configs of several dates as files: proved by the command, read by the oldest runtime."""

from __future__ import annotations

import re
import subprocess
import warnings
from pathlib import Path
from typing import Any, Dict

import numpy as np
import pytest
import torch
from earth_states import fill
from mmengine.config import Config
from support import ROOT, main_leg

pytest.importorskip('onnx')
pytest.importorskip('onnxruntime')

from mapsage.commands.cli import build_model  # noqa: E402
from mapsage.extras.demo import (  # noqa: E402
    ChangeParams,
    CropParams,
    write_change_pairs,
    write_crop_places,
)
from mapsage.extras.export import export as command  # noqa: E402
from mapsage.extras.export.graph import open_session  # noqa: E402

pytestmark = main_leg

# PASTIS, Sen1Floods11 and burn scars need data of others.
CONFIGS = [
    path
    for pattern in ('earth/*_crops.py', 'stacks/*.py', 'change/*.py')
    for path in sorted((ROOT / 'configs').glob(pattern))
]
READER = """
import sys
import numpy
import onnxruntime
print(onnxruntime.__version__)
for path in sys.argv[1:]:
    session = onnxruntime.InferenceSession(path, providers=['CPUExecutionProvider'])
    numpy.save(path + '.out.npy', session.run(None, dict(numpy.load(path + '.npz')))[0])
"""


@pytest.fixture(scope='module')
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp('data')
    write_crop_places(folder / 'crops', CropParams(train_places=1, val_places=1, size=64))
    write_change_pairs(
        folder / 'change', ChangeParams(train_scenes=1, val_scenes=1, scene_size=256, pair_size=128)
    )
    return folder


@pytest.fixture(scope='module')
def files() -> Dict[str, Path]:
    """Files for gcu, by the name of the config."""
    return {}


def random_inputs(session: Any) -> Dict[str, np.ndarray]:
    random, inputs = np.random.RandomState(0), {}
    for value in session.get_inputs():
        numbers = random.random_sample(value.shape)
        inputs[value.name] = (
            numbers * 3000
            if value.name.endswith('pixels')
            else numbers > 0.3
            if value.name.endswith('valid')
            else np.sort(45000 + np.rint(numbers * 300))
            if value.name.endswith('days')
            else numbers * 90
        ).astype(np.float32)
    return inputs


@pytest.mark.parametrize('target', ['onnx', 'gcu'])
@pytest.mark.parametrize('config', CONFIGS, ids=lambda path: path.stem)
def test_a_config_proves_its_file(
    config: Path,
    target: str,
    data: Path,
    files: Dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv('MAPSAGE_CROPS', str(data / 'crops'))
    monkeypatch.setenv('MAPSAGE_CHANGE', str(data / 'change'))
    model = fill(build_model(Config.fromfile(str(config))))
    checkpoint, path = (data / f'{config.stem}_{target}{suffix}' for suffix in ('.pth', '.onnx'))
    torch.save(
        dict(
            state_dict=model.state_dict(),
            meta=dict(
                dataset_meta=dict(
                    classes=[f'class {number}' for number in range(int(model.num_classes))]
                )
            ),
        ),
        str(checkpoint),
    )
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        command.main(
            [
                str(config),
                str(checkpoint),
                '--out',
                str(path),
                '--tiles',
                '5',
                '--accelerator',
                'cpu',
                '--target',
                target,
            ]
        )
    proof = re.search(r'largest difference (\S+), equal pixels (\S+) %', capsys.readouterr().out)
    assert proof and float(proof[1]) < 1e-4 and float(proof[2]) > 99.9, proof
    if target == 'gcu':
        files[config.stem] = path


def test_the_oldest_runtime_computes_the_same(files: Dict[str, Path]) -> None:
    ready = subprocess.run(
        ['bash', str(ROOT / 'scripts' / 'setup_env.sh'), 'ort19'], capture_output=True, text=True
    )
    if ready.returncode:
        pytest.skip(f'no environment with ONNX Runtime 1.9.0: {ready.stderr[-400:]}')
    expected = {}
    for name, path in files.items():
        session = open_session(path.read_bytes())
        inputs = random_inputs(session)
        np.savez(f'{path}.npz', **inputs)
        expected[name] = session.run(None, inputs)[0]
    read = subprocess.run(
        [ready.stdout.strip(), '-c', READER, *map(str, files.values())],
        capture_output=True,
        text=True,
    )
    assert read.returncode == 0 and read.stdout.split() == ['1.9.0'], read.stderr
    for name, path in files.items():
        assert np.abs(np.load(f'{path}.out.npy') - expected[name]).max() < 1e-4, name
