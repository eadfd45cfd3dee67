"""Peak memory and time of a map of change of a pair of scenes of 10,000 x 10,000 pixels.

    python tools/benchmarks/change_map.py [--size 10000] [--ranks 1 2]

Writes two scenes that differ in scattered squares, block by block, and maps them with
tools/predict.py in processes of its own, with a siamese model of one EfficientNet stage that calls
strong differences change. The bound is stated before the map: a strip of scores is as wide as the
scene, and nothing is as large as the scene. The peak is the largest resident set of any process, as
the kernel counts it. Maps of all numbers of ranks must have the same bytes.
"""
from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Tuple

import numpy as np
import rasterio
import torch
from mmengine.config import Config
from mmengine.registry import MODELS, DefaultScope
from rasterio.windows import Window

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'tools' / 'benchmarks')]

from _common import describe_machine  # noqa: E402

import mapsage  # noqa: E402, F401

# Bound on the resident set of a process in GiB, for scenes up to 20,000 pixels wide.
BOUND = 2.
_BLOCK = 512
_CONFIG = '''
default_scope = 'mmseg'
custom_imports = dict(imports=['mapsage'])
sensors = dict(image=dict(bands=[1, 2, 3], max_dates=2))
model = dict(
    type='EncoderDecoder',
    data_preprocessor=dict(type='StackDataPreProcessor', sensors=sensors, size=(512, 512),
                           mean=dict(image=[127.] * 3), std=dict(image=[60.] * 3)),
    backbone=dict(type='SiameseBackbone', sensors=sensors, fusion='abs_diff', encoder=dict(
        type='EfficientNetLite', out_indices=(0, ))),
    decode_head=dict(type='FCNHead', in_channels=24, in_index=0, channels=24, num_convs=0,
                     concat_input=False, num_classes=2, dropout_ratio=0., align_corners=False),
    test_cfg=dict(mode='whole'))
test_dataloader = dict(dataset=dict(type='ChangeDataset', sensors=sensors, pipeline=[
    dict(type='LoadChangePair'), dict(type='LoadChangeLabels'), dict(type='PackStackInputs')]))
'''


def write_model(folder: Path) -> Tuple[Path, Path]:
    """Write the config and the weights of the model; return their paths."""
    config, checkpoint = folder / 'change.py', folder / 'model.pth'
    config.write_text(_CONFIG)
    torch.manual_seed(0)
    with DefaultScope.overwrite_default_scope('mmseg'):
        weights = MODELS.build(Config.fromfile(str(config)).model).state_dict()
    weights['decode_head.conv_seg.weight'][:] = torch.tensor([-1e4, 1e4])[:, None, None, None]
    weights['decode_head.conv_seg.bias'][:] = torch.tensor([.5, -.5])
    torch.save(dict(state_dict=weights, meta=dict(dataset_meta=dict(
        classes=('unchanged', 'changed'), palette=[[255, 255, 255], [230, 25, 75]]))),
        str(checkpoint))
    return config, checkpoint


def write_pair(folder: Path, size: int) -> Tuple[Path, Path]:
    """Write two scenes that differ in a square of every fourth block; return their paths."""
    paths = folder / 'before_20190614.tif', folder / 'after_20230702.tif'
    rng = np.random.default_rng(0)
    ground = rng.integers(60, 190, (3, _BLOCK, _BLOCK), np.uint8)
    changed = ground.copy()
    changed[:, 100:200, 150:300] = rng.integers(1, 255, (3, 100, 150))
    profile = dict(driver='GTiff', width=size, height=size, count=3, dtype='uint8', tiled=True,
                   blockxsize=_BLOCK, blockysize=_BLOCK, compress='deflate', crs='EPSG:32633',
                   transform=rasterio.Affine(.5, 0, 4e5, 0, -.5, 5e6), nodata=0)
    for date, path in enumerate(paths):
        with rasterio.open(str(path), 'w', **profile) as file:
            for number, (row, column) in enumerate(
                    (row, column) for row in range(0, size, _BLOCK)
                    for column in range(0, size, _BLOCK)):
                block = changed if date and number % 4 == 0 else ground
                height, width = min(_BLOCK, size - row), min(_BLOCK, size - column)
                file.write(block[:, :height, :width], window=Window(column, row, width, height))
    return paths


def predict(folder: Path, out: Path, ranks: int) -> Tuple[float, float]:
    """Map the pair; return the largest resident set of a process in GiB, and seconds."""
    command = [sys.executable, str(ROOT / 'tools' / 'predict.py')]
    environ = dict(os.environ, PYTHONPATH=str(ROOT))
    if ranks > 1:
        command = ['bash', str(ROOT / 'scripts' / 'predict.sh')]
        environ.update(NPROC_PER_NODE=str(ranks), MAPSAGE_PYTHON=sys.executable)
    start = time.monotonic()
    process = subprocess.Popen(
        [*command, str(folder / 'change.py'), str(folder / 'model.pth'),
         str(folder / 'before_20190614.tif'), str(folder / 'after_20230702.tif'), '--out', str(out),
         '--polygons', '--accelerator', 'cpu'], env=environ, cwd=str(ROOT),
        stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f'predict.py ended with {status}')
    return usage.ru_maxrss / 2**20, time.monotonic() - start


def main() -> None:
    """State the bound, map the pair, and print a row for each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--size', type=int, default=10000, help='side of the scenes in pixels')
    parser.add_argument('--ranks', type=int, nargs='+', default=[1])
    args = parser.parse_args()
    print(describe_machine())
    print(f'bound: {BOUND:g} GiB of a process; the pair has {6 * args.size**2 / 2**30:.2f} GiB, '
          f'its scores in float32 {8 * args.size**2 / 2**30:.2f} GiB')
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder)
        write_pair(folder, args.size)
        maps = set()
        for ranks in args.ranks:
            peak, seconds = predict(folder, folder / f'maps{ranks}', ranks)
            path, = (folder / f'maps{ranks}').glob('*_to_*.tif')
            maps.add(path.read_bytes())
            print(f'{ranks} rank(s): peak {peak:.2f} GiB, {seconds:.0f} s, '
                  f'{"within" if peak <= BOUND else "BEYOND"} the bound', flush=True)
        print('the same bytes' if len(maps) == 1 else 'DIFFERENT bytes')


if __name__ == '__main__':
    main()
