"""A real MMEngine run of a second: one convolution on random images.

The tests build it in process; test_progress_hook runs this file inside a pseudo-terminal.
"""

from __future__ import annotations

import argparse
import os
import time
import warnings
from typing import Any, Dict, List, Optional

import cv2
import numpy as np
import torch
from mmengine.evaluator import BaseMetric
from mmengine.model import BaseModel
from mmengine.runner import Runner
from mmengine.structures import BaseDataElement, PixelData

METAINFO = dict(classes=('land', 'water', 'road'), palette=[[0, 90, 0], [0, 0, 255], [255, 0, 0]])
SIDE = 16


class TinyDataset(torch.utils.data.Dataset):
    """Image ``i`` holds ``i % 3 + 1`` classes in vertical stripes and one row of no data."""

    metainfo = METAINFO

    def __init__(self, folder: str, length: int = 6) -> None:
        self.paths = [os.path.join(folder, f'{index}.png') for index in range(length)]
        for index, path in enumerate(self.paths):
            # Red only, in RGB terms: a wrong channel order shows.
            cv2.imwrite(path, np.full((SIDE, SIDE, 3), (0, 0, 100 + index), dtype=np.uint8))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Dict[str, Any]:
        truth = torch.arange(SIDE).repeat(SIDE, 1) % (index % 3 + 1)
        truth[0] = 255
        sample = BaseDataElement(
            metainfo=dict(
                img_path=self.paths[index], ori_shape=(SIDE, SIDE), img_shape=(SIDE, SIDE)
            )
        )
        sample.gt_sem_seg = PixelData(data=truth[None])
        inputs = torch.from_numpy(cv2.imread(self.paths[index])).permute(2, 0, 1)
        return dict(inputs=inputs, data_samples=sample)


class TinyModel(BaseModel):
    """Predicts 'land' everywhere; its loss is what the test asks for.

    Args:
        bad_from: Iteration, counted from 0, from which the loss is NaN.
        crash_at: Iteration at which the forward pass raises.
        seconds: Time an iteration takes at least.
        chatty: Whether the third iteration prints a line and warns.
    """

    def __init__(
        self,
        bad_from: Optional[int] = None,
        crash_at: Optional[int] = None,
        seconds: float = 0.0,
        chatty: bool = False,
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.bad_from, self.crash_at = bad_from, crash_at
        self.seconds, self.chatty = seconds, chatty
        self.iteration = 0

    def forward(
        self, inputs: List[torch.Tensor], data_samples: Any = None, mode: str = 'tensor'
    ) -> Any:
        time.sleep(self.seconds)
        if mode == 'predict':
            for sample in data_samples:
                sample.pred_sem_seg = PixelData(data=torch.zeros(1, SIDE, SIDE, dtype=torch.long))
            return data_samples
        if self.iteration == self.crash_at:
            raise RuntimeError('the forward pass crashed')
        bad = self.bad_from is not None and self.iteration >= self.bad_from
        self.iteration += 1
        if self.chatty and self.iteration == 3:
            print('a line printed by the model')
            warnings.warn('a warning of the model', stacklevel=1)
        loss = (self.weight**2).sum()
        return dict(loss_ce=loss * float('nan') if bad else loss, loss_aux=loss * 0.5)


class TinyMetric(BaseMetric):
    default_prefix = ''

    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.results.append(1)

    def compute_metrics(self, results: list) -> Dict[str, float]:
        return dict(mIoU=42.5)


def build_runner(
    work_dir: str,
    hooks: List[Any],
    model: Optional[TinyModel] = None,
    train_cfg: Optional[Dict[str, Any]] = None,
    **kwargs: Any,
) -> Runner:
    """Return a runner that trains, validates and tests on six tiny images."""
    images = os.path.join(work_dir, 'images')
    os.makedirs(images, exist_ok=True)
    loader = dict(
        dataset=TinyDataset(images),
        batch_size=2,
        num_workers=0,
        collate_fn=dict(type='pseudo_collate'),
        sampler=dict(type='DefaultSampler', shuffle=False),
    )
    by_epoch = bool(train_cfg and train_cfg['by_epoch'])
    train_loader = (
        loader if by_epoch else dict(loader, sampler=dict(type='InfiniteSampler', shuffle=False))
    )
    settings = dict(
        train_dataloader=train_loader,
        val_dataloader=loader,
        test_dataloader=loader,
        train_cfg=train_cfg or dict(by_epoch=False, max_iters=4, val_interval=4),
        val_cfg=dict(),
        test_cfg=dict(),
        val_evaluator=[TinyMetric()],
        test_evaluator=[TinyMetric()],
        optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.01)),
        default_hooks=dict(logger=dict(type='LoggerHook', interval=1)),
        log_processor=dict(by_epoch=False),
        default_scope='mmengine',
        experiment_name=os.path.basename(work_dir) + str(time.time_ns()),
    )
    settings.update(kwargs)
    return Runner(model or TinyModel(), work_dir, custom_hooks=hooks, **settings)


def main() -> None:
    """Train with the progress bar, as a user's process does."""
    from mapsage.engine.display import ProgressBarHook

    parser = argparse.ArgumentParser()
    parser.add_argument('work_dir')
    parser.add_argument('--seconds', type=float, default=0.01)
    parser.add_argument('--max', type=int, default=20)
    args = parser.parse_args()
    model = TinyModel(seconds=args.seconds, chatty=True)
    train_cfg = dict(by_epoch=False, max_iters=args.max, val_interval=10)
    build_runner(args.work_dir, [ProgressBarHook(refresh_interval=0)], model, train_cfg).train()


if __name__ == '__main__':
    main()
