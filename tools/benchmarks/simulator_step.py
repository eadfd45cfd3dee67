"""A training step on a simulated card against the CPU's, and what the simulator costs to start.

    OMP_NUM_THREADS=1 python tools/benchmarks/simulator_step.py [--steps 40]

FCN on ResNet-18, 128x128 tiles, batch 4: forward, backward, SGD. The two take turns.
"""
import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'tools' / 'benchmarks')]
WARM_UP = 5

import torch  # noqa: E402
from _common import describe_machine  # noqa: E402
from mmengine.config import Config  # noqa: E402
from mmengine.structures import PixelData  # noqa: E402
from mmseg.registry import MODELS  # noqa: E402
from mmseg.structures import SegDataSample  # noqa: E402
from mmseg.utils import register_all_modules  # noqa: E402

import mapsage  # noqa: E402, F401
from mapsage.accelerator import resolve_accelerator  # noqa: E402
from mapsage.accelerator.simulator.build import build_library  # noqa: E402


def timed_build() -> float:
    """Return the seconds of a first build, in a cache of its own."""
    with tempfile.TemporaryDirectory() as folder:
        before = os.environ.get('XDG_CACHE_HOME')
        os.environ['XDG_CACHE_HOME'] = folder
        start = time.perf_counter()
        build_library()
        seconds = time.perf_counter() - start
        del os.environ['XDG_CACHE_HOME']
        if before is not None:
            os.environ['XDG_CACHE_HOME'] = before
    return seconds


class Trainee:
    """The model, its optimizer and one batch on a device."""

    def __init__(self, device: str) -> None:
        torch.manual_seed(0)
        cfg = Config.fromfile(str(ROOT / 'tools' / 'benchmarks' / 'fcn_r18.py'))
        self.model = MODELS.build(cfg.model).to(device).train()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.images = torch.randn(4, 3, 128, 128).to(device)
        labels = torch.randint(0, 7, (4, 1, 128, 128)).to(device)
        self.samples = [SegDataSample(gt_sem_seg=PixelData(data=each)) for each in labels]
        self.seconds: list = []

    def step(self) -> None:
        start = time.perf_counter()
        losses = self.model(self.images, self.samples, mode='loss')
        loss = losses['decode.loss_ce']
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        loss.item()
        self.seconds.append(time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--steps', type=int, default=40)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    register_all_modules()
    first_build = timed_build()
    build_library()
    start = time.perf_counter()
    resolve_accelerator('sim')
    cached = time.perf_counter() - start
    trainees = {'cpu': Trainee('cpu'), 'sim': Trainee('gcu:0')}
    for _ in range(WARM_UP + steps):
        for trainee in trainees.values():
            trainee.step()
    seconds = {name: trainee.seconds[WARM_UP:] for name, trainee in trainees.items()}
    print(describe_machine())
    for name, each in seconds.items():
        print(f'{name}: median {1000 * statistics.median(each):.1f} ms/step')
    ratio = statistics.median(a / b for a, b in zip(seconds['sim'], seconds['cpu']))
    print(f'sim / cpu: median of {steps} paired ratios {ratio:.3f}')
    print(f'first build {first_build:.1f} s, cached start {cached:.3f} s')


if __name__ == '__main__':
    main()
