"""Dynamic sampling for any MMEngine config."""
from __future__ import annotations

import contextlib
import itertools
import json
from collections import Counter
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from mmengine.hooks import Hook, LoggerHook
from mmengine.logging import print_log
from mmengine.optim import OptimWrapperDict
from mmengine.registry import HOOKS, TASK_UTILS
from torch import nn

from mapsage.accelerator import current_accelerator
from mapsage.background_worker import BackgroundWorker
from mapsage.distributed import open_channel
from mapsage.distributed.virtual_ranks import VirtualRanks
from mapsage.hooks.ranks.accelerator_hook import seed_rank
from mapsage.sampling import BlockSampler, Candidate, TileHistory, Validity, WeightedRewards
from mapsage.sampling.lockstep import check_equal_settings
from mapsage.wrappers import VirtualDataParallel
from mapsage.wrappers.batch_counts import names_of_counters

from .sample_weights import PixelWeights, check_asked, weigh_heads
from .sampled_steps import (
    LoaderError,
    LoaderStream,
    OwnStep,
    SampledEpochs,
    SampledSteps,
    Step,
)
from .sampling_report import SamplingReport

_KEY = 'dynamic_sampling'  # in the checkpoint
_LOG_INTERVAL = 50  # steps, where there is no LoggerHook


@TASK_UTILS.register_module()
class RewardScore(WeightedRewards):
    """Score samples by the weighted sum of reward functions, which get the samples of a batch.

    Args:
        rewards: Reward functions: configs of TASK_UTILS, or callables.
        weights: Weight of each reward; 1 for all when None.
    """

    def __init__(self, rewards: Sequence[Any], weights: Optional[Sequence[float]] = None) -> None:
        parts = [_build(each) for each in rewards]
        super().__init__([_of_batches(part) for part in parts], weights)
        self._parts = parts
        self.uses_model = any(getattr(part, 'uses_model', False) for part in parts)

    def bind(self, model: Any, collate: Callable[[List[Any]], Any]) -> None:
        """Give the model and the collate function to the rewards that need them."""
        for part in self._parts:
            if hasattr(part, 'bind'):
                part.bind(model, collate)


