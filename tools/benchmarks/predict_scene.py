"""Predict a large synthetic scene on the CPU: rate against the bare model, memory, two ranks.

    python tools/benchmarks/predict_scene.py [--size 20000] [--window 512] [--skip-ranks]
                                             [--skip-commands] [--script]

"bare model" is preprocessor and forward of the model as its config builds it, on windows that lie
in memory, with all threads for each batch. "folded" is the same with batch normalizations folded
into convolutions, as the pipeline (read, forward, blend) has it. The three take turns on the same
windows, with the same number of threads. The commands are then run as a user runs them, and their
largest resident set is the kernel's count. --script compares a whole map with a script that a user
writes of rasterio and MMSegmentation's inference_model, in turns, in one process.
"""

import argparse
import copy
import logging
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Dict, List, Tuple

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'tools' / 'benchmarks')]
CONFIG = ROOT / 'configs' / 'demo' / 'efficientnet_lite0_fpn_demo.py'

import numpy as np  # noqa: E402
import rasterio  # noqa: E402
import torch  # noqa: E402
from _common import describe_machine  # noqa: E402
from mmseg.apis import inference_model, init_model  # noqa: E402
from rasterio.windows import Window  # noqa: E402

from mapsage.commands import cli  # noqa: E402
from mapsage.commands import predict as predict_program  # noqa: E402
from mapsage.commands.cli import build_model  # noqa: E402
from mapsage.commands.predict import map_options, open_model  # noqa: E402
from mapsage.extras.demo.demo_scenes import SCENE_KINDS, draw_scene  # noqa: E402
from mapsage.maps.inputs import Scene  # noqa: E402
from mapsage.maps.model import Bands  # noqa: E402
from mapsage.maps.prediction import Prediction  # noqa: E402
from mapsage.maps.predictor import WindowPredictor  # noqa: E402
from mapsage.maps.reading import most_readers  # noqa: E402
from mapsage.maps.strips import count_windows, predict_strips  # noqa: E402
from mapsage.maps.windows import Grid, window_starts  # noqa: E402

TILE, BATCH = 512, 4


def write_scene(path: Path, size: int) -> None:
    """Write drawn aerial scenes side by side, block by block, in UTM."""
    pictures = [
        draw_scene(seed, kind, 640, no_data=False)[0][:TILE, :TILE].transpose(2, 0, 1)
        for seed, kind in enumerate(list(SCENE_KINDS) * 3)
    ]
    random = np.random.RandomState(0)
    with rasterio.open(
        path,
        'w',
        driver='GTiff',
        width=size,
        height=size,
        count=3,
        dtype='uint8',
        crs='EPSG:32633',
        transform=rasterio.Affine(0.3, 0, 4e5, 0, -0.3, 5e6),
        tiled=True,
        blockxsize=TILE,
        blockysize=TILE,
        compress='deflate',
        bigtiff='IF_SAFER',
    ) as file:
        for row in range(0, size, TILE):
            for column in range(0, size, TILE):
                picture = pictures[random.randint(len(pictures))]
                height, width = min(TILE, size - row), min(TILE, size - column)
                file.write(picture[:, :height, :width], window=Window(column, row, width, height))


def compare_with_bare(scene: Path, size: int, side: int, rounds: int, threads: int) -> np.ndarray:
    """Return what each turn measures, in six columns.

    Windows a second of the bare model, of the folded one and of the pipeline; the pipeline's rate
    as a share of the bare model's, by the seconds that pass and by processor time, which depends
    less on what else the machine does; its share of the folded model's by processor time.
    """
    args = cli.build_parser('').parse_args([str(CONFIG)])
    model = build_model(cli.load_config(args)).eval()
    window, overlap = (side, side), side // 4
    grid = Grid(size, size, window, overlap)
    bare, folded = (
        WindowPredictor(each, torch.device('cpu'), window, overlap, BATCH)
        for each in (model, copy.deepcopy(model))
    )
    folded.fold_batch_norms(folded.choose_folds(bands=3).folded)
    folded.use_threads(threads)
    source = Scene(str(scene), Bands(3, True))
    turns: List[Tuple[float, ...]] = []
    for turn in range(rounds + 1):
        strip = 1 + turn % (len(grid.rows) - 1)
        batches = ready_batches(source, grid, (strip - 1, strip))
        count = count_windows(grid, [strip])
        times = [(time.perf_counter(), time.process_time())]
        for predictor in (bare, folded):
            with torch.no_grad():
                for batch in batches:
                    predictor.logits(batch)
            times.append((time.perf_counter(), time.process_time()))
        predict_strips(
            source,
            grid,
            [strip],
            folded,
            BATCH,
            True,
            lambda strip: None,
            lambda count: None,
            most_readers=most_readers(source),
        )
        times.append((time.perf_counter(), time.process_time()))
        (first, first_cpu), (second, second_cpu), (whole, whole_cpu) = np.diff(times, axis=0)
        turns.append(
            (
                count / first,
                count / second,
                count / whole,
                first / whole,
                first_cpu / whole_cpu,
                second_cpu / whole_cpu,
            )
        )
    return np.array(turns[1:])


