"""Trains on unlabeled images too: FixMatch with a teacher that is an average of the model.

The hook replaces the loss of the model by a :class:`FixMatchStep`, and moves the teacher after each
optimizer step. Evaluations and checkpoints use the teacher: the hook swaps the weights of model and
teacher around a validation, and in a checkpoint under the model's names. So what a tool reads from
a checkpoint is the teacher, and the student is an extra entry for resuming.
"""

from __future__ import annotations

from typing import Any, Dict, Iterator, List, Optional

import numpy as np
import torch
from mmengine.dist import get_world_size, is_main_process
from mmengine.hooks import EMAHook, Hook
from mmengine.registry import HOOKS
from mmengine.runner import EpochBasedTrainLoop
from mmseg.models import BaseSegmentor
from torch import nn

from mapsage.base.errors import UserError
from mapsage.distributed import broadcast_tensors, open_channel
from mapsage.distributed.wrappers import MMModelParallel
from mapsage.distributed.wrappers.batch_counts import gives_counts
from mapsage.distributed.wrappers.rank_batches import Batch
from mapsage.distributed.wrappers.split_model import SplitModel
from mapsage.extras.labels.fixmatch.fixmatch import VIEWS, FixMatchStep
from mapsage.extras.labels.fixmatch.strong_view import StrongView
from mapsage.extras.labels.fixmatch.teacher import Teacher
from mapsage.extras.labels.fixmatch.unlabeled_loss import UnlabeledLoss
from mapsage.extras.labels.unlabeled.joined import SemiSupervisedDataset
from mapsage.extras.labels.unlabeled.sampler import LabeledUnlabeledSampler
from mapsage.host.runner import HostRunner, hooks_of_type, inside_cycle, plain_model
from mapsage.host.segmentors import gives_scores, is_segmentor
from mapsage.models.frozen_weights import why_not_frozen
from mapsage.sampling.hooks.dynamic_sampling_hook import DynamicSamplingHook, log_interval

from .pseudo_label_report import PseudoLabelReport

# Key in a checkpoint, for the student and the number of steps.
_KEY = 'semi_supervised'


class SemiSupervisedError(UserError, ValueError):
    """``FixMatchHook`` and the model, the loader or another hook do not suit each other."""


