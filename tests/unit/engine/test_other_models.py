"""Models that are no segmentors train and evaluate, and each of MapSage's hooks can be left out."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, Dict, List

import pytest
import torch
from mmengine.config import Config
from mmengine.evaluator import BaseMetric
from mmengine.model import BaseModel
from mmengine.registry import DATASETS, HOOKS, METRICS, MODELS
from mmengine.structures import BaseDataElement
from torch.utils.data import Dataset

from mapsage.engine import MapSageRunner
from mapsage.engine.guards.step_numbers import add_images, image_paths

OURS = dict(
    accelerator='AcceleratorHook',
    device_check='DeviceCheckHook',
    non_finite_loss='NonFiniteLossHook',
    preview='PreviewHook',
    progress_bar='ProgressBarHook',
    accumulated_gradients='AccumulatedGradientsHook',
    equal_buffers='EqualBuffersHook',
    reproducibility='ReproducibilityHook',
)


@DATASETS.register_module()
class Points(Dataset):
    """Rows of two numbers and their sum, as MMEngine's own examples have them."""

    def __init__(self, metainfo: Any = None) -> None:
        self.metainfo = metainfo

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Dict[str, torch.Tensor]:
        point = torch.tensor([float(index), 1.0])
        return dict(inputs=point, data_samples=point.sum())


# What a model may answer when it predicts, from its output (N, 1).
ANSWERS: Dict[str, Callable[[torch.Tensor], Any]] = dict(
    tensor=lambda output: output,
    tensors=lambda output: list(output),
    dicts=lambda output: [dict(pred_sem_seg=1, scores=row) for row in output],
    elements=lambda output: [BaseDataElement(scores=row) for row in output],
    odd_elements=lambda output: [BaseDataElement(pred_sem_seg=row) for row in output],
    text=lambda output: 'pred_sem_seg',
)


@MODELS.register_module()
class Regression(BaseModel):
    """One linear layer."""

    def __init__(self, answer: str) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.answer = answer

    def forward(self, inputs: Any, data_samples: Any = None, mode: str = 'tensor') -> Any:
        output = self.layer(torch.stack(list(inputs)))
        if mode == 'loss':
            return dict(loss=(output[:, 0] - torch.stack(list(data_samples))).pow(2).mean())
        return ANSWERS[self.answer](output) if mode == 'predict' else output


@METRICS.register_module()
class Counted(BaseMetric):
    """The number of batches."""

    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.results.append(1)

    def compute_metrics(self, results: List[int]) -> Dict[str, int]:
        return dict(batches=len(results))


def config(work: Path, answer: str = 'tensor', **changes: Any) -> Config:
    loader = dict(
        batch_size=2,
        num_workers=0,
        sampler=dict(type='DefaultSampler', shuffle=False),
        dataset=dict(type='Points'),
        collate_fn=dict(type='default_collate'),
    )
    settings: Dict[str, Any] = dict(
        work_dir=str(work),
        default_scope='mmengine',
        env_cfg=dict(accelerator='cpu'),
        experiment_name=f'{work.name}{time.time_ns()}',
        model=dict(type='Regression', answer=answer),
        train_dataloader=loader,
        val_dataloader=loader,
        test_dataloader=loader,
        train_cfg=dict(by_epoch=True, max_epochs=1),
        val_cfg=dict(),
        test_cfg=dict(),
        val_evaluator=dict(type='Counted'),
        test_evaluator=dict(type='Counted'),
        optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.01)),
    )
    settings.update(changes)
    return Config(settings)


@pytest.mark.parametrize('answer', list(ANSWERS))
def test_what_a_model_answers_is_its_own_matter(answer: str, tmp_path: Path) -> None:
    runner = MapSageRunner.from_cfg(config(tmp_path, answer))
    runner.train()
    assert runner.iter == 2
    assert runner.test() == {'batches': 2}
    assert not (tmp_path / 'preview.png').exists()


