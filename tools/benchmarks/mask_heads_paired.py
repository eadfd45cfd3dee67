"""PMT and EoMT against UPerNet on the same ViT: a step on cached features, and windows a second.

    OMP_NUM_THREADS=1 python tools/benchmarks/mask_heads_paired.py [--arch small] [--side 256]

Models are those of configs/_base_/dinov3_vit_l_{pmt,eomt,upernet}.py with another size of ViT and
random weights. UPerNet is there twice: with the 512 channels of its config, and with 128.

First each head trains on a frozen encoder's features from a cache, in a runner of its own; the
runners take turns step by step in one process, so that other work on the machine hits all of them.
A step is everything from batch to hooks: labels, reading of the features, head, loss, optimizer.
Then EoMT, as it is after its training, and ViT + UPerNet predict the same windows in turns, through
what tools/predict.py uses. Ratios are medians over turns, of wall-clock and of processor time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Dict, List, Sequence, Tuple

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'tools' / 'benchmarks')]

import torch  # noqa: E402
from _common import describe_machine, write_tiles  # noqa: E402
from mmengine.config import Config  # noqa: E402
from mmengine.hooks import Hook  # noqa: E402

from mapsage.accelerator import resolve_accelerator, set_current_accelerator  # noqa: E402
from mapsage.commands.cli import build_model  # noqa: E402
from mapsage.engine import MapSageRunner  # noqa: E402
from mapsage.extras.streaming import cache_features  # noqa: E402
from mapsage.maps.predictor import WindowPredictor  # noqa: E402
from mapsage.models.backbones.dinov3_weights import ARCHS  # noqa: E402

CLASSES, BATCH, WARM_UP = 7, 2, 2
# The channels of UPerNet; None is the model of mask queries, which the others are held against.
WIDTHS: Dict[str, Any] = {'queries': None, 'UPerNet 512': 512, 'UPerNet 128': 128}
DATA = """
custom_imports = dict(imports=['mapsage'])
default_scope = 'mmseg'
env_cfg = dict(accelerator='cpu')
randomness = dict(seed=7)
pipeline = [dict(type='LoadImageFromFile'), dict(type='LoadAnnotations'),
            dict(type='PackSegInputs')]
train_dataloader = dict(
    batch_size={batch}, num_workers=0, sampler=dict(type='InfiniteSampler', shuffle=True),
    dataset=dict(type='LoveDADataset', data_root={root!r}, reduce_zero_label=True,
                 pipeline=pipeline,
                 data_prefix=dict(img_path='img_dir/train', seg_map_path='ann_dir/train')))