@HOOKS.register_module()
class DynamicSamplingHook(Hook):
    """Fill every step with valid samples: judge, drop and draw again on all ranks in lockstep.

    Works with iteration- and epoch-based loops. An iteration is one step of the loop, however many
    batches were drawn for it; an epoch has as many steps as the loader has batches. Its counts go
    to the log, the message hub, the visualizer and ``WORK_DIR/dynamic_sampling/``, which
    ``tools/plot_sampling.py`` draws. Checkpoints hold the state for an exact resume.

    Args:
        score: Scorer of the samples, or a config of TASK_UTILS for it (``LabelScore``,
            ``ModelScore``, ``RewardScore`` or one of your own). Either it has a method
            ``score(sample)`` that returns a number, which is called in the loader's workers; or it
            takes the samples of a batch and returns one number for each.
        validity: Arguments of :class:`mapsage.sampling.Validity`.
        local_target: Number of samples a virtual rank trains on in a step; the loader's batch size
            when None.
        group_size: Number of samples that stay together and are judged together.
        max_resample_times: Number of resamples a step may make.
        shortfall: Policy for when the resamples do not suffice: ``'fallback'``, ``'pad'``,
            ``'shrink'`` or ``'raise'``, see :func:`mapsage.sampling.decide_shortfall`.
        max_age: Number of steps that surplus samples may wait for their use.
        max_refill_rounds: Number of batches that one resample may draw on each rank.
        keep_fraction: Probability with which a group that is not valid is kept nevertheless.
        unbiased: Whether such a group weighs ``1 / keep_fraction`` in the loss, so that the class
            prior is that of the data. Needs heads of MMSegmentation with cross-entropy.
        prefetch: Whether to sample the next step in the background while this one computes. Needs
            loader workers and a score that neither uses the model nor draws random numbers.
        timeout: Seconds a rank may be late; that of the default group when None.
        interval: Number of steps between summaries; that of LoggerHook when None.

    Attributes:
        uneven_batches: Whether ranks may have different numbers of samples in a step.

    Raises:
        ValueError: For a setting out of range.
    """

    # After DeviceCheckHook, before LoggerHook and CheckpointHook.
    priority = 'ABOVE_NORMAL'

    def __init__(self, score: Any, validity: Dict[str, Any], local_target: Optional[int] = None,
                 group_size: int = 1, max_resample_times: int = 3, shortfall: str = 'fallback',
                 max_age: int = 1, max_refill_rounds: int = 4, keep_fraction: float = 0.0,
                 unbiased: bool = False, prefetch: bool = False,
                 timeout: Optional[float] = None, interval: Optional[int] = None) -> None:
        self._scorer = _build(score)
        self._validity = Validity(**validity)
        each = getattr(self._scorer, 'scores_per_sample', 1)
        self._validity.check_group_size(group_size * each)
        self._settings: Dict[str, Any] = dict(
            group_size=group_size, max_resample_times=max_resample_times, shortfall=shortfall,
            max_age=max_age, max_refill_rounds=max_refill_rounds, keep_fraction=keep_fraction,
            unbiased=unbiased, scores_per_sample=each, timeout=timeout)
        self._several = each > 1
        if hasattr(self._scorer, 'check_sampling'):
            self._scorer.check_sampling(self._validity, self._settings)
        self._weighing: Dict[str, PixelWeights] = {}
        self.uneven_batches = shortfall == 'shrink'
        self._local_target, self._prefetch, self._interval = local_target, prefetch, interval
        name = type(self._scorer).__name__
        if prefetch and getattr(self._scorer, 'uses_model', False):
            raise ValueError(f'prefetch=True with {name}: it would read weights while the step '
                             f'changes them. Set prefetch=False, or score by labels.')
        if group_size > 1 and hasattr(self._scorer, 'history'):
            raise ValueError(f'group_size={group_size} with {name}: it remembers one score per '
                             f'tile, and all views of a tile would get it. Set group_size=1.')
        self._history: Optional[TileHistory] = None
        self._step: Optional[Step] = None
        self._turn = 0  # place in the block of the virtual rank whose turn it is
        self._scored: Counter = Counter()  # batches scored in the step, by virtual rank
        self._scored_step = 0
        self._resumed: Optional[Dict[str, Any]] = None
        self._gathered: Optional[Dict[str, Any]] = None

    def after_load_checkpoint(self, runner: Any, checkpoint: Dict[str, Any]) -> None:
        """Read from the checkpoint where a resumed run continues."""
        if runner._resume:
            self._resumed = checkpoint.get(_KEY, {})

    def before_train(self, runner: Any) -> None:
        """Put dynamic sampling between the loop and its loader. Collective.

        Raises:
            ValueError: If loader, model and settings do not suit each other.
            LockstepError: On every rank, if a rank has different settings.
        """
        loop, loader = runner.train_loop, runner.train_loop.dataloader
        target = self._target(loader)
        self._batch_size = loader.batch_size or target
        self._interval = self._interval or log_interval(runner)
        self._channel = open_channel(None, self._settings['timeout'], 'sampling summary')
        world = len(self._channel.ranks)
        self._ranks = VirtualRanks(world, world)
        if isinstance(runner.model, VirtualDataParallel):
            self._ranks = runner.model.virtual_ranks
            if self._take_turn not in runner.model.on_virtual_rank_start:
                runner.model.on_virtual_rank_start.append(self._take_turn)
        self._block = self._ranks.block(self._channel.ranks.index(self._channel.rank))
        collate = loader.collate_fn
        score = self._bind(runner, loader, collate)
        stream = LoaderStream(loader, self._block)
        self._sampler = BlockSampler(
            stream, score, self._validity, target, self._ranks, seed=runner.seed,
            logger=runner.logger,
            observe=lambda group, reason: self._report.observe(group, reason, self._sampler.step),
            **self._settings)
        self._report = SamplingReport(runner, self._channel, self._sampler.global_target)
        if self._resumed is not None:
            self._continue(runner, loader, stream, self._resumed)
        self._steps = SampledSteps(
            self._sampler, stream, collate, self._take,
            BackgroundWorker('dynamic-sampling',
                             lambda: current_accelerator().set_device(runner.local_rank))
            if self._prefetch else None, lambda: runner.iter + 1 < runner.max_iters)
        if hasattr(loop, 'dataloader_iterator'):
            # mmengine 0.10.7 discards items on resume, see mapsage/compat/loop_resume.py
            discarded = getattr(loop, 'num_discarded', 0)
            loop.dataloader_iterator = itertools.chain(
                itertools.repeat(None, discarded), self._steps) if discarded else self._steps
        else:
            loop.dataloader = SampledEpochs(loader, self._steps)
        if self.uneven_batches and target > 1:
            _warn_of_single_samples(runner.model)
        if self.uneven_batches and not getattr(self._scorer, 'weighs_loss', False):
            self._weigh(runner.optim_wrapper, names_of_counters(runner.model))
        if self._settings['unbiased']:
            self._weighing = weigh_heads(
                runner.model, lambda: self._step.batches[self._turn].weights if self._step else ())

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None,
                         outputs: Optional[dict] = None) -> None:
        """Add this step to the report, and summarize it at the interval. Collective then."""
        assert self._step is not None and self._interval is not None
        check_asked(self._weighing)
        self._report.add(self._step.batches[0].statistics)  # of all in this process
        if self.every_n_train_iters(runner, self._interval) or self.is_last_train_iter(runner):
            self._report.summarize()
            if self._history is not None:
                self._history.share(self._channel)

    def after_train(self, runner: Any) -> None:
        """Wait for the step that is sampled in the background, and save the gallery."""
        self._steps.close()
        self._report.save_gallery()

    def gather_state(self, runner: Any) -> None:
        """Gather the state of every rank for a checkpoint. Collective."""
        if self._step is not None:
            every = self._channel.gather_texts(json.dumps(self._own_states()))
            self._gathered = self._state([text for each in every for text in json.loads(each)])

    def check_own_state(self, runner: Any) -> None:
        """Keep the state of this rank alone for a checkpoint that the others do not know of."""
        if self._step is None:
            return
        history = None if self._history is None else dict(self._history.rank_state(), rows=[])
        texts = [json.dumps(dict(pool=[], history=history))] * self._ranks.count
        texts[self._block.start:self._block.stop] = self._own_states()
        self._gathered = self._state(texts)
        runner.logger.warning(
            f'[DynSample] the checkpoint of step {runner.iter + 1} is saved by one rank: the pools '
            f'of the others are missing from it, and a run that resumes from it draws other '
            f'samples. To save them, enter runner.saving_together() on all ranks.')

    def _own_states(self) -> List[str]:
        """Return the state of each virtual rank of this process."""
        assert self._step is not None
        pools = [[dict(found_at=group['found_at'], at_random=group['at_random'],
                       keys=[[each.index, list(each.seed), each.score]
                             for each in group['samples']]) for group in pool]
                 for pool in self._step.state['pools']]
        return [json.dumps(dict(
            pool=pool, history=self._history.rank_state(turn) if self._history else None))
            for turn, pool in enumerate(pools)]

    def _state(self, ranks: List[str]) -> Dict[str, Any]:
        assert self._step is not None
        return dict(
            step=self._step.state['step'], rate=self._step.state['rate'],
            scores=self._step.state['scores'], drawn=self._step.drawn, batch_size=self._batch_size,
            ranks=ranks,
            history=self._history.shared_state() if self._history else None)

    def before_save_checkpoint(self, runner: Any, checkpoint: Dict[str, Any]) -> None:
        """Put the gathered state into the checkpoint."""
        if self._gathered is not None:
            checkpoint[_KEY] = self._gathered
            self._report.save_gallery()

    def _target(self, loader: Any) -> int:
        if self._prefetch and not loader.num_workers:
            raise LoaderError(
                'DynamicSamplingHook: prefetch=True needs train_dataloader.num_workers of 1 or '
                "more. Without workers, loading in the background would draw from the training "
                "step's random generators.")
        target = self._local_target or loader.batch_size
        if target is None:
            raise LoaderError(
                'DynamicSamplingHook: the training loader has a batch_sampler and so no batch '
                'size. Set local_target, the samples of a rank in a step.')
        return int(target)

    def _bind(self, runner: Any, loader: Any,
              collate: Callable[[List[Any]], Any]) -> Callable[[int, Sequence[Candidate]], Any]:
        """Return the function that scores the candidates of a virtual rank."""
        scorer: Any = self._scorer
        in_worker = hasattr(scorer, 'score')
        finish = Finish(scorer if in_worker else None)
        if hasattr(loader, 'samples'):
            loader.samples.finish = finish
        if hasattr(scorer, 'bind'):
            scorer.bind(runner.model, collate)
        if hasattr(scorer, 'describe'):
            check_equal_settings(self._channel, scorer.describe())
        if hasattr(scorer, 'follow'):
            if runner.cfg.get('feature_source'):
                raise ValueError(f'{type(scorer).__name__} runs the encoder on two batches a step, '
                                 f'and feature_source has the features of one. Leave it out.')
            scorer.follow(self._own_step)
        if hasattr(scorer, 'history'):
            self._history = TileHistory(scorer, turns=len(self._block), **scorer.history)

        def score(rank: int, candidates: Sequence[Candidate]) -> Any:
            if not self._prefetch:
                self._seed_score(runner, rank)
            if in_worker:
                return [finish.score(each) if each.score is None else each.score
                        for each in candidates]
            if hasattr(scorer, 'begin_batch'):
                scorer.begin_batch(rank - self._block.start, self._scored[rank] == 1)
            with self._buffers(runner.model, rank):
                scores = (scorer([each.sample for each in candidates]) if self._history is None
                          else self._history(candidates, rank - self._block.start))
            for each, value in zip(candidates, scores):
                each.score = float(sum(value) / len(value) if self._several else value)
            return scores

        return score

    def _seed_score(self, runner: Any, rank: int) -> None:
        """Seed the generators that a score may use, by virtual rank, step and batch in it."""
        step = self._sampler.step
        if step != self._scored_step:
            self._scored_step, self._scored = step, Counter()
        self._scored[rank] += 1
        # The leading 2 makes these seeds different from those of samples and of training steps,
        # which AcceleratorHook sets anew.
        seed_rank(2, runner.seed, rank, step, self._scored[rank])

    def _buffers(self, model: Any, rank: int) -> Any:
        """Return a context in which the model has the buffers of a virtual rank."""
        virtual = isinstance(model, VirtualDataParallel) and not self._prefetch
        return model.buffers_of(rank) if virtual else contextlib.nullcontext()

    def _take(self, step: Step) -> None:
        self._step = step

    def _own_step(self) -> Optional[OwnStep]:
        """Return the step of the virtual rank whose turn it is; None before the first."""
        return None if self._step is None else OwnStep.of(self._step.batches[self._turn],
                                                          self._turn)

    def _take_turn(self, virtual_rank: int, batch: Any) -> None:
        self._turn = virtual_rank - self._block.start

    def _weigh(self, optim_wrapper: Any, counters: Sequence[str] = ()) -> None:
        """Multiply the loss of each step by its weight, before gradients are averaged."""
        if counters:
            raise ValueError(f"shortfall='shrink' weighs the loss of a rank by its number of "
                             f'samples, and {", ".join(counters)} counts over the global batch '
                             f"already. Choose another policy, for example 'pad'.")
        if isinstance(optim_wrapper, OptimWrapperDict):
            raise ValueError(f"shortfall='shrink' weighs one loss a step, and "
                             f'{type(optim_wrapper).__name__} has several. Choose another policy.')
        scale_loss = optim_wrapper.scale_loss

        def weighed(loss: Any) -> Any:
            weight = 1.0 if self._step is None else self._step.batches[self._turn].loss_weight
            return scale_loss(loss) if weight == 1 else scale_loss(loss) * weight

        optim_wrapper.scale_loss = weighed

    def _continue(self, runner: Any, loader: Any, stream: LoaderStream,
                  state: Dict[str, Any]) -> None:
        """Continue from the state in the checkpoint."""
        if not state:
            stream.skip(runner.iter)
            runner.logger.warning(
                '[DynSample] the checkpoint was written without dynamic sampling: the pool begins '
                f'empty and the loader after {runner.iter} batches.')
            return
        ranks = [json.loads(text) for text in state['ranks']]
        world = self._ranks.count
        drawn = state['drawn'] * state['batch_size'] * len(ranks)  # samples, on all ranks
        batches = round(drawn / (self._batch_size * world))
        stream.skip(batches)
        if batches != state['drawn']:
            runner.logger.warning(
                f'[DynSample] the run had {len(ranks)} rank(s) of batch size {state["batch_size"]} '
                f'and has {world} of {self._batch_size}: the loader begins after {batches} batches '
                f'instead of {state["drawn"]}.')
        pools = [each['pool'] for each in ranks]
        if len(ranks) != world:
            runner.logger.warning(f'[DynSample] the run had {len(ranks)} rank(s) and has {world}: '
                                  f'the pool is dealt out again.')
            every = [group for pool in pools for group in pool]
            pools = [every[rank::world] for rank in range(world)]
        pools = pools[self._block.start:self._block.stop]
        groups = [[dict(found_at=group['found_at'], at_random=group.get('at_random', False),
                        samples=[_reload(loader, *key) for key in group['keys']])
                   for group in pool if all(key[0] >= 0 and key[1] for key in group['keys'])
                   and len(group['keys']) == self._sampler.group_size] for pool in pools]
        lost = sum(map(len, pools)) - sum(map(len, groups))
        if lost:
            runner.logger.warning(
                f'[DynSample] {lost} group(s) of the pool are left out: they '
                f'have a different group_size, or samples without the index and seed to load them. '
                f'Their samples are counted as not_restored.')
        self._sampler.load_state_dict(dict(
            step=state['step'], rate=state['rate'], pools=groups, scores=state.get('scores', ()),
            not_restored=sum(len(group['keys']) for pool in pools for group in pool)
            - sum(len(group['samples']) for pool in groups for group in pool)))
        if self._history is not None and state['history'] is not None:
            self._history.load_state(state['history'], *(
                ranks[rank % len(ranks)]['history'] for rank in self._block))


