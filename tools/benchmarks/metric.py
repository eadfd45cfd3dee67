"""ConfusionMatrixMetric against MMSeg's IoUMetric: 1024x1024, 7 classes, CPU, in turns.

    OMP_NUM_THREADS=1 python tools/benchmarks/metric.py [--images 16] [--rounds 7]

"metric" is process() and evaluate() alone. "validation loop" is all of MMEngine's ValLoop but the
model's forward: data loader (samples lie in memory), hooks, evaluator.
"""

import argparse
import logging
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Dict, List

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'tools' / 'benchmarks')]
SIDE, CLASSES, BATCH = 1024, 7, 2
NAMES = ('IoUMetric', 'ConfusionMatrixMetric')

import torch  # noqa: E402
from _common import describe_machine  # noqa: E402
from mmengine.model import BaseModel  # noqa: E402
from mmengine.registry import DefaultScope  # noqa: E402
from mmengine.runner import Runner  # noqa: E402
from mmengine.structures import PixelData  # noqa: E402
from mmseg.registry import METRICS  # noqa: E402
from mmseg.structures import SegDataSample  # noqa: E402

import mapsage  # noqa: E402, F401
from mapsage.evaluation import boundary_counts  # noqa: E402


def samples(count: int) -> List[SegDataSample]:
    """Return fields of 32x32 pixels, an eighth ignored, of which 83 % are predicted right."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for number in range(count):
        fields = torch.randint(0, CLASSES + 1, (32, 32), generator=generator)
        truth = fields.repeat_interleave(SIDE // 32, 0).repeat_interleave(SIDE // 32, 1)
        guess = torch.randint(0, CLASSES, (SIDE, SIDE), generator=generator)
        wrong = torch.rand(SIDE, SIDE, generator=generator) < 0.2
        sample = SegDataSample(metainfo=dict(img_path=f'{number}.png'))
        sample.pred_sem_seg = PixelData(
            data=torch.where(wrong | (truth == CLASSES), guess, truth)[None]
        )
        sample.gt_sem_seg = PixelData(data=torch.where(truth == CLASSES, 255, truth)[None])
        made.append(sample)
    return made


class Ready(BaseModel):
    """Hands out predictions that are there, and times it."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0

    def val_step(self, data: Dict[str, Any]) -> List[SegDataSample]:
        start = time.perf_counter()
        try:
            return list(data['data_samples'])
        finally:
            self.seconds += time.perf_counter() - start

    def forward(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError


class InMemory(torch.utils.data.Dataset):
    """A dataset that is its samples."""

    metainfo = dict(classes=[f'class {number}' for number in range(CLASSES)])

    def __init__(self, made: List[SegDataSample]) -> None:
        self.made = made

    def __len__(self) -> int:
        return len(self.made)

    def __getitem__(self, index: int) -> dict:
        return dict(inputs=torch.zeros(1), data_samples=self.made[index])


def metric_alone(name: str, made: List[SegDataSample]) -> Callable[[], Any]:
    with DefaultScope.overwrite_default_scope('mmseg'):
        metric = METRICS.build(dict(type=name))
    metric.dataset_meta = InMemory.metainfo
    ready = [sample.to_dict() for sample in made]

    def run() -> float:
        start = time.perf_counter()
        for first in range(0, len(ready), BATCH):
            metric.process(None, ready[first : first + BATCH])
        metric.evaluate(len(ready))
        return time.perf_counter() - start

    return run


def validation_loop(name: str, made: List[SegDataSample], folder: str) -> Callable[[], Any]:
    model = Ready()
    runner = Runner(
        model,
        f'{folder}/{name}',
        val_cfg=dict(type='ValLoop'),
        val_evaluator=dict(type=name),
        val_dataloader=dict(
            batch_size=BATCH,
            num_workers=0,
            dataset=InMemory(made),
            sampler=dict(type='DefaultSampler', shuffle=False),
            collate_fn=dict(type='pseudo_collate'),
        ),
        default_scope='mmseg',
        experiment_name=name,
        log_level='ERROR',
    )
    runner.val()
    loop = runner.val_loop

    def run() -> float:
        before, start = model.seconds, time.perf_counter()
        loop.run()
        return time.perf_counter() - start - (model.seconds - before)

    return run


def in_turns(cases: Dict[str, Callable[[], float]], rounds: int) -> Dict[str, List[float]]:
    times: Dict[str, List[float]] = {name: [] for name in cases}
    for _ in range(rounds + 1):
        for name, run in cases.items():
            times[name].append(run())
    return {name: each[1:] for name, each in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--images', type=int, default=16)
    parser.add_argument('--rounds', type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    made = samples(args.images)
    print(describe_machine())
    print(f'{"":<16} {"IoUMetric ms/image":>19} {"ours ms/image":>14} {"times":>6}')
    with tempfile.TemporaryDirectory() as folder:
        tables = {
            'metric': {name: metric_alone(name, made) for name in NAMES},
            'validation loop': {name: validation_loop(name, made, folder) for name in NAMES},
        }
        for title, cases in tables.items():
            theirs, ours = in_turns(cases, args.rounds).values()
            ratio = statistics.median(a / b for a, b in zip(theirs, ours))
            print(
                f'{title:<16} {1000 * statistics.median(theirs) / len(made):19.2f} '
                f'{1000 * statistics.median(ours) / len(made):14.2f} {ratio:6.1f}'
            )
    pair = made[0].pred_sem_seg.data[0], made[0].gt_sem_seg.data[0]
    times = []
    for _ in range(args.rounds):
        start = time.perf_counter()
        boundary_counts(*pair, CLASSES)
        times.append(time.perf_counter() - start)
    print(f'mBoundaryIoU adds {1000 * statistics.median(times):.2f} ms/image')


if __name__ == '__main__':
    main()
