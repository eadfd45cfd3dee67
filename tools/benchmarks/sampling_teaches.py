"""Does dynamic sampling teach? Ways to spend steps on tiles that teach, at equal steps and time.

    OMP_NUM_THREADS=1 python tools/benchmarks/sampling_teaches.py --nwpu data/nwpu_polygons

Trains EfficientNet-Lite0 FPN in one process and thread: no sampling, dynamic sampling by labels
and by the model's loss, MMSegmentation's cat_max_ratio and OHEM; on demo tiles of which 70 % are
dull, and on NWPU VHR-10. The time of a run is its processor time in one thread, which is its
wall-clock on a free core, also on a machine that does other things. Every way is then run again
for as many steps as fit into the time that no sampling took. Results are appended to ``--out`` as
they come, and runs that it holds are not run again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, List

import cv2
import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

METHODS = ('none', 'label', 'model', 'cat_max_ratio', 'ohem')
SEEDS = (0, 1, 2)
DULL_NATS = 0.1  # a tile below this entropy is dull
_NOISE = 0.1  # costs that differ by less count as equal: repetitions of one run differ as much
# Steps at equal steps; lowest entropy and lowest loss that are valid; the crop.
TASKS: Dict[str, Dict[str, Any]] = dict(
    demo=dict(
        steps=200, batch=8, label=0.2, model=0.3, cat=0.75, crop=96, rare=['building', 'road']
    ),
    nwpu=dict(
        steps=120,
        batch=4,
        label=0.1,
        model=0.1,
        cat=0.9,
        crop=256,
        rare=['ship', 'storage_tank', 'bridge'],
    ),
)


def dull_demo(root: Path) -> Path:
    """Write demo data and ``dull.txt``, a list of training tiles of which 70 % are dull."""
    from mapsage.datasets import LabelScore
    from mapsage.extras.demo import write_demo_data

    write_demo_data(root)
    entropy, score = [], LabelScore()
    for number in range(600):
        mask = cv2.imread(str(root / f'ann_dir/train/{number}.png'), cv2.IMREAD_GRAYSCALE)
        # the transform's own arithmetic on a label map with 255 for no data
        entropy.append(score.score(_packed(np.where(mask == 0, 255, mask - 1))))
    order = np.random.RandomState(0).permutation(600)
    dull = [n for n in order if entropy[n] < DULL_NATS]
    rich = [n for n in order if entropy[n] >= DULL_NATS]
    count = min(len(dull), len(rich) * 7 // 3)
    names = dull[:count] + rich[: count * 3 // 7]
    (root / 'dull.txt').write_text('\n'.join(map(str, sorted(names))))
    print(f'demo: {len(names)} tiles, {count} of them below {DULL_NATS} nats')
    return root


def _packed(labels: np.ndarray) -> Dict[str, Any]:
    import torch
    from mmengine.structures import PixelData
    from mmseg.structures import SegDataSample

    sample = SegDataSample()
    sample.gt_sem_seg = PixelData(data=torch.from_numpy(labels.astype(np.int64))[None])
    return dict(data_samples=sample)


def config_of(task: str, method: str, seed: int, steps: int, data: str) -> Any:
    """Return the config of one run."""
    from mmengine.config import Config

    setting = TASKS[task]
    cfg = Config.fromfile(str(ROOT / f'configs/{task}/efficientnet_lite0_fpn_{task}.py'))
    cfg.merge_from_dict(
        {
            'train_cfg.max_iters': steps,
            'train_cfg.val_interval': 10 * steps,
            'train_dataloader.batch_size': setting['batch'],
            'train_dataloader.num_workers': 0,
            'train_dataloader.persistent_workers': False,
            'val_dataloader.num_workers': 0,
            'val_dataloader.persistent_workers': False,
            'train_dataloader.dataset.data_root': data,
            'val_dataloader.dataset.data_root': data,
            'randomness.seed': seed,
            'default_hooks.checkpoint': None,
            'default_hooks.logger.interval': 50,
            'param_scheduler.1.end': steps,
            'env_cfg.accelerator': 'cpu',
            'custom_hooks': [dict(type='ProgressBarHook', refresh_interval=1e9)],
        }
    )
    cfg.visualizer.vis_backends = [dict(type='LocalVisBackend')]
    crop = dict(
        type='RandomCrop',
        crop_size=(setting['crop'], setting['crop']),
        cat_max_ratio=setting['cat'] if method == 'cat_max_ratio' else 1.0,
    )
    pipeline = [
        each for each in cfg.train_dataloader.dataset.pipeline if each['type'] != 'RandomCrop'
    ]
    before = 2 if task == 'demo' else 3  # after loading, and after nwpu's resize
    cfg.train_dataloader.dataset.pipeline = pipeline[:before] + [crop] + pipeline[before:]
    cfg.model.data_preprocessor.size = crop['crop_size']
    if task == 'demo':
        cfg.train_dataloader.dataset.ann_file = 'dull.txt'
    if method == 'ohem':
        pixels = setting['crop'] ** 2
        cfg.model.decode_head.sampler = dict(
            type='OHEMPixelSampler', thresh=0.7, min_kept=pixels // 16
        )
    scores = dict(label=dict(type='LabelScore'), model=dict(type='ModelScore'))
    if method in scores:
        cfg.custom_hooks.append(
            dict(
                type='DynamicSamplingHook', score=scores[method], validity=dict(low=setting[method])
            )
        )
    cfg.runner_type, cfg.launcher = 'MapSageRunner', 'none'
    return cfg


def run_one(task: str, method: str, seed: int, steps: int, data: str) -> Dict[str, Any]:
    """Train and evaluate; return scores in percent and seconds of processor time."""
    from mapsage.commands.cli import build_runner

    cfg = config_of(task, method, seed, steps, data)
    with tempfile.TemporaryDirectory() as folder:
        cfg.work_dir = folder
        runner = build_runner(cfg)
        loop = runner.val_loop
        runner._val_loop = None
        begin = time.process_time()
        runner.train()
        seconds = time.process_time() - begin
        intersection, union = confusion(runner, loop.dataloader)
    iou = 100 * intersection / np.maximum(union, 1)
    classes = list(loop.dataloader.dataset.metainfo['classes'])
    rare = [iou[classes.index(name)] for name in TASKS[task]['rare']]
    return dict(
        task=task,
        method=method,
        seed=seed,
        steps=steps,
        seconds=seconds,
        miou=float(iou.mean()),
        rare=float(np.mean(rare)),
    )


def confusion(runner: Any, loader: Any) -> Any:
    """Return intersection and union in pixels a class."""
    import torch

    model, classes = runner.model, len(loader.dataset.metainfo['classes'])
    model.eval()
    intersection, union = np.zeros(classes), np.zeros(classes)
    with torch.no_grad():
        for batch in loader:
            for sample in model.val_step(batch):
                predicted = sample.pred_sem_seg.data.numpy().ravel()
                truth = sample.gt_sem_seg.data.numpy()
                if truth.size != predicted.size:  # predictions have the image's original size
                    truth = cv2.resize(
                        truth[0].astype(np.uint8),
                        sample.ori_shape[::-1],
                        interpolation=cv2.INTER_NEAREST,
                    )
                truth = truth.ravel()
                known = truth != 255
                pair = np.bincount(
                    truth[known] * classes + predicted[known], minlength=classes**2
                ).reshape(classes, classes)
                intersection += np.diag(pair)
                union += pair.sum(0) + pair.sum(1) - np.diag(pair)
    return intersection, union


def run_missing(
    out: Path, task: str, method: str, seed: int, steps: int, data: str
) -> Dict[str, Any]:
    """Run in a separate process, unless the results are there."""
    known = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    for row in known:
        if (row['task'], row['method'], row['seed'], row['steps']) == (task, method, seed, steps):
            return row
    done = subprocess.run(
        [sys.executable, __file__, '--one', task, method, str(seed), str(steps), data],
        stdout=subprocess.PIPE,
        universal_newlines=True,
        check=True,
    )
    line = done.stdout.strip().splitlines()[-1]
    with open(str(out), 'a') as file:
        file.write(line + '\n')
    print(line, flush=True)
    return json.loads(line)


def table(task: str, rows: Dict[str, List[Dict[str, Any]]], title: str) -> None:
    """Print mean and spread over the seeds."""
    print(f'\n{task}, {title}\n| | steps | s | mIoU | rare classes |\n|---|---|---|---|---|')
    for method, each in rows.items():

        def spread(key: str, each: Any = each) -> str:
            values = [row[key] for row in each]
            return f'{np.mean(values):.1f} ({min(values):.1f} to {max(values):.1f})'

        print(
            f'| {method} | {each[0]["steps"]} | {np.mean([r["seconds"] for r in each]):.0f} | '
            f'{spread("miou")} | {spread("rare")} |'
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--nwpu', help='folder of the NWPU polygons; left out without it')
    parser.add_argument('--demo', default='data/demo_dull', help='where demo data is or goes')
    parser.add_argument('--out', default='work_dirs/sampling_teaches.jsonl')
    parser.add_argument('--one', nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        task, method, seed, steps, data = args.one
        row = run_one(task, method, int(seed), int(steps), data)
        print('\n' + json.dumps(row))
        return
    out = Path(args.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    places = dict(demo=str(dull_demo(Path(args.demo))))
    if args.nwpu:
        places['nwpu'] = args.nwpu
    for task, data in places.items():
        steps = TASKS[task]['steps']
        equal = {
            method: [run_missing(out, task, method, seed, steps, data) for seed in SEEDS]
            for method in METHODS
        }
        table(task, equal, 'equal steps')
        cost = {
            method: float(np.mean([row['seconds'] for row in rows]))
            for method, rows in equal.items()
        }
        fitting = {method: round(steps * cost['none'] / cost[method]) for method in METHODS}
        table(
            task,
            {
                method: [
                    run_missing(out, task, method, seed, fitting[method], data) for seed in SEEDS
                ]
                if abs(fitting[method] / steps - 1) > _NOISE
                else equal[method]
                for method in METHODS
            },
            'equal time',
        )


if __name__ == '__main__':
    main()
