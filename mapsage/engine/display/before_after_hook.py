"""Scores a trained model before a further stage of training, and compares at the end.

A stage that optimizes one figure, such as the IoU, may lower another one unnoticed. So the model is
scored with the same metrics before its first step. That validation runs outside MMEngine's loop, so
no hook takes it for a validation of the training.
"""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any, Dict, Mapping, Optional

import numpy as np
import torch
from mmengine.dist import is_main_process
from mmengine.evaluator import Evaluator
from mmengine.hooks import Hook
from mmengine.registry import HOOKS

from mapsage.accelerator import current_accelerator
from mapsage.base.errors import UserError
from mapsage.base.files import atomic_write
from mapsage.evaluation import scores
from mapsage.evaluation.confusion_matrix import mean_of_defined
from mapsage.host.runner import HostRunner, confusion_matrix

# Key of the figures before the stage, in a checkpoint.
_KEY = 'scores_before'
_BASELINE = 'single_class_mIoU'
# A model that has come less than this share of the way from the baseline to 100 is not trained.
_TRAINED = 0.1


class NoValidationError(UserError, ValueError):
    """A hook wants to score the model, and the config has nothing to score it with."""


@HOOKS.register_module()
class BeforeAfterHook(Hook):
    """Validates the model before the first step, and logs each figure before and after at the end.

    It is for a second stage that starts from ``load_from``, where a figure that rises may hide one
    that falls: list ``ConfusionMatrixMetric`` with ``iou_metrics=['mIoU', 'mBoundaryIoU',
    'mFscore']`` and ``CalibrationError`` in ``val_evaluator``. To their figures it adds
    ``rare_recall``, the mean recall of the rare classes, in percent. If the mIoU says that the
    model was not trained, it warns: the gradient of an IoU is nearly 0 where nothing overlaps.

    The figures are in the log and in ``WORK_DIR/before_after.json``. Checkpoints hold the figures
    before the stage, so a resumed run does not validate again.

    Args:
        rare_share: Share of the labeled pixels below which a class is rare.

    Raises:
        ValueError: If ``rare_share`` is not between 0 and 1.
    """

    priority = 'LOW'

    def __init__(self, rare_share: float = 0.05) -> None:
        if not 0 < rare_share < 1:
            raise ValueError(
                f'rare_share={rare_share}, expected a share between 0 and 1 such as 0.05'
            )
        self.rare_share = rare_share
        self._before: Optional[Dict[str, float]] = None
        self._after: Dict[str, float] = {}

    def after_load_checkpoint(self, runner: HostRunner, checkpoint: Dict[str, Any]) -> None:
        """Read the figures before the stage from a checkpoint that is resumed."""
        if runner._resume:
            self._before = checkpoint.get(_KEY)

    def before_train(self, runner: HostRunner) -> None:
        """Validate the model, unless the run is resumed. Collective.

        Raises:
            NoValidationError: If the config has no validation.
        """
        if runner.val_loop is None:
            raise NoValidationError(
                'BeforeAfterHook: the config has no val_dataloader, '
                'val_evaluator and val_cfg to score the model with. Set them, '
                'or take the hook out of custom_hooks.'
            )
        if self._before is None and not runner.iter:
            self._before = self._validate(runner)
            self._warn_if_untrained(runner, self._before)

    def after_val_epoch(
        self, runner: HostRunner, metrics: Optional[Dict[str, float]] = None
    ) -> None:
        """Store the figures of the last validation."""
        assert runner.val_loop is not None
        self._after = self._with_recall(runner.val_loop.evaluator, metrics or {})

    def after_train(self, runner: HostRunner) -> None:
        """Log the figures before and after, and write them to a file."""
        if self._before is None or not self._after or not is_main_process():
            return
        names = [name for name in self._before if name in self._after and name != _BASELINE]
        width = max(map(len, names), default=0)
        lines = [
            f'{name:<{width}}  {self._before[name]:7.2f}  {self._after[name]:7.2f}  '
            f'{self._after[name] - self._before[name]:+.2f}'
            for name in names
        ]
        runner.logger.info('this stage, before and after, in percent:\n' + '\n'.join(lines))
        atomic_write(
            Path(runner.work_dir, 'before_after.json'),
            json.dumps(dict(before=self._before, after=self._after), indent=1).encode(),
        )

    def before_save_checkpoint(self, runner: HostRunner, checkpoint: Dict[str, Any]) -> None:
        """Put the figures before the stage into the checkpoint."""
        if self._before is not None:
            checkpoint[_KEY] = self._before

    @torch.no_grad()
    def _validate(self, runner: HostRunner) -> Dict[str, float]:
        """Return the figures of the current model. No hook takes this for a validation."""
        loop, accelerator = runner.val_loop, current_accelerator()
        assert loop is not None
        # A segmentor or its wrapper, which have MMEngine's val_step.
        model: Any = runner.model
        training = [module for module in model.modules() if module.training]
        model.eval()
        for batch in loop.dataloader:
            loop.evaluator.process(data_samples=model.val_step(batch), data_batch=batch)
            accelerator.flush()
        metrics = loop.evaluator.evaluate(len(loop.dataloader.dataset))
        for module in training:
            module.training = True
        figures = self._with_recall(loop.evaluator, metrics)
        runner.logger.info(
            'before this stage: '
            + ', '.join(f'{name} {value:.2f}' for name, value in figures.items())
        )
        return figures

    def _with_recall(self, evaluator: Evaluator, metrics: Mapping[str, Any]) -> Dict[str, float]:
        """Return the metrics that are numbers, with the recall of the rare classes."""
        figures = {
            name: float(value) for name, value in metrics.items() if isinstance(value, (int, float))
        }
        for metric in evaluator.metrics:
            matrix = confusion_matrix(metric)
            if matrix is not None:
                figures['rare_recall'] = rare_recall(matrix, self.rare_share)
                break
        return figures

    def _warn_if_untrained(self, runner: HostRunner, figures: Dict[str, float]) -> None:
        mious = [value for name, value in figures.items() if name.split('/')[-1] == 'mIoU']
        if not mious:
            return
        assert runner.val_loop is not None
        metainfo = runner.val_loop.dataloader.dataset.metainfo or {}
        classes = len(metainfo.get('classes') or [0])
        baseline = figures.get(_BASELINE, 100 / classes)
        # Also true for an mIoU of NaN.
        if not mious[0] >= baseline + _TRAINED * (100 - baseline):
            runner.logger.log(
                logging.WARNING,
                (
                    f'the second stage begins from a model of mIoU {mious[0]:.2f}, and one that always '
                    f'predicts the same class has {baseline:.2f}: it looks untrained, and the gradient '
                    f'of an IoU is nearly 0 where nothing overlaps. Train with cross-entropy first, '
                    f'and set load_from to that checkpoint (now {runner._load_from!r}).'
                ),
            )


def rare_recall(matrix: np.ndarray, share: float) -> float:
    """Return the mean recall in percent of the classes with less than a share of the pixels.

    Args:
        matrix: Confusion matrix, integers ``(C, C)``; rows are the truth.
        share: Share of the labeled pixels, 0 to 1.

    Returns:
        NaN if no class that occurs is rare.
    """
    counts = np.asarray(matrix, np.float64)
    truth = counts.sum(1)
    rare = (truth > 0) & (truth < share * truth.sum())
    recall = np.asarray(scores(matrix)['Recall'])[rare]
    value = 100 * mean_of_defined(recall) if len(recall) else math.nan
    return round(value, 2)
