"""mIoU of a crop model on scenes with and without the offset of Sentinel-2's newer baselines.

    python tools/benchmarks/crop_offset.py [--seeds 0 1 2] [--steps 200] [--norms GN BN]

The optical half of configs/stacks/resnet18_attention_crops.py is trained in this process, on one
thread, on made places as they were before the offset. The images of the validated places then get
1,000 added and the tags of the newer baseline. The checkpoint is scored on the places before the
offset, on those with it as stored, which the passport refuses unless it is removed from the
checkpoint, and with units='harmonized'. The encoder has the config's group
normalization (GN) or batch normalization (BN).
"""

import argparse
import contextlib
import itertools
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Dict

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'tools' / 'benchmarks')]

import numpy as np  # noqa: E402
import rasterio  # noqa: E402
import torch  # noqa: E402
from _common import describe_machine  # noqa: E402
from mmengine.config import Config  # noqa: E402

from mapsage.engine import MapSageRunner  # noqa: E402
from mapsage.engine.loading.data_checks import DataError  # noqa: E402
from mapsage.extras.demo.crop_places import CropParams, write_crop_places  # noqa: E402

CONFIG = ROOT / 'configs/stacks/resnet18_attention_crops.py'


def small_config(data: Path, work: Path, steps: int, seed: int, norm: str) -> Config:
    """Return the config without radar, with a narrow stem, and without workers."""
    cfg = Config.fromfile(str(CONFIG))
    sensors = dict(s2=cfg.sensors['s2'])
    encoder = dict(cfg.model.backbone.encoder['s2'], stem_channels=16)
    if norm == 'BN':
        encoder['norm_cfg'] = cfg.model.decode_head.norm_cfg = dict(type='BN')
    cfg.model.backbone = dict(type='StackBackbone', sensors=sensors, encoder=dict(s2=encoder))
    cfg.model.neck['sensors'] = sensors
    cfg.model.decode_head.in_channels = [16, 32, 64]
    preprocessor = dict(cfg.model.data_preprocessor, sensors=sensors)
    for key in ('mean', 'std'):
        preprocessor[key] = dict(s2=preprocessor[key]['s2'])
    cfg.model.data_preprocessor = preprocessor
    for name in ('train', 'val', 'test'):
        loader = cfg[f'{name}_dataloader']
        loader.update(num_workers=0, persistent_workers=False)
        loader.dataset.pop('sensors')
        loader.dataset.update(
            sensors=sensors, data_root=str(data / ('train' if name == 'train' else 'val'))
        )
    cfg.train_dataloader.batch_size = 4
    cfg.train_cfg.update(max_iters=steps, val_interval=steps)
    cfg.param_scheduler[-1].end = steps
    cfg.default_hooks.checkpoint.update(interval=steps, save_best=None)
    cfg.default_hooks.logger.interval = steps
    cfg.vis_backends = cfg.visualizer.vis_backends = []
    cfg.env_cfg.accelerator = 'cpu'
    cfg.log_level = 'ERROR'
    cfg.work_dir, cfg.randomness = str(work), dict(seed=seed)
    return cfg


def add_offset(folder: Path) -> None:
    """Write the images of a folder as a newer baseline has them; 0 stays no data."""
    for path in folder.glob('*.tif'):
        with rasterio.open(path, 'r+') as file:
            values = file.read()
            file.write(np.where(values, values + 1000, 0).astype(values.dtype))
            file.scales, file.offsets = (1e-4,) * file.count, (-0.1,) * file.count


def measure(seed: int, steps: int, norm: str, folder: Path) -> Dict[str, float]:
    data, new, work = folder / 'data', folder / 'new', folder / 'run'
    write_crop_places(data, CropParams(seed=seed))
    for path in data.rglob('s2/*.tif'):
        with rasterio.open(path, 'r+') as file:
            file.scales, file.offsets = (1e-4,) * file.count, (0.0,) * file.count
    shutil.copytree(str(data / 'val'), str(new))
    add_offset(new / 's2')
    cfg = small_config(data, work, steps, seed, norm)
    MapSageRunner.from_cfg(cfg).train()
    checkpoint, bare = work / f'iter_{steps}.pth', folder / 'bare.pth'
    content = torch.load(str(checkpoint), map_location='cpu', weights_only=False)
    content['meta']['data'].pop('passport')
    torch.save(content, str(bare))

    def score(weights: Path, root: Path, units: str) -> float:
        test: Any = small_config(data, folder / 'test', steps, seed, norm)
        test.load_from = str(weights)
        test.test_dataloader.dataset.update(data_root=str(root), units=units)
        return float(MapSageRunner.from_cfg(test).test()['mIoU'])

    try:
        score(checkpoint, new, 'stored')
        raise SystemExit('the passport did not refuse the scenes with the offset')
    except DataError as error:
        assert 'harmonized' in str(error), error
    return {
        'before the offset': score(checkpoint, data / 'val', 'stored'),
        'with it, stored': score(bare, new, 'stored'),
        'with it, harmonized': score(checkpoint, new, 'harmonized'),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
    parser.add_argument('--seeds', type=int, nargs='+', default=[0, 1, 2])
    parser.add_argument('--steps', type=int, default=200)
    parser.add_argument('--norms', nargs='+', choices=['GN', 'BN'], default=['GN', 'BN'])
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f'{describe_machine()}; {args.steps} steps, mIoU')
    for number, (norm, seed) in enumerate(itertools.product(args.norms, args.seeds)):
        start = time.process_time()
        with tempfile.TemporaryDirectory() as name, open(os.devnull, 'w') as silence:
            # The table of each evaluation.
            with contextlib.redirect_stdout(silence), contextlib.redirect_stderr(silence):
                row = measure(seed, args.steps, norm, Path(name))
        if not number:
            print('| norm | seed | ' + ' | '.join(row) + ' | processor time |')
            print('|---|' + '---|' * (len(row) + 2))
        cells = ' | '.join(f'{value:.1f}' for value in row.values())
        print(f'| {norm} | {seed} | {cells} | {time.process_time() - start:.0f} s |', flush=True)


if __name__ == '__main__':
    main()
