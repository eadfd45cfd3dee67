"""Step time of the stock MMSegmentation loop against MapSage's, as it is and with options.

    OMP_NUM_THREADS=1 python tools/benchmarks/step_options.py [--cases r18-192-4 ...] [--steps 24]

For each case runners train one model in one process, each in its own thread; a baton lets one of
them work at a time, so that all see the same machine. The stock runner is MMEngine's, with its own
optimizer wrapper and MMSegmentation's own data preprocessor; a second one shows what the place
among the runners makes of the same work. A step is everything from batch to
hooks, data loading included. Images are read as they are, so that all train on the same numbers:
the losses of the stock runner and of MapSage's defaults are compared digit for digit.

A case is model-side-batch: r18 is FCN on ResNet-18 (SGD), eff the demo's FPN on EfficientNet-Lite0
(AdamW), with random weights. --profile times the parts of a step of MapSage's defaults instead.
"""

import argparse
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, Callable

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'tools' / 'benchmarks')]
CASES = ['r18-192-4', 'eff-256-4', 'r18-128-2', 'eff-128-2']
BFLOAT16 = {'optim_wrapper.type': 'AmpOptimWrapper', 'optim_wrapper.dtype': 'bfloat16'}
LAST, FUSED = {'env_cfg.channels_last': True}, {'optim_wrapper.optimizer.fused': True}
RUNNERS = {
    'MMEngine': {},
    'MapSage': {},
    'bfloat16': BFLOAT16,
    'channels_last': LAST,
    'fused': FUSED,
    'bfloat16, fused': {**BFLOAT16, **FUSED},
    'all three': {**BFLOAT16, **LAST, **FUSED},
    'MMEngine again': {},
}
WARM_UP = 4

import numpy as np  # noqa: E402
import torch  # noqa: E402
from _common import describe_machine, write_tiles  # noqa: E402
from mmengine.config import Config  # noqa: E402
from mmengine.hooks import Hook  # noqa: E402
from mmengine.registry import MODELS, OPTIM_WRAPPERS, Registry, init_default_scope  # noqa: E402
from mmengine.runner import Runner  # noqa: E402


class Baton(Hook):
    """Times its runner's steps, and hands over after each; every runner draws its own numbers."""

    priority = 'LOWEST'

    def __init__(self) -> None:
        self.mine, self.next, self.ready = threading.Event(), self, threading.Event()
        self.seconds, self.losses, self._draws = [], [], None

    def before_train_epoch(self, runner) -> None:
        self._draws = draws()
        self.ready.set()
        self._wait()

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        self.seconds.append(
            (time.perf_counter() - self._start[0], time.process_time() - self._start[1])
        )
        self.losses.append(float(outputs['loss'].detach()))
        self._draws = draws()
        self.next.mine.set()
        if runner.iter + 1 < runner.max_iters:
            self._wait()

    def _wait(self) -> None:
        self.mine.wait()
        self.mine.clear()
        random.setstate(self._draws[0])
        np.random.set_state(self._draws[1])
        torch.set_rng_state(self._draws[2])
        self._start = time.perf_counter(), time.process_time()


def draws() -> tuple:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def make_config(case, data, work, steps, options) -> Config:
    """Return the config of one runner: MMSeg's FCN or the demo's model, images as they are."""
    model, side, batch = case.split('-')
    cfg = Config.fromfile(str(ROOT / 'tools' / 'benchmarks' / 'fcn_r18.py'))
    if model == 'eff':
        demo = Config.fromfile(str(ROOT / 'configs' / 'demo' / 'efficientnet_lite0_fpn_demo.py'))
        cfg.model, cfg.optim_wrapper = demo.model, demo.optim_wrapper
        cfg.model.backbone.init_cfg = None
    cfg.model.decode_head.dropout_ratio = 0.0
    cfg.model.data_preprocessor.size = (int(side), int(side))
    cfg.train_dataloader.batch_size = int(batch)
    cfg.train_dataloader.dataset.data_root = str(data)
    cfg.train_dataloader.dataset.pipeline = [
        each
        for each in cfg.train_dataloader.dataset.pipeline
        if each.type.startswith(('Load', 'Pack'))
    ]
    cfg.train_cfg.max_iters, cfg.work_dir, cfg.experiment_name = steps, str(work), work.name
    cfg.env_cfg, cfg.log_level = dict(accelerator='cpu'), 'ERROR'
    cfg.merge_from_dict(options)
    return cfg


def start(runner, baton) -> threading.Thread:
    """Let ``runner`` train up to its first step, where it waits for the baton."""
    runner.register_hook(baton)
    thread = threading.Thread(target=runner.train)
    thread.start()
    baton.ready.wait()
    return thread


def compare(case, steps) -> None:
    """Print the table of a case."""
    init_default_scope('mmseg')
    MODELS.get('SegDataPreProcessor')  # imports MMSegmentation
    # What MapSage registers over: put back for as long as the stock runner is built.
    hosts = {(registry, name): registry.get(name) for registry, name in overridden()}
    from mapsage.engine import MapSageRunner

    ours = {(registry, name): registry.get(name) for registry, name in hosts}
    assert all(ours[key] is not host for key, host in hosts.items())
    batons, threads = {name: Baton() for name in RUNNERS}, []
    order = list(batons.values())
    for baton, following in zip(order, order[1:] + order[:1]):
        baton.next = following
    with tempfile.TemporaryDirectory() as folder:
        data = write_tiles(Path(folder) / 'data', size=int(case.split('-')[1]))
        for number, (name, options) in enumerate(RUNNERS.items()):
            stock = name.startswith('MMEngine')
            cfg = make_config(case, data, Path(folder) / f'{case}_{number}', steps, options)
            register(hosts if stock else ours)
            threads.append(start((Runner if stock else MapSageRunner).from_cfg(cfg), batons[name]))
        order[0].mine.set()
        for thread in threads:
            thread.join()
    print_table(
        case,
        {name: baton.seconds[WARM_UP:] for name, baton in batons.items()},
        {name: baton.losses for name, baton in batons.items()},
    )


