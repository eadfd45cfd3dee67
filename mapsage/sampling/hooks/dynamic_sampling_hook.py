"""Dynamic sampling for any MMEngine config.

The hook connects a run with `mapsage/sampling`, which decides which samples fill a step and knows
neither MMEngine nor loaders. A step is sampled when the loop asks for its batch, so the loop never
sees a sample that was dropped. `scoring.py` computes the scores, `sampled_steps.py` replaces the
loop's batches, `saved_pools.py` puts the pools into checkpoints, and `sampling_report.py` reports.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any, Dict, Iterator, List, Optional, Sequence, Union

import torch
from mmengine.hooks import LoggerHook
from mmengine.logging import print_log
from mmengine.optim import OptimWrapper, OptimWrapperDict
from mmengine.registry import HOOKS
from torch import nn
from torch.utils.data import DataLoader

from mapsage.accelerator import current_accelerator
from mapsage.base.process import BackgroundWorker
from mapsage.distributed import check_descriptors, open_channel
from mapsage.distributed.virtual_ranks import VirtualRanks
from mapsage.distributed.wrappers import VirtualDataParallel
from mapsage.distributed.wrappers.batch_counts import names_of_counters
from mapsage.distributed.wrappers.rank_batches import Batch
from mapsage.host.hook import MapSageHook
from mapsage.host.runner import HostRunner, LoopStage, MapSageRun, insert_stage, keyed_samples
from mapsage.sampling import BatchShare, BlockSampler, SamplingSettings, Validity
from mapsage.sampling.lockstep import check_equal_settings
from mapsage.sampling.scorer import check_scorer

from .sample_weights import PixelWeights, check_asked, weigh_heads
from .sampled_steps import LoaderError, LoaderStream, SampledEpochs, SampledSteps, Step
from .sampling_report import SamplingReport
from .saved_pools import deal_out, load_pools, replace_samples_by_keys
from .scoring import CandidateScoring, build_scorer

# Key of the state in a checkpoint.
_KEY = 'dynamic_sampling'
# Number of steps between summaries in a run without a LoggerHook.
_LOG_INTERVAL = 50


@HOOKS.register_module()
class DynamicSamplingHook(MapSageHook):
    """Fill every step with valid samples: judge, drop and draw again on all ranks in lockstep.

    Works with iteration- and epoch-based loops. An iteration is one step of the loop, however many
    batches were drawn for it; an epoch has as many steps as the loader has batches. Its counts go
    to the log, the message hub, the visualizer and ``WORK_DIR/dynamic_sampling/``, which
    ``tools/plot_sampling.py`` draws. Checkpoints hold the state for an exact resume.

    Args:
        score: Scorer of the samples, or a config of TASK_UTILS for it: ``LabelScore``,
            ``ModelScore``, ``RewardScore`` or a user's class. See :class:`mapsage.sampling.Scorer`
            for its members. A scorer with a method ``score(sample)`` is called in the loader's
            workers; any other callable gets the samples of a batch and returns one number each.
        validity: Arguments of :class:`mapsage.sampling.Validity`.
        local_target: Number of samples a virtual rank trains on in a step; the loader's batch size
            when None.
        prefetch: Whether to sample the next step in the background while this one computes. Needs
            loader workers and a score that neither uses the model nor draws random numbers.
        timeout: Seconds a rank may be late; the timeout of the default group when None.
        interval: Number of steps between summaries; the interval of LoggerHook when None.
        **settings: ``group_size``, ``max_resample_times``, ``shortfall``, ``max_age``,
            ``max_refill_rounds``, ``keep_fraction`` and ``unbiased`` of
            :class:`mapsage.sampling.SamplingSettings`.

    Attributes:
        settings_class: Class that takes the settings.
        uneven_batches: Whether ranks may have different numbers of samples in a step.

    Raises:
        ValueError: For a setting out of range.
    """

    # After DeviceCheckHook, before LoggerHook and CheckpointHook.
    priority = 'ABOVE_NORMAL'
    settings_class = SamplingSettings

    def __init__(
        self,
        score: Any,
        validity: Dict[str, Any],
        local_target: Optional[int] = None,
        prefetch: bool = False,
        timeout: Optional[float] = None,
        interval: Optional[int] = None,
        **settings: Any,
    ) -> None:
        self._scorer = build_scorer(score)
        self._settings = SamplingSettings(
            Validity(**validity),
            # Without a target, one group until the loader is known.
            local_target or settings.get('group_size', 1),
            scores_per_sample=self._scorer.scores_per_sample,
            group_key=None,
            **settings,
        )
        check_scorer(self._scorer, self._settings, prefetch)
        self._timeout = timeout
        self._pixel_weights: Dict[str, PixelWeights] = {}
        self.uneven_batches = self._settings.shortfall == 'shrink'
        self._weighs_samples = self._settings.unbiased or self._settings.shortfall == 'mask'
        if self.uneven_batches or self._weighs_samples or self._scorer.follows_step:
            self.cross_check_obstacle = (
                "DynamicSamplingHook with unbiased=True, shortfall='shrink' or rewards, where "
                'weights of the losses are not part of the batch'
            )
        self._local_target, self._prefetch, self._interval = local_target, prefetch, interval
        self._step: Optional[Step] = None
        # Position, in the block of this process, of the virtual rank that trains now.
        self._slot = 0
        self._resumed: Optional[Dict[str, Any]] = None
        self._gathered: Optional[Dict[str, Any]] = None

    def after_load_checkpoint(self, runner: HostRunner, checkpoint: Dict[str, Any]) -> None:
        """Read from the checkpoint where a resumed run continues."""
        if runner._resume:
            self._resumed = checkpoint.get(_KEY, {})

    def before_train(self, runner: MapSageRun) -> None:
        """Put dynamic sampling between the loop and its loader. Collective.

        Raises:
            ValueError: If loader, model and settings do not suit each other.
            LockstepError: On every rank, if a rank has different settings.
        """
        loop, loader = runner.train_loop, runner.train_loop.dataloader
        target = self._choose_target(loader)
        self._batch_size = loader.batch_size or target
        self._interval = self._interval or log_interval(runner)
        self._channel = open_channel(None, self._timeout, 'sampling summary')
        world = len(self._channel.ranks)
        # Sooner or later, any two ranks have samples to exchange.
        check_descriptors(world, 1)
        self._ranks = VirtualRanks(world, world)
        if isinstance(runner.model, VirtualDataParallel):
            self._ranks = runner.model.virtual_ranks
        self.follow_virtual_ranks(runner)
        self._block = self._ranks.block(self._channel.ranks.index(self._channel.rank))
        collate = loader.collate_fn
        self._scoring = self._bind_scorer(runner, loader)
        settings = replace(self._settings, local_target=target)
        stream = LoaderStream(loader, self._block, settings.group_size)
        self._sampler = BlockSampler(
            stream,
            self._scoring,
            ranks=self._ranks,
            seed=runner.seed,
            channel=open_channel(None, self._timeout, 'sampling'),
            logger=runner.logger,
            initial_size=self._batch_size,
            observe=lambda group, reason: self._report.observe(group, reason, self._sampler.step),
            **vars(settings),
        )
        self._report = SamplingReport(
            runner, self._channel, self._sampler.global_target, self._scorer
        )
        if self._resumed is not None:
            self._continue_from(self._resumed, runner, loader, stream)
        self._steps = SampledSteps(
            self._sampler,
            stream,
            collate,
            self._set_step,
            BackgroundWorker(
                'dynamic-sampling', lambda: current_accelerator().set_device(runner.local_rank)
            )
            if self._prefetch
            else None,
            lambda: runner.iter + 1 < runner.max_iters,
        )
        insert_stage(
            loop,
            LoopStage(self._replace_iterator, lambda loader: SampledEpochs(loader, self._steps)),
        )
        self._weigh_losses(runner, target)

    def after_train_iter(
        self,
        runner: HostRunner,
        batch_idx: int,
        data_batch: Optional[Batch] = None,
        outputs: Optional[Dict[str, Any]] = None,
    ) -> None:
        """Add the step to the report; at the interval, summarize it, which is collective."""
        assert self._step is not None and self._interval is not None
        check_asked(self._pixel_weights)
        # All batches of this process share one object of statistics.
        self._report.add(self._step.batches[0].statistics)
        if self.every_n_train_iters(runner, self._interval) or self.is_last_train_iter(runner):
            self._report.summarize()
            if self._scoring.history is not None:
                self._scoring.history.share(self._channel)

    def after_train(self, runner: HostRunner) -> None:
        """Wait for the step that is sampled in the background, and save the gallery."""
        self._steps.close()
        self._report.save_gallery()

    def on_virtual_rank_start(self, runner: HostRunner, virtual_rank: int, batch: Batch) -> None:
        """Note which virtual rank of this process trains now."""
        self._slot = virtual_rank - self._block.start

    def gather_state(self, runner: MapSageRun) -> None:
        """Gather the state of every rank for a checkpoint. Collective."""
        if self._step is not None:
            texts = self._channel.gather_texts(json.dumps(self._rank_states()))
            self._gathered = self._whole_state(
                [rank_state for text in texts for rank_state in json.loads(text)]
            )

    def check_own_state(self, runner: MapSageRun) -> None:
        """Use only the state of this rank for a checkpoint that the other ranks take no part in."""
        if self._step is None:
            return
        history = self._scoring.history
        empty: Dict[str, Any] = dict(
            pool=[],
            drawn=self._step.drawn[0],
            history=None if history is None else dict(history.rank_state(), rows=[]),
        )
        texts = [json.dumps(empty)] * self._ranks.count
        texts[self._block.start : self._block.stop] = self._rank_states()
        self._gathered = self._whole_state(texts)
        runner.logger.warning(
            f'[DynSample] the checkpoint of step {runner.iter + 1} is saved by one rank: the pools '
            f'of the others are missing from it, and a run that resumes from it draws other '
            f'samples. To save them, enter runner.saving_together() on all ranks.'
        )

    def before_save_checkpoint(self, runner: HostRunner, checkpoint: Dict[str, Any]) -> None:
        """Put the gathered state into the checkpoint."""
        if self._gathered is not None:
            checkpoint[_KEY] = self._gathered
            self._report.save_gallery()

    def _rank_states(self) -> List[str]:
        """Return the state of each virtual rank of this process, as JSON."""
        assert self._step is not None
        history = self._scoring.history
        return [
            json.dumps(
                dict(
                    pool=replace_samples_by_keys(pool),
                    drawn=drawn,
                    history=None if history is None else history.rank_state(slot),
                )
            )
            for slot, (pool, drawn) in enumerate(zip(self._step.state['pools'], self._step.drawn))
        ]

    def _whole_state(self, ranks: List[str]) -> Dict[str, Any]:
        """Return the state for a checkpoint.

        Args:
            ranks: State of each virtual rank of the run, as JSON.
        """
        assert self._step is not None
        history = self._scoring.history
        return dict(
            step=self._step.state['step'],
            rate=self._step.state['rate'],
            scores=self._step.state['scores'],
            batch_size=self._batch_size,
            ranks=ranks,
            history=None if history is None else history.shared_state(),
        )

    def _choose_target(self, loader: DataLoader) -> int:
        """Return the number of samples that a virtual rank trains on in a step."""
        if self._prefetch and not loader.num_workers:
            raise LoaderError(
                'DynamicSamplingHook: prefetch=True needs train_dataloader.num_workers of 1 or '
                'more. Without workers, loading in the background would draw from the training '
                "step's random generators."
            )
        target = self._local_target or loader.batch_size
        if target is None:
            raise LoaderError(
                'DynamicSamplingHook: the training loader has a batch_sampler and so no batch '
                'size. Set local_target, the samples of a rank in a step.'
            )
        return int(target)

    def _bind_scorer(self, runner: HostRunner, loader: DataLoader) -> CandidateScoring:
        """Connect the scorer with the run. Collective for a scorer that describes itself."""
        scorer = self._scorer
        scorer.bind(runner.model, loader.collate_fn)
        description = scorer.describe()
        if description:
            check_equal_settings(self._channel, description)
        if scorer.follows_step and runner.cfg.get('feature_source'):
            raise ValueError(
                f'{scorer.name} runs the encoder on two batches a step, '
                f'and feature_source has the features of one. Leave it out.'
            )
        scorer.follow(self._current_share)
        scoring = CandidateScoring(
            scorer,
            runner.model,
            self._block,
            runner.seed,
            lambda: self._sampler.step,
            self._prefetch,
        )
        samples = keyed_samples(loader)
        if samples is not None:
            samples.finish = scoring.factory
        return scoring

    def _replace_iterator(self, batches: Iterator[Any], discarded: int) -> Iterator[Any]:
        """Return the iterator of an iteration-based loop, which begins with ``discarded`` items."""
        # The stream itself begins where the checkpoint says, so placeholders are enough.
        return (
            itertools.chain(itertools.repeat(None, discarded), self._steps)
            if discarded
            else self._steps
        )

    def _set_step(self, step: Step) -> None:
        self._step = step

    def _current_share(self) -> Optional[BatchShare]:
        """Return the share of the virtual rank that trains now; None before the first step."""
        return (
            None
            if self._step is None
            else BatchShare.of(self._step.batches[self._slot], self._slot)
        )

    def _weigh_losses(self, runner: HostRunner, target: int) -> None:
        """Let the loss of each step, and of each sample if unbiased, have its weight."""
        if self.uneven_batches and target > 1:
            _warn_of_single_samples(runner.model)
        if self.uneven_batches and not self._scorer.weighs_loss:
            self._weigh(runner.optim_wrapper, names_of_counters(runner.model))
        if self._weighs_samples:
            self._pixel_weights = weigh_heads(
                runner.model,
                lambda: self._step.batches[self._slot].weights if self._step else (),
                'unbiased=True' if self._settings.unbiased else "shortfall='mask'",
            )

    def _weigh(
        self, optim_wrapper: Union[OptimWrapper, OptimWrapperDict], counters: Sequence[str] = ()
    ) -> None:
        """Multiply the loss of each step by its weight, before gradients are averaged.

        Args:
            optim_wrapper: Wrapper of the optimizer.
            counters: Names of the model's losses that count over the global batch.

        Raises:
            ValueError: If there are such losses, or several optimizers.
        """
        if counters:
            raise ValueError(
                f"shortfall='shrink' weighs the loss of a rank by its number of "
                f'samples, and {", ".join(counters)} counts over the global batch '
                f"already. Choose another policy, for example 'pad'."
            )
        if isinstance(optim_wrapper, OptimWrapperDict):
            raise ValueError(
                f"shortfall='shrink' weighs one loss a step, and "
                f'{type(optim_wrapper).__name__} has several. Choose another policy.'
            )
        scale_loss = optim_wrapper.scale_loss

        def scale_and_weigh(loss: torch.Tensor) -> torch.Tensor:
            weight = 1.0 if self._step is None else self._step.batches[self._slot].loss_weight
            return scale_loss(loss) if weight == 1 else scale_loss(loss) * weight

        optim_wrapper.scale_loss = scale_and_weigh

    def _continue_from(
        self, state: Dict[str, Any], runner: HostRunner, loader: DataLoader, stream: LoaderStream
    ) -> None:
        """Continue from the state in a checkpoint; ``{}`` if it was written without this hook."""
        if not state:
            stream.skip([runner.iter * self._batch_size] * len(self._block))
            runner.logger.warning(
                '[DynSample] the checkpoint was written without dynamic sampling: the pool begins '
                f'empty and the loader after {runner.iter} batches.'
            )
            return
        rank_states = [json.loads(text) for text in state['ranks']]
        world = self._ranks.count
        # Earlier checkpoints have a number of batches, equal for all virtual ranks.
        drawn = [
            rank_state.get('drawn', state.get('drawn', 0) * state['batch_size'])
            for rank_state in rank_states
        ]
        if (len(drawn), state['batch_size']) == (world, self._batch_size):
            stream.skip(drawn[self._block.start : self._block.stop])
        else:
            batches = round(sum(drawn) / (self._batch_size * world))
            stream.skip([batches * self._batch_size] * len(self._block))
            runner.logger.warning(
                f'[DynSample] the run had {len(rank_states)} rank(s) of batch size '
                f'{state["batch_size"]} and has {world} of {self._batch_size}: the loader begins '
                f'after {batches} batches instead of '
                f'{sum(drawn) // (len(drawn) * state["batch_size"])}.'
            )
        pools = [rank_state['pool'] for rank_state in rank_states]
        if len(rank_states) != world:
            runner.logger.warning(
                f'[DynSample] the run had {len(rank_states)} rank(s) and has '
                f'{world}: the pool is dealt out again.'
            )
            pools = deal_out(pools, world)
        restored = load_pools(
            pools[self._block.start : self._block.stop],
            keyed_samples(loader),
            self._settings.group_size,
        )
        if restored.lost_groups:
            runner.logger.warning(
                f'[DynSample] {restored.lost_groups} group(s) of the pool are left out: they '
                f'have a different group_size, or samples without the index and seed to load them. '
                f'Their samples are counted as not_restored.'
            )
        self._sampler.load_state_dict(
            dict(
                step=state['step'],
                rate=state['rate'],
                pools=restored.pools,
                scores=state.get('scores', ()),
                not_restored=restored.lost_samples,
            )
        )
        history = self._scoring.history
        if history is not None and state['history'] is not None:
            history.load_state(
                state['history'],
                *(rank_states[rank % len(rank_states)]['history'] for rank in self._block),
            )


def log_interval(runner: HostRunner) -> int:
    """Return the number of steps between two lines of the run's LoggerHook."""
    intervals = [hook.interval for hook in runner.hooks if isinstance(hook, LoggerHook)]
    return int(intervals[0]) if intervals else _LOG_INTERVAL


def _warn_of_single_samples(model: nn.Module) -> None:
    """Warn of layers that cannot train on the single sample that ``'shrink'`` may leave a rank."""
    # The loop calls train() after this hook. Without the call here, layers that norm_eval freezes
    # would look as if they trained.
    model.train()
    layers = [
        name
        for name, layer in model.named_modules()
        if layer.training
        and isinstance(layer, nn.modules.batchnorm._BatchNorm)
        and not isinstance(layer, nn.SyncBatchNorm)
    ]
    if layers:
        print_log(
            f"[DynSample] shortfall='shrink' may leave a rank one sample, and BatchNorm "
            f'raises an error where it has one value for a channel, as behind a global '
            f'pooling ({len(layers)} layers, {layers[0]} the first). Choose '
            f"shortfall='pad', or norm_cfg=dict(type='GN', num_groups=32).",
            logger='current',
            level=30,
        )
