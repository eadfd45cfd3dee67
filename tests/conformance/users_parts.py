"""What a user may register with MMEngine: models, datasets, samplers, hooks, loops, a backend."""

from __future__ import annotations

import hashlib
from typing import Any, Dict, Iterator, List

import numpy as np
import torch
from mmengine.evaluator import BaseMetric
from mmengine.fileio import LocalBackend, register_backend
from mmengine.hooks import Hook
from mmengine.model import BaseModel, BaseModule
from mmengine.optim import OptimWrapper, OptimWrapperDict
from mmengine.registry import (
    DATA_SAMPLERS,
    DATASETS,
    HOOKS,
    LOOPS,
    METRICS,
    MODELS,
    OPTIM_WRAPPER_CONSTRUCTORS,
    OPTIMIZERS,
    TRANSFORMS,
)
from mmengine.runner import BaseLoop, IterBasedTrainLoop
from mmseg.datasets import BaseSegDataset
from mmseg.utils import register_all_modules
from torch import nn
from torch.utils.data import BatchSampler, Dataset, IterableDataset, Sampler

register_all_modules(init_default_scope=False)

_POINTS = (
    'before_run',
    'after_run',
    'before_train',
    'after_train',
    'before_val',
    'after_val',
    'before_test',
    'after_test',
    'before_train_epoch',
    'after_train_epoch',
    'before_val_epoch',
    'after_val_epoch',
    'before_test_epoch',
    'after_test_epoch',
    'before_train_iter',
    'after_train_iter',
    'before_val_iter',
    'after_val_iter',
    'before_test_iter',
    'after_test_iter',
    'before_save_checkpoint',
    'after_load_checkpoint',
)


@HOOKS.register_module()
class RecordHook(Hook):
    """Writes down every call of a hook with the counters and a digest of what came with it."""

    priority = 'LOWEST'
    calls: List[Any] = []  # of the run that is going on


def _recorded(point: str) -> Any:
    def call(self: Any, runner: Any, **given: Any) -> None:
        loop = runner._train_loop  # runner.iter would build the loop, also in a test
        place = (loop.epoch, loop.iter) if isinstance(loop, BaseLoop) else ()
        RecordHook.calls.append((point, *place, digest(given)))

    return call


for _point in _POINTS:
    setattr(RecordHook, _point, _recorded(_point))


def digest(value: Any) -> Any:
    """Return something small that is equal only for equal batches, outputs and metrics."""
    if isinstance(value, torch.Tensor):
        data = value.detach().cpu().contiguous().reshape(-1).float().numpy().tobytes()
        return f'{value.dtype} {tuple(value.shape)} {hashlib.sha1(data).hexdigest()[:12]}'
    if isinstance(value, dict):
        return {
            str(key): digest(each)
            for key, each in value.items()
            if key not in ('message_hub', 'meta', 'gradients', 'accumulative_counts')
        }
    if isinstance(value, (list, tuple)):
        return [digest(each) for each in value]
    if hasattr(value, 'metainfo'):
        facts = {name: each for name, each in value.metainfo.items() if not name.endswith('path')}
        return [
            str(value.metainfo.get('img_path', '')).rsplit('/', 1)[-1],
            digest(facts),
            {name: digest(field.data) for name, field in value.items()},
        ]
    if isinstance(value, np.generic):
        return value.item()
    return value if isinstance(value, (bool, int, float, str, type(None))) else type(value).__name__


@HOOKS.register_module()
class HalvingHook(Hook):
    """Halves the learning rate in each iteration, and may fail."""

    def __init__(self, fail_at: int = -1) -> None:
        self._fail_at = fail_at

    def after_train_iter(self, runner: Any, batch_idx: int, **given: Any) -> None:
        if runner.iter == self._fail_at:
            raise ArithmeticError(f"the user's hook fails in iteration {runner.iter}")
        for group in runner.optim_wrapper.param_groups:
            group['lr'] *= 0.5


@HOOKS.register_module()
class ReadingHook(Hook):
    """Reads the iteration before every run, for which MMEngine builds the training loop."""

    def before_run(self, runner: Any) -> None:
        assert runner.iter == 0 < runner.max_iters


@HOOKS.register_module()
class PipelineSwitchHook(Hook):
    """Gives the dataset another pipeline from the second epoch on, as YOLOX's hook does."""

    def before_train_epoch(self, runner: Any) -> None:
        if runner.epoch == 1:
            pipeline = runner.train_dataloader.dataset.pipeline
            flipped = TRANSFORMS.build(dict(type='RandomFlip', prob=1.0, direction='vertical'))
            runner.train_dataloader.dataset.pipeline = type(pipeline)(
                [*pipeline.transforms[:-1], flipped, pipeline.transforms[-1]]
            )


@LOOPS.register_module()
class TwiceAsOftenLoop(IterBasedTrainLoop):
    """Trains twice on every batch."""

    def run_iter(self, data_batch: Any) -> None:
        super().run_iter(data_batch)
        if self._iter < self._max_iters:
            super().run_iter(data_batch)


@MODELS.register_module()
class TinyBackbone(BaseModule):
    """One convolution with batch statistics, so that a model has buffers as well as weights."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> List[torch.Tensor]:
        return [torch.relu(self.norm(self.conv(x)))]


@MODELS.register_module()
class Regressor(BaseModel):
    """A model of something else than segmentation, as in MMEngine's own tests."""

    def __init__(self, returns: str = 'tensors') -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 3), nn.Linear(3, 1)
        self._returns = returns

    def forward(self, inputs: Any, data_samples: Any = None, mode: str = 'tensor') -> Any:
        inputs = torch.stack(list(inputs))
        values = self.second(torch.relu(self.first(inputs)))
        if mode == 'loss':
            return dict(loss=(values[:, 0] - torch.stack(list(data_samples))).square().mean())
        dicts = [dict(values=value) for value in values]
        return dict(tensors=values, dicts=dicts, dict=dict(values=values))[self._returns]


