#!/usr/bin/env python
"""Measure what several dates are worth: mIoU of six dates, of each single date, of one repeated.

    python tools/make_demo_data.py data/crops --stacks
    python tools/benchmarks/stack_dates.py data/crops [--seeds 3] [--steps 200]

All variants have the same small encoder, attention over dates, head, steps and batches; they differ
in the images that their dataset lists. The best single date is chosen by its mIoU on the validation
places, in its favor. `one date six times` has as many images as the stack, and no more to tell.
"""

from __future__ import annotations

import argparse
import csv
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, List, Sequence, Tuple

import numpy as np
import torch
from mmengine.registry import DATASETS, MODELS, DefaultScope
from torch import nn
from torch.nn import functional

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]
import mapsage  # noqa: E402, F401  (registers the classes)
from mapsage.extras.demo import CROP_CLASSES  # noqa: E402

_BANDS, _RADAR = ['B03', 'B04', 'B08', 'B11'], ['vv', 'vh']
_MEAN = dict(s2=[1000.0, 1100.0, 3000.0, 2500.0], s1=[-10.4, -17.8])
_STD = dict(s2=[230.0, 500.0, 980.0, 650.0], s1=[1.9, 2.6])
_CROP, _BATCH, _WIDTH = 32, 8, 16


@MODELS.register_module()
class SmallEncoder(nn.Module):
    """Two convolutions at full resolution."""

    def __init__(self, in_channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(in_channels, _WIDTH, 3, padding=1),
            nn.GroupNorm(4, _WIDTH),
            nn.ReLU(),
            nn.Conv2d(_WIDTH, _WIDTH, 3, padding=1),
            nn.GroupNorm(4, _WIDTH),
            nn.ReLU(),
        )

    def forward(self, images: torch.Tensor) -> Tuple[torch.Tensor, ...]:
        """Return one level, (N, 16, H, W)."""
        return (self.layers(images),)


def write_lists(root: Path, folder: Path, name: str, dates: Sequence[int], radar: bool) -> str:
    """Write a list of a variant's files for each split; return their pattern.

    Args:
        root: Folder of the places.
        folder: Folder to write.
        name: Name of the variant.
        dates: Numbers of the files of a place in the order of time; a file may be repeated, and
            then has the date of its position.
        radar: Whether radar is listed, too.
    """
    for split in ('train', 'val'):
        rows: List[Sequence[str]] = [('place', 'sensor', 'date', 'path', 'mask', 'labels')]
        for labels in sorted((root / split / 'labels').glob('*.tif')):
            place = labels.stem
            files = sorted((root / split / 's2').glob(f'{place}_*.tif'))
            for position, number in enumerate(dates):
                repeated = len(set(dates)) < len(dates)
                date = (files[position] if repeated else files[number]).stem.split('_')[1]
                mask = root / split / 'scl' / files[number].name
                rows.append(
                    (
                        place,
                        's2',
                        date,
                        str(files[number].resolve()),
                        str(mask.resolve()),
                        str(labels.resolve()),
                    )
                )
            for file in sorted((root / split / 's1').glob(f'{place}_*.tif')) if radar else ():
                rows.append((place, 's1', file.stem.split('_')[1], str(file.resolve()), '', ''))
        with open(folder / f'{name}_{split}.csv', 'w', newline='') as file:
            csv.writer(file).writerows(rows)
    return str(folder / f'{name}_{{split}}.csv')


def load(lists: str, sensors: Dict[str, Any], split: str) -> Tuple[torch.Tensor, torch.Tensor]:
    """Return the model's inputs (N, channels, 64, 64) and labels of all windows of a split."""
    with DefaultScope.overwrite_default_scope('mmseg'):
        dataset = DATASETS.build(
            dict(
                type='SceneStackDataset',
                sensors=sensors,
                places=lists.format(split=split),
                window=64,
                metainfo=dict(classes=CROP_CLASSES, palette=[[0, 0, 0]] * len(CROP_CLASSES)),
                pipeline=[
                    dict(type=step)
                    for step in ('LoadSceneStack', 'LoadGeoTiffLabels', 'PackStackInputs')
                ],
            )
        )
        preprocessor = MODELS.build(
            dict(
                type='StackDataPreProcessor',
                sensors=sensors,
                mean={name: _MEAN[name] for name in sensors},
                std={name: _STD[name] for name in sensors},
            )
        )
        samples = [dataset[index] for index in range(len(dataset))]
        inputs = preprocessor(
            dict(
                inputs=[sample['inputs'] for sample in samples],
                data_samples=[sample['data_samples'] for sample in samples],
            )
        )
    return inputs['inputs'], torch.cat(
        [sample['data_samples'].gt_sem_seg.data for sample in samples]
    ).long()


