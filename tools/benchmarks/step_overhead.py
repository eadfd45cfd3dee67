"""Step time of MapSageRunner against MMEngine's Runner: same config, one process, taken in turns.

    OMP_NUM_THREADS=1 python tools/benchmarks/step_overhead.py [--steps 200]

Three runners train in one process, each in its own thread; a baton lets one of them work at a time,
so that all see the same machine. Two are MMEngine's: how far they differ is what can be measured.
A step is everything from batch to hooks, data loading included.
"""
import argparse
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'tools' / 'benchmarks')]
WARM_UP = 20

import torch  # noqa: E402
from _common import describe_machine, write_tiles  # noqa: E402
from mmengine.config import Config  # noqa: E402
from mmengine.hooks import Hook  # noqa: E402
from mmengine.runner import Runner  # noqa: E402


class Baton(Hook):
    """Times its runner's steps and hands over after each."""

    priority = 'LOWEST'

    def __init__(self) -> None:
        self.mine, self.waits = threading.Event(), threading.Event()
        self.next: Baton = self
        self.seconds: list = []
        self._start = 0.0

    def before_train_epoch(self, runner) -> None:
        self._wait()

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        self.seconds.append(time.perf_counter() - self._start)
        self.next.mine.set()
        if runner.iter + 1 < runner.max_iters:
            self._wait()

    def _wait(self) -> None:
        self.waits.set()
        self.mine.wait()
        self.mine.clear()
        self._start = time.perf_counter()


def make_config(data: Path, work: Path, steps: int) -> Config:
    """Return MMSeg's FCN on ResNet-18, 128x128 tiles, batch 4."""
    text = (ROOT / 'tools' / 'benchmarks' / 'fcn_r18.py').read_text()
    cfg = Config.fromstring(text, '.py')
    cfg.train_dataloader.dataset.data_root = str(data)
    cfg.train_cfg.max_iters, cfg.work_dir = steps, str(work)
    return cfg


def start(runner: Runner, baton: Baton) -> threading.Thread:
    """Let ``runner`` train up to its first step, where it waits for the baton."""
    runner.register_hook(baton)
    # An error of the main thread ends the program, not the wait of the others.
    thread = threading.Thread(target=runner.train, daemon=True)
    thread.start()
    while not baton.waits.wait(0.1):
        if not thread.is_alive():
            sys.exit('a runner failed before its first step')
    return thread


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--steps', type=int, default=200)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    batons = [Baton(), Baton(), Baton()]
    for baton, following in zip(batons, batons[1:] + batons[:1]):
        baton.next = following
    with tempfile.TemporaryDirectory() as folder:
        data = write_tiles(Path(folder) / 'data')
        configs = [make_config(data, Path(folder) / str(number), steps) for number in range(3)]
        # These two are built before mapsage is imported, which registers over their classes.
        threads = [start(Runner.from_cfg(cfg), baton) for cfg, baton in zip(configs, batons[:2])]
        from mapsage.engine import MapSageRunner
        threads.append(start(MapSageRunner.from_cfg(configs[2]), batons[2]))
        batons[0].mine.set()
        for thread in threads:
            thread.join()
    first, again, ours = (baton.seconds[WARM_UP:] for baton in batons)
    print(describe_machine())
    print(f'{"runner":<16} {"median ms/step":>14}')
    for name, seconds in (('MMEngine', first), ('MMEngine again', again), ('MapSage', ours)):
        print(f'{name:<16} {1000 * statistics.median(seconds):14.2f}')
    for name, base in (('MMEngine', first), ('MMEngine again', again)):
        ratio = statistics.median(a / b for a, b in zip(ours, base))
        print(f'MapSage / {name}: median of {len(ours)} paired ratios {ratio:.4f}')
    control = statistics.median(a / b for a, b in zip(again, first))
    print(f'MMEngine again / MMEngine: {control:.4f}')


if __name__ == '__main__':
    main()