def predict_by_hand(scene: Path, model: torch.nn.Module, side: int, out: Path) -> None:
    """Write a class map as a user's script does: windows, mean of probabilities, argmax."""
    with rasterio.open(scene) as file:
        sums = np.zeros((model.num_classes, file.height, file.width), np.float32)
        counts = np.zeros((file.height, file.width), np.float32)
        starts = window_starts(file.height, side, side // 4)
        for row in starts:
            for column in starts:
                image = file.read(window=Window(column, row, side, side)).transpose(1, 2, 0)
                result = inference_model(model, np.ascontiguousarray(image[:, :, ::-1]))
                box = np.s_[row : row + side, column : column + side]
                sums[(slice(None), *box)] += result.seg_logits.data.softmax(0).cpu().numpy()
                counts[box] += 1
        classes = (sums / counts).argmax(0).astype(np.uint8)
        profile = dict(file.profile, count=1, compress='deflate')
    with rasterio.open(out, 'w', **profile) as file:
        file.write(classes, 1)


def compare_with_script(
    scene: Path, checkpoint: Path, folder: Path, side: int, rounds: int
) -> np.ndarray:
    """Return for each turn the processor seconds of the script and of predict, models loaded."""
    by_hand = init_model(str(CONFIG), str(checkpoint), 'cpu')
    turns = []
    for turn in range(rounds + 1):
        arguments = [
            str(CONFIG),
            str(checkpoint),
            str(scene),
            '--out',
            str(folder / f'script{turn}'),
            '--window',
            str(side),
            '--batch-size',
            str(BATCH),
            '--accelerator',
            'cpu',
        ]
        args = predict_program.build_parser(arguments).parse_args(arguments)
        prediction = Prediction(
            map_options(args), open_model(args, lambda line: None), lambda line: None
        )
        times = [time.process_time()]
        predict_by_hand(scene, by_hand, side, folder / 'by_hand.tif')
        times.append(time.process_time())
        prediction.run()
        times.append(time.process_time())
        turns.append(np.diff(times))
    return np.array(turns[1:])


def ready_batches(source: Scene, grid: Grid, rows: Tuple[int, int]) -> List[torch.Tensor]:
    """Return the batches of some rows of windows as the pipeline makes them."""
    batches = []
    for row in rows:
        windows = [
            np.ascontiguousarray(source.read(column, grid.rows[row], grid.window)[0])
            for column in grid.columns
        ]
        batches += [
            torch.from_numpy(np.stack(windows[first : first + BATCH]))
            for first in range(0, len(windows), BATCH)
        ]
    return batches


def command(
    scene: Path, checkpoint: Path, folder: Path, side: int, ranks: int, threads: int
) -> Dict[str, float]:
    """Run tools/predict.py and return its rate, seconds and largest resident set in GB."""
    options = [
        'tools/predict.py',
        CONFIG,
        checkpoint,
        scene,
        '--out',
        folder,
        '--window',
        side,
        '--batch-size',
        BATCH,
        '--confidence',
        '--accelerator',
        'cpu',
    ]
    if ranks > 1:
        options = [
            'tools/launch.py',
            '--nproc_per_node',
            ranks,
            '--rdzv_backend',
            'c10d',
            '--rdzv_endpoint',
            'localhost:0',
            *options,
            '--launcher',
            'pytorch',
        ]
    start = time.perf_counter()
    log = folder.with_suffix('.log')
    process = os.fork()
    if process == 0:
        with open(log, 'w') as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            os.chdir(ROOT)
            os.environ['OMP_NUM_THREADS'] = str(threads)
            os.execv(sys.executable, [sys.executable, *map(str, options)])
    _, status, usage = os.wait4(process, 0)
    seconds = time.perf_counter() - start
    said = log.read_text()
    if status:
        sys.exit(f'the command failed:\n{said[-3000:]}')
    found = re.search(r'windows in ([\d.]+) s .*: ([\d.]+) windows/s', said)
    return dict(
        rate=float(found.group(2)),
        predicting=float(found.group(1)),
        seconds=seconds,
        memory=usage.ru_maxrss / 1e6,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--size', type=int, default=20000, help='side of the scene in pixels')
    parser.add_argument('--window', type=int, default=512)
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument('--threads', type=int, default=os.cpu_count(), help='of the model')
    parser.add_argument('--skip-ranks', action='store_true', help='only one process')
    parser.add_argument('--skip-commands', action='store_true', help='only the comparisons')
    parser.add_argument('--script', action='store_true', help="compare with a user's script")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(describe_machine(), f'rasterio {rasterio.__version__}', sep=', ')
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_scene(folder / 'scene.tif', args.size)
        print(
            f'{args.size}x{args.size} pixels, three bands, tiles of {TILE}, deflate; windows of '
            f'{args.window} that share {args.window // 4}; {CONFIG.stem}'
        )
        checkpoint = folder / 'model.pth'
        options = cli.build_parser('').parse_args([str(CONFIG)])
        model = build_model(cli.load_config(options))
        logging.disable(logging.INFO)
        model.init_weights()
        torch.save(dict(state_dict=model.state_dict(), meta={}), checkpoint)
        turns = compare_with_bare(
            folder / 'scene.tif', args.size, args.window, args.rounds, args.threads
        )
        labels = (
            'bare model, windows/s',
            'folded, windows/s',
            'pipeline, windows/s',
            'pipeline of the bare model',
            'the same by processor time',
            'pipeline of the folded model by processor time',
        )
        print(f'{args.threads} threads, {args.rounds} turns: median (range)')
        for label, values in zip(labels, turns.T):
            print(
                f'{label:<48} {np.median(values):.3f} ({values.min():.3f}-{values.max():.3f})',
                flush=True,
            )
        if args.script:
            turns = compare_with_script(
                folder / 'scene.tif', checkpoint, folder, args.window, args.rounds
            )
            script, ours = np.median(turns, 0)
            ratios = turns[:, 0] / turns[:, 1]
            print(
                f'CPU seconds of a map: script {script:.2f}, predict {ours:.2f}, ratio '
                f'{np.median(ratios):.2f} ({ratios.min():.2f} to {ratios.max():.2f})',
                flush=True,
            )
        if args.skip_commands:
            return
        print(f'{"command":<24} {"windows/s":>9} {"predicting s":>12} {"all s":>7} {"GB":>5}')
        cases = [(1, args.threads)] + ([] if args.skip_ranks else [(1, 1), (2, 1)])
        rates = {}
        for ranks, threads in dict.fromkeys(cases):
            found = command(
                folder / 'scene.tif',
                checkpoint,
                folder / f'maps{ranks}_{threads}',
                args.window,
                ranks,
                threads,
            )
            rates[ranks, threads] = found
            label = f'{ranks} rank(s), {threads} thread(s)'
            print(
                f'{label:<24} {found["rate"]:9.2f} {found["predicting"]:12.1f} '
                f'{found["seconds"]:7.1f} {found["memory"]:5.2f}',
                flush=True,
            )
        if not args.skip_ranks:
            print(
                f'two ranks of one thread against one: '
                f'{rates[1, 1]["predicting"] / rates[2, 1]["predicting"]:.2f} times'
            )
            same = all(
                (folder / 'maps2_1' / file).read_bytes() == (folder / 'maps1_1' / file).read_bytes()
                for file in ('scene.tif', 'scene_confidence.tif')
            )
            print(f'their maps are {"the same bytes" if same else "DIFFERENT"}')


if __name__ == '__main__':
    main()