def train(
    sensors: Dict[str, Any],
    data: Dict[str, Tuple[torch.Tensor, torch.Tensor]],
    seed: int,
    steps: int,
) -> float:
    """Train the small model; return its mIoU on the validation places."""
    torch.manual_seed(seed)
    random = np.random.RandomState(seed)
    encoder = {
        name: dict(type='SmallEncoder', in_channels=len(sensor['bands']))
        for name, sensor in sensors.items()
    }
    neck = MODELS.build(
        dict(
            type='TemporalPool',
            sensors=sensors,
            channels=[_WIDTH],
            pool='attention',
            attention=dict(heads=4, width=32),
        )
    )
    model = nn.Sequential(
        MODELS.build(dict(type='StackBackbone', sensors=sensors, encoder=encoder)), neck
    )
    head = nn.Conv2d(neck.out_channels[0], len(CROP_CLASSES), 1)
    parameters = [*model.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=5e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    inputs, labels = data['train']
    for _ in range(steps):
        rows = random.randint(0, len(inputs), _BATCH)
        row, column = random.randint(0, inputs.shape[-1] - _CROP + 1, 2)
        flip = [axis for axis in (-2, -1) if random.rand() < 0.5]
        window = np.s_[..., row : row + _CROP, column : column + _CROP]
        images, truth = (values[rows][window].flip(flip) for values in (inputs, labels))
        loss = functional.cross_entropy(head(model(images)[0]), truth, ignore_index=255)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    counts = np.zeros((len(CROP_CLASSES),) * 2)
    model.eval()
    with torch.no_grad():
        for image, truth in zip(*data['val']):
            classes = head(model(image[None])[0]).argmax(1)[0]
            counted = truth != 255
            np.add.at(counts, (truth[counted].numpy(), classes[counted].numpy()), 1)
    hits = np.diag(counts)
    return float(100 * np.mean(hits / (counts.sum(0) + counts.sum(1) - hits)))


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('root', type=Path, help='folder that make_demo_data.py --stacks wrote')
    parser.add_argument('--seeds', type=int, default=3)
    parser.add_argument('--steps', type=int, default=200)
    args = parser.parse_args()
    torch.set_num_threads(1)
    clouds = dict(mask='scl', clear=[4, 5])
    optical = dict(bands=_BANDS, clouds=clouds)
    start = time.process_time()

    def measure(
        name: str, dates: Sequence[int], seeds: Sequence[int], radar: bool = False
    ) -> List[float]:
        sensors = dict(s2=dict(optical, max_dates=len(dates)))
        if radar:
            sensors['s1'] = dict(bands=_RADAR, max_dates=6)
        with tempfile.TemporaryDirectory() as folder:
            lists = write_lists(args.root, Path(folder), 'variant', dates, radar)
            data = {split: load(lists, sensors, split) for split in ('train', 'val')}
        scores = [train(sensors, data, seed, args.steps) for seed in seeds]
        print(
            f'{name:32} mIoU {np.mean(scores):5.1f}  ({", ".join(f"{s:.1f}" for s in scores)})',
            flush=True,
        )
        return scores

    seeds = range(args.seeds)
    stack = measure('six dates', range(6), seeds)
    singles = [measure(f'single date {number + 1}', [number], [0])[0] for number in range(6)]
    best = int(np.argmax(singles))
    single = measure(f'best single date ({best + 1})', [best], seeds)
    repeated = measure(f'date {best + 1} six times', [best] * 6, seeds)
    measure('six dates and radar', range(6), seeds, radar=True)
    print(
        f'six dates - best single date: {np.mean(stack) - np.mean(single):+.1f}, '
        f'- one date six times: {np.mean(stack) - np.mean(repeated):+.1f}; '
        f'{time.process_time() - start:.0f} s of processor time'
    )


if __name__ == '__main__':
    main()
