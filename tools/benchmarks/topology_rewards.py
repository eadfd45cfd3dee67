"""Roads in one piece, buildings apart: cross-entropy, a topology loss and rewards at equal time.

    OMP_NUM_THREADS=1 python tools/benchmarks/topology_rewards.py [--seconds 150] [--seeds 0 1 2]

The demo's model of 200 steps is tuned further in one process and thread in three ways: by
cross-entropy, by cross-entropy with the centerline Dice loss on roads, and by `GroupRewardTuning`
with the rewards `UnbrokenLength` of roads and `ComponentsFound` of buildings. Each way takes as
many steps as fit into ``--seconds`` of processor time; its speed is measured first. A fourth row is
cross-entropy for as many steps as the rewards took. The table has
means over the seeds with the largest distance from the mean, in percent. Results are appended to
``--out`` as they come, and runs that it holds are not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, List

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

WAYS = ('cross-entropy', 'centerline Dice', 'rewards')
FEW_STEPS = 'cross-entropy, few'
ROAD, BUILDING = 2, 1
REWARDS = [
    dict(type='UnbrokenLength', classes=[ROAD]),
    dict(type='ComponentsFound', classes=[BUILDING]),
]
METRICS = ('UnbrokenLength', 'ComponentsFound', 'mIoU', 'mBoundaryIoU', 'ECE')
# Steps that measure the speed of a way; the first ones are slower.
_WARM_UP, _TIMED = 2, 6


def config_of(way: str, seed: int, steps: int, data: str, checkpoint: str) -> Any:
    """Return the config of a run; with an empty ``checkpoint``, of the first 200 steps."""
    from mmengine.config import Config

    cfg = Config.fromfile(str(ROOT / 'configs/demo/efficientnet_lite0_fpn_demo.py'))
    cfg.merge_from_dict(
        {
            'train_cfg.max_iters': steps,
            'train_cfg.val_interval': 10 * steps,
            'train_dataloader.batch_size': 16,
            'train_dataloader.dataset.data_root': data,
            'val_dataloader.dataset.data_root': data,
            'randomness.seed': seed,
            'default_hooks.checkpoint.interval': steps,
            'default_hooks.logger.interval': 50,
            'env_cfg.accelerator': 'cpu',
            'env_cfg.virtual_ranks': None,
            'param_scheduler.1.end': steps,
            'custom_hooks': [dict(type='ProgressBarHook', refresh_interval=1e9)],
        }
    )
    cfg.visualizer.vis_backends = [dict(type='LocalVisBackend')]
    cfg.val_evaluator = [
        dict(type='ConfusionMatrixMetric', iou_metrics=['mIoU', 'mBoundaryIoU']),
        dict(type='MeanReward', rewards=REWARDS),
        dict(type='CalibrationError'),
    ]
    cfg.test_evaluator, cfg.test_dataloader = cfg.val_evaluator, cfg.val_dataloader
    cfg.runner_type, cfg.launcher = 'MapSageRunner', 'none'
    if not checkpoint:
        return cfg
    cfg.load_from = checkpoint
    cfg.optim_wrapper.optimizer.lr = 1e-4
    cfg.param_scheduler[0].end = cfg.param_scheduler[1].begin = min(10, steps // 2)
    if way == 'centerline Dice':
        cfg.model.decode_head.loss_decode = [
            dict(type='CrossEntropyLoss', loss_weight=0.7, avg_non_ignore=True),
            dict(type='CenterlineDiceLoss', classes=[ROAD], iterations=4, loss_weight=0.3),
        ]
    if way == 'rewards':
        cfg.custom_hooks.append(
            dict(
                type='DynamicSamplingHook',
                validity=dict(eps=0),
                max_age=0,
                shortfall='pad',
                score=dict(
                    type='GroupRewardTuning',
                    rewards=REWARDS,
                    weights=[0.5, 0.5],
                    maps=8,
                    region=4,
                    anchor=0.7,
                ),
            )
        )
    return cfg


def run_one(
    way: str, seed: int, steps: int, data: str, checkpoint: str, work_dir: str
) -> Dict[str, Any]:
    """Train and evaluate in this process; return scores in percent, steps and seconds."""
    from mapsage.commands.cli import build_runner

    cfg = config_of(way, seed, steps, data, checkpoint)
    cfg.work_dir = work_dir
    runner = build_runner(cfg)
    seconds, scores = 0.0, {}
    if way == 'before':
        scores = runner.test()
    else:
        # The training would end with a validation, whose time is not to count.
        loop, runner._val_loop = runner.val_loop, None
        begin = time.process_time()
        runner.train()
        seconds, runner._val_loop = time.process_time() - begin, loop
        if steps > _WARM_UP + _TIMED:
            scores = loop.run()
    scores = {key.split('/')[-1]: value for key, value in scores.items()}
    return dict(
        {name: float(scores[name]) for name in METRICS if name in scores},
        way=way,
        seed=seed,
        steps=steps,
        seconds=round(seconds, 1),
    )


def run_apart(*arguments: Any) -> Dict[str, Any]:
    """Return the result of :func:`run_one` in a new process."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, 'result.json')
        subprocess.run(
            [
                sys.executable,
                __file__,
                '--run',
                json.dumps([*arguments, folder]),
                '--out',
                str(result),
            ],
            stdout=subprocess.DEVNULL,
            check=True,
        )
        return json.loads(result.read_text())


