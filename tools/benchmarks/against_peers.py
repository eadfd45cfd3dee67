"""MapSage next to what a user would pick: loading, evaluation, maps, steps, exchange of samples.

    OMP_NUM_THREADS=1 python tools/benchmarks/against_peers.py

Peers are TorchGeo, MMSegmentation, MMEngine, Lightning, torchmetrics, a gather of all samples, and
scripts that a user writes with rasterio and PyTorch. What they need besides the requirements is
installed into an environment next to those of the tests. The ways of one job take turns; a figure is
the median of the processor time of all threads, and of the elapsed time. A ratio is the median of
the ratios of processor time of the turns, with its range.
"""

import argparse
import hashlib
import itertools
import json
import logging
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
import warnings
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Tuple

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'tools' / 'benchmarks')]
# Without their own requirements: the benchmark uses the packages of the calling environment.
PEERS = (
    'torchgeo==0.7.2',
    'torchmetrics==1.9.0',
    'lightning-utilities==0.15.3',
    'einops==0.8.2',
    'geopandas==1.2.0',
    'rtree==1.4.1',
    'kornia==0.9.0',
    'kornia_rs==0.2.0',
    'pytorch-lightning==2.5.5',
    'fsspec==2025.9.0',
    'fiona==1.10.1',
    'pandas',
    'pytz',
)
# Tried on 2026-11-29.
ABSENT = (
    'Not measured: rslearn 0.1.19 and TerraTorch 1.2.13, which require torchvision, and TerraTorch '
    'NumPy 2; neither is among the requirements. TorchGeo imports torchvision and uses nothing of '
    'it for windows, so it gets empty modules of that name.'
)

Way = Callable[[], Any]
# Processor and elapsed seconds of each round.
Times = List[Tuple[float, float]]


def peer_python() -> Path:
    """Return the Python of the environment with the peers, which is built if it is missing."""
    packages = sysconfig.get_paths()['purelib']
    key = hashlib.sha256(' '.join((*PEERS, packages)).encode()).hexdigest()[:16]
    root = Path(os.environ.get('MAPSAGE_ENVS', Path.home() / '.cache/mapsage/envs'))
    folder = root / f'peers-{key}'
    python, complete = folder / 'bin' / 'python', folder / 'complete'
    if not complete.exists():
        print(f'installing {", ".join(PEERS)} into {folder}', flush=True)
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([python, '-m', 'pip', 'install', '-q', '--no-deps', *PEERS], check=True)
        version = f'python{sys.version_info.major}.{sys.version_info.minor}'
        (folder / 'lib' / version / 'site-packages' / 'calling.pth').write_text(packages)
        complete.touch()
    return python


def take_turns(ways: Dict[str, Way], rounds: int) -> Dict[str, Times]:
    """Return the seconds of every way in each round; the first round is left out."""
    times: Dict[str, Times] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, run in list(ways.items()) if number % 2 else list(ways.items())[::-1]:
            start = time.process_time(), time.perf_counter()
            run()
            times[name].append((time.process_time() - start[0], time.perf_counter() - start[1]))
    return {name: seconds[1:] for name, seconds in times.items()}


def describe(job: str, times: Dict[str, Times], unit: float) -> None:
    """Print a row for every way: milliseconds a unit, and how many times as long as MapSage."""
    for name, seconds in times.items():
        cells = [f'{statistics.median(column) * 1e3 / unit:.2f}' for column in zip(*seconds)]
        for ours in (way for way in times if way.startswith('MapSage')):
            ratios = sorted(other[0] / own[0] for other, own in zip(seconds, times[ours]))
            # Of single steps, a few meet other work of the machine.
            edge = len(ratios) // 20
            cells.append(
                f'{statistics.median(ratios):.2f} ({ratios[edge]:.2f}-{ratios[-1 - edge]:.2f})'
            )
        print(f'| {job} | {name} | {" | ".join(cells)} |', flush=True)


def header(title: str, unit: str, ours: List[str]) -> None:
    """Print the head of a table."""
    columns = [
        title,
        'way',
        f'processor ms a {unit}',
        'elapsed ms',
        *(f'of {name}' for name in ours),
    ]
    print(f'\n| {" | ".join(columns)} |\n|{"---|" * len(columns)}', flush=True)


def compare_loading(root: Path, side: int, batches: int, rounds: int) -> None:
    """Time loaders on every kind of scenes."""
    import _peer_loaders as peers

    peers.write_data(root, side)

    def way(stream: Iterator[Any]) -> Way:
        return lambda: [None for _ in itertools.islice(stream, batches)]

    for kind in (*peers.KINDS, peers.POLYGONS):
        ways = {name: way(build()) for name, build in peers.loaders(root, kind).items()}
        header('scenes', 'sample', [name for name in ways if name.startswith('MapSage')])
        describe(kind, take_turns(ways, rounds), batches * peers.BATCH)


