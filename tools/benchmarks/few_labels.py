"""Few labels: what unlabeled images, a second stage and suggested tiles add, at equal time.

    OMP_NUM_THREADS=1 python tools/benchmarks/few_labels.py --nwpu data/nwpu_polygons

Trains the configs of configs/demo and configs/nwpu for few labels in one process: on the labels
alone, with pseudo-labels, with FixMatch, and with FixMatch and channel dropout. Behind the best of
them comes a second stage with JaccardLoss, and as its control as many steps of plain cross-entropy.
On the demo, 16 labels and 16 more that tools/suggest_labels.py chose are compared with 16 and 16 at
random. A seed chooses the labeled images too, the same ones for all.

Equal time is equal processor time of the process that trains: loading is in it (no loader workers),
start and validation are not. For pseudo-labels, both trainings and the prediction between them share
this time: each training gets half of what the prediction leaves. A few steps of each method say how many fit.

Every result is a line of results.jsonl in ``--work-dir``. Lines that are there are not run again,
so the script can be killed at any time and called again; ``--table`` prints what there is.
"""

from __future__ import annotations

import argparse
import csv
import functools
import importlib
import os
import random
import shutil
import sys
import time
from pathlib import Path
from typing import Any, Dict, List, Sequence

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

DATA = ('demo', 'nwpu')
LABELS = dict(demo=(16, 48), nwpu=(16, 40))
CONFIGS = dict(demo='demo_48', nwpu='nwpu_40')
METHODS = ('labels alone', 'pseudo-labels', 'FixMatch', 'FixMatch, channel dropout')
STAGES = ('more steps', 'stage two')
ROUNDS = ('16 + 16 at random', '16 + 16 suggested')
FIRST, NEXT = 16, 16  # labels of the rounds
BATCH = 4  # labeled images, and as many unlabeled ones
RATE = 1e-3
STAGE_SHARE = 4  # of the time, the part that a second stage takes
WHOLE = dict(demo=128, nwpu=672)  # side of a window that holds an image, as validation sees it
WARMUP = 20  # steps
CALIBRATION = (3, 15)  # steps that are run before the clock, and with it
_KINDS = {'FixMatch': '_fixmatch', 'FixMatch, channel dropout': '_fixmatch_dropout'}


def read_config(data: str, method: str, names: Path) -> Any:
    """Return the shipped config of a method, with the list of the labeled images in its place."""
    from mmengine.config import Config

    name = f'efficientnet_lite0_fpn_{CONFIGS[data]}{_KINDS.get(method, "")}.py'
    cfg = Config.fromfile(str(ROOT / 'configs' / data / name))
    dataset = cfg.train_dataloader.dataset
    for part in (dataset.get('labeled', dataset), dataset.get('unlabeled')):
        if part is not None:
            part.names = str(names)
    if method in _KINDS:
        cfg.train_dataloader.sampler.update(labeled=BATCH, unlabeled=BATCH)
    cfg.train_dataloader.batch_size = BATCH * (2 if method in _KINDS else 1)
    return cfg


