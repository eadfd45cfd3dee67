"""Time that a training stands still for a checkpoint: written meanwhile, or waited for.

    OMP_NUM_THREADS=1 python tools/benchmarks/checkpoint_stop.py [--megabytes 300] [--saves 8]
        [--folder DIR]

One run on the CPU saves in three ways in turn, on the disk of --folder: in the background, waiting
(both end with fsync), and as MMEngine's Runner does it (waits, without fsync). "stands still" is
the time that the save takes of the step; "in all" adds what the steps behind it take longer than
those behind no save, while a thread writes. Median of the saves.
"""

import argparse
import itertools
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'tools' / 'benchmarks')]

import torch  # noqa: E402
from _common import describe_machine  # noqa: E402
from mmengine.config import Config  # noqa: E402
from mmengine.hooks import Hook  # noqa: E402
from mmengine.model import BaseModel  # noqa: E402
from mmengine.registry import DATASETS, MODELS  # noqa: E402
from mmengine.runner import Runner  # noqa: E402

from mapsage.engine import MapSageRunner  # noqa: E402

WIDTH, LAYERS = 1024, 24
BEHIND = 20  # steps behind a save that are timed; the next save comes after them
WAYS = ('none', 'background', 'waits', 'MMEngine')


@DATASETS.register_module()
class Numbers(torch.utils.data.Dataset):
    """64 samples."""

    metainfo: dict = {}

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict:
        return dict(inputs=torch.full((WIDTH,), float(index)))


@MODELS.register_module()
class Layers(BaseModel):
    """Layers side by side, with a given number of parameters together."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        height = parameters // WIDTH // LAYERS
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(WIDTH, height, bias=False) for _ in range(LAYERS)
        )

    def forward(self, inputs, data_samples=None, mode='tensor') -> dict:
        values = torch.stack(inputs) / 64
        return dict(loss=sum(layer(values).square().mean() for layer in self.layers))


class SaveInTurn(Hook):
    """Saves in one way after the other, and times the save and the steps behind it."""

    priority = 'LOWEST'

    def __init__(self) -> None:
        self.stops = {way: [] for way in WAYS}
        self.behind = {way: [] for way in WAYS}
        self._ways = itertools.cycle(WAYS)
        self._way, self._start = '', 0.0

    def before_train_iter(self, runner, batch_idx, data_batch=None) -> None:
        if runner.iter % (BEHIND + 1) == 1 and self._way:
            self._start = time.perf_counter()

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        if runner.iter % (BEHIND + 1):
            return
        if self._start:
            self.behind[self._way].append(time.perf_counter() - self._start)
        runner.finish_saves()
        self._way = next(self._ways)
        start = time.perf_counter()
        if self._way == 'MMEngine':
            Runner.save_checkpoint(runner, runner.work_dir, 'stock.pth', by_epoch=False)
        elif self._way != 'none':
            with runner.saving_together(background=self._way == 'background'):
                runner.save_checkpoint(runner.work_dir, f'{self._way}.pth', by_epoch=False)
        self.stops[self._way].append(time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--megabytes', type=int, default=300)
    parser.add_argument('--saves', type=int, default=8, help='of each way')
    parser.add_argument('--folder', help='where to write')
    args = parser.parse_args()
    torch.set_num_threads(1)
    hook = SaveInTurn()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        runner = MapSageRunner.from_cfg(
            Config(
                dict(
                    default_scope='mmengine',
                    work_dir=folder,
                    env_cfg=dict(accelerator='cpu'),
                    # 4 bytes a parameter, and two moments
                    model=dict(type='Layers', parameters=args.megabytes * 10**6 // 12),
                    train_dataloader=dict(
                        batch_size=2,
                        num_workers=0,
                        dataset=dict(type='Numbers'),
                        collate_fn=dict(type='pseudo_collate'),
                        sampler=dict(type='InfiniteSampler', shuffle=False),
                    ),
                    train_cfg=dict(
                        by_epoch=False, max_iters=(args.saves + 1) * len(WAYS) * (BEHIND + 1) + 1
                    ),
                    optim_wrapper=dict(type='OptimWrapper', optimizer=dict(type='Adam', lr=1e-6)),
                    default_hooks=dict(
                        checkpoint=None, logger=dict(type='LoggerHook', interval=10**6)
                    ),
                    log_level='ERROR',
                    experiment_name='checkpoint_stop',
                )
            )
        )
        runner.register_hook(hook)
        runner.train()
        size = os.path.getsize(Path(folder, 'background.pth')) / 1e6
    first = 1  # the first of each way takes new memory
    quiet = statistics.median(hook.behind['none'][first:])
    stops = {way: statistics.median(hook.stops[way][first:]) for way in WAYS[1:]}
    total = {
        way: stops[way] + statistics.median(hook.behind[way][first:]) - quiet for way in WAYS[1:]
    }
    print(
        f'{describe_machine()}, load {os.getloadavg()[0]:.1f}; {size:.0f} MB, {args.saves} saves '
        f'of each way, {quiet / BEHIND * 1e3:.0f} ms/step'
    )
    print(f'{"way":<12} {"stands still":>14} {"of waits":>9} {"in all":>10} {"of waits":>9}')
    for way in WAYS[1:]:
        print(
            f'{way:<12} {stops[way] * 1e3:>11.0f} ms {stops[way] / stops["waits"]:>9.2f} '
            f'{total[way] * 1e3:>7.0f} ms {total[way] / total["waits"]:>9.2f}'
        )


if __name__ == '__main__':
    main()
