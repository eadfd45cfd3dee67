"""Peak memory and time of a map of change of a pair of scenes of 10,000 x 10,000 pixels.

    OMP_NUM_THREADS=1 python tools/benchmarks/change_map.py [--size 10000] [--ranks 1 2]

Writes two scenes that differ in scattered squares, block by block, and maps them with
tools/predict.py in other processes, with a siamese model of one EfficientNet stage that calls
strong differences change. The bound is stated before the map: the formula of
docs/how-to/scene-stacks.md, and what a forward pass of the model adds to a process. The peak is the
largest resident set of any process, as the kernel counts it. While the map is made, the peak is
noted next to the number of finished strips: memory that grows with the scene would show there. Maps
of all numbers of ranks must have the same bytes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Dict, List, NamedTuple, Tuple

import numpy as np
import rasterio
import torch
from mmengine.config import Config
from mmengine.registry import MODELS, DefaultScope
from rasterio.windows import Window

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'tools' / 'benchmarks')]

from _common import describe_machine  # noqa: E402

from mapsage.accelerator import resolve_accelerator  # noqa: E402
from mapsage.commands.checkpoint_model import choose_batch  # noqa: E402

_BLOCK, _WINDOW = 512, 512
# Bands of both dates, two planes for each date, and two of the place.
_CHANNELS = 2 * 3 + 2 * 2 + 2
_CLASSES = 2
# Python, PyTorch and GDAL with its cache of blocks, and pixels that wait to be predicted.
_PROGRAM, _AHEAD = 1 << 30, 512 << 20
# Groups of strips that have a line in the report.
_GROUPS = 5
_CONFIG = """
default_scope = 'mmseg'
custom_imports = dict(imports=['mapsage'])
sensors = dict(image=dict(bands=[1, 2, 3], max_dates=2))
model = dict(
    type='EncoderDecoder',
    data_preprocessor=dict(type='StackDataPreProcessor', sensors=sensors, size=(512, 512),
                           mean=dict(image=[127.] * 3), std=dict(image=[60.] * 3)),
    backbone=dict(type='SiameseBackbone', sensors=sensors, fusion='abs_diff', encoder=dict(
        type='EfficientNetLite', out_indices=(0, ))),
    decode_head=dict(type='FCNHead', in_channels=24, in_index=0, channels=24, num_convs=0,
                     concat_input=False, num_classes=2, dropout_ratio=0., align_corners=False),
    test_cfg=dict(mode='whole'))
test_dataloader = dict(dataset=dict(type='ChangeDataset', sensors=sensors, pipeline=[
    dict(type='LoadChangePair'), dict(type='LoadChangeLabels'), dict(type='PackStackInputs')]))
