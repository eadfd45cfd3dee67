"""Seconds that a device check of a 300-million-parameter model takes, and its cost between checks.

    OMP_NUM_THREADS=1 torchrun --nproc_per_node 8 tools/benchmarks/device_check.py

Needs 1.2 GB a rank. Printed is the slowest rank's time.
"""
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'tools' / 'benchmarks')]
MILLIONS, LAYERS, STEPS = 300, 24, 10_000

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from _common import describe_machine  # noqa: E402
from mmengine.logging import MMLogger  # noqa: E402
from torch import nn  # noqa: E402

import mapsage  # noqa: E402, F401
from mapsage.accelerator import resolve_accelerator, set_current_accelerator  # noqa: E402
from mapsage.distributed import init_process_group  # noqa: E402
from mapsage.hooks import DeviceCheckHook  # noqa: E402


def slowest(action) -> float:
    """Return the seconds of ``action`` on the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    action()
    seconds = torch.tensor([time.perf_counter() - start])
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


def main() -> None:
    torch.set_num_threads(1)
    accelerator = set_current_accelerator(resolve_accelerator(os.environ.get('ACCELERATOR', 'cpu')))
    init_process_group(accelerator)
    side = int((MILLIONS * 1e6 / LAYERS) ** 0.5)
    model = nn.ModuleList(nn.Linear(side, side, bias=False) for _ in range(LAYERS))
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.5)  # equal on all ranks, and quick
    model.to(accelerator.device(int(os.environ['LOCAL_RANK'])))
    runner = SimpleNamespace(model=model, logger=MMLogger.get_instance('benchmark'), iter=0)
    hook = DeviceCheckHook(interval=STEPS)
    before = slowest(lambda: hook.before_train(runner))
    start = time.perf_counter()
    for runner.iter in range(STEPS - 1):
        hook.after_train_iter(runner, 0)
    idle = (time.perf_counter() - start) / (STEPS - 1)
    runner.iter = STEPS - 1
    during = slowest(lambda: hook.after_train_iter(runner, 0))
    if dist.get_rank() == 0:
        count = sum(parameter.numel() for parameter in model.parameters())
        print(f'{describe_machine()}, {dist.get_world_size()} ranks on {accelerator.name}')
        print(f'{count / 1e6:.0f} M parameters: {before:.2f} s before the run, {during:.2f} s '
              f'during it, {1e6 * idle:.2f} us a step between checks')


if __name__ == '__main__':
    main()
