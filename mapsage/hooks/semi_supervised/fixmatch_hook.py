"""Lets unlabeled images teach: FixMatch with a teacher that is an average of the model."""
from __future__ import annotations

from typing import Any, Dict, List, Optional

import numpy as np
import torch
from mmengine.dist import get_world_size, is_main_process
from mmengine.hooks import EMAHook, Hook
from mmengine.model import is_model_wrapper
from mmengine.registry import HOOKS
from mmengine.runner import EpochBasedTrainLoop
from mmseg.models import BaseSegmentor

from mapsage.distributed import broadcast_tensors, open_channel
from mapsage.errors import UserError
from mapsage.features.encoder_gate import FeatureSourceError, check_frozen
from mapsage.hooks.dynamic_sampling.dynamic_sampling_hook import DynamicSamplingHook, log_interval
from mapsage.hooks.gradients.accumulated_gradients_hook import inside_cycle
from mapsage.models.semi_supervised.fixmatch import VIEWS, FixMatchStep
from mapsage.models.semi_supervised.strong_view import StrongView
from mapsage.models.semi_supervised.teacher import Teacher
from mapsage.models.semi_supervised.unlabeled_loss import UnlabeledLoss
from mapsage.wrappers import HeadReplicas, MMModelParallel
from mapsage.wrappers.batch_counts import gives_counts

from .pseudo_label_report import PseudoLabelReport

_KEY = 'semi_supervised'  # in a checkpoint: the student, and the number of steps


class SemiSupervisedError(UserError, ValueError):
    """``FixMatchHook`` and the model, the loader or another hook do not go together."""


