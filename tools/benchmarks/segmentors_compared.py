"""Mask queries against heads per pixel, at equal processor time.

    OMP_NUM_THREADS=1 python tools/benchmarks/segmentors_compared.py --nwpu data/nwpu_polygons

Trains linear, FPN, UPerNet, PMT and EoMT (fixed and Hungarian matching) on one small ViT from
scratch, and the heads per pixel on EfficientNet-Lite0's ImageNet features too; on the demo's tiles
and on NWPU VHR-10. Nothing is frozen but what configs/_base_/efficientnet_lite0_fpn.py freezes.

Equal time is equal processor time of the training process: loading is in it (no loader workers),
start and validation are not. A few steps of each variant say how many fit into ``--seconds``, and
the learning rate of a ViT is the better of two in a third of that time, on the demo, with a seed of
its own. The seconds that a run took are in the table.

Every result is a line of ``--out``, written when it is there. Lines that are there are not run
again, so the script can be killed at any time and called again. Runs go seed by seed, so that an
unfinished table has few holes; ``--table`` prints what there is.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, Sequence

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / 'tools/benchmarks'))

from _results import (  # noqa: E402
    Results,
    Row,
    ious_of,
    mean_of,
    rare_classes,
    run_timed,
    spread,
    write_demo,
)
from _segmentors import VARIANTS, model_of, takes_queries  # noqa: E402

DATA = ('demo', 'nwpu')
CROP = dict(demo=128, nwpu=256)
BATCH = 4
RATES = (1e-3, 3e-3)  # of a ViT from scratch
PRETRAINED_RATE = 1e-3  # of the configs with EfficientNet-Lite0
PILOT_SEED, PILOT_SHARE = 100, 3
WARMUP = 20  # steps
CALIBRATION = (3, 15)  # steps that are run before the clock, and with it


def config_of(
    data: str, variant: str, place: str, seed: int, steps: int, rate: float, work_dir: str
) -> Any:
    """Return the config of one run."""
    from mmengine.config import Config

    base = (
        ROOT
        / 'configs'
        / ('demo/eomt_tiny_demo.py' if data == 'demo' else 'mask_transformers/eomt_tiny_nwpu.py')
    )
    cfg = Config.fromfile(str(base))
    classes = cfg.model.decode_head.num_classes
    queries, pretrained = takes_queries(variant), variant.startswith('lite0')
    cfg.model = model_of(variant, classes, CROP[data])
    cfg.optim_wrapper = dict(
        type='OptimWrapper',
        optimizer=dict(type='AdamW', lr=rate, weight_decay=0.01 if pretrained else 0.05),
        **(dict(clip_grad=dict(max_norm=0.01)) if queries else {}),
    )
    warmup = min(WARMUP, steps // 2)
    cfg.param_scheduler = [
        dict(type='LinearLR', start_factor=0.05, begin=0, end=warmup, by_epoch=False),
        dict(type='PolyLR', power=0.9, eta_min=1e-5, begin=warmup, end=steps, by_epoch=False),
    ]
    cfg.custom_hooks = [dict(type='ProgressBarHook', refresh_interval=1e9)]
    if queries:
        cfg.custom_hooks.append(dict(type='MaskAnnealingHook'))
    loader = dict(num_workers=0, persistent_workers=False)
    cfg.merge_from_dict(
        {
            'train_cfg.max_iters': steps,
            'train_cfg.val_interval': 10 * steps,
            'train_dataloader': dict(loader, batch_size=BATCH, dataset=dict(data_root=place)),
            'val_dataloader': dict(loader, dataset=dict(data_root=place)),
            'default_hooks.checkpoint': None,
            'default_hooks.logger.interval': 100,
            'randomness.seed': seed,
            'env_cfg.accelerator': 'cpu',
            'log_level': 'WARNING',
        }
    )
    cfg.val_evaluator = [dict(type='ConfusionMatrixMetric', iou_metrics=['mIoU', 'mBoundaryIoU'])]
    cfg.test_evaluator = cfg.val_evaluator
    cfg.visualizer.vis_backends = []
    cfg.launcher, cfg.work_dir = 'none', work_dir
    return cfg


def train(data: str, variant: str, place: str, seed: int, steps: int, rate: float) -> Any:
    """Train and return the runner, and processor time at the start and after each step, in s."""
    from mapsage.commands.cli import build_runner

    with tempfile.TemporaryDirectory() as folder:
        runner = build_runner(config_of(data, variant, place, seed, steps, rate, folder))
        return runner, run_timed(runner)


def calibrate(data: str, variant: str, place: str) -> Row:
    """Return the processor time of a step in seconds."""
    before, timed = CALIBRATION
    _, times = train(data, variant, place, PILOT_SEED, before + timed, RATES[0])
    return dict(step=(times[-1] - times[before]) / timed)


def measure(
    data: str, variant: str, place: str, seed: int, steps: int, rate: float, rare: Sequence[int]
) -> Row:
    """Train and evaluate; return scores in percent and the processor time in seconds."""
    begin = time.time()
    runner, times = train(data, variant, place, seed, steps, rate)
    figures = runner.val()
    iou = ious_of(runner)
    return dict(
        steps=steps,
        rate=rate,
        seconds=round(times[-1] - times[0], 2),
        wall=round(time.time() - begin, 1),
        miou=figures['mIoU'],
        boundary=figures['mBoundaryIoU'],
        rare=mean_of(iou, rare),
        iou=iou,
    )


class Comparison:
    """What is run, in which order, and what it depends on."""

    def __init__(self, results: Results, places: Dict[str, str], seconds: Dict[str, float]) -> None:
        self.results, self.places, self.seconds = results, places, seconds

    def run(self, variants: Sequence[str], seeds: Sequence[int]) -> None:
        """Run what is missing."""
        for seed in seeds:
            for data in self.places:
                for variant in variants:
                    self.one(data, variant, seed)

    def one(self, data: str, variant: str, seed: int) -> Row:
        """Return the scores of one run."""
        return self._measured('run', data, variant, seed, self.rate(variant), self.seconds[data])

    def rate(self, variant: str) -> float:
        """Return the learning rate with the higher mIoU of two in a pilot on the demo.

        Both ways of matching take the rate of fixed matching.
        """
        if variant.startswith('lite0'):
            return PRETRAINED_RATE
        data = next(iter(self.places))
        pilots = [
            self._measured(
                'pilot',
                data,
                variant.replace('hungarian', 'fixed'),
                PILOT_SEED,
                rate,
                self.seconds[data] / PILOT_SHARE,
            )
            for rate in RATES
        ]
        return max(pilots, key=lambda row: row['miou'])['rate']

    def _measured(
        self, kind: str, data: str, variant: str, seed: int, rate: float, seconds: float
    ) -> Row:
        place = self.places[data]
        step = self.results.get_or_run(
            lambda: calibrate(data, variant, place), kind='step', data=data, variant=variant
        )['step']
        rare = self.results.get_or_run(
            lambda: rare_classes(config_of(data, VARIANTS[0], place, 0, 2, RATES[0], '')),
            kind='rare',
            data=data,
        )['classes']
        steps = max(2, round(seconds / step))
        return self.results.get_or_run(
            lambda: measure(data, variant, place, seed, steps, rate, rare),
            kind=kind,
            data=data,
            variant=variant,
            seed=seed,
            rate=rate,
            budget=seconds,
        )


def print_table(rows: Sequence[Row]) -> None:
    """Print mean, lowest and highest of each figure over the seeds."""
    for data in dict.fromkeys(row['data'] for row in rows if row['kind'] == 'run'):
        rare = next(row for row in rows if row['kind'] == 'rare' and row['data'] == data)
        print(f'\n{data}; rare classes: {", ".join(rare["names"])}\n')
        print('| | seeds | steps | s | learning rate | mIoU | boundary IoU | rare classes |')
        print('|' + '---|' * 8)
        for variant in VARIANTS:
            each = [
                row
                for row in rows
                if (row['kind'], row['data'], row.get('variant')) == ('run', data, variant)
            ]
            if each:
                cells = [
                    spread([row[name] for row in each]) for name in ('miou', 'boundary', 'rare')
                ]
                seconds = np.mean([row['seconds'] for row in each])
                print(
                    f'| {variant} | {len(each)} | {each[0]["steps"]} | {seconds:.0f} | '
                    f'{each[0]["rate"]:g} | {" | ".join(cells)} |'
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--nwpu', help='folder of the NWPU polygons; left out without it')
    parser.add_argument('--demo', default='data/demo', help='where demo data is or goes')
    parser.add_argument(
        '--out', default='work_dirs/segmentors_compared.jsonl', help='file of the results'
    )
    parser.add_argument(
        '--seconds',
        type=float,
        nargs=2,
        default=[60, 60],
        metavar=('DEMO', 'NWPU'),
        help='processor time of a training, in seconds',
    )
    parser.add_argument('--seeds', type=int, nargs='+', default=[0, 1, 2], help='seeds')
    parser.add_argument(
        '--variants',
        nargs='+',
        default=list(VARIANTS),
        choices=VARIANTS,
        metavar='VARIANT',
        help=f'some of: {", ".join(VARIANTS)}',
    )
    parser.add_argument('--table', action='store_true', help='table of what there is, no run')
    args = parser.parse_args()
    results = Results(Path(args.out))
    if not args.table:
        import torch

        torch.set_num_threads(1)
        import mmseg.models  # noqa: F401  # before the forks

        import mapsage  # noqa: F401

        places = dict(demo=write_demo(Path(args.demo)))
        if args.nwpu:
            places['nwpu'] = args.nwpu
        Comparison(results, places, dict(zip(DATA, args.seconds))).run(args.variants, args.seeds)
    from _common import describe_machine

    print(describe_machine())
    print_table(results.rows())


if __name__ == '__main__':
    main()
