"""An exported model in ONNX Runtime against its checkpoint in PyTorch, float32, one thread.

    python tools/benchmarks/exported_model.py CONFIG CHECKPOINT MODEL.onnx [SCENE]

Windows are computed in turn; the last column is of processor time. With a scene, both commands of
tools/predict.py run in turn, from their start to the written map, and the two maps are compared.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import List

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'tools' / 'benchmarks')]
os.environ['OMP_NUM_THREADS'] = '1'

import numpy as np  # noqa: E402
import rasterio  # noqa: E402
import torch  # noqa: E402
from _common import describe_machine  # noqa: E402

from mapsage.accelerator import resolve_accelerator, set_current_accelerator  # noqa: E402
from mapsage.commands import cli  # noqa: E402
from mapsage.commands.cli import build_model  # noqa: E402
from mapsage.maps.exported import ExportedModel  # noqa: E402
from mapsage.maps.model import load_weights  # noqa: E402
from mapsage.maps.predictor import WindowPredictor  # noqa: E402


def compare_windows(config: str, checkpoint: str, file: str, turns: int) -> str:
    """Return a row: ms a window of both, and medians of the paired ratios."""
    model = build_model(cli.load_config(cli.build_parser('').parse_args([config])))
    load_weights(model, checkpoint)
    exported = ExportedModel(file)
    side = exported.description.window
    of_torch = WindowPredictor(model, torch.device('cpu'), (side, side), exported.overlap, 1)
    window = np.random.default_rng(0).integers(
        0, 256, (1, exported.description.bands.count, side, side), np.uint8
    )
    rows = []
    for _ in range(turns + 2):
        row: List[float] = []
        for predictor in (of_torch, exported):
            start, computed = time.perf_counter(), time.process_time()
            predictor(window)
            row += [time.perf_counter() - start, time.process_time() - computed]
        rows.append(row)
    one, one_cpu, other, other_cpu = np.array(rows[2:]).T  # the first two warm up
    return (
        f'| {side} | {1e3 * statistics.median(one_cpu):.1f} | '
        f'{1e3 * statistics.median(other_cpu):.1f} | {statistics.median(one / other):.2f} | '
        f'{statistics.median(one_cpu / other_cpu):.2f} |'
    )


def compare_maps(config: str, checkpoint: str, file: str, scene: str, turns: int) -> List[str]:
    """Return lines on the seconds of both commands, and on the pixels of their maps."""
    commands = [[config, checkpoint, '--accelerator', 'cpu'], ['--model', file]]
    seconds: List[List[float]] = [[], []]
    processor: List[List[float]] = [[], []]
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(turns):
            for number, command in enumerate(commands):
                start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
                subprocess.run(
                    [
                        sys.executable,
                        str(ROOT / 'tools' / 'predict.py'),
                        *command,
                        scene,
                        '--out',
                        f'{folder}/{number}',
                        '--overwrite',
                    ],
                    check=True,
                    stdout=subprocess.DEVNULL,
                )
                seconds[number].append(time.perf_counter() - start)
                after = resource.getrusage(resource.RUSAGE_CHILDREN)
                processor[number].append(
                    after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
                )
        maps = []
        for number in range(2):
            with rasterio.open(f'{folder}/{number}/{Path(scene).stem}.tif') as made:
                maps.append(made.read(1))
    ratios = [a / b for a, b in zip(*seconds)]
    of_processor = [a / b for a, b in zip(*processor)]
    return [
        f'{Path(scene).name}, {maps[0].shape[1]}x{maps[0].shape[0]}: '
        f'{statistics.median(seconds[0]):.1f} s by the checkpoint, '
        f'{statistics.median(seconds[1]):.1f} s by the file; '
        f'{statistics.median(ratios):.2f} times as fast, '
        f'{statistics.median(of_processor):.2f} in processor time; '
        f'{100 * (maps[0] == maps[1]).mean():.4f} % of the pixels equal'
    ]


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('config')
    parser.add_argument('checkpoint')
    parser.add_argument('model')
    parser.add_argument('scene', nargs='?')
    parser.add_argument('--turns', type=int, default=30)
    parser.add_argument('--scene-turns', type=int, default=3)
    args = parser.parse_args()
    import onnxruntime

    torch.set_num_threads(1)
    set_current_accelerator(resolve_accelerator('cpu'))
    print(describe_machine(), f'onnxruntime {onnxruntime.__version__}', sep=', ')
    print(
        '| window | PyTorch, ms of processor | ONNX Runtime, ms | times as fast | of processor '
        'time |\n| --- | --- | --- | --- | --- |'
    )
    print(compare_windows(args.config, args.checkpoint, args.model, args.turns), flush=True)
    if args.scene:
        for line in compare_maps(
            args.config, args.checkpoint, args.model, args.scene, args.scene_turns
        ):
            print(line)


if __name__ == '__main__':
    main()
