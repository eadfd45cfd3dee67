"""Trains the head on features of a frozen encoder that come from a feature source.

The encoder stays in the model. In a training step an :class:`EncoderGate` in front of it returns
features that `mapsage/extras/streaming` has fetched, so the rest of the model does not notice. The hook
requests the features of later batches ahead, and therefore stands between the loop and its loader.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple

import torch
from mmengine.dist import get_rank, is_main_process
from mmengine.logging import print_log
from mmengine.registry import HOOKS
from mmengine.runner import BaseLoop
from mmseg.models import EncoderDecoder
from torch import nn

from mapsage.accelerator import current_accelerator
from mapsage.distributed import DEFAULT_TIMEOUT_SECONDS
from mapsage.distributed.wrappers import VirtualDataParallel
from mapsage.distributed.wrappers.rank_batches import Batch, unpack_rank_batches
from mapsage.extras.streaming import Features, FeatureSource, Item
from mapsage.extras.streaming.build import Surroundings, build_source, view_seeds
from mapsage.extras.streaming.cache.keys import ViewSeeds
from mapsage.extras.streaming.encoder_gate import EncoderGate, FeatureSourceError
from mapsage.extras.streaming.split_head.replica_parallel import HeadReplicas
from mapsage.extras.streaming.steps import FeatureEpochs, FeatureSteps
from mapsage.host.hook import MapSageHook
from mapsage.host.runner import (
    HostRunner,
    KeyedSamples,
    LoopStage,
    MapSageRun,
    cast_dtype,
    dataset_of,
    hooks_of_type,
    insert_stage,
    keyed_samples,
    plain_model,
)
from mapsage.host.segmentors import batch_augments, child_module
from mapsage.sampling.hooks.dynamic_sampling_hook import DynamicSamplingHook, log_interval

from .image_stand_in import leave_images_out


@HOOKS.register_module()
class FeatureSourceHook(MapSageHook):
    """Hook that gets the features of ``model.backbone`` from a source, in every training step.

    ``MapSageRunner`` registers it for a config with ``feature_source``. Validation, testing and
    checkpoints work as without it, since the encoder stays in the model.

    Args:
        source: ``feature_source`` of the config: ``type`` is ``'Local'``, ``'Prefetched'``,
            ``'Cached'`` or ``'Streamed'``; the other keys are settings of that type.
        interval: Steps between summaries in the log; the interval of LoggerHook when None.
        timeout: Seconds to wait for other ranks at the start.

    Raises:
        FeatureSourceError: If the source, its settings, the model or the loader do not suit each
            other.
    """

    # After DynamicSamplingHook, so that this hook gets the batches that dynamic sampling makes.
    priority = 'NORMAL'

    def __init__(
        self,
        source: Dict[str, Any],
        interval: Optional[int] = None,
        timeout: float = DEFAULT_TIMEOUT_SECONDS,
    ) -> None:
        self._config = dict(source)
        self._timeout = timeout
        self._interval = interval
        self._number = 0
        # Items of the step, one for each virtual rank of this process.
        self._items: List[Item] = []
        self._block = range(1)
        self._source: Optional[FeatureSource] = None
        self._gate: Optional[EncoderGate] = None
        self._view_seeds: Optional[ViewSeeds] = None
        self._report: Dict[str, float] = {}
        self._restore_images: Optional[Callable[[], None]] = None

    def before_run(self, runner: HostRunner) -> None:
        """Make the dataset load the cached views and keep the keys of its samples.

        This happens before any sample is loaded.
        """
        loop: Any = runner._train_loop
        self._view_seeds = None
        samples = keyed_samples(loop.dataloader) if isinstance(loop, BaseLoop) else None
        if samples is not None:
            seeds = view_seeds(self._config, samples.dataset)
            if seeds is not None:
                self._view_seeds = seeds
                samples.reseed, samples.keep_keys = seeds, True
                self._leave_images_out(runner, samples, seeds)

    def before_train(self, runner: MapSageRun) -> None:
        """Build the source, and put it between the loader and the encoder."""
        model: Any = plain_model(runner)
        self._preprocessor = model.data_preprocessor
        _check_model(model)
        self._gate = EncoderGate(model.backbone)
        accelerator = current_accelerator()
        precision = cast_dtype(runner.optim_wrapper)

        def encode(images: torch.Tensor) -> Features:
            assert self._gate is not None
            if precision is None:
                return self._gate.encode(images)
            with accelerator.autocast(precision):
                return self._gate.encode(images)

        self._source = build_source(
            self._config,
            Surroundings(
                encoder=model.backbone,
                encode=encode,
                accelerator=accelerator,
                local_rank=runner.local_rank,
                device=accelerator.device(runner.local_rank),
                runner=runner,
                timeout=self._timeout,
                log=log_on_any_rank,
                replicas=runner.model.replicas if isinstance(runner.model, HeadReplicas) else None,
                cast_dtype=precision,
                view_seeds=self._view_seeds,
            ),
        )
        if _samples_dynamically(runner) and self._source.may_wait:
            self._source.ahead = 0
        if self._source.ahead and _samples_dynamically(runner):
            raise FeatureSourceError(
                f'feature_source of type {self._config["type"]!r} works ahead of the step, but '
                f"DynamicSamplingHook fills one step at a time. Use 'Local' or 'Cached' with it."
            )
        if isinstance(runner.model, VirtualDataParallel):
            self._block = runner.model.block
        self.follow_virtual_ranks(runner)
        self._insert_source(runner.train_loop, self._source)
        self._interval = self._interval or log_interval(runner)
        self._begin = time.monotonic()
        runner.logger.info(
            f'[Features] source {self._config["type"]}: up to {self._source.ahead} '
            f'batch(es) ahead of the step'
        )

    def before_train_iter(
        self, runner: HostRunner, batch_idx: int, data_batch: Optional[Batch] = None
    ) -> None:
        """Make the encoder return this step's features, for the first virtual rank."""
        self._open_gate(self._block.start)

    def after_train_iter(
        self,
        runner: HostRunner,
        batch_idx: int,
        data_batch: Optional[Batch] = None,
        outputs: Optional[Dict[str, Any]] = None,
    ) -> None:
        """Let the encoder compute again, and log a summary at the interval."""
        assert self._gate is not None and self._source is not None and self._interval is not None
        self._gate.close()
        for name, value in self._source.report().items():
            self._report[name] = self._report.get(name, 0) + value
        if self.every_n_train_iters(runner, self._interval) or self.is_last_train_iter(runner):
            self._summarize(runner)

    def after_train(self, runner: HostRunner) -> None:
        """Close the source and restore the encoder."""
        self._close(runner)

    def after_run(self, runner: HostRunner) -> None:
        """Close the source and restore the encoder, if the training has not done so."""
        self._close(runner)

    def on_virtual_rank_start(self, runner: HostRunner, virtual_rank: int, batch: Batch) -> None:
        """Make the encoder return the features of a virtual rank."""
        self._open_gate(virtual_rank)

    def _open_gate(self, virtual_rank: int) -> None:
        assert self._gate is not None and self._source is not None
        source, item = self._source, self._items[virtual_rank - self._block.start]
        self._gate.open(
            lambda: source.features(item), item.images.shape if source.needs_images else None
        )

    def _leave_images_out(
        self, runner: HostRunner, samples: KeyedSamples, seeds: ViewSeeds
    ) -> None:
        """Let the loader decode no images, if only the encoder looks at them."""
        kind: Any = type(plain_model(runner))
        looks_at_images = (
            kind.loss is not EncoderDecoder.loss
            or kind.extract_feat is not EncoderDecoder.extract_feat
        )
        if looks_at_images or self._config.get('load_images') or _samples_dynamically(runner):
            return
        self._restore_images = leave_images_out(samples, seeds)
        if self._restore_images is not None:
            runner.logger.info(
                '[Features] training images are not decoded, since the cache has their features: '
                'hooks see black ones. Set feature_source.load_images=True if one needs them.'
            )

    def _close_images(self) -> None:
        """Let the loader decode images again."""
        if self._restore_images is not None:
            self._restore_images()
            self._restore_images = None

    def _close(self, runner: HostRunner) -> None:
        self._close_images()
        self.unfollow_virtual_ranks(runner)
        if self._source is not None:
            self._source.close()
        if self._gate is not None:
            self._gate.remove()
        self._source = self._gate = None

    def _insert_source(self, loop: Any, source: FeatureSource) -> None:
        """Let the loop take its batches from this hook's steps."""
        dataset = dataset_of(loop)
        if not source.needs_images and keyed_samples(loop.dataloader) is None:
            raise FeatureSourceError(
                f'feature_source of type {self._config["type"]!r} finds features by the number of '
                f'a sample, but the samples of the training dataset ({type(dataset).__name__}) '
                f'have no numbers: expected a map-style dataset.'
            )

        def wrap_iterator(batches: Iterator[Any], discarded: int) -> Iterator[Any]:
            # FeatureSteps passes placeholders of discarded items on.
            return self._steps(batches, source, lambda: loop.max_iters - loop.iter - 1)

        def wrap_loader(loader: Any) -> FeatureEpochs:
            return FeatureEpochs(
                loader, lambda batches: self._steps(batches, source, lambda: source.ahead)
            )

        insert_stage(loop, LoopStage(wrap_iterator, wrap_loader))

    def _steps(
        self, batches: Iterable[Any], source: FeatureSource, still_wanted: Callable[[], int]
    ) -> FeatureSteps:
        return FeatureSteps(batches, self._make_items, source, self._set_items, still_wanted)

    def _set_items(self, items: List[Item]) -> None:
        self._items = items

    def _make_items(self, batch: Any) -> List[Item]:
        return [
            self._make_item(rank_batch) for rank_batch in unpack_rank_batches(batch, self._block)
        ]

    def _make_item(self, batch: Dict[str, Any]) -> Item:
        assert self._source is not None
        number, self._number = self._number, self._number + 1
        if not self._source.needs_images:
            return Item(number, keys_of(batch), torch.empty(len(batch['data_samples']), 0, 0, 0))
        with torch.no_grad():
            images = self._preprocessor(batch, True)['inputs']
        return Item(number, (), images)

    def _summarize(self, runner: HostRunner) -> None:
        seconds = time.monotonic() - self._begin
        report, self._report = self._report, {}
        self._begin = time.monotonic()
        for name, value in report.items():
            runner.message_hub.update_scalar(f'features/{name}', value)
        if report and is_main_process():
            counts = ', '.join(f'{name} {value:.4g}' for name, value in report.items())
            runner.logger.info(f'[Features] of {seconds:.1f} s: {counts}')