@HOOKS.register_module()
class FixMatchHook(Hook):
    """Hook that trains a segmentor on labeled and unlabeled images, as FixMatch does.

    A teacher, the moving average of the model, predicts classes for unlabeled images. Where its
    probability passes ``threshold``, the model must predict the same classes for a strongly changed
    view. Half of the loss is the loss of the labels, and half is this one, see
    :class:`~mapsage.extras.labels.fixmatch.fixmatch.FixMatchStep`.

    - The training loader has a ``SemiSupervisedDataset`` and a ``LabeledUnlabeledSampler``.
    - Validations, tests after the training, and the best checkpoint use the teacher. A checkpoint
      has the teacher's weights under the names of the model, so that every tool reads it with this
      config or with the config of the plain model. The student is stored in addition
      (``semi_supervised``), and a resumed run continues bit for bit.
    - The teacher follows the buffers of the first rank, on all ranks, so that it is the same
      everywhere.

    Args:
        threshold: Least probability of the teacher's class that counts, 0 or more and below 1.
        momentum: Largest weight of the teacher in a step. The first steps give it less,
            ``min(1 - 1 / (t + 1), momentum)``.
        views: What strong views are made of: 'images', or 'features' of a frozen backbone, which
            may come from a ``feature_source``.
        channel_dropout: Whether there are two strong views of each image, which lack complementary
            channels of the backbone's features (UniMatch V2). Always so with 'features'.
        cut_mix: Probability that a strong view has a box of another image of the batch.
        strong: Arguments of :class:`~mapsage.extras.labels.fixmatch.strong_view.StrongView`.
        interval: Steps between two tables in the log; the interval of LoggerHook when None.
        patience: Steps without a confident pixel of a class after which a warning names it.

    Attributes:
        ema_model: The teacher, while a training runs.

    Raises:
        SemiSupervisedError: At the start, if model, loader or another hook do not suit it.
        ValueError: If an argument is out of its range.
    """

    priority = 'NORMAL'
    cross_check_obstacle = 'FixMatchHook, whose teacher changes with the step'

    def __init__(
        self,
        threshold: float = 0.95,
        momentum: float = 0.996,
        views: str = 'images',
        channel_dropout: bool = False,
        cut_mix: float = 0.5,
        strong: Optional[Dict[str, float]] = None,
        interval: Optional[int] = None,
        patience: int = 200,
    ) -> None:
        self._loss = UnlabeledLoss(threshold)
        for name, value in (('momentum', momentum), ('cut_mix', cut_mix)):
            if not 0 <= value <= 1:
                raise ValueError(f'FixMatchHook.{name}={value!r}, expected a number from 0 to 1.')
        if views not in VIEWS:
            raise ValueError(f'FixMatchHook.views={views!r}, expected one of {VIEWS}.')
        if views == 'features' and strong:
            raise ValueError(
                f"FixMatchHook.strong={strong} with views='features', where images "
                'do not change: leave it out.'
            )
        self._momentum, self._views, self._dropout = momentum, views, channel_dropout
        self._cut_mix, self._strong = cut_mix, StrongView(**(strong or {}))
        self._interval, self._patience = interval, patience
        self._teacher: Optional[Teacher] = None
        self._step: Optional[FixMatchStep] = None
        # The teacher of a resumed checkpoint, until the training begins.
        self._resumed: Optional[Dict[str, Any]] = None
        self._evaluating = False
        # Number of steps since the last table.
        self._steps_seen = 0

    @property
    def ema_model(self) -> Optional[nn.Module]:
        """The teacher, in which NonFiniteLossHook looks for NaN; None before a training."""
        return None if self._teacher is None else self._teacher.module

    def after_load_checkpoint(self, runner: HostRunner, checkpoint: Dict[str, Any]) -> None:
        """Move the student of a resumed checkpoint to the model's names, and keep its teacher."""
        saved = checkpoint.get(_KEY) if runner._resume else None
        if saved is None:
            if runner._resume:
                runner.logger.warning(
                    'the checkpoint has a model but no student: a run without FixMatchHook saved '
                    'it. The teacher begins with its weights.'
                )
            return
        state = checkpoint['state_dict']
        teacher = {name: state[name] for name in saved['student']}
        state.update(saved['student'])
        self._resumed = dict(teacher=teacher, steps=saved['steps'])

    def before_train(self, runner: HostRunner) -> None:
        """Create the teacher, and replace the model's loss."""
        # A segmentor of MMSegmentation, whose classes carry no types.
        model: Any = plain_model(runner)
        for mistake in _find_mistakes(runner, model, self._views):
            raise SemiSupervisedError(f'FixMatchHook with {mistake}.')
        model.train()
        frozen = _frozen_backbone(model)
        if self._views == 'features' and frozen is None:
            raise SemiSupervisedError(str(why_not_frozen(model.backbone, "views='features'")))
        # A second training of the same runner continues with the teacher.
        if self._teacher is None:
            self._teacher = Teacher(
                model,
                self._momentum,
                [module for module in (frozen, model.data_preprocessor) if module is not None],
            )
        if self._resumed is not None:
            self._teacher.load(self._resumed['teacher'], self._resumed['steps'])
            self._resumed = None
        if gives_counts(runner.model):
            counts: Any = runner.model.counts
            counts.watch(self._loss)
        elif get_world_size() > 1:
            raise SemiSupervisedError(
                f'FixMatchHook with the model wrapper {type(runner.model).__name__}, which gives '
                'losses no counts of all ranks: expected MMDistributedDataParallel, or no '
                'model_wrapper_cfg.'
            )
        self._step = FixMatchStep(
            model,
            self._teacher,
            self._loss,
            self._views,
            self._dropout,
            self._cut_mix,
            self._strong,
        )
        model.loss = self._step
        self._channel = open_channel(purpose='pseudo-labels')
        self._interval = self._interval or log_interval(runner)
        self._report = PseudoLabelReport(
            _class_names(runner, model), self._loss.threshold, self._patience
        )
        runner.logger.info(self._describe(runner, self._teacher))
        sampler: Any = runner.train_dataloader.sampler
        if self._cut_mix and sampler.unlabeled == 1:
            runner.logger.warning(
                '[FixMatch] a batch of a rank has one unlabeled image, which can '
                'have no box of another one (CutMix). Set unlabeled=2 or more in '
                'the sampler.'
            )

    def after_train_iter(
        self,
        runner: HostRunner,
        batch_idx: int,
        data_batch: Optional[Batch] = None,
        outputs: Optional[Dict[str, Any]] = None,
    ) -> None:
        """Let the teacher follow a step of the optimizer, and log a table at the interval."""
        assert self._teacher is not None and self._interval is not None
        if not inside_cycle(runner.optim_wrapper):
            self._teacher.follow(plain_model(runner), _copy_from_first_rank)
        self._steps_seen += 1
        if self.every_n_train_iters(runner, self._interval) or self.is_last_train_iter(runner):
            self._summarize(runner)

    def before_val_epoch(self, runner: HostRunner) -> None:
        """Put the teacher's weights into the model."""
        self._set_evaluating(runner, True)

    def after_val_epoch(
        self, runner: HostRunner, metrics: Optional[Dict[str, float]] = None
    ) -> None:
        """Put the student's weights back into the model."""
        self._set_evaluating(runner, False)

    def before_test_epoch(self, runner: HostRunner) -> None:
        """Put the teacher's weights into the model, if a training has created a teacher."""
        self._set_evaluating(runner, True)

    def after_test_epoch(
        self, runner: HostRunner, metrics: Optional[Dict[str, float]] = None
    ) -> None:
        """Put the student's weights back into the model."""
        self._set_evaluating(runner, False)

    def before_save_checkpoint(self, runner: HostRunner, checkpoint: Dict[str, Any]) -> None:
        """Save the teacher under the names of the model, and the student in an extra entry."""
        if self._teacher is None:
            return
        state = checkpoint['state_dict']
        # During a validation the model holds the teacher's weights, and the teacher the student's.
        in_teacher = {
            name: value.cpu() for name, value in self._teacher.state(plain_model(runner)).items()
        }
        in_model = {name: state[name] for name in in_teacher}
        teacher, student = (in_model, in_teacher) if self._evaluating else (in_teacher, in_model)
        state.update(teacher)
        # Only a checkpoint with an optimizer can be resumed; the best one, for example, has none.
        if 'optimizer' in checkpoint:
            checkpoint[_KEY] = dict(student=student, steps=self._teacher.steps)

    def after_train(self, runner: HostRunner) -> None:
        """Restore the model's loss."""
        self._restore_loss(runner)

    def after_run(self, runner: HostRunner) -> None:
        """Restore the model's loss, if the training ended early."""
        self._restore_loss(runner)

    def _restore_loss(self, runner: HostRunner) -> None:
        model: Any = plain_model(runner)
        if self._step is not None and model.__dict__.get('loss') is self._step:
            del model.loss
        self._step = None

    def _set_evaluating(self, runner: HostRunner, evaluating: bool) -> None:
        if self._teacher is not None and self._evaluating != evaluating:
            self._teacher.exchange(plain_model(runner))
            self._evaluating = evaluating

    def _summarize(self, runner: HostRunner) -> None:
        """Log the table of all ranks since the last one. Collective."""
        assert self._step is not None
        local_counts = torch.stack(self._step.seen).cpu().double().sum(0).round().to(torch.int64)
        self._step.seen.clear()
        steps, self._steps_seen = self._steps_seen, 0
        counts = torch.stack(self._channel.gather(local_counts)).sum(0).numpy()
        warning = self._report.warning(counts[1], steps)
        if is_main_process():
            runner.logger.info(f'[FixMatch] {self._report.table(np.asarray(counts), steps)}')
            if warning:
                runner.logger.warning(f'[FixMatch] {warning}')

    def _describe(self, runner: HostRunner, teacher: Teacher) -> str:
        dataset: Any = runner.train_dataloader.dataset
        sampler: Any = runner.train_dataloader.sampler
        return (
            f'[FixMatch] {dataset.sizes[0]} labeled and {dataset.sizes[1]} unlabeled samples, '
            f'{sampler.labeled} and {sampler.unlabeled} in each batch of a rank; an epoch, in '
            f'which the kind that lasts longer is shown once, has {sampler.batches} steps. '
            f'Strong views of {self._views}, threshold {self._loss.threshold:g}; the teacher, '
            f'which is evaluated and saved, has followed {teacher.steps} step(s)'
        )