@MODELS.register_module()
class TwoOptimizers(Regressor):
    """A model that steps two optimizers itself, as generative ones do."""

    def train_step(self, data: Any, optim_wrapper: Any) -> Dict[str, torch.Tensor]:
        data = self.data_preprocessor(data, True)
        images = torch.stack(list(data['inputs'])).float()
        inputs = images.flatten(2).mean(2)[:, :2] / 100
        loss = self.second(torch.relu(self.first(inputs))).square().mean()
        first, second = optim_wrapper['first'], optim_wrapper['second']
        first.zero_grad()
        second.zero_grad()
        loss.backward()
        first.step()
        second.step()
        return dict(loss=loss)


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class OneForEachPart:
    """Builds one optimizer for each child of the model."""

    def __init__(self, optim_wrapper_cfg: Dict[str, Any], paramwise_cfg: Any = None) -> None:
        self._optimizer = optim_wrapper_cfg['optimizer']

    def __call__(self, model: nn.Module) -> OptimWrapperDict:
        return OptimWrapperDict(
            **{
                name: OptimWrapper(
                    optimizer=OPTIMIZERS.build(
                        dict(self._optimizer, params=getattr(model, name).parameters())
                    )
                )
                for name in ('first', 'second')
            }
        )


@DATASETS.register_module()
class Line(Dataset):
    """Points near a line, without any metainfo; samples are dicts or tuples."""

    def __init__(self, kind: str = 'dict') -> None:
        self._kind = kind
        self._points = torch.arange(16.0).reshape(8, 2) / 16

    def __len__(self) -> int:
        return len(self._points)

    def __getitem__(self, index: int) -> Any:
        point = self._points[index]
        return (
            (point, point.sum())
            if self._kind == 'tuple'
            else dict(inputs=point, data_samples=point.sum())
        )


@METRICS.register_module()
class CountMetric(BaseMetric):
    """Counts the batches."""

    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.results.append(1)

    def compute_metrics(self, results: Any) -> Dict[str, float]:
        return dict(count=float(sum(results)))


@DATASETS.register_module()
class CategoryDataset(BaseSegDataset):
    """Says which classes an image has, which ClassBalancedDataset asks for."""

    def get_cat_ids(self, idx: int) -> List[int]:
        return [int(idx > 1), 2]


@DATASETS.register_module()
class Stream(IterableDataset):
    """The samples of another dataset, one after the other."""

    def __init__(self, dataset: Dict[str, Any]) -> None:
        self._dataset = DATASETS.build(dataset)
        self.metainfo = self._dataset.metainfo

    def __len__(self) -> int:
        return len(self._dataset)

    def __iter__(self) -> Iterator[Any]:
        return (self._dataset[index] for index in range(len(self._dataset)))


@DATA_SAMPLERS.register_module()
class EveryOtherSampler(Sampler):
    """The even indices, then the odd ones, or the reverse, as the seed decides."""

    def __init__(self, dataset: Any, seed: int = 0, turns: int = 1) -> None:
        self._size, self._seed, self._turns = len(dataset), seed or 0, turns

    def __len__(self) -> int:
        return self._size * self._turns

    def __iter__(self) -> Iterator[Any]:
        start = self._seed % 2
        for _ in range(self._turns):
            yield from range(start, self._size, 2)
            yield from range(1 - start, self._size, 2)


@DATA_SAMPLERS.register_module()
class PairSampler(EveryOtherSampler):
    """Gives the dataset a pair in place of an index."""

    def __iter__(self) -> Iterator[Any]:
        for index in super().__iter__():
            yield index, f'scale {index % 3}'


@DATASETS.register_module()
class PairDataset(BaseSegDataset):
    """A dataset that is asked with the pairs of :class:`PairSampler`."""

    def __getitem__(self, key: Any) -> Any:
        index, scale = key
        sample = super().__getitem__(index)
        sample['data_samples'].set_metainfo(dict(scale=scale))
        return sample


@DATA_SAMPLERS.register_module()
class GrowingBatchSampler(BatchSampler):
    """Batches of one sample, then of two, up to the batch size, and again."""

    def __init__(self, sampler: Any, batch_size: int, drop_last: bool = False) -> None:
        super().__init__(sampler, batch_size, drop_last)

    def __iter__(self) -> Iterator[List[Any]]:
        indices, size = list(self.sampler), 1
        while indices:
            batch, indices = indices[:size], indices[size:]
            yield batch
            size = size % self.batch_size + 1

    def __len__(self) -> int:
        return sum(1 for _ in self)


@register_backend('mapped', prefixes='mapped')
class MappedBackend(LocalBackend):
    """Finds files in another folder than their path says, as petrel's path mapping does."""

    def __init__(self, path_mapping: Any = None) -> None:
        self._mapping = dict(path_mapping or {})

    def _place(self, path: Any) -> str:
        text = str(path)
        for prefix, folder in self._mapping.items():
            text = text.replace(prefix, folder, 1)
        return text

    def get(self, filepath: Any) -> bytes:
        return super().get(self._place(filepath))

    def isdir(self, filepath: Any) -> bool:
        return super().isdir(self._place(filepath))

    def list_dir_or_file(self, dir_path: Any, *args: Any, **kwargs: Any) -> Iterator[str]:
        return super().list_dir_or_file(self._place(dir_path), *args, **kwargs)
