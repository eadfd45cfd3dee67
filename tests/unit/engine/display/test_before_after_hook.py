"""A stage is scored before its first step and at its end; an untrained model is warned of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict

import numpy as np
import pytest
import torch
from label_pairs import data_sample
from mmengine.model import BaseModel
from mmengine.registry import DATASETS, MODELS
from support import on_host
from toy_runs import log_of, toy_train

from mapsage.engine.display.before_after_hook import BeforeAfterHook, NoValidationError, rare_recall

pytestmark = on_host
EVALUATORS = [
    dict(type='ConfusionMatrixMetric', iou_metrics=['mIoU', 'mBoundaryIoU']),
    dict(type='CalibrationError'),
    dict(type='SingleClassBaseline'),
]


@MODELS.register_module(force=True)
class StagedToy(BaseModel):
    """Its logits are ``skill`` times the truth; each step teaches it."""

    def __init__(self, skill: float) -> None:
        super().__init__()
        self.skill = torch.nn.Parameter(torch.tensor([skill]))

    def forward(self, inputs: Any, data_samples: Any = None, mode: str = 'tensor') -> Any:
        if mode == 'loss':
            return dict(loss=-self.skill.sum())
        assert not self.training
        for image, sample in zip(inputs, data_samples):
            truth = sample.gt_sem_seg.data
            logits = torch.cat([image[:1] + 1, self.skill.detach() * truth.float() - 0.5])
            sample.seg_logits = type(sample.gt_sem_seg)(data=logits)
            sample.pred_sem_seg = type(sample.gt_sem_seg)(data=logits.argmax(0, keepdim=True))
        return data_samples


@DATASETS.register_module(force=True)
class StagedTiles(torch.utils.data.Dataset):
    metainfo = dict(classes=('land', 'road'))

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Dict[str, Any]:
        labels = torch.zeros(8, 8, dtype=torch.int64)
        labels[index, :2] = 1
        sample = data_sample(labels, labels)
        sample.set_metainfo(dict(number=int(index), img_path=f'tile {int(index)}'))
        return dict(inputs=torch.full((3, 8, 8), 0.1 * int(index)), data_samples=sample)


def run(folder: Path, skill: float, steps: int = 4, **changes: Any) -> Any:
    tiles = dict(type='StagedTiles', _delete_=True)
    return toy_train(
        folder,
        **{
            'model': dict(type='StagedToy', skill=skill, _delete_=True),
            'train_dataloader.dataset': tiles,
            'val_dataloader.dataset': tiles,
            'val_evaluator': EVALUATORS,
            'test_dataloader': None,
            'test_evaluator': None,
            'test_cfg': None,
            'custom_hooks': [dict(type='BeforeAfterHook')],
            'default_hooks.checkpoint.interval': 2,
            'optim_wrapper.optimizer.lr': 0.1,
            'train_cfg': dict(by_epoch=False, max_iters=steps, val_interval=2),
            **changes,
        },
    )


@pytest.fixture(autouse=True)
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    import toy_runs

    monkeypatch.setattr(toy_runs.Record, 'after_val_epoch', lambda *a, **k: None)


def test_figures_before_and_after_also_of_a_resumed_run(tmp_path: Path) -> None:
    runner, _ = run(tmp_path, 1.95)
    told = json.loads((tmp_path / 'before_after.json').read_text())
    assert told['before']['mIoU'] < told['after']['mIoU'] == 100
    assert 0 < told['before']['rare_recall'] < 100 == told['after']['rare_recall']
    log = log_of(runner)
    assert 'before this stage: ' in log and 'this stage, before and after, in percent' in log
    assert 'looks untrained' not in log and 'ECE' in log
    (tmp_path / 'before_after.json').unlink()
    (tmp_path / 'iter_4.pth').unlink()
    (tmp_path / 'last_checkpoint').write_text(str(tmp_path / 'iter_2.pth'))
    again, _ = run(tmp_path, 1.95, resume=True)
    assert json.loads((tmp_path / 'before_after.json').read_text()) == told
    # Runs of one second share a file.
    assert 'before this stage: ' not in log_of(again).replace(log, '')


def test_an_untrained_model_is_warned_of(tmp_path: Path) -> None:
    runner, _ = run(tmp_path, 0.0, steps=2)
    assert (
        'the second stage begins from a model of mIoU 48.44, and one that always predicts the '
        'same class has 48.44: it looks untrained' in log_of(runner)
    )


def test_a_config_without_validation_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NoValidationError, match='no val_dataloader'):
        run(
            tmp_path,
            1.0,
            val_dataloader=None,
            val_evaluator=None,
            val_cfg=None,
            train_cfg=dict(by_epoch=False, max_iters=2),
        )
    with pytest.raises(ValueError, match='rare_share=5, expected a share'):
        BeforeAfterHook(rare_share=5)


def test_recall_of_rare_classes() -> None:
    matrix = np.array([[900, 50, 0, 0], [1, 3, 0, 0], [10, 0, 10, 0], [0, 0, 0, 0]])
    assert rare_recall(matrix, 0.05) == pytest.approx((75 + 50) / 2)
    assert rare_recall(matrix, 0.01) == pytest.approx(75)
    assert np.isnan(rare_recall(matrix, 0.001))