def log_on_any_rank(level: int, text: str) -> None:
    """Log a text. Warnings of every rank are shown; MMEngine's logger shows rank 0 only."""
    text = f'[Features] {text}'
    print_log(text, logger='current', level=level)
    if get_rank() and level >= logging.WARNING:
        # stderr may be closed, or its disk full.
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f'rank {get_rank()}: {text}\n')


def _samples_dynamically(runner: HostRunner) -> bool:
    return bool(hooks_of_type(runner, DynamicSamplingHook))


def keys_of(batch: Dict[str, Any]) -> Tuple[Tuple[int, Tuple[int, ...]], ...]:
    """Return the key (index, seed) of each sample, which ``KeyedDataset`` wrote into the batch."""
    samples: Sequence[Any] = batch['data_samples']
    return tuple(
        (sample.metainfo['sample_key'][0], tuple(sample.metainfo['sample_key'][1]))
        for sample in samples
    )


def _check_model(model: nn.Module) -> None:
    if child_module(model, 'backbone') is None:
        raise FeatureSourceError(
            f'feature_source takes the place of model.backbone, but {type(model).__name__} has '
            f'none. Take feature_source out of the config.'
        )
    if batch_augments(model) is not None:
        raise FeatureSourceError(
            'feature_source preprocesses each batch before the step does, so that the random '
            'data_preprocessor.batch_augments would be applied twice, with different results. Move '
            'that augmentation into the pipeline.'
        )
