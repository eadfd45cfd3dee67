"""F1 of change of several configs at equal processor time, on pairs shifted by 0, 1 and 2 pixels.

    python tools/make_demo_data.py data/change --change
    python tools/benchmarks/change.py configs/change/siamese_fpn_change.py \\
        configs/change/unet_change.py --seeds 0 1 2 --seconds 60
    python tools/benchmarks/change.py configs/change/siamese_fpn_change.py --seconds 60 \\
        --without ShiftDate
    python tools/benchmarks/change.py --table

Each row is one training, in a separate process with one thread. The number of steps is the
processor time divided by the time of a step, which is measured first, once for each config; loading
and augmentation count, start and evaluation do not. The second date of the validation pairs is
shifted to the right by whole pixels; the labels stay with the first date.

Rows are appended to results.jsonl in ``--work-dir``. Rows that are there are not run again, so the
script can be killed and started again. ``--table`` prints mean and standard deviation over seeds.
"""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, List, Tuple

import numpy as np
import torch
from mmengine.config import Config
from mmengine.registry import DefaultScope

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'tools' / 'benchmarks')]

from _results import Results, Row, run_timed  # noqa: E402

import mapsage  # noqa: E402, F401
from mapsage.engine import MapSageRunner  # noqa: E402

_CALIBRATION_STEPS, _SKIPPED_STEPS = 12, 4
_SHIFTS = (0, 1, 2)
# Pairs of the validation that are evaluated: the first four scenes of the demo.
_PAIRS = 100