test_pipeline = pipeline
train_cfg = dict(type='IterBasedTrainLoop', max_iters={steps})
default_hooks = dict(checkpoint=dict(type='CheckpointHook', by_epoch=False, interval=1000000))
log_level = 'ERROR'
"""


def config_of(kind: str, arch: str, side: int, root: Path, steps: int = 1) -> Config:
    """Return the config of ``'eomt'``, ``'pmt'`` or a number of UPerNet's channels."""
    base = kind if kind in ('eomt', 'pmt') else 'upernet'
    cfg = Config.fromfile(str(ROOT / f'configs/_base_/dinov3_vit_l_{base}.py'))
    cfg.merge_from_dict(
        dict(Config.fromstring(DATA.format(batch=BATCH, root=str(root), steps=steps), '.py'))
    )
    dims, layers = ARCHS[arch].embed_dims, ARCHS[arch].num_layers
    last = tuple(layers * part // 4 - 1 for part in (1, 2, 3, 4))
    cfg.model.data_preprocessor.size = (side, side)
    cfg.model.test_cfg = dict(mode='whole')
    cfg.model.backbone.update(
        arch=arch, init_cfg=None, out_indices=last[-1:] if base == 'eomt' else last
    )
    head = cfg.model.decode_head
    head.update(num_classes=CLASSES, in_channels=dims if base == 'eomt' else [dims] * 4)
    if base == 'pmt':
        head.num_heads = ARCHS[arch].num_heads
        cfg.custom_hooks = [dict(type='MaskAnnealingHook')]
    elif base == 'upernet':
        head.channels, cfg.model.neck.embed_dim = int(kind), dims
    elif layers == 12:
        head.num_blocks = 3
    cfg.optim_wrapper = dict(
        type='OptimWrapper',
        optimizer=dict(type='AdamW', lr=2e-4, weight_decay=0.05),
        **(dict() if base == 'upernet' else dict(clip_grad=dict(max_norm=0.01))),
    )
    cfg.param_scheduler = []
    cfg.experiment_name = f'{base}-{kind}'
    return cfg


class Turn(Hook):
    """Times its runner's steps and hands over after each."""

    priority = 'LOWEST'

    def __init__(self) -> None:
        self.mine, self.ready = threading.Event(), threading.Event()
        self.next: Turn = self
        self.times: List[Tuple[float, float]] = []  # wall-clock and processor time
        self._start = (0.0, 0.0)

    def before_train_epoch(self, runner: Any) -> None:
        self.ready.set()
        self._wait()

    def after_train_iter(self, runner: Any, *_: Any, **__: Any) -> None:
        self.times.append(
            (time.perf_counter() - self._start[0], time.process_time() - self._start[1])
        )
        self.next.mine.set()
        if runner.iter + 1 < runner.max_iters:
            self._wait()

    def _wait(self) -> None:
        self.mine.wait()
        self.mine.clear()
        self._start = (time.perf_counter(), time.process_time())


def compare_steps(folder: Path, arch: str, side: int, steps: int) -> None:
    """Print the time of a step on cached features."""
    data = write_tiles(folder / 'data', 2 * BATCH, side)
    turns = {name: Turn() for name in WIDTHS}
    order = list(turns.values())
    threads = []
    for turn, following in zip(order, order[1:] + order[:1]):
        turn.next = following
    for name, width in WIDTHS.items():
        cfg = config_of('pmt' if width is None else str(width), arch, side, data, steps)
        # Heads that read the same maps share a cache; PMT reads the other tokens too.
        cache = folder / ('tokens' if width is None else 'maps')
        path = folder / f'{cfg.experiment_name}.py'
        cfg.dump(str(path))
        cache_features.main([str(path), '--folder', str(cache), '--work-dir', str(folder / 'work')])
        cfg.feature_source = dict(type='Cached', folder=str(cache))
        cfg.work_dir = str(folder / cfg.experiment_name)
        runner = MapSageRunner.from_cfg(cfg)
        runner.register_hook(turns[name])
        threads.append(threading.Thread(target=runner.train))
        threads[-1].start()
        turns[name].ready.wait()
    order[0].mine.set()
    for thread in threads:
        thread.join()
    print(
        f'\n{arch}, {side} x {side}, batch {BATCH}, a step on cached features, {steps - WARM_UP} '
        'turns:'
    )
    _print(
        {
            ('PMT' if name == 'queries' else name): turn.times[WARM_UP:]
            for name, turn in turns.items()
        },
        'images',
    )


def compare_windows(arch: str, side: int, rounds: int, root: Path) -> None:
    """Print how many windows a second each model predicts."""
    torch.manual_seed(0)
    predictors = {}
    for name, width in WIDTHS.items():
        model = build_model(config_of('eomt' if width is None else str(width), arch, side, root))
        if width is None:
            model.decode_head.attn_mask_probs.zero_()  # as after its training
        label = 'EoMT' if width is None else f'ViT + {name}'
        predictors[label] = WindowPredictor(
            model, torch.device('cpu'), (side, side), side // 4, BATCH
        )
    windows = torch.randint(0, 255, (BATCH, 3, side, side), dtype=torch.uint8)
    times: Dict[str, List[Tuple[float, float]]] = {name: [] for name in predictors}
    for _ in range(rounds):
        for name, predictor in predictors.items():
            start = (time.perf_counter(), time.process_time())
            predictor(windows)
            times[name].append((time.perf_counter() - start[0], time.process_time() - start[1]))
    print(f'\n{arch}, {side} x {side}, batch {BATCH}, predict, {rounds - 1} turns:', flush=True)
    _print({name: each[1:] for name, each in times.items()}, 'windows')


def _print(times: Dict[str, Sequence[Tuple[float, float]]], what: str) -> None:
    """Print medians, and the time of the first as a share of each one's, turn by turn."""
    (first, base), *_ = times.items()
    print(f'| | s | {what}/s | time of {first} / its own | of processor time | times as fast |')
    print('|' + '---|' * 6)
    for name, each in times.items():
        wall, processor = (
            statistics.median(one[which] / other[which] for one, other in zip(base, each))
            for which in (0, 1)
        )
        seconds = statistics.median(wall for wall, _ in each)
        print(
            f'| {name} | {seconds:.2f} | {BATCH / seconds:.2f} | {wall:.3f} | {processor:.3f} | '
            f'{1 / wall:.2f} |'
        )


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--arch', default='small', help='of DINOv3ViT (default: small)')
    parser.add_argument('--side', type=int, default=256, help='of crops and windows, in pixels')
    parser.add_argument('--turns', type=int, default=7, help='of each, the first ones warm up')
    args = parser.parse_args()
    torch.set_num_threads(1)
    set_current_accelerator(resolve_accelerator('cpu'))
    print(describe_machine())
    with tempfile.TemporaryDirectory() as folder:
        compare_windows(args.arch, args.side, args.turns, Path(folder))
        compare_steps(Path(folder), args.arch, args.side, args.turns)


if __name__ == '__main__':
    main()
