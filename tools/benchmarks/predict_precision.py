"""Windows in bfloat16 (predict --amp) against float32 on a CPU: rate, and pixels that change.

    python tools/benchmarks/predict_precision.py [CONFIG] [--checkpoint FILE --scene FILE]
                                                 [--windows 256 512] [--threads 1]

Both precisions take turns on the same batches. With a checkpoint and a scene the maps of both are
compared, blended as tools/predict.py blends them; weights of no training say nothing of that.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import List, Tuple

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'tools' / 'benchmarks')]
CONFIG = ROOT / 'configs' / 'demo' / 'efficientnet_lite0_fpn_demo.py'

import numpy as np  # noqa: E402
import torch  # noqa: E402
from _common import describe_machine  # noqa: E402

from mapsage.accelerator import resolve_accelerator, set_current_accelerator  # noqa: E402
from mapsage.commands import cli  # noqa: E402
from mapsage.commands.cli import build_model  # noqa: E402
from mapsage.maps.inputs import Scene  # noqa: E402
from mapsage.maps.model import find_bands, load_weights  # noqa: E402
from mapsage.maps.predictor import WindowPredictor  # noqa: E402
from mapsage.maps.strips import predict_strips  # noqa: E402
from mapsage.maps.windows import Grid  # noqa: E402

BATCH = 4
PRECISIONS = (None, torch.bfloat16)


def compare_rates(model: torch.nn.Module, side: int, turns: int) -> Tuple[float, ...]:
    """Return windows/s of float32, and medians of the ratios of seconds and processor seconds."""
    windows = torch.randint(0, 255, (BATCH, 3, side, side), dtype=torch.uint8)
    predictors = [
        WindowPredictor(model, torch.device('cpu'), (side, side), side // 4, BATCH, amp=amp)
        for amp in PRECISIONS
    ]
    seconds: List[List[float]] = []
    for _ in range(turns + 1):
        row = []
        for predictor in predictors:
            start, computed = time.perf_counter(), time.process_time()
            predictor(windows)
            row += [time.perf_counter() - start, time.process_time() - computed]
        seconds.append(row)
    full, full_cpu, half, half_cpu = np.array(seconds[1:]).T  # the first turn warms up
    return (
        BATCH / statistics.median(full),
        statistics.median(full / half),
        statistics.median(full_cpu / half_cpu),
    )


def changed(model: torch.nn.Module, scene: Scene, side: int) -> float:
    """Return the share of a scene's pixels with data whose class differs, in per cent."""
    grid = Grid(*scene.size, (side, side), side // 4)
    maps = []
    for amp in PRECISIONS:
        predictor = WindowPredictor(
            model, torch.device('cpu'), grid.window, grid.overlap, BATCH, amp=amp
        )
        rows: List[np.ndarray] = []
        predict_strips(
            scene,
            grid,
            range(len(grid.rows)),
            predictor,
            BATCH,
            False,
            lambda strip, rows=rows: rows.append(strip.classes),
            lambda count: None,
        )
        maps.append(np.concatenate(rows))
    known = maps[0] != 255
    return 100 * float((maps[0] != maps[1])[known].mean())


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('config', nargs='?', default=str(CONFIG))
    parser.add_argument('--checkpoint')
    parser.add_argument('--scene')
    parser.add_argument('--windows', type=int, nargs='+', default=[256, 512])
    parser.add_argument('--threads', type=int, default=1)
    parser.add_argument('--turns', type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    set_current_accelerator(resolve_accelerator('cpu'))
    cfg = cli.load_config(cli.build_parser('').parse_args([args.config]))
    model = build_model(cfg)
    if args.checkpoint:
        load_weights(model, args.checkpoint)
    bf16 = 'avx512_bf16' in Path('/proc/cpuinfo').read_text()
    print(describe_machine(), f'avx512_bf16 {"present" if bf16 else "MISSING"}', sep=', ')
    print(
        '| windows | float32 windows/s | bfloat16, times as fast | of processor time | changed '
        'pixels |\n| --- | --- | --- | --- | --- |'
    )
    for side in args.windows:
        rate, ratio, cpu_ratio = compare_rates(model, side, args.turns)
        share = '-'
        if args.checkpoint and args.scene:
            share = f'{changed(model, Scene(args.scene, find_bands(cfg, model)), side):.3f} %'
        print(f'| {side} | {rate:.1f} | {ratio:.2f} | {cpu_ratio:.2f} | {share} |', flush=True)


if __name__ == '__main__':
    main()