def scheduled(cfg: Any, seed: int, steps: int, work_dir: Path, rate: float = RATE) -> Any:
    """Return a config that trains for some steps in this process and keeps the last checkpoint."""
    warmup = min(WARMUP, steps // 2)
    cfg.optim_wrapper.optimizer.lr = rate
    cfg.param_scheduler = [
        dict(type='LinearLR', start_factor=0.05, begin=0, end=warmup, by_epoch=False),
        dict(type='PolyLR', power=0.9, eta_min=rate / 100, begin=warmup, end=steps, by_epoch=False),
    ]
    cfg.custom_hooks = [
        *cfg.get('custom_hooks', []),
        dict(type='ProgressBarHook', refresh_interval=1e9),
    ]
    loader = dict(num_workers=0, persistent_workers=False)
    cfg.merge_from_dict(
        {
            'train_cfg.max_iters': steps,
            'train_cfg.val_interval': 10 * steps,
            'train_dataloader': loader,
            'val_dataloader': loader,
            'default_hooks.checkpoint': dict(
                interval=steps, save_best=None, save_optimizer=False, save_param_scheduler=False
            ),
            'default_hooks.logger.interval': 100,
            'randomness.seed': seed,
            'env_cfg.accelerator': 'cpu',
            'env_cfg.virtual_ranks': 1,
            'log_level': 'WARNING',
        }
    )
    cfg.val_evaluator = [
        dict(type='ConfusionMatrixMetric', iou_metrics=['mIoU', 'mBoundaryIoU']),
        dict(type='CalibrationError'),
    ]
    cfg.test_evaluator = cfg.val_evaluator
    cfg.visualizer.vis_backends = []
    cfg.launcher, cfg.work_dir = 'none', str(work_dir)
    return cfg


def train(cfg: Any) -> Any:
    """Train; return the runner, and processor time at the start and after each step, in s."""
    from mapsage.commands.cli import build_runner

    shutil.rmtree(cfg.work_dir, ignore_errors=True)
    cfg.dump(_config_file(Path(cfg.work_dir)))
    runner = build_runner(cfg)
    return runner, run_timed(runner)


def scores(runner: Any, rare: Sequence[int]) -> Row:
    """Return the scores of a validation, in percent."""
    figures = runner.val()
    iou = ious_of(runner)
    return dict(
        miou=figures['mIoU'],
        boundary=figures['mBoundaryIoU'],
        rare=mean_of(iou, rare),
        ece=round(float(figures['ECE']), 2),
        iou=iou,
    )


def run_tool(name: str, *arguments: Any) -> None:
    """Run one of tools/ in this process.

    Raises:
        RuntimeError: If its exit status is not 0.
    """
    program = importlib.import_module(f'mapsage.commands.{name}')
    status = program.main([str(argument) for argument in arguments])
    if status:
        raise RuntimeError(f'tools/{name}.py ended with status {status}')


def images_of(data: str) -> List[str]:
    """Return the paths of the training images, sorted."""
    from mmengine.config import Config
    from mmengine.registry import DATASETS, init_default_scope

    init_default_scope('mmseg')
    cfg = Config.fromfile(str(ROOT / f'configs/{data}/efficientnet_lite0_fpn_{data}.py'))
    dataset = DATASETS.build(cfg.train_dataloader.dataset)
    dataset.full_init()
    return sorted(dataset.get_data_info(index)['img_path'] for index in range(len(dataset)))


def _config_file(work_dir: Path) -> str:
    work_dir.mkdir(parents=True, exist_ok=True)
    return str(work_dir / 'run_config.py')


class Comparison:
    """What is run, in which order, and what it depends on.

    Args:
        folder: Folder of results, lists of labeled images and checkpoints.
        seconds: Processor time of a training on each data set, in seconds.
    """

    def __init__(self, folder: Path, seconds: Dict[str, float]) -> None:
        self.results, self.seconds = Results(folder / 'results.jsonl'), seconds
        self._folder = folder
        self._images = {data: images_of(data) for data in seconds}

    def run(self, seeds: Sequence[int]) -> None:
        """Run what is missing: all methods, label rounds, and then the stages of the best."""
        for seed in seeds:
            for data in self.seconds:
                for labels in LABELS[data]:
                    for method in METHODS:
                        self.one(data, labels, method, seed)
                if data == DATA[0]:
                    for way in ROUNDS:
                        self.round(data, way, seed)
        for data in self.seconds:
            for labels in LABELS[data]:
                best = best_method(self.results.rows(), data, labels)
                for seed in seeds:
                    for stage in STAGES:
                        self.stage(data, labels, best, stage, seed)

    def one(self, data: str, labels: int, method: str, seed: int) -> Row:
        """Return the scores of a method."""
        names = self._chosen(data, labels, seed)
        return self._row(
            self._pseudo if method == METHODS[1] else self._train,
            kind='run',
            data=data,
            labels=labels,
            method=method,
            seed=seed,
            names=names,
        )

    def round(self, data: str, way: str, seed: int) -> Row:
        """Return the scores of a training on the first labels and those of a second round."""
        count = FIRST + NEXT
        if way == ROUNDS[0]:
            names = self._chosen(data, count, seed)
        else:
            self.one(data, FIRST, METHODS[0], seed)
            found = self.results.get_or_run(
                lambda: self._suggest(data, seed), kind='suggest', data=data, seed=seed
            )
            names = self._list(
                f'{data}_{seed}_suggested', [*self._order(data, seed)[:FIRST], *found['names']]
            )
        return self._row(
            self._train, kind='round', data=data, labels=count, method=way, seed=seed, names=names
        )

    def stage(self, data: str, labels: int, best: str, stage: str, seed: int) -> Row:
        """Return the scores of a second stage, or of its control."""
        names = self._chosen(data, labels, seed)
        return self._row(
            self._stage,
            kind='stage',
            data=data,
            labels=labels,
            method=stage,
            seed=seed,
            names=names,
            after=best,
        )

    def _row(self, work: Any, names: Path, **key: Any) -> Row:
        data = key['data']
        rare = self.results.get_or_run(lambda: rare_classes(_plain(data)), kind='rare', data=data)[
            'classes'
        ]
        place = self._place(key)
        budget = self.seconds[data] / (STAGE_SHARE if key['kind'] == 'stage' else 1)
        return self.results.get_or_run(
            lambda: work(place, names, rare, budget, **key), budget=budget, **key
        )

    def _steps(self, data: str, method: str, seconds: float) -> int:
        """Return the steps that fit into a time."""
        before, timed = CALIBRATION

        def calibrate(method: str) -> Row:
            cfg = read_config(data, method, self._chosen(data, FIRST, 0))
            place = self._folder.absolute() / 'runs/calibration'
            _, times = train(scheduled(cfg, 0, before + timed, place))
            return dict(step=float(np.median(np.diff(times[before:]))))

        # One after another: equally busy.
        step = {
            each: self.results.get_or_run(
                functools.partial(calibrate, each), kind='step', data=data, method=each
            )['step']
            for each in METHODS
            if each != METHODS[1]
        }
        return max(2, round(seconds / step[method]))

    def _train(
        self,
        place: Path,
        names: Path,
        rare: Sequence[int],
        budget: float,
        data: str,
        method: str,
        seed: int,
        kind: str,
        **_: Any,
    ) -> Row:
        method = method if kind == 'run' else METHODS[0]
        steps, begin = self._steps(data, method, budget), time.time()
        runner, times = train(scheduled(read_config(data, method, names), seed, steps, place))
        return dict(
            scores(runner, rare),
            steps=steps,
            seconds=round(times[-1] - times[0], 1),
            wall=round(time.time() - begin, 1),
        )

    def _pseudo(
        self,
        place: Path,
        names: Path,
        rare: Sequence[int],
        budget: float,
        data: str,
        seed: int,
        **_: Any,
    ) -> Row:
        from mmengine.config import Config

        first, begin = self._steps(data, METHODS[0], budget / 2), time.time()
        cfg = scheduled(read_config(data, METHODS[0], names), seed, first, place / 'first')
        _, times = train(cfg)
        spent = times[-1] - times[0]
        known = set(names.read_text().split())
        rest = [path for path in self._images[data] if Path(path).stem not in known]
        clock = time.process_time()
        shutil.rmtree(place / 'masks', ignore_errors=True)
        run_tool(
            'predict',
            _config_file(place / 'first'),
            place / f'first/iter_{first}.pth',
            *rest,
            '--pseudo-labels',
            place / 'masks',
            '--window',
            WHOLE[data],
            '--overlap',
            0,
        )
        predicted = time.process_time() - clock
        spent += predicted
        steps = self._steps(data, METHODS[0], max(0.0, budget - spent))
        runner, times = train(
            scheduled(
                Config.fromfile(str(place / 'masks/pseudo_labels.py')),
                seed,
                steps,
                place / 'second',
            )
        )
        return dict(
            scores(runner, rare),
            steps=steps,
            first=first,
            predicted=round(predicted, 1),
            seconds=round(spent + times[-1] - times[0], 1),
            wall=round(time.time() - begin, 1),
        )

    def _stage(
        self,
        place: Path,
        names: Path,
        rare: Sequence[int],
        budget: float,
        data: str,
        labels: int,
        method: str,
        seed: int,
        after: str,
        **_: Any,
    ) -> Row:
        steps, begin = self._steps(data, METHODS[0], budget), time.time()
        cfg = scheduled(read_config(data, METHODS[0], names), seed, steps, place, RATE / 10)
        cfg.load_from = str(self._checkpoint(data, labels, after, seed, names, rare))
        if method == STAGES[1]:
            cfg.model.decode_head.loss_decode = [
                dict(type='CrossEntropyLoss', loss_weight=0.25, avg_non_ignore=True),
                dict(type='JaccardLoss', loss_weight=0.75, band_weight=0.5),
            ]
        runner, times = train(cfg)
        return dict(
            scores(runner, rare),
            steps=steps,
            seconds=round(times[-1] - times[0], 1),
            wall=round(time.time() - begin, 1),
        )

    def _suggest(self, data: str, seed: int) -> Row:
        """Return the images of the windows to label next, one window of each at most."""
        names = self._chosen(data, FIRST, seed)
        checkpoint = self._checkpoint(data, FIRST, METHODS[0], seed, names, [0])
        run = checkpoint.parent
        known = set(self._order(data, seed)[:FIRST])
        rest = [path for path in self._images[data] if Path(path).stem not in known]
        table = run / 'next_tiles.csv'
        table.unlink(missing_ok=True)
        clock = time.process_time()
        run_tool(
            'suggest_labels',
            _config_file(run),
            checkpoint,
            *rest,
            '--count',
            NEXT,
            '--tta',
            '--min-distance',
            1000,
            '--out',
            table,
        )
        with open(table, encoding='utf-8', newline='') as file:
            found = [Path(row['path']).stem for row in csv.DictReader(file)]
        if len(set(found)) != NEXT:
            raise RuntimeError(f'{table} names {len(set(found))} images, expected {NEXT}')
        return dict(names=found, seconds=round(time.process_time() - clock, 1))

    def _checkpoint(
        self, data: str, labels: int, method: str, seed: int, names: Path, rare: Sequence[int]
    ) -> Path:
        """Return the last checkpoint of a run; one that is gone is trained again."""
        key = dict(kind='run', data=data, labels=labels, method=method, seed=seed)
        place = self._place(key)
        if not any(place.rglob('iter_*.pth')):
            work = self._pseudo if method == METHODS[1] else self._train
            work(place, names, rare, self.seconds[data], **key)
        return max(place.rglob('iter_*.pth'), key=os.path.getmtime)

    def _order(self, data: str, seed: int) -> List[str]:
        """Return the names of the training images in the order in which they are labeled."""
        names = [Path(path).stem for path in self._images[data]]
        random.Random(seed).shuffle(names)
        return names

    def _chosen(self, data: str, count: int, seed: int) -> Path:
        return self._list(f'{data}_{seed}_{count}', self._order(data, seed)[:count])

    def _list(self, name: str, images: Sequence[str]) -> Path:
        path = self._folder / f'lists/{name}.txt'
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('\n'.join(images) + '\n', encoding='utf-8')
        return path.absolute()

    def _place(self, key: Row) -> Path:
        words = [key['kind'], key['data'], key['labels'], key['method'], key['seed']]
        return (
            self._folder.absolute()
            / 'runs'
            / '_'.join(str(word) for word in words).replace(', ', '_').replace(' ', '_')
        )


def best_method(rows: Sequence[Row], data: str, labels: int) -> str:
    """Return the method with the highest mean mIoU."""
    return max(
        METHODS,
        key=lambda method: np.mean(
            [row['miou'] for row in _runs(rows, 'run', data, labels, method).values()] or [-1]
        ),
    )


def _plain(data: str) -> Any:
    from mmengine.config import Config

    return Config.fromfile(str(ROOT / f'configs/{data}/efficientnet_lite0_fpn_{data}.py'))


def _runs(rows: Sequence[Row], kind: str, data: str, labels: int, method: str) -> Dict[int, Row]:
    """Return the runs of a method by their seeds."""
    return {
        row['seed']: row
        for row in rows
        if (row['kind'], row['data'], row.get('labels'), row.get('method'))
        == (kind, data, labels, method)
    }


def print_table(rows: Sequence[Row]) -> None:
    """Print mean, lowest and highest of each figure over the seeds, and the gains seed by seed."""
    for data in dict.fromkeys(row['data'] for row in rows if row['kind'] == 'run'):
        rare = next(row for row in rows if row['kind'] == 'rare' and row['data'] == data)
        print(f'\n{data}; rare classes: {", ".join(rare["names"])}\n')
        print(
            '| labels | | seeds | steps | s | mIoU | boundary IoU | rare classes | ECE | '
            'mIoU gained |'
        )
        print('|' + '---|' * 10)
        for labels in LABELS[data]:
            best = best_method(rows, data, labels)
            for method in METHODS:
                _print_line(rows, ('run', data, labels, method), ('run', data, labels, METHODS[0]))
            for stage in STAGES:
                _print_line(
                    rows,
                    ('stage', data, labels, stage),
                    ('run', data, labels, best),
                    f' after {best}',
                )
        for way in ROUNDS:
            _print_line(
                rows, ('round', data, FIRST + NEXT, way), ('round', data, FIRST + NEXT, ROUNDS[0])
            )


def _print_line(rows: Sequence[Row], key: Any, before: Any, more: str = '') -> None:
    each, base = _runs(rows, *key), _runs(rows, *before)
    if not each:
        return
    cells = [
        spread([row[name] for row in each.values()]) for name in ('miou', 'boundary', 'rare', 'ece')
    ]
    gained = [row['miou'] - base[seed]['miou'] for seed, row in each.items() if seed in base]
    some = next(iter(each.values()))
    steps = f'{some["first"]} + {some["steps"]}' if 'first' in some else some['steps']
    seconds = np.mean([row['seconds'] for row in each.values()])
    print(
        f'| {key[2]} | {key[3]}{more} | {len(each)} | {steps} | {seconds:.0f} | '
        f'{" | ".join(cells)} | {spread(gained) if gained and key != before else ""} |'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--nwpu', help='folder of the NWPU polygons; left out without it')
    parser.add_argument('--only', choices=DATA, help='data to run, for a process of each')
    parser.add_argument('--demo', default='data/demo', help='where demo data is or goes')
    parser.add_argument(
        '--work-dir', default='work_dirs/few_labels', help='folder of the results and checkpoints'
    )
    parser.add_argument(
        '--seconds',
        type=float,
        nargs=2,
        default=[150, 150],
        metavar=('DEMO', 'NWPU'),
        help='processor time of a training, in seconds',
    )
    parser.add_argument('--seeds', type=int, nargs='+', default=[0, 1, 2], help='seeds')
    parser.add_argument('--table', action='store_true', help='table of what there is, no run')
    args = parser.parse_args()
    folder = Path(args.work_dir)
    if not args.table:
        import torch

        torch.set_num_threads(1)
        import mmseg.models  # noqa: F401  # before the forks

        import mapsage  # noqa: F401

        seconds = {}
        if args.only != 'nwpu':
            os.environ['MAPSAGE_DEMO'] = str(Path(write_demo(Path(args.demo))).absolute())
            seconds['demo'] = args.seconds[0]
        if args.nwpu and args.only != 'demo':
            os.environ['MAPSAGE_NWPU'] = str(Path(args.nwpu).absolute())
            seconds['nwpu'] = args.seconds[1]
        Comparison(folder, seconds).run(args.seeds)
    from _common import describe_machine

    print(describe_machine())
    print_table(Results(folder / 'results.jsonl').rows())


if __name__ == '__main__':
    main()