def _copy_from_first_rank(buffers: List[torch.Tensor]) -> List[torch.Tensor]:
    """Return copies of the buffers of rank 0. Collective."""
    copies = [buffer.detach().clone() for buffer in buffers]
    broadcast_tensors(copies)
    return copies


def _frozen_backbone(model: Any) -> Optional[nn.Module]:
    """Return the backbone of a model if it never changes, else None."""
    backbone = getattr(model, 'backbone', None)
    return None if backbone is None or why_not_frozen(backbone, '') else backbone


def _class_names(runner: HostRunner, model: Any) -> List[str]:
    dataset: Any = runner.train_dataloader.dataset
    names = [str(name) for name in dataset.metainfo.get('classes') or ()]
    count = int(model.num_classes)
    return (names + [f'class {index}' for index in range(len(names), count)])[:count]


def _find_mistakes(runner: HostRunner, model: nn.Module, views: str) -> Iterator[str]:
    """Yield what does not suit FixMatch, each as the rest of a sentence; the gravest first."""
    if not isinstance(model, BaseSegmentor) or not is_segmentor(model):
        yield (
            f'the model {type(model).__name__}: expected a segmentor with encode_decode, such '
            f'as EncoderDecoder'
        )
    if isinstance(runner.model, (SplitModel, MMModelParallel)):
        yield (
            f'the model wrapper {type(runner.model).__name__}: expected one device a model, '
            f'since the teacher is a second model on the same device'
        )
    for module in model.modules():
        if gives_scores(module):
            yield (
                f'{type(module).__name__}, which gives scores and no logits: expected a head '
                f'whose output a softmax turns into probabilities. Pseudo-labels serve such a '
                f'head too'
            )
    loop = runner.train_loop
    loader = loop.dataloader
    sampler = loader.sampler
    if not isinstance(loader.dataset, SemiSupervisedDataset):
        yield (
            f'the training dataset {type(loader.dataset).__name__}: expected a '
            f'SemiSupervisedDataset, with labeled and unlabeled samples'
        )
    if not isinstance(sampler, LabeledUnlabeledSampler):
        yield f'the sampler {type(sampler).__name__}: expected LabeledUnlabeledSampler'
    if sampler.labeled + sampler.unlabeled != loader.batch_size:
        yield (
            f'train_dataloader.batch_size={loader.batch_size}, and {sampler.labeled} '
            f'labeled and {sampler.unlabeled} unlabeled samples in a batch: expected their sum'
        )
    if isinstance(loop, EpochBasedTrainLoop) and sampler.infinite:
        yield (
            'LabeledUnlabeledSampler in a loop of epochs, of which the first would never end: '
            'set infinite=False'
        )
    if hooks_of_type(runner, DynamicSamplingHook):
        yield 'DynamicSamplingHook, which fills batches by other rules: leave one of them out'
    if hooks_of_type(runner, EMAHook):
        yield (
            'EMAHook, whose average would be a second one: leave it out, the teacher is an average'
        )
    wrapper: Any = runner.model
    if gives_counts(wrapper) and wrapper.counts.wants_first_pass:
        yield (
            'a loss of the predictions of all ranks, such as JaccardLoss, in a process that '
            'runs several virtual ranks: each step would be computed twice. Start a process '
            'for each virtual rank, or leave the loss to a separate stage'
        )
    if runner.cfg.get('feature_source') and views == 'images':
        yield (
            "a feature_source and views='images', whose strong views need the encoder: set "
            "views='features', or leave feature_source out"
        )
