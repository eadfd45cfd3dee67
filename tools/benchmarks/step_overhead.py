"""What MapSage adds to a stock step: the same model by MMEngine's Runner and by MapSageRunner.

    OMP_NUM_THREADS=1 python tools/benchmarks/step_overhead.py [--cases ...] [--steps 320]

For each case four runners train one model in one process, each in a thread: MMEngine's, two of
MapSage, and MMEngine's again, built in this order. A baton lets one of them work at a time, so that
all see the same machine. A step is everything from batch to hooks: loading, augmentation, and the
log, which is written every 50 steps. Which memory a runner gets depends on when it is built, which
moves the time of equal kernels by more than the 2 % in question. So two figures are printed: the
ratio of whole steps, and MapSage's own cost, the difference of what a step takes besides the
model's loss, the backward pass without the hooks of tensors, and the optimizer's kernels, as a
share of the stock step.

A case is model-side-batch, with `-fused` for a fused optimizer: r18 is FCN on ResNet-18 (SGD), eff
the demo's FPN on EfficientNet-Lite0 (AdamW), mit SegFormer-B0 (AdamW, a group for every parameter).
"""

import argparse
import functools
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'tools' / 'benchmarks')]
CASES = ['r18-128-2', 'eff-128-2', 'mit-128-2-fused']
# Two stock runners around two of MapSage: an effect of the order that grows evenly cancels out.
RUNNERS = ('MMEngine', 'MapSage', 'MapSage again', 'MMEngine again')
WARM_UP, BLOCK = 20, 50

import torch  # noqa: E402
from _common import describe_machine, write_tiles  # noqa: E402
from mmengine.config import Config  # noqa: E402
from mmengine.hooks import Hook  # noqa: E402
from mmengine.model import is_model_wrapper  # noqa: E402
from mmengine.registry import MODELS, init_default_scope  # noqa: E402
from mmengine.runner import Runner  # noqa: E402
from step_options import overridden, register  # noqa: E402

MIT = dict(
    type='EncoderDecoder',
    backbone=dict(
        type='MixVisionTransformer',
        in_channels=3,
        embed_dims=32,
        num_stages=4,
        num_layers=[2, 2, 2, 2],
        num_heads=[1, 2, 5, 8],
        patch_sizes=[7, 3, 3, 3],
        sr_ratios=[8, 4, 2, 1],
        out_indices=(0, 1, 2, 3),
        mlp_ratio=4,
        qkv_bias=True,
    ),
    decode_head=dict(
        type='SegformerHead',
        in_channels=[32, 64, 160, 256],
        in_index=[0, 1, 2, 3],
        channels=256,
        dropout_ratio=0.1,
        num_classes=7,
        norm_cfg=dict(type='BN'),
        align_corners=False,
        loss_decode=dict(type='CrossEntropyLoss'),
    ),
    train_cfg=dict(),
    test_cfg=dict(mode='whole'),
)
# As in MMSegmentation's configs of SegFormer: a group of the optimizer for every parameter.
MIT_OPTIMIZER = dict(
    type='OptimWrapper',
    optimizer=dict(type='AdamW', lr=6e-5, weight_decay=0.01),
    paramwise_cfg=dict(custom_keys=dict(norm=dict(decay_mult=0.0), head=dict(lr_mult=10.0))),
)


class Baton(Hook):
    """Times its runner's steps and hands over after each."""

    priority = 'LOWEST'

    def __init__(self) -> None:
        self.turn, self.ready = threading.Event(), threading.Event()
        self.next: Baton = self
        # Processor time of each step, and of its kernels.
        self.seconds: List[Tuple[float, float]] = []
        self._start = self._kernels = 0.0

    def before_train_epoch(self, runner: Runner) -> None:
        """Wait for the first turn."""
        model = runner.model.module if is_model_wrapper(runner.model) else runner.model
        model.loss = timed(model.loss)
        self._wait()

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        """Note the time of the step, and let the next runner work."""
        self.seconds.append((time.process_time() - self._start, KERNELS[0] - self._kernels))
        self.next.turn.set()
        if runner.iter + 1 < runner.max_iters:
            self._wait()

    def _wait(self) -> None:
        self.ready.set()
        self.turn.wait()
        self.turn.clear()
        self._start, self._kernels = time.process_time(), KERNELS[0]


# Processor time of all kernels so far. Only one runner works at a time.
KERNELS = [0.0]


def timed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that adds its processor time to ``KERNELS``."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        start = time.process_time()
        try:
            return function(*args, **kwargs)
        finally:
            KERNELS[0] += time.process_time() - start

    return call