@HOOKS.register_module()
class FixMatchHook(Hook):
    """Hook that trains a segmentor on labeled and unlabeled images, as FixMatch does.

    A teacher, the moving average of the model, gives classes to unlabeled images; where its
    probability passes ``threshold``, the model must give the same classes to a strongly changed
    view. The loss is half that of the labels and half this one, see
    :class:`~mapsage.models.semi_supervised.fixmatch.FixMatchStep`.

    - The training loader has a ``SemiSupervisedDataset`` and a ``LabeledUnlabeledSampler``.
    - Validation, tests behind the training, and the best checkpoint are those of the teacher. A
      checkpoint has the teacher's weights under the names of the model, so that every tool reads it
      with this config or with that of the plain model. The student is kept beside it
      (``semi_supervised``), and a resumed run goes on to the same bits.
    - The teacher follows the buffers of the first rank, on all ranks, so that it is the same
      everywhere.

    Args:
        threshold: Least probability of the teacher's class that counts, 0 or more and below 1.
        momentum: Most of the teacher that a step keeps; the first steps keep less,
            ``min(1 - 1 / (t + 1), momentum)``.
        views: What strong views are made of: 'images', or 'features' of a frozen backbone, which
            may come from a ``feature_source``.
        channel_dropout: Whether there are two strong views of each image, which lack complementary
            channels of the backbone's features (UniMatch V2). Always so with 'features'.
        cut_mix: Probability that a strong view has a box of another image of the batch.
        strong: Arguments of :class:`~mapsage.models.semi_supervised.strong_view.StrongView`.
        interval: Steps between two tables in the log; that of LoggerHook when None.
        patience: Steps without a sure pixel of a class after which a warning names it.

    Attributes:
        ema_model: The teacher, while a training runs.

    Raises:
        SemiSupervisedError: At the start, if model, loader or another hook do not suit it.
        ValueError: If an argument is out of its range.
    """

    priority = 'NORMAL'

    def __init__(self, threshold: float = 0.95, momentum: float = 0.996, views: str = 'images',
                 channel_dropout: bool = False, cut_mix: float = 0.5,
                 strong: Optional[Dict[str, float]] = None, interval: Optional[int] = None,
                 patience: int = 200) -> None:
        self._loss = UnlabeledLoss(threshold)
        for name, value in (('momentum', momentum), ('cut_mix', cut_mix)):
            if not 0 <= value <= 1:
                raise ValueError(f'FixMatchHook.{name}={value!r}, expected a number from 0 to 1.')
        if views not in VIEWS:
            raise ValueError(f'FixMatchHook.views={views!r}, expected one of {VIEWS}.')
        if views == 'features' and strong:
            raise ValueError(f"FixMatchHook.strong={strong} with views='features', where images "
                             'do not change: leave it out.')
        self._momentum, self._views, self._dropout = momentum, views, channel_dropout
        self._cut_mix, self._strong = cut_mix, StrongView(**(strong or {}))
        self._interval, self._patience = interval, patience
        self._teacher: Optional[Teacher] = None
        self._step: Optional[FixMatchStep] = None
        self._kept: Optional[Dict[str, Any]] = None
        self._evaluating = False
        self._steps_seen = 0

    @property
    def ema_model(self) -> Any:  # noqa: D102  (NonFiniteLossHook looks for NaN in it)
        return None if self._teacher is None else self._teacher.module

    def after_load_checkpoint(self, runner: Any, checkpoint: Dict[str, Any]) -> None:
        """Take the student out of a checkpoint that is resumed, and keep its teacher."""
        kept = checkpoint.get(_KEY) if runner._resume else None
        if kept is None:
            if runner._resume:
                runner.logger.warning(
                    'the checkpoint has no student beside a teacher, so that it was not saved by a '
                    'run with FixMatchHook: the teacher begins with its weights.')
            return
        state = checkpoint['state_dict']
        teacher = {name: state[name] for name in kept['student']}
        state.update(kept['student'])
        self._kept = dict(teacher=teacher, steps=kept['steps'])

    def before_train(self, runner: Any) -> None:
        """Make the teacher, and take the place of the model's loss."""
        model = _model(runner)
        _check_run(runner, model, self._views)
        model.train()
        frozen = _frozen(model)
        if self._views == 'features' and frozen is None:
            check_frozen(model.backbone)
        if self._teacher is None:  # a second train() goes on with it
            self._teacher = Teacher(model, self._momentum, [
                each for each in (frozen, model.data_preprocessor) if each is not None])
        if self._kept is not None:
            self._teacher.load(self._kept['teacher'], self._kept['steps'])
            self._kept = None
        if gives_counts(runner.model):
            runner.model.counts.watch(self._loss)
        elif get_world_size() > 1:
            raise SemiSupervisedError(
                f'FixMatchHook with the model wrapper {type(runner.model).__name__}, which gives '
                'losses no counts of all ranks: expected MMDistributedDataParallel, or no '
                'model_wrapper_cfg.')
        self._step = FixMatchStep(model, self._teacher, self._loss, self._views, self._dropout,
                                  self._cut_mix, self._strong)
        model.loss = self._step
        self._channel = open_channel(purpose='pseudo-labels')
        self._interval = self._interval or log_interval(runner)
        self._report = PseudoLabelReport(_class_names(runner, model), self._loss.threshold,
                                         self._patience)
        runner.logger.info(self._described(runner))
        if self._cut_mix and runner.train_dataloader.sampler.unlabeled == 1:
            runner.logger.warning('[FixMatch] a batch of a rank has one unlabeled image, which can '
                                  'have no box of another one (CutMix). Set unlabeled=2 or more in '
                                  'the sampler.')

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None,
                         outputs: Optional[dict] = None) -> None:
        """Let the teacher follow a step of the optimizer, and log a table at the interval."""
        assert self._teacher is not None and self._interval is not None
        if not inside_cycle(runner.optim_wrapper):
            self._teacher.follow(_model(runner), _of_first_rank)
        self._steps_seen += 1
        if self.every_n_train_iters(runner, self._interval) or self.is_last_train_iter(runner):
            self._summarize(runner)

    def before_val_epoch(self, runner: Any) -> None:
        """Evaluate the teacher."""
        self._exchange(runner, True)

    def after_val_epoch(self, runner: Any, metrics: Optional[Dict[str, float]] = None) -> None:
        """Give the model its own weights back."""
        self._exchange(runner, False)

    def before_test_epoch(self, runner: Any) -> None:
        """Evaluate the teacher, if a training has made one."""
        self._exchange(runner, True)

    def after_test_epoch(self, runner: Any, metrics: Optional[Dict[str, float]] = None) -> None:
        """Give the model its own weights back."""
        self._exchange(runner, False)

    def before_save_checkpoint(self, runner: Any, checkpoint: Dict[str, Any]) -> None:
        """Save the teacher under the names of the model, and beside it the student to resume."""
        if self._teacher is None:
            return
        state = checkpoint['state_dict']
        other = {name: value.cpu() for name, value in
                 self._teacher.state(_model(runner)).items()}
        model = {name: state[name] for name in other}
        teacher, student = (model, other) if self._evaluating else (other, model)
        state.update(teacher)
        if 'optimizer' in checkpoint:  # nobody resumes the others, such as the best one
            checkpoint[_KEY] = dict(student=student, steps=self._teacher.steps)

    def after_train(self, runner: Any) -> None:
        """Give the model its own loss back."""
        self._release(runner)

    def after_run(self, runner: Any) -> None:
        """Give the model its own loss back, if the training has not come to its end."""
        self._release(runner)

    def _release(self, runner: Any) -> None:
        model = _model(runner)
        if self._step is not None and model.__dict__.get('loss') is self._step:
            del model.loss
        self._step = None

    def _exchange(self, runner: Any, evaluating: bool) -> None:
        if self._teacher is not None and self._evaluating != evaluating:
            self._teacher.exchange(_model(runner))
            self._evaluating = evaluating

    def _summarize(self, runner: Any) -> None:
        """Log the table of all ranks since the last one. Collective."""
        assert self._step is not None
        seen = torch.stack(self._step.seen).cpu().double().sum(0).round().to(torch.int64)
        self._step.seen.clear()
        steps, self._steps_seen = self._steps_seen, 0
        counts = sum(self._channel.gather(seen)).numpy()  # type: ignore[union-attr]
        warning = self._report.warning(counts[1], steps)
        if is_main_process():
            runner.logger.info(f'[FixMatch] {self._report.table(np.asarray(counts), steps)}')
            if warning:
                runner.logger.warning(f'[FixMatch] {warning}')

    def _described(self, runner: Any) -> str:
        dataset, sampler = runner.train_dataloader.dataset, runner.train_dataloader.sampler
        assert self._teacher is not None
        return (f'[FixMatch] {dataset.sizes[0]} labeled and {dataset.sizes[1]} unlabeled samples, '
                f'{sampler.labeled} and {sampler.unlabeled} in each batch of a rank; an epoch, in '
                f'which the kind that lasts longer is shown once, has {sampler.batches} steps. '
                f'Strong views of {self._views}, threshold {self._loss.threshold:g}; the teacher, '
                f'which is evaluated and saved, has followed {self._teacher.steps} step(s)')