"""


def write_model(folder: Path) -> Tuple[Path, Path]:
    """Write the config and the weights of the model; return their paths."""
    config, checkpoint = folder / 'change.py', folder / 'model.pth'
    config.write_text(_CONFIG)
    torch.manual_seed(0)
    with DefaultScope.overwrite_default_scope('mmseg'):
        weights = MODELS.build(Config.fromfile(str(config)).model).state_dict()
    weights['decode_head.conv_seg.weight'][:] = torch.tensor([-1e4, 1e4])[:, None, None, None]
    weights['decode_head.conv_seg.bias'][:] = torch.tensor([0.5, -0.5])
    torch.save(
        dict(
            state_dict=weights,
            meta=dict(
                dataset_meta=dict(
                    classes=('unchanged', 'changed'), palette=[[255, 255, 255], [230, 25, 75]]
                )
            ),
        ),
        str(checkpoint),
    )
    return config, checkpoint


def write_pair(folder: Path, size: int) -> Tuple[Path, Path]:
    """Write two scenes that differ in a square of every fourth block; return their paths."""
    paths = folder / 'before_20190614.tif', folder / 'after_20230702.tif'
    rng = np.random.default_rng(0)
    ground = rng.integers(60, 190, (3, _BLOCK, _BLOCK), np.uint8)
    changed = ground.copy()
    changed[:, 100:200, 150:300] = rng.integers(1, 255, (3, 100, 150))
    profile = dict(
        driver='GTiff',
        width=size,
        height=size,
        count=3,
        dtype='uint8',
        tiled=True,
        blockxsize=_BLOCK,
        blockysize=_BLOCK,
        compress='deflate',
        crs='EPSG:32633',
        transform=rasterio.Affine(0.5, 0, 4e5, 0, -0.5, 5e6),
        nodata=0,
    )
    for date, path in enumerate(paths):
        with rasterio.open(str(path), 'w', **profile) as file:
            for number, (row, column) in enumerate(
                (row, column) for row in range(0, size, _BLOCK) for column in range(0, size, _BLOCK)
            ):
                block = changed if date and number % 4 == 0 else ground
                height, width = min(_BLOCK, size - row), min(_BLOCK, size - column)
                file.write(block[:, :height, :width], window=Window(column, row, width, height))
    return paths


def memory_of_program(width: int, batch: int) -> int:
    """Return the bytes that docs/how-to/scene-stacks.md allows without the model's own memory."""
    readers, threads = min(8, len(os.sched_getaffinity(0))), torch.get_num_threads()
    window = 4 * _CHANNELS * _WINDOW**2
    ahead = max(readers, min(4 * readers, _AHEAD // window))
    return (
        _PROGRAM
        + window * (ahead + 1 + readers + batch * (3 + 4 * threads))
        + 4 * _CLASSES * (2 * _WINDOW * width + 4 * batch * _WINDOW**2)
    )


def memory_of_model(folder: Path, batch: int) -> int:
    """Return what a forward pass adds to the largest resident set of a process, in bytes."""
    read_end, write_end = os.pipe()
    process = os.fork()
    if process == 0:
        with DefaultScope.overwrite_default_scope('mmseg'):
            model = MODELS.build(Config.fromfile(str(folder / 'change.py')).model).eval()
        before = _resident(os.getpid(), 'VmHWM')
        with torch.no_grad():
            model(torch.zeros(batch, _CHANNELS, _WINDOW, _WINDOW), mode='tensor')
        os.write(write_end, str(_resident(os.getpid(), 'VmHWM') - before).encode())
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        text = pipe.read()
    os.waitpid(process, 0)
    if not text:
        raise SystemExit('the forward pass of the model failed')
    return int(text)


def _resident(process: int, field: str) -> int:
    """Return a field of a process's status in bytes; 0 if the process has ended."""
    try:
        status = Path(f'/proc/{process}/status').read_text()
    except OSError:
        return 0
    return next(
        (
            int(line.split()[1]) << 10
            for line in status.splitlines()
            if line.startswith(field + ':')
        ),
        0,
    )


def _descendants(process: int) -> List[int]:
    """Return a process and all processes that it has started and that still run."""
    try:
        children = Path(f'/proc/{process}/task/{process}/children').read_text().split()
    except OSError:
        children = []
    return [process, *(descendant for child in children for descendant in _descendants(int(child)))]


class Course(NamedTuple):
    """Memory and time of a map.

    Attributes:
        peak: Largest resident set of any process in bytes.
        by_strips: Largest resident set until so many strips were finished, in bytes.
        seconds, processor_seconds: Elapsed and processor time.
    """

    peak: int
    by_strips: Dict[int, int]
    seconds: float
    processor_seconds: float

    def describe(self) -> str:
        """Return the memory of groups of strips, and while the files are written."""
        strips = sorted(self.by_strips)
        size = -(-len(strips) // _GROUPS)
        groups = [strips[start : start + size] for start in range(0, len(strips), size)]
        return ', '.join(
            f'{group[0]} to {group[-1]}: '
            f'{max(self.by_strips[strip] for strip in group) / 2**30:.2f}'
            for group in groups
        )


def predict(folder: Path, out: Path, ranks: int) -> Course:
    """Map the pair; return memory and time."""
    command = [sys.executable, str(ROOT / 'tools' / 'predict.py')]
    environ = dict(os.environ, PYTHONPATH=str(ROOT))
    if ranks > 1:
        command = ['bash', str(ROOT / 'scripts' / 'predict.sh')]
        environ.update(NPROC_PER_NODE=str(ranks), MAPSAGE_PYTHON=sys.executable)
    start = time.monotonic()
    process = subprocess.Popen(
        [
            *command,
            str(folder / 'change.py'),
            str(folder / 'model.pth'),
            str(folder / 'before_20190614.tif'),
            str(folder / 'after_20230702.tif'),
            '--out',
            str(out),
            '--polygons',
            '--accelerator',
            'cpu',
        ],
        env=environ,
        cwd=str(ROOT),
        stdout=subprocess.DEVNULL,
    )
    by_strips: Dict[int, int] = {}
    ended = threading.Event()

    def watch() -> None:
        strips = 0
        while not ended.wait(1):
            # The strips are removed when the files are written.
            strips = max(strips, sum(1 for _ in out.glob('.*/strip*')))
            largest = max(
                _resident(descendant, 'VmHWM') for descendant in _descendants(process.pid)
            )
            by_strips[strips] = max(by_strips.get(strips, 0), largest)

    watcher = threading.Thread(target=watch)
    watcher.start()
    _, status, usage = os.wait4(process.pid, 0)
    ended.set()
    watcher.join()
    if status:
        raise SystemExit(f'predict.py ended with {status}')
    return Course(
        usage.ru_maxrss << 10, by_strips, time.monotonic() - start, usage.ru_utime + usage.ru_stime
    )


def main() -> None:
    """State the bound, map the pair, and print a row for each number of ranks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--size', type=int, default=10000, help='side of the scenes in pixels')
    parser.add_argument('--ranks', type=int, nargs='+', default=[1])
    args = parser.parse_args()
    print(f'{describe_machine()}, rasterio {rasterio.__version__}')
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder)
        batch = choose_batch(
            None, (_WINDOW, _WINDOW), _CLASSES, resolve_accelerator('cpu'), _CHANNELS
        )
        program, model = memory_of_program(args.size, batch), memory_of_model(folder, batch)
        bound = program + model
        print(
            f'bound of a process: {bound / 2**30:.2f} GiB, of it {model / 2**30:.2f} GiB of the '
            f'model with {batch} windows; the pair has {6 * args.size**2 / 2**30:.2f} GiB, its '
            f'scores in float32 {8 * args.size**2 / 2**30:.2f} GiB',
            flush=True,
        )
        write_pair(folder, args.size)
        maps, is_within = set(), True
        for ranks in args.ranks:
            course = predict(folder, folder / f'maps{ranks}', ranks)
            (path,) = (folder / f'maps{ranks}').glob('*_to_*.tif')
            maps.add(path.read_bytes())
            is_within = is_within and course.peak <= bound
            print(
                f'{ranks} rank(s): peak {course.peak / 2**30:.2f} GiB, '
                f'{course.processor_seconds:.0f} s of processor time, {course.seconds:.0f} s, '
                f'{"within" if course.peak <= bound else "BEYOND"} the bound\n'
                f'  largest resident set until then in GiB, by finished strips: '
                f'{course.describe()}',
                flush=True,
            )
        print('the same bytes' if len(maps) == 1 else 'DIFFERENT bytes')
    if len(maps) > 1 or not is_within:
        sys.exit(1)


if __name__ == '__main__':
    main()