def seconds_of_a_step(way: str, data: str, checkpoint: str) -> float:
    """Return the processor time of a step."""
    short, long = (
        run_apart(way, 0, steps, data, checkpoint)['seconds']
        for steps in (_WARM_UP, _WARM_UP + _TIMED)
    )
    return (long - short) / _TIMED


def table(rows: List[Dict[str, Any]]) -> str:
    """Return the results as a table."""
    lines = [f'{"":24}{"steps":>7}' + ''.join(f'{name:>18}' for name in METRICS)]
    for way in ('before', *WAYS, FEW_STEPS):
        runs = [row for row in rows if row['way'] == way]
        if runs:
            line = f'{way + f" ({len(runs)} runs)":24}{runs[0]["steps"]:7}'
            for name in METRICS:
                values = np.array([row[name] for row in runs])
                line += f'{values.mean():11.2f} ± {abs(values - values.mean()).max():4.2f}'
            lines.append(line)
    return '\n'.join(lines)


def main() -> None:
    """Run what ``--out`` lacks, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
    parser.add_argument('--seconds', type=float, default=150)
    parser.add_argument('--seeds', type=int, nargs='+', default=[0, 1, 2])
    parser.add_argument('--out', type=Path, default=Path('work_dirs/topology_rewards'))
    parser.add_argument('--run', help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        args.out.write_text(json.dumps(run_one(*json.loads(args.run))))
        # Once in ten runs, a thread of a library aborted the interpreter's end.
        os._exit(0)
    from mapsage.extras.demo import write_demo_data

    args.out.mkdir(parents=True, exist_ok=True)
    data, results = args.out / 'data', args.out / 'results.jsonl'
    if not data.exists():
        write_demo_data(data)
    lines = results.read_text().splitlines() if results.exists() else []
    rows = [json.loads(line) for line in lines]

    def keep(row: Dict[str, Any]) -> None:
        rows.append(row)
        with results.open('a') as file:
            file.write(json.dumps(row) + '\n')
        print(row, flush=True)

    checkpoint = args.out / 'stage_one/iter_200.pth'
    if not checkpoint.exists():
        run_one('stage one', 0, 200, str(data), '', str(checkpoint.parent))
    if not any(row['way'] == 'before' for row in rows):
        keep(run_apart('before', 0, 200, str(data), str(checkpoint)))
    for way in (*WAYS, FEW_STEPS):
        seeds = set(args.seeds) - {row['seed'] for row in rows if row['way'] == way}
        if seeds:
            steps = (
                [row['steps'] for row in rows if row['way'] == 'rewards'][0]
                if way == FEW_STEPS
                else round(args.seconds / seconds_of_a_step(way, str(data), str(checkpoint)))
            )
            for seed in sorted(seeds):
                keep(run_apart(way, seed, steps, str(data), str(checkpoint)))
    print(table(rows))


if __name__ == '__main__':
    main()