def read_config(
    path: str, seed: int, steps: int, without: List[str], workers: int, work_dir: str
) -> Config:
    """Return a config that trains for some steps and does not validate."""
    cfg = Config.fromfile(path)
    cfg.work_dir, cfg.randomness = work_dir, dict(seed=seed)
    cfg.train_cfg = dict(type='IterBasedTrainLoop', max_iters=steps, val_interval=10**9)
    cfg.train_dataloader.dataset.pipeline = [
        step for step in cfg.train_dataloader.dataset.pipeline if step['type'] not in without
    ]
    cfg.train_dataloader.update(num_workers=workers, persistent_workers=workers > 0)
    warmup = min(20, steps // 5)
    cfg.param_scheduler = [
        dict(type='LinearLR', start_factor=0.05, begin=0, end=warmup, by_epoch=False),
        dict(type='PolyLR', power=0.9, eta_min=1e-5, begin=warmup, end=steps, by_epoch=False),
    ]
    cfg.default_hooks.checkpoint = dict(
        type='CheckpointHook', by_epoch=False, interval=10**9, save_last=False
    )
    cfg.visualizer = dict(type='SegLocalVisualizer', vis_backends=[], name=f'{seed}{steps}')
    cfg.log_level = 'WARNING'
    # The loop would validate after its last step, on all pairs.
    cfg.validation = dict(dataloader=cfg.val_dataloader, evaluator=cfg.val_evaluator)
    cfg.val_dataloader = cfg.val_evaluator = cfg.val_cfg = None
    return cfg


def train(
    path: str, seed: int, steps: int, without: List[str], workers: int = 0
) -> Tuple[Any, np.ndarray]:
    """Train a config; return the runner and the processor time of each step in seconds."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as work_dir:
        cfg = read_config(path, seed, steps, without, workers, work_dir)
        cfg.experiment_name = f'{Path(path).stem}_{seed}_{steps}_{time.monotonic_ns()}'
        runner = MapSageRunner.from_cfg(cfg)
        times = run_timed(runner)
    return runner, np.diff(times)


def evaluate(runner: Any, shift: int) -> Dict[str, float]:
    """Return the scores on the validation pairs, with the second date shifted to the right."""
    cfg = runner.cfg.copy()
    loader = cfg.validation.dataloader
    pipeline = list(loader.dataset.pipeline)
    pipeline.insert(len(pipeline) - 1, dict(type='ShiftDate', fixed=(shift, 0)))
    loader.dataset.pipeline, loader.dataset.indices = pipeline, _PAIRS
    with DefaultScope.overwrite_default_scope('mmseg'):
        data = runner.build_dataloader(loader, seed=0)
        evaluator = runner.build_evaluator(cfg.validation.evaluator)
    evaluator.dataset_meta = data.dataset.metainfo
    runner.model.eval()
    for batch in data:
        with torch.no_grad():
            evaluator.process(data_samples=runner.model.val_step(batch), data_batch=batch)
    return evaluator.evaluate(len(data.dataset))


def measure_step(path: str) -> Row:
    """Return the processor time of a training step of a config."""
    times = train(path, 0, _CALIBRATION_STEPS, [])[1]
    return dict(step_seconds=round(float(np.median(times[_SKIPPED_STEPS:])), 3))


def measure_scores(path: str, seed: int, steps: int, without: List[str], workers: int) -> Row:
    """Train a config, and return its scores at all shifts."""
    runner, times = train(path, seed, steps, without, workers)
    scores = {shift: evaluate(runner, shift) for shift in _SHIFTS}
    return dict(
        steps=steps,
        device=str(next(runner.model.parameters()).device),
        train_seconds=round(float(times.sum()), 1),
        parameters=sum(value.numel() for value in runner.model.parameters()),
        scores=scores[0],
        F1=[scores[shift]['F1'] for shift in _SHIFTS],
    )


def print_table(rows: List[Row]) -> None:
    """Print mean and standard deviation over the seeds of each config, as Markdown."""
    groups: Dict[Tuple[Any, ...], List[Row]] = {}
    for row in rows:
        if 'F1' in row:
            key = row['config'], row['without'], row['seconds'], row['parameters']
            groups.setdefault(key, []).append(row)
    print(
        '| config | without | seconds | parameters | seeds | steps | IoU |',
        ' | '.join(f'F1 at {shift} px' for shift in _SHIFTS),
        '| F1 lost at 2 px |',
    )
    print('|---' * (8 + len(_SHIFTS)) + '|')
    for (config, without, seconds, parameters), group in sorted(groups.items()):
        f1 = np.array([row['F1'] for row in group])
        cells = [
            _spread(np.array([row['scores']['IoU'] for row in group])),
            *(_spread(column) for column in f1.T),
            _spread(f1[:, 0] - f1[:, -1]),
        ]
        print(
            f'| {config} | {without or "-"} | {seconds:g} | {parameters / 1e6:.2f} M | '
            f'{len(group)} | {group[0]["steps"]} | {" | ".join(cells)} |'
        )


def _spread(values: np.ndarray) -> str:
    return f'{values.mean():.1f} ± {values.std(ddof=1) if len(values) > 1 else float("nan"):.1f}'


def main() -> None:
    """Train and evaluate what has no row yet, and print a line of JSON for each training."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('configs', nargs='*')
    parser.add_argument('--seeds', type=int, nargs='+', default=[0, 1, 2])
    parser.add_argument('--seconds', type=float, default=60, help='processor time of a training')
    parser.add_argument(
        '--without',
        nargs='*',
        default=[],
        metavar='TRANSFORM',
        help='transforms of the training that are left out',
    )
    parser.add_argument(
        '--workers',
        type=int,
        default=0,
        help='loader processes, for a card: the steps are those of the processor '
        'time that results.jsonl has from a CPU, and the process does not fork',
    )
    parser.add_argument('--work-dir', type=Path, default=Path('work_dirs/change_benchmark'))
    parser.add_argument('--table', action='store_true', help='print the table of all rows')
    args = parser.parse_args()
    results = Results(args.work_dir / 'results.jsonl')
    for seed in args.seeds:
        for path in args.configs:
            step = results.get_or_run(
                functools.partial(measure_step, path), kind='step', config=Path(path).stem
            )
            steps = max(20, round(args.seconds / step['step_seconds']))
            results.get_or_run(
                functools.partial(measure_scores, path, seed, steps, args.without, args.workers),
                in_process=args.workers > 0,
                config=Path(path).stem,
                seed=seed,
                without=' '.join(args.without),
                seconds=args.seconds,
            )
    if args.table:
        print_table(results.rows())


if __name__ == '__main__':
    main()
