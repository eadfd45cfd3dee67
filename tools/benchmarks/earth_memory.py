"""Peak memory of one block of OlmoEarth Base with the cells of 12 dates, on the CPU.

    python tools/benchmarks/earth_memory.py

Prints, for an evaluation and a training step, with PyTorch's fused attention and with the explicit
form of versions before 2.0, by how much the largest memory of a process exceeds the memory before
the step. Every figure is of a separate process. One date is missing, so that attention is masked.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

_GIB = 2**30


def _resident_bytes(field: str) -> int:
    """Return the resident memory of this process now ('VmRSS'), or the largest ('VmHWM')."""
    lines = Path('/proc/self/status').read_text(encoding='ascii').splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f'{field}:'))


def _measure(side: int, patch: int, fused: bool, training: bool) -> None:
    """Print the peak memory and the processor time of one step as JSON."""
    import torch

    from mapsage.extras.earth import OlmoEarth
    from mapsage.geo.stacks import StackLayout
    from mapsage.models.backbones import attention

    torch.manual_seed(0)
    torch.set_num_threads(1)
    if not fused:
        attention._fused_attention = None
    sensors = dict(s2=dict(bands=['B02', 'B03', 'B04', 'B08'], max_dates=12))
    layout = StackLayout.of_config(sensors)
    encoder = OlmoEarth(sensors, 'base', patch, out_indices=(0,)).train(training)
    images = torch.rand(1, layout.image_channels, side, side) * 3000
    days = 45000.0 + 20 * torch.arange(12.0)[None]
    images[:, layout.pixel_channels :] = 1
    images[:, -1], days[:, -1] = 0, 0
    inputs = layout.add_planes(images, days)
    before, start = _resident_bytes('VmRSS'), time.process_time()
    with torch.set_grad_enabled(training):
        (features,) = encoder(inputs)
    if training:
        features.square().mean().backward()
    print(
        json.dumps(
            dict(
                gib=(_resident_bytes('VmHWM') - before) / _GIB, seconds=time.process_time() - start
            )
        )
    )


def main() -> None:
    """Measure every case in a process."""
    parser = argparse.ArgumentParser(description=(__doc__ or '').split('\n')[0])
    parser.add_argument('--case', help=argparse.SUPPRESS)
    parser.add_argument('--patches', type=int, nargs='+', default=[4, 8])
    args = parser.parse_args()
    if args.case:
        _measure(**json.loads(args.case))
        return
    for patch in args.patches:
        for fused in (True, False):
            for training in (False, True):
                case = dict(side=128, patch=patch, fused=fused, training=training)
                result = subprocess.run(
                    [sys.executable, __file__, '--case', json.dumps(case)],
                    check=True,
                    stdout=subprocess.PIPE,
                    text=True,
                    env=dict(os.environ, OMP_NUM_THREADS='1'),
                )
                figures = json.loads(result.stdout.splitlines()[-1])
                print(
                    f'{(128 // patch) ** 2 * 12:,} cells, {"fused" if fused else "explicit"}, '
                    f'{"training" if training else "evaluation"}: {figures["gib"]:.2f} GiB, '
                    f'{figures["seconds"]:.0f} s of processor time',
                    flush=True,
                )


if __name__ == '__main__':
    main()
