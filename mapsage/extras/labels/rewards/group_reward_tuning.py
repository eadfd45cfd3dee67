"""Tunes a segmentor by rewards of label maps drawn from it; a score of dynamic sampling.

A reward such as a number of polygons has no gradient with respect to the logits. So several label
maps are drawn from the model's probabilities, and the model is moved toward the maps with a larger
reward than the other maps of the same tile. Drawing happens when a tile is scored; the loss of the
training step then reads the drawn maps from the tile's data sample. The formulas are in
`group_reward.py`.

Shapes: N tiles, G label maps of a tile, C classes, H x W pixels, R regions of a tile.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import numpy as np
import torch
from mmengine.logging import print_log
from mmengine.registry import TASK_UTILS
from torch import nn

from mapsage.host.batch_images import Channels
from mapsage.host.runner import unwrap
from mapsage.host.segmentors import batch_augments, class_logits, is_segmentor
from mapsage.sampling import BatchShare, Scorer, Validity
from mapsage.sampling.hooks.model_score import evaluating

from .group_reward import (
    draw,
    label_maps,
    leave_one_out,
    region_logits,
    surrogate,
)
from .reward_functions import Rewards
from .reward_pictures import RewardPictures

Loss = Union[torch.Tensor, List[torch.Tensor], Tuple[torch.Tensor, ...]]


@TASK_UTILS.register_module()
class GroupRewardTuning(Scorer):
    """Scores tiles by the rewards of drawn label maps, and trains the model on their differences.

    Use it as the score of a ``DynamicSamplingHook``::

        custom_hooks = [dict(
            type='DynamicSamplingHook', validity=dict(eps=0), max_age=0,
            score=dict(type='GroupRewardTuning', rewards=[dict(type='ComponentsFound')]))]

    For every tile that is judged it draws a group of label maps, region by region, and rewards
    each map. A tile whose rewards are all equal has no gradient, so the hook drops it and draws
    another. The loss becomes ``anchor * (the model's own loss) + (1 - anchor) * (1 - reward)``:

    - The model's own loss, the anchor, is computed on the initial batch of each step, before any
      tile is dropped, since a dropped tile has a gradient there.
    - The gradient of the reward is the policy gradient with the leave-one-out baseline, without
      division by the standard deviation. It estimates the gradient of the mean over all tiles: the
      gradient of the kept tiles is multiplied by the pass rate of the initial batch. (The pass
      rate of the whole step is too large on average, since a step ends once enough tiles have
      passed.) The logged value is 1 - the mean reward of the maps that the step trains on.

    The estimator is unbiased if the model computes the same in training and evaluation mode
    (no dropout, ``norm_eval``) and in the precision of the training. One step costs a
    forward pass for each batch judged, and two forward and backward passes.

    Args:
        rewards: Reward functions: configs of TASK_UTILS (``ComponentsFound``, ``PolygonCount``,
            ``UnbrokenLength`` or a user's class), or callables. A function gets a label map and
            the truth, int64 arrays ``(H, W)``, and returns a number.
        weights: Weight of each reward in the sum; 1 for all when None.
        maps: Number of label maps of a tile, G, 2 or more.
        region: Side in pixels of the regions, each of which draws one class.
        anchor: Share of the model's own loss, 0 to 1. With less than 0.5 the model tends to forget
            what that loss has taught.
        ignore_index: Label of pixels without a class.
        workers: Number of processes of each rank that compute the rewards; 0: the training process
            does.

    Raises:
        ValueError: For an argument out of its range.
    """

    uses_model = True
    # The loss below applies the weight of the shortfall policy to the reward's term only.
    weighs_loss = True

    def __init__(
        self,
        rewards: Sequence[Any],
        weights: Optional[Sequence[float]] = None,
        maps: int = 8,
        region: int = 8,
        anchor: float = 0.5,
        ignore_index: int = 255,
        workers: int = 0,
    ) -> None:
        if maps < 2:
            raise ValueError(
                f'maps={maps}: the baseline of a label map is the mean reward of the '
                f'others in its group, and a group of one has none. Expected 2 or '
                f'more, for example 8.'
            )
        if region < 1 or not 0 <= anchor < 1:
            raise ValueError(
                f'region={region}, anchor={anchor}: expected a number of pixels, and '
                f'a share of 0 or more, below 1'
            )
        self._rewards = Rewards(rewards, weights, workers)
        self._pictures = RewardPictures(self._rewards.names)
        self.scores_per_sample = maps
        self.region, self.anchor, self.ignore_index = region, anchor, ignore_index
        # Initial batch of the step, by position of the virtual rank in the block.
        self._initial_batches: Dict[int, List[Any]] = {}
        self._slot, self._is_initial = 0, False
        # A segmentor of MMSegmentation, whose classes carry no types.
        self._model: Any = None
        self._collate: Callable[[List[Any]], Any] = list
        self._current_share: Callable[[], Optional[BatchShare]] = lambda: None

    def check_sampling(self, validity: Validity, settings: Dict[str, Any]) -> None:
        """Check the settings of the sampling hook.

        Raises:
            ValueError: If they drop tiles that have a gradient, or train on tiles that were drawn
                from an earlier model.
        """
        if validity.eps is None or validity.criteria() != f'eps={validity.eps:g}':
            raise ValueError(
                f'GroupRewardTuning with validity=dict({validity.criteria()}): it '
                f'would drop tiles that have a gradient. Expected dict(eps=0).'
            )
        if validity.eps > 0:
            print_log(
                f'[GroupRewards] validity=dict(eps={validity.eps:g}) drops tiles that have a '
                f'small gradient, which is then biased; dict(eps=0) drops nothing but zeros.',
                logger='current',
                level=30,
            )
        for name, expected, why in (
            ('max_age', 0, 'surplus tiles would have label maps of an earlier model'),
            ('group_size', 1, 'a tile with its label maps is a group'),
            ('keep_fraction', 0, 'a tile without spread has no gradient to keep'),
            ('unbiased', False, 'its gradient is unbiased already'),
        ):
            if settings[name] != expected:
                raise ValueError(
                    f'GroupRewardTuning with {name}={settings[name]}: {why}. Set {name}={expected}.'
                )

    def describe(self) -> str:
        """Return a text that is equal on two ranks if their rewards are."""
        return (
            f'maps={self.scores_per_sample}, region={self.region}, anchor={self.anchor}, '
            f'rewards: {self._rewards.describe()}'
        )

    def bind(self, model: nn.Module, collate: Callable[[List[Any]], Any]) -> None:
        """Put the reward into the loss of a segmentor.

        Args:
            model: Segmentor in training, wrapped or not.
            collate: Function that makes a batch of samples.

        Raises:
            ValueError: If the model has no ``encode_decode`` as MMSegmentation's segmentors do, or
                its preprocessor mixes samples.
        """
        segmentor: Any = unwrap(model)
        if not is_segmentor(segmentor):
            raise ValueError(
                f'GroupRewardTuning: {type(segmentor).__name__} has no encode_decode, '
                f"as MMSegmentation's segmentors do, to draw label maps from."
            )
        if batch_augments(segmentor):
            raise ValueError(
                'GroupRewardTuning: data_preprocessor.batch_augments changes tiles '
                'after label maps were drawn for them. Leave it out.'
            )
        _warn_of_other_modes(segmentor)
        self._model, self._collate = segmentor, collate
        # The method of the class, because an earlier training may have replaced the instance's.
        model_loss = type(segmentor).loss.__get__(segmentor)
        segmentor.loss = lambda inputs, data_samples: self._loss(model_loss, inputs, data_samples)

    def follow(self, step: Callable[[], Optional[BatchShare]]) -> None:
        """Set the function that returns the share of the batch in training."""
        self._current_share = step

    def begin_batch(self, slot: int, first: bool) -> None:
        """Note the virtual rank of the next batch, and whether it is an initial batch."""
        self._slot, self._is_initial = slot, first

    @torch.no_grad()
    def __call__(self, samples: Sequence[Any]) -> torch.Tensor:
        """Draw label maps for samples, and return their rewards, float64 ``(len(samples), G)``.

        The drawn classes of each region, the advantages of the maps and their mean reward are
        written into each sample's data sample, for the loss of the step.
        """
        if self._is_initial:
            self._initial_batches[self._slot] = [copy.deepcopy(sample) for sample in samples]
        model = self._model
        with evaluating(model):
            # Copies, because the preprocessor pads in place.
            data = model.data_preprocessor(
                self._collate([copy.deepcopy(sample) for sample in samples]), True
            )
            logits = self._logits(data['inputs']).float().cpu()
        truth = _labels(data['data_samples']).cpu()
        valid = truth != self.ignore_index
        actions = draw(region_logits(logits, valid, self.region), self.scores_per_sample)
        maps = label_maps(logits, actions, valid, self.region, self.ignore_index)
        values = self._rewards(
            maps.numpy(),
            truth.numpy(),
            [str(sample.metainfo.get('img_path') or 'a tile') for sample in data['data_samples']],
        )
        rewards = torch.from_numpy(self._rewards.total(values))
        # The smallest type that holds the classes, since the actions travel with the samples.
        dtype = torch.uint8 if logits.shape[1] <= 256 else torch.int16
        for sample, tile_actions, advantages, mean, tile_values in zip(
            samples, actions.to(dtype), leave_one_out(rewards), rewards.mean(1), values
        ):
            sample['data_samples'].set_data(
                dict(
                    group_actions=tile_actions.clone(),
                    group_advantages=advantages.float(),
                    group_reward=mean.float()[None],
                    reward_facts=torch.from_numpy(
                        np.stack([tile_values.mean(0), tile_values.std(0)], 1)
                    ).float()[None],
                )
            )
        self._pictures.offer(samples, maps, logits.argmax(1), truth, rewards, values)
        return rewards

    def _loss(
        self,
        model_loss: Callable[[Any, Any], Dict[str, Loss]],
        inputs: torch.Tensor,
        data_samples: Sequence[Any],
    ) -> Dict[str, Loss]:
        """Return the losses of the anchor and of the reward.

        Args:
            model_loss: The segmentor's own loss.
            inputs: Preprocessed images, (N, B, H, W).
            data_samples: Their data samples, with what the score has drawn.
        """
        batch = self._current_share()
        if batch is None:
            raise ValueError(
                'GroupRewardTuning has no batch of dynamic sampling: expected it as '
                'the score of a DynamicSamplingHook.'
            )
        losses: Dict[str, Loss] = {}
        if self.anchor:
            initial_batch = self._initial_batches[batch.slot]
            data = self._model.data_preprocessor(
                self._collate([copy.deepcopy(sample) for sample in initial_batch]), True
            )
            losses = {
                name: _scale(value, self.anchor) if 'loss' in name else value
                for name, value in model_loss(data['inputs'], data['data_samples']).items()
            }
        logits = self._logits(inputs)
        # The layers of a model that is split over devices move their inputs, so the logits may be
        # on another device than the labels.
        device = logits.device
        valid = (_labels(data_samples) != self.ignore_index).to(device)
        advantages = torch.stack([sample.group_advantages for sample in data_samples]).to(device)
        actions = torch.stack([sample.group_actions for sample in data_samples]).to(device)
        terms = surrogate(logits, actions, advantages, valid, self.region)
        reward = torch.cat([sample.group_reward for sample in data_samples]).mean().to(device)
        reward = torch.nan_to_num(reward)
        gradient = terms.mean() * (batch.share * batch.loss_weight)
        # The value is 1 - reward; only the surrogate, whose value cancels, has a gradient.
        losses['loss_reward'] = (1 - self.anchor) * (1 - reward + (gradient - gradient.detach()))
        losses['group_reward'] = reward
        facts = torch.cat([sample.reward_facts for sample in data_samples]).to(device)
        for name, (mean, spread) in zip(self._rewards.names, _finite_means(facts)):
            losses[f'reward/{name}'], losses[f'reward_spread/{name}'] = mean, spread
        return losses

    def save_pictures(self, folder: Path, metainfo: Mapping[str, Any], channels: Channels) -> None:
        """Draw some of the latest tiles with their label maps and rewards: ``reward_maps.png``."""
        self._pictures.save(folder / 'reward_maps.png', metainfo, channels)

    def _logits(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return logits of the size of the inputs, ``(N, C, H, W)``."""
        size = tuple(inputs.shape[-2:])
        metas = [dict(img_shape=size, pad_shape=size, ori_shape=size) for _ in inputs]
        return class_logits(self._model.decode_head, self._model.encode_decode(inputs, metas))


def _finite_means(facts: torch.Tensor) -> torch.Tensor:
    """Return the means ``(K, 2)`` over tiles with finite facts ``(N, K, 2)``; 0 without any."""
    finite = torch.isfinite(facts)
    return torch.where(finite, facts, torch.zeros_like(facts)).sum(0) / finite.sum(0).clamp(min=1)


def _scale(value: Loss, factor: float) -> Loss:
    """Return a loss, or a list of losses, times a factor."""
    if isinstance(value, (list, tuple)):
        return [factor * loss for loss in value]
    return factor * value


def _labels(data_samples: Sequence[Any]) -> torch.Tensor:
    """Return the label maps of data samples, int64 (N, H, W)."""
    return torch.stack([sample.gt_sem_seg.data[0] for sample in data_samples]).long()


def _warn_of_other_modes(model: nn.Module) -> None:
    """Warn of layers that compute something else in training mode than in evaluation mode."""
    names = sorted(
        {
            type(layer).__name__
            for layer in model.modules()
            if (isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p > 0)
            or (isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.training)
        }
    )
    if names:
        print_log(
            f'[GroupRewards] {", ".join(names)}: these layers compute something else in '
            f'training than where label maps are drawn, so that the gradient of the reward '
            f'is biased. Set dropout_ratio=0 and norm_eval=True.',
            logger='current',
            level=30,
        )
