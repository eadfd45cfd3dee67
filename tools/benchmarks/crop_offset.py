"""mIoU of a crop model on scenes with and without the offset of Sentinel-2's newer baselines.

    python tools/benchmarks/crop_offset.py [--seeds 0 1 2] [--steps 300]

A model of configs/stacks/resnet18_attention_crops.py is trained on made places as they were before
the offset, by tools/train.py. The optical images of the validated places then get 1,000 added and the
tags of the newer baseline. tools/test.py scores the checkpoint on the places before the offset, on
those with it as stored, which the passport refuses unless it is removed from the checkpoint, and with
units='harmonized'.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Dict, Optional

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'tools' / 'benchmarks')]

import numpy as np  # noqa: E402
import rasterio  # noqa: E402
import torch  # noqa: E402
from _common import describe_machine  # noqa: E402

CONFIG = 'configs/stacks/resnet18_attention_crops.py'


def run(program: str, *arguments: str) -> 'subprocess.CompletedProcess[str]':
    return subprocess.run(
        [sys.executable, f'tools/{program}.py', CONFIG, *arguments],
        cwd=str(ROOT),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        universal_newlines=True,
    )


def add_offset(folder: Path) -> None:
    """Write the images of a folder as a newer baseline has them; 0 stays no data."""
    for path in folder.glob('*.tif'):
        with rasterio.open(path, 'r+') as file:
            values = file.read()
            file.write(np.where(values, values + 1000, 0).astype(values.dtype))
            file.scales, file.offsets = (1e-4,) * file.count, (-0.1,) * file.count


def score(text: str) -> Optional[float]:
    found = re.findall(r'mIoU: *([\d.]+)', text)
    return float(found[-1]) if found else None


def measure(seed: int, steps: int, folder: Path) -> Dict[str, Optional[float]]:
    from mapsage.extras.demo.crop_places import CropParams, write_crop_places

    data, new, work = folder / 'data', folder / 'new', folder / 'run'
    write_crop_places(data, CropParams(seed=seed))
    for path in [*data.rglob('s2/*.tif')]:
        with rasterio.open(path, 'r+') as file:
            file.scales, file.offsets = (1e-4,) * file.count, (0.0,) * file.count
    shutil.copytree(str(data / 'val'), str(new))
    add_offset(new / 's2')
    roots = [f'train_dataloader.dataset.data_root={data}/train']
    common = ['train_dataloader.num_workers=0', 'train_dataloader.persistent_workers=False']
    common += ['val_dataloader.num_workers=0', 'val_dataloader.persistent_workers=False']
    common += ['test_dataloader.num_workers=0', 'test_dataloader.persistent_workers=False']
    trained = run(
        'train', '--accelerator', 'cpu', '--work-dir', str(work), '--cfg-options', *common, *roots,
        f'val_dataloader.dataset.data_root={data}/val', f'train_cfg.max_iters={steps}',
        f'train_cfg.val_interval={steps}', f'randomness.seed={seed}',
    )  # fmt: skip
    checkpoints = sorted(work.glob('iter_*.pth'), key=lambda path: path.stat().st_mtime)
    if not checkpoints:
        raise SystemExit(trained.stdout[-3000:])
    bare = folder / 'bare.pth'
    content = torch.load(str(checkpoints[-1]), map_location='cpu', weights_only=False)
    content['meta']['data'].pop('passport')
    torch.save(content, str(bare))

    def test(checkpoint: Path, root: Path, units: str) -> 'subprocess.CompletedProcess[str]':
        return run(
            'test', str(checkpoint), '--accelerator', 'cpu', '--work-dir', str(folder / 'test'),
            '--cfg-options', *common, f'test_dataloader.dataset.data_root={root}',
            f'test_dataloader.dataset.units={units}',
        )  # fmt: skip

    refused = test(checkpoints[-1], new, 'stored')
    assert refused.returncode and 'harmonized' in refused.stdout, refused.stdout[-3000:]
    return {
        'before the offset': score(test(checkpoints[-1], data / 'val', 'stored').stdout),
        'with it, stored': score(test(bare, new, 'stored').stdout),
        'with it, harmonized': score(test(checkpoints[-1], new, 'harmonized').stdout),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
    parser.add_argument('--seeds', type=int, nargs='+', default=[0, 1, 2])
    parser.add_argument('--steps', type=int, default=300)
    args = parser.parse_args()
    print(f'{describe_machine()}; {args.steps} steps')
    for number, seed in enumerate(args.seeds):
        with tempfile.TemporaryDirectory() as name:
            row = measure(seed, args.steps, Path(name))
        if not number:
            print('| seed | ' + ' | '.join(row) + ' |\n|---|' + '---|' * len(row))
        print(f'| {seed} | ' + ' | '.join(str(value) for value in row.values()) + ' |', flush=True)


if __name__ == '__main__':
    main()