@pytest.mark.parametrize(
    'outputs',
    [dict(scores=torch.ones(2), pred_sem_seg=1), 1, None, [], torch.ones(0), torch.ones(())],
)
def test_hooks_leave_alone_what_only_a_users_loop_hands_them(outputs: Any, tmp_path: Path) -> None:
    runner = MapSageRunner.from_cfg(config(tmp_path, default_hooks=dict(logger=None)))
    for phase in ('val', 'test'):
        runner.call_hook(f'before_{phase}_epoch')
        runner.call_hook(
            f'after_{phase}_iter', batch_idx=0, data_batch=(torch.ones(2),), outputs=outputs
        )
        runner.call_hook(f'after_{phase}_epoch', metrics={})
    assert not (tmp_path / 'preview.png').exists()


@pytest.mark.parametrize('metainfo', ['a text', ['a', 'list'], 7])
def test_a_dataset_may_describe_itself_in_any_way(metainfo: Any, tmp_path: Path) -> None:
    cfg = config(tmp_path, 'odd_elements')
    cfg.val_dataloader.dataset.metainfo = metainfo
    assert MapSageRunner.from_cfg(cfg).val() == {'batches': 2}


def names(runner: MapSageRunner) -> List[str]:
    return [type(hook).__name__ for hook in runner.hooks]


@pytest.mark.parametrize('key', list(OURS))
def test_each_hook_can_be_switched_off(key: str, tmp_path: Path) -> None:
    assert sorted(
        set(OURS.values()) & set(names(MapSageRunner.from_cfg(config(tmp_path))))
    ) == sorted(OURS.values())
    runner = MapSageRunner.from_cfg(config(tmp_path, default_hooks={key: None, 'logger': None}))
    assert sorted(set(OURS.values()) & set(names(runner))) == sorted(
        set(OURS.values()) - {OURS[key]}
    )
    assert 'LoggerHook' not in names(runner)
    runner.train()
    assert runner.iter == 2


def test_all_of_them_can_be_switched_off(tmp_path: Path) -> None:
    runner = MapSageRunner.from_cfg(config(tmp_path, default_hooks=dict.fromkeys(OURS)))
    assert not set(OURS.values()) & set(names(runner))
    runner.train()
    assert runner.test() == {'batches': 2}


def test_a_hook_takes_other_arguments_under_its_key_or_in_custom_hooks(tmp_path: Path) -> None:
    for changes in (
        dict(default_hooks=dict(preview=dict(type='PreviewHook', max_images=9))),
        dict(default_hooks=dict(preview=dict(max_images=9))),
        dict(custom_hooks=[dict(type='PreviewHook', max_images=9)]),
        dict(
            custom_hooks=[dict(type='PreviewHook', max_images=9)], default_hooks=dict(preview=None)
        ),
    ):
        runner = MapSageRunner.from_cfg(config(tmp_path, **changes))
        assert [
            hook.max_images for hook in runner.hooks if type(hook).__name__ == 'PreviewHook'
        ] == [9]


@HOOKS.register_module()
class LouderPreviewHook(HOOKS.get('PreviewHook')):
    """A user's own version."""


def test_a_users_subclass_takes_the_place_of_a_hook(tmp_path: Path) -> None:
    runner = MapSageRunner.from_cfg(config(tmp_path, custom_hooks=[dict(type='LouderPreviewHook')]))
    assert 'LouderPreviewHook' in names(runner) and 'PreviewHook' not in names(runner)


@pytest.mark.parametrize(
    'batch, path',
    [
        (dict(data_samples=torch.zeros(2)), 'unknown'),
        (torch.zeros(2, 2), 'unknown'),
        (dict(data_samples=3), 'unknown'),
        ([torch.zeros(2)], 'unknown'),
        (dict(data_samples=(SimpleNamespace(img_path='a.png'),)), 'a.png'),
    ],
)
def test_the_report_of_a_bad_loss_takes_any_batch(batch: Any, path: str) -> None:
    assert path in add_images('the loss is nan', image_paths(batch))