def timed_hook(register: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``Tensor.register_hook`` for hooks that do not count as kernels."""

    def register_timed(tensor: torch.Tensor, hook: Callable[..., Any]) -> Any:
        def call(gradient: torch.Tensor) -> Any:
            start = time.process_time()
            try:
                return hook(gradient)
            finally:
                KERNELS[0] -= time.process_time() - start

        return register(tensor, call)

    return register_timed


def make_config(case: str, data: Path, work: Path, steps: int) -> Config:
    """Return the config of a case, which all runners train."""
    model, side, batch, *fused = case.split('-')
    cfg = Config.fromfile(str(ROOT / 'tools' / 'benchmarks' / 'fcn_r18.py'))
    if model == 'eff':
        demo = Config.fromfile(str(ROOT / 'configs' / 'demo' / 'efficientnet_lite0_fpn_demo.py'))
        cfg.optim_wrapper = demo.optim_wrapper
        demo.model.backbone.init_cfg = None
        cfg.model = demo.model
    elif model == 'mit':
        cfg.model = dict(MIT, data_preprocessor=cfg.model.data_preprocessor)
        cfg.optim_wrapper = MIT_OPTIMIZER
    if fused:
        cfg.optim_wrapper.optimizer.fused = True
    cfg.model.data_preprocessor.size = (int(side), int(side))
    cfg.train_dataloader.batch_size = int(batch)
    cfg.train_dataloader.dataset.data_root = str(data)
    cfg.train_cfg.max_iters, cfg.work_dir, cfg.experiment_name = steps, str(work), work.name
    cfg.visualizer = dict(
        type='SegLocalVisualizer', name=work.name, vis_backends=[dict(type='LocalVisBackend')]
    )
    return cfg


def start(runner: Runner, baton: Baton) -> threading.Thread:
    """Let ``runner`` train up to its first step, where it waits for the baton."""
    runner.register_hook(baton)
    # An error of the main thread ends the program, not the wait of the others.
    thread = threading.Thread(target=runner.train, daemon=True)
    thread.start()
    while not baton.ready.wait(0.1):
        if not thread.is_alive():
            sys.exit('a runner failed before its first step')
    return thread


def time_steps(case: str, steps: int) -> Dict[str, List[Tuple[float, float]]]:
    """Return the processor time of each step of each runner, and of the step's kernels."""
    init_default_scope('mmseg')
    # This imports MMSegmentation.
    MODELS.get('SegDataPreProcessor')
    # What MapSage registers over: put back for as long as a stock runner is built.
    hosts = {(registry, name): registry.get(name) for registry, name in overridden()}
    from mapsage.engine import MapSageRunner

    ours = {(registry, name): registry.get(name) for registry, name in hosts}
    batons, threads = [Baton() for _ in RUNNERS], []
    for baton, following in zip(batons, batons[1:] + batons[:1]):
        baton.next = following
    with tempfile.TemporaryDirectory() as folder:
        data = write_tiles(Path(folder) / 'data', size=int(case.split('-')[1]))
        for number, (name, baton) in enumerate(zip(RUNNERS, batons)):
            cfg = make_config(case, data, Path(folder) / f'{case}_{number}', steps)
            is_stock = name.startswith('MMEngine')
            register(hosts if is_stock else ours)
            threads.append(start((Runner if is_stock else MapSageRunner).from_cfg(cfg), baton))
        batons[0].turn.set()
        for thread in threads:
            thread.join()
    return {name: baton.seconds[WARM_UP:] for name, baton in zip(RUNNERS, batons)}


def print_row(case: str, seconds: Dict[str, List[Tuple[float, float]]]) -> None:
    """Print the row of a case."""

    def pairs(name: str) -> List[Tuple[float, float]]:
        """Return the time of each step and of what is no kernel, the mean of both runners."""
        both = zip(seconds[name], seconds[f'{name} again'])
        return [((a + b) / 2, (a - c + b - d) / 2) for (a, c), (b, d) in both]

    stock, ours = pairs('MMEngine'), pairs('MapSage')
    whole = statistics.median(step for step, _ in stock)
    ratios = [a / b for (a, _), (b, _) in zip(ours, stock)]
    control = statistics.median(
        a / b for (a, _), (b, _) in zip(seconds['MMEngine again'], seconds['MMEngine'])
    )
    # Means over as many steps as lie between two lines of the log, so that it counts.
    costs = []
    for first in range(0, len(stock) - BLOCK + 1, BLOCK):
        block = range(first, first + BLOCK)
        costs.append((sum(ours[n][1] for n in block) - sum(stock[n][1] for n in block)) / BLOCK)
    cost = statistics.median(costs) if costs else float('nan')
    spread = (
        ' to '.join(f'{100 * edge / whole:.1f}' for edge in (min(costs), max(costs)))
        if costs
        else '-'
    )
    rest = statistics.median(other for _, other in stock)
    quarters = statistics.quantiles(ratios, n=4)
    print(
        f'| {case} | {1000 * whole:.1f} | {1000 * rest:.2f} | {1000 * cost:+.2f} | '
        f'{100 * cost / whole:+.1f} % ({spread}) | {statistics.median(ratios):.3f} '
        f'({quarters[0]:.3f}-{quarters[2]:.3f}) | {control:.3f} |',
        flush=True,
    )


def main() -> None:
    """Time the cases, each in a process, because MapSage must not be imported before."""
    parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
    parser.add_argument('--cases', nargs='+', default=CASES)
    parser.add_argument('--steps', type=int, default=WARM_UP + 300)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.Tensor.backward = timed(torch.Tensor.backward)  # type: ignore[method-assign]
    torch.Tensor.register_hook = timed_hook(  # type: ignore[method-assign]
        torch.Tensor.register_hook
    )
    for name in ('sgd', 'adam'):
        # torch.optim hides its modules.
        module = sys.modules[f'torch.optim.{name}']
        setattr(module, name, timed(getattr(module, name)))
    if len(args.cases) == 1:
        print_row(args.cases[0], time_steps(args.cases[0], args.steps))
        return
    print(describe_machine())
    print(
        '| case | stock step, ms | of it no kernels | MapSage adds, ms | share, median '
        f'of {BLOCK} steps (range) | MapSage / stock, whole steps (quartiles) | MMEngine again / '
        f'MMEngine |\n|{"---|" * 7}',
        flush=True,
    )
    for case in args.cases:
        command = [sys.executable, __file__, '--cases', case, '--steps', str(args.steps)]
        rows = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        print('\n'.join(row for row in rows.splitlines() if row.startswith('|')), flush=True)


if __name__ == '__main__':
    main()