def _model(runner: Any) -> Any:
    return runner.model.module if is_model_wrapper(runner.model) else runner.model


def _of_first_rank(buffers: List[torch.Tensor]) -> List[torch.Tensor]:
    """Return copies of the buffers of rank 0. Collective."""
    copies = [buffer.detach().clone() for buffer in buffers]
    broadcast_tensors(copies)
    return copies


def _frozen(model: Any) -> Optional[Any]:
    """Return the backbone of a model if it never changes, else None."""
    try:
        check_frozen(model.backbone)
    except (AttributeError, FeatureSourceError):
        return None
    return model.backbone


def _class_names(runner: Any, model: Any) -> List[str]:
    names = [str(each) for each in runner.train_dataloader.dataset.metainfo.get('classes') or ()]
    count = int(model.num_classes)
    return (names + [f'class {at}' for at in range(len(names), count)])[:count]


def _check_run(runner: Any, model: Any, views: str) -> None:
    loader = getattr(runner.train_loop, 'dataloader', None)
    sizes = getattr(getattr(loader, 'dataset', None), 'sizes', None)
    sampler = getattr(loader, 'sampler', None)
    taken = [getattr(sampler, name, None) for name in ('labeled', 'unlabeled')]
    heads = [type(each).__name__ for each in model.modules() if getattr(
        each, 'gives_scores', False)]
    source = runner.cfg.get('feature_source')
    for wrong, text in (
        (not isinstance(model, BaseSegmentor) or not hasattr(model, 'encode_decode'),
         f'the model {type(model).__name__}: expected a segmentor with encode_decode, such as '
         'EncoderDecoder'),
        (isinstance(runner.model, (HeadReplicas, MMModelParallel)),
         f'the model wrapper {type(runner.model).__name__}: expected one device a model, for the '
         'teacher is another model beside it'),
        (bool(heads), f'{"".join(heads[:1])}, which gives scores and no logits: expected a head '
         'whose output a softmax turns into probabilities. Pseudo-labels serve such a head too'),
        (not isinstance(sizes, tuple), 'the training dataset '
         f'{type(getattr(loader, "dataset", None)).__name__}: expected a SemiSupervisedDataset, '
         'with labeled and unlabeled samples'),
        (None in taken, f'the sampler {type(sampler).__name__}: expected LabeledUnlabeledSampler'),
        (None not in taken and sum(taken) != getattr(loader, 'batch_size', None),  # type: ignore
         f'train_dataloader.batch_size={getattr(loader, "batch_size", None)}, and {taken[0]} '
         f'labeled and {taken[1]} unlabeled samples in a batch: expected their sum'),
        (isinstance(runner.train_loop, EpochBasedTrainLoop) and getattr(sampler, 'infinite', False),
         'LabeledUnlabeledSampler in a loop of epochs, of which the first would never end: set '
         'infinite=False'),
        (any(isinstance(each, DynamicSamplingHook) for each in runner.hooks),
         'DynamicSamplingHook, which fills batches by other rules: leave one of them out'),
        (any(isinstance(each, EMAHook) for each in runner.hooks),
         'EMAHook, whose average would be a second one: leave it out, the teacher is an average'),
        (getattr(getattr(runner.model, 'counts', None), 'wants_first_pass', False),
         'a loss of the predictions of all ranks, such as JaccardLoss, where a process carries out '
         'several virtual ranks: each step would be computed twice. Start a process for each '
         'virtual rank, or leave the loss to a stage of its own'),
        (bool(source) and views == 'images', "a feature_source and views='images', whose strong "
         "views need the encoder: set views='features', or leave feature_source out"),
    ):
        if wrong:
            raise SemiSupervisedError(f'FixMatchHook with {text}.')