def compare_evaluation(rounds: int, count: int = 6) -> None:
    """Time a confusion matrix of predictions of 1,024 pixels with 7 classes."""
    import metric
    from torchmetrics.classification import MulticlassConfusionMatrix

    samples = metric.samples(count)

    def torchmetrics_matrix() -> None:
        matrix = MulticlassConfusionMatrix(metric.CLASSES, ignore_index=255)
        for sample in samples:
            matrix.update(sample.pred_sem_seg.data, sample.gt_sem_seg.data)
        matrix.compute()

    ways = {
        'MapSage, ConfusionMatrixMetric': metric.metric_alone('ConfusionMatrixMetric', samples),
        'MMSegmentation, IoUMetric': metric.metric_alone('IoUMetric', samples),
        'torchmetrics, MulticlassConfusionMatrix': torchmetrics_matrix,
    }
    header('evaluation', 'image of 1,024 x 1,024', list(ways)[:1])
    describe('7 classes', take_turns(ways, rounds), count)


def compare_prediction(root: Path, rounds: int, size: int = 1280) -> None:
    """Time the map of a scene by windows of 512 that share 128, without writing the file."""
    import _peer_maps as maps
    import predict_scene

    root.mkdir(exist_ok=True)
    predict_scene.write_scene(root / 'scene.tif', size)
    ways = maps.ways(root / 'scene.tif', size)
    header('prediction', 'window', list(ways)[:1])
    describe('EfficientNet-Lite0 FPN', take_turns(ways, rounds), maps.count_windows(size))


def compare_steps() -> None:
    """Time a training step; in a process of its own, which imports MapSage after MMEngine."""
    import _peer_steps as steps

    output = subprocess.run(
        [sys.executable, '-W', 'ignore', steps.__file__],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout
    times = json.loads(output.splitlines()[-1])
    header('training', 'step', list(times)[:1])
    describe(f'FCN on ResNet-18, {steps.CASE}', times, 1)


def compare_exchange() -> None:
    """Time the exchange of samples between 2 and 4 ranks; elapsed time of the slowest rank."""
    import sampling_exchange

    print('\n| exchange | gather of all samples, s | MapSage, s | ratio |\n|---|---|---|---|')
    for world in (2, 4):
        for row in sampling_exchange.on_ranks('ways', world):
            print(
                f'| {world} ranks, {row["kind"]} | {row["gather"]:.2f} | {row["all"]:.3f} | '
                f'{row["gather"] / row["all"]:.0f} |',
                flush=True,
            )


def main() -> None:
    """Compare the jobs that are asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
    parser.add_argument(
        '--jobs', nargs='+', default=['loading', 'evaluation', 'prediction', 'steps', 'exchange']
    )
    parser.add_argument('--side', type=int, default=4096, help='of the scenes in pixels')
    parser.add_argument('--batches', type=int, default=6, help='batches of 4 windows in a round')
    parser.add_argument('--rounds', type=int, default=5)
    args = parser.parse_args()
    if not os.environ.get('MAPSAGE_PEERS'):
        os.environ.update(MAPSAGE_PEERS='1', OMP_NUM_THREADS='1')
        # So that the scenes are much larger than what GDAL keeps decoded, as real scenes are.
        os.environ.setdefault('GDAL_CACHEMAX', '16')
        python = str(peer_python())
        os.execv(python, [python, '-W', 'ignore', *sys.argv])
    import rasterio
    import torch
    from _common import describe_machine

    import mapsage  # noqa: F401

    warnings.simplefilter('ignore')
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    print(
        f'{describe_machine()}, rasterio {rasterio.__version__}, GDAL '
        f'{rasterio.__gdal_version__}, {", ".join(PEERS[:2])}, pytorch-lightning 2.5.5',
        flush=True,
    )
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        if 'loading' in args.jobs:
            compare_loading(Path(folder) / 'loading', args.side, args.batches, args.rounds)
        if 'evaluation' in args.jobs:
            compare_evaluation(args.rounds)
        if 'prediction' in args.jobs:
            compare_prediction(Path(folder) / 'maps', min(args.rounds, 3))
        if 'steps' in args.jobs:
            compare_steps()
        if 'exchange' in args.jobs:
            compare_exchange()
    print(f'\n{ABSENT}\n{(time.monotonic() - begin) / 60:.1f} minutes')


if __name__ == '__main__':
    main()