class Finish:
    """Turns samples into candidates, in the loader's workers.

    Args:
        scorer: Scorer with a method ``score``, which is then called there; or None.
    """

    def __init__(self, scorer: Optional[Any]) -> None:
        self.scorer = scorer

    def __call__(self, index: int, seed: Tuple[int, ...], sample: Any) -> Candidate:
        """Return the candidate."""
        candidate = Candidate(sample, index, seed)
        if self.scorer is not None:
            self.score(candidate)
        return candidate

    def score(self, candidate: Candidate) -> float:
        """Score a candidate."""
        assert self.scorer is not None
        candidate.score = float(self.scorer.score(candidate.sample))
        return candidate.score


def _build(score: Any) -> Any:
    if isinstance(score, dict):
        return TASK_UTILS.build(score)
    if callable(score) or hasattr(score, 'score'):
        return score
    raise ValueError(f'score={score!r}, expected a config such as '
                     f"dict(type='LabelScore', metric='class_entropy') or a callable.")


def _of_batches(score: Any) -> Callable[[Sequence[Any]], Any]:
    if not hasattr(score, 'score'):
        return score
    return lambda samples: [score.score(sample) for sample in samples]


def log_interval(runner: Any) -> int:
    """Return the steps between two lines of the run's LoggerHook."""
    intervals = [hook.interval for hook in runner.hooks if isinstance(hook, LoggerHook)]
    return int(intervals[0]) if intervals else _LOG_INTERVAL


def _reload(loader: Any, index: int, seed: Sequence[int], score: Optional[float]) -> Candidate:
    candidate: Candidate = loader.samples.load(index, tuple(seed))
    candidate.score = score
    return candidate


def _warn_of_single_samples(model: nn.Module) -> None:
    """Warn of layers that cannot train on the single sample that ``'shrink'`` may leave a rank."""
    # As the loop does after this hook: a model with norm_eval freezes its layers only now.
    model.train()
    layers = [name for name, layer in model.named_modules() if layer.training and isinstance(
        layer, nn.modules.batchnorm._BatchNorm) and not isinstance(layer, nn.SyncBatchNorm)]
    if layers:
        print_log(f"[DynSample] shortfall='shrink' may leave a rank one sample, and BatchNorm "
                  f'raises an error where it has one value for a channel, as behind a global '
                  f'pooling ({len(layers)} layers, {layers[0]} the first). Choose '
                  f"shortfall='pad', or norm_cfg=dict(type='GN', num_groups=32).",
                  logger='current', level=30)