def overridden() -> list:
    from mmseg.registry import MODELS as SEG_MODELS

    return [
        (OPTIM_WRAPPERS, 'OptimWrapper'),
        (OPTIM_WRAPPERS, 'AmpOptimWrapper'),
        (SEG_MODELS, 'SegDataPreProcessor'),
    ]


def register(kinds) -> None:
    for (registry, name), kind in kinds.items():
        assert isinstance(registry, Registry)
        registry.register_module(name=name, force=True, module=kind)


def print_table(case, seconds, losses) -> None:
    equal = losses['MMEngine'] == losses['MapSage']
    print(
        f'\n{case}: losses of MMEngine and MapSage '
        f'{"equal" if equal else "DIFFER"} in {len(losses["MapSage"])} steps'
    )
    print(
        '| runner | ms/step | MMEngine / this | of processor time | last loss |\n'
        '| --- | --- | --- | --- | --- |'
    )
    stock = seconds['MMEngine']
    for name, own in seconds.items():
        wall, cpu = (
            statistics.median(one[at] / other[at] for one, other in zip(stock, own))
            for at in (0, 1)
        )
        print(
            f'| {name} | {1000 * statistics.median(each[0] for each in own):.1f} | {wall:.2f} '
            f'| {cpu:.2f} | {losses[name][-1]:.6f} |',
            flush=True,
        )


class Parts(Hook):
    """Times the parts of each step by wrapping what runs them."""

    priority = 'LOWEST'

    def __init__(self) -> None:
        self.spent, self.rows, self._start = defaultdict(float), [], None

    def before_train(self, runner) -> None:
        model, wrapper, loop = runner.model, runner.optim_wrapper, runner.train_loop
        for owner, name, part in (
            (model.data_preprocessor, 'forward', 'preprocessor'),
            (model, '_run_forward', 'forward'),
            (wrapper, 'backward', 'backward'),
            (wrapper, 'step', 'optimizer'),
            (wrapper, 'zero_grad', 'optimizer'),
            (model, 'train_step', 'train_step'),
            (runner, 'call_hook', 'hooks'),
            (loop.dataloader_iterator, '__next__', 'data'),
        ):
            if part == 'data':
                loop.dataloader_iterator = Timed(loop.dataloader_iterator, self)
            else:
                setattr(owner, name, self.timed(getattr(owner, name), part))

    def timed(self, function, part) -> Callable[..., Any]:
        def call(*args, **kwargs) -> Any:
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.spent[part] += time.perf_counter() - begin

        return call

    def before_train_iter(self, runner, batch_idx, data_batch=None) -> None:
        now = time.perf_counter()
        if self._start is not None:
            self.rows.append((now - self._start, dict(self.spent)))
            self.spent.clear()
        self._start = now


class Timed:
    """A loader's iterator whose batches are timed."""

    def __init__(self, inner, parts) -> None:
        self._next = parts.timed(lambda: next(inner), 'data')

    def __iter__(self) -> 'Timed':
        return self

    def __next__(self) -> Any:
        return self._next()


def profile(case, steps) -> None:
    """Print where a step of MapSage's defaults goes, with the pipeline of the config."""
    init_default_scope('mmseg')
    from mapsage.engine import MapSageRunner

    parts = Parts()
    with tempfile.TemporaryDirectory() as folder:
        data = write_tiles(Path(folder) / 'data', size=int(case.split('-')[1]))
        cfg = make_config(case, data, Path(folder) / case, steps, {})
        pipeline = Config.fromfile(str(ROOT / 'tools' / 'benchmarks' / 'fcn_r18.py'))
        cfg.train_dataloader.dataset.pipeline = pipeline.train_dataloader.dataset.pipeline
        runner = MapSageRunner.from_cfg(cfg)
        runner.register_hook(parts)
        runner.train()
    rows = parts.rows[WARM_UP:]
    whole = statistics.median(total for total, _ in rows)
    print(f'\n{case}: {1000 * whole:.1f} ms/step\n| part | ms | of the step |\n| --- | --- | --- |')
    for part in ('data', 'preprocessor', 'forward', 'backward', 'optimizer', 'hooks'):
        median = statistics.median(spent.get(part, 0.0) for _, spent in rows)
        print(f'| {part} | {1000 * median:.2f} | {100 * median / whole:.1f} % |')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--cases', nargs='+', default=CASES)
    parser.add_argument('--steps', type=int, default=24)
    parser.add_argument('--profile', action='store_true')
    args = parser.parse_args()
    torch.set_num_threads(1)
    if len(args.cases) == 1:
        (profile if args.profile else compare)(args.cases[0], args.steps)
        return
    bf16 = 'avx512_bf16' in Path('/proc/cpuinfo').read_text()
    print(
        describe_machine(), f'avx512_bf16 {"present" if bf16 else "MISSING"}', sep=', ', flush=True
    )
    for case in args.cases:  # a process each, since MapSage must not be imported before
        subprocess.run(
            [
                sys.executable,
                __file__,
                '--cases',
                case,
                '--steps',
                str(args.steps),
                *['--profile'] * args.profile,
            ],
            check=True,
        )


if __name__ == '__main__':
    main()
