"""Tunes a segmentor by rewards of label maps drawn from it; a score of dynamic sampling."""
from __future__ import annotations

import copy
from typing import Any, Callable, Dict, List, Optional, Sequence

import torch
from mmengine.logging import print_log
from mmengine.model import is_model_wrapper
from mmengine.registry import TASK_UTILS
from torch import nn

from mapsage.hooks.dynamic_sampling.model_score import evaluating
from mapsage.models.losses.group_reward import (
    draw,
    label_maps,
    leave_one_out,
    region_logits,
    surrogate,
)
from mapsage.sampling import Validity

from .reward_functions import Rewards

_LEAST = 1e-8  # score that counts as certainly another class


@TASK_UTILS.register_module()
class GroupRewardTuning:
    """Scores tiles by the rewards of drawn label maps, and trains the model on their differences.

    Use it as the score of a ``DynamicSamplingHook``::

        custom_hooks = [dict(
            type='DynamicSamplingHook', validity=dict(eps=0), max_age=0,
            score=dict(type='GroupRewardTuning', rewards=[dict(type='ComponentsFound')]))]

    For every tile that is judged it draws a group of label maps, region by region, and rewards
    each. A tile whose rewards are all equal has no gradient, so the hook drops it and draws
    another. The loss becomes ``anchor * (the model's own loss) + (1 - anchor) * (1 - reward)``:

    - The model's own loss, the anchor, is computed on the batch that each step begins with, before
      any tile is dropped, since a dropped tile has a gradient there.
    - The gradient of the reward is the policy gradient with the leave-one-out baseline, without
      division by the standard deviation. It is that of the mean over all tiles: of those kept it
      is multiplied by the pass rate of the batch that the step begins with. (The pass rate of the
      whole step is too large on average, since a step ends once enough tiles have passed.) Its
      value in the log is 1 - the mean reward of the maps that the step trains on.

    The estimator is unbiased if the model computes the same in training and evaluation mode
    (no dropout, ``norm_eval``) and in the precision of the training. One step costs a
    forward pass for each batch judged, and two forward and backward passes.

    Args:
        rewards: Reward functions: configs of TASK_UTILS (``ComponentsFound``, ``PolygonCount``,
            ``UnbrokenLength`` or one of your own), or callables. A function gets a label map and
            the truth, int64 arrays ``(H, W)``, and returns a number.
        weights: Weight of each reward in the sum; 1 for all when None.
        maps: Number of label maps of a tile, G, 2 or more.
        region: Side in pixels of the regions that draw one class each.
        anchor: Share of the model's own loss, 0 to 1; less than 0.5 tends to forget it.
        ignore_index: Label of pixels without a class.

    Raises:
        ValueError: For an argument out of its range.
    """

    uses_model = True
    weighs_loss = True  # it applies the weight of the shortfall policy to its own term

    def __init__(self, rewards: Sequence[Any], weights: Optional[Sequence[float]] = None,
                 maps: int = 8, region: int = 8, anchor: float = 0.5, ignore_index: int = 255
                 ) -> None:
        if maps < 2:
            raise ValueError(f'maps={maps}: the baseline of a label map is the mean reward of the '
                             f'others in its group, and a group of one has none. Expected 2 or '
                             f'more, for example 8.')
        if region < 1 or not 0 <= anchor < 1:
            raise ValueError(f'region={region}, anchor={anchor}: expected a number of pixels, and '
                             f'a share of 0 or more, below 1')
        self._rewards = Rewards(rewards, weights)
        self.scores_per_sample = maps
        self.region, self.anchor, self.ignore_index = region, anchor, ignore_index
        self._originals: Dict[int, List[Any]] = {}  # samples by place in the block
        self._turn, self._first = 0, False
        self._model: Any = None
        self._collate: Callable[[List[Any]], Any] = list
        self._step: Callable[[], Any] = lambda: None

    def check_sampling(self, validity: Validity, settings: Dict[str, Any]) -> None:
        """Check the settings of the sampling hook.

        Raises:
            ValueError: If they drop tiles that have a gradient, or train on tiles that were drawn
                from an earlier model.
        """
        if validity.eps is None or validity.criteria() != f'eps={validity.eps:g}':
            raise ValueError(f'GroupRewardTuning with validity=dict({validity.criteria()}): it '
                             f'would drop tiles that have a gradient. Expected dict(eps=0).')
        if validity.eps > 0:
            print_log(f'[GroupRewards] validity=dict(eps={validity.eps:g}) drops tiles that have a '
                      f'small gradient, which is then biased; dict(eps=0) drops nothing but zeros.',
                      logger='current', level=30)
        for name, expected, why in (
                ('max_age', 0, 'surplus tiles would have label maps of an earlier model'),
                ('group_size', 1, 'a tile with its label maps is a group'),
                ('keep_fraction', 0, 'a tile without spread has no gradient to keep'),
                ('unbiased', False, 'its gradient is unbiased already')):
            if settings[name] != expected:
                raise ValueError(f'GroupRewardTuning with {name}={settings[name]}: {why}. Set '
                                 f'{name}={expected}.')

    def describe(self) -> str:
        """Return a text that is equal on ranks whose rewards are."""
        return (f'maps={self.scores_per_sample}, region={self.region}, anchor={self.anchor}, '
                f'rewards: {self._rewards.describe()}')

    def bind(self, model: nn.Module, collate: Callable[[List[Any]], Any]) -> None:
        """Put the reward into the loss of a segmentor.

        Args:
            model: Segmentor in training, wrapped or not.
            collate: Function that makes a batch of samples.

        Raises:
            ValueError: If the model has no ``encode_decode`` as MMSegmentation's segmentors do, or
                its preprocessor mixes samples.
        """
        inner: Any = model.module if is_model_wrapper(model) else model
        if not hasattr(inner, 'encode_decode'):
            raise ValueError(f'GroupRewardTuning: {type(inner).__name__} has no encode_decode, as '
                             f"MMSegmentation's segmentors do, to draw label maps from.")
        if getattr(inner.data_preprocessor, 'batch_augments', None):
            raise ValueError('GroupRewardTuning: data_preprocessor.batch_augments changes tiles '
                             'after label maps were drawn for them. Leave it out.')
        _warn_of_other_modes(inner)
        self._model, self._collate = inner, collate
        # The class's own, and not that of a former training.
        own_loss = type(inner).loss.__get__(inner)
        inner.loss = lambda inputs, data_samples: self._loss(own_loss, inputs, data_samples)

    def follow(self, step: Callable[[], Any]) -> None:
        """Set the function that returns this virtual rank's ``SampledBatch`` of the step."""
        self._step = step

    def begin_batch(self, turn: int, first: bool) -> None:
        """Note which virtual rank the next batch is of, and whether a step begins with it.

        Args:
            turn: Place of the virtual rank in the block of this process.
            first: Whether it is the first batch of the step.
        """
        self._turn, self._first = turn, first

    @torch.no_grad()
    def __call__(self, samples: Sequence[Any]) -> torch.Tensor:
        """Draw label maps for samples, and return their rewards, float64 ``(len(samples), G)``."""
        if self._first:
            self._originals[self._turn] = [copy.deepcopy(each) for each in samples]
        model = self._model
        with evaluating(model):
            # The preprocessor pads in place.
            data = model.data_preprocessor(
                self._collate([copy.deepcopy(each) for each in samples]), True)
            logits = self._logits(data['inputs']).float().cpu()
        truth = _labels(data['data_samples']).cpu()
        valid = truth != self.ignore_index
        actions = draw(region_logits(logits, valid, self.region), self.scores_per_sample)
        maps = label_maps(logits, actions, valid, self.region, self.ignore_index)
        rewards = torch.tensor([
            [self._rewards(each, tile_truth, _name(sample)) for each in tile_maps]
            for tile_maps, tile_truth, sample in zip(maps.numpy(), truth.numpy(),
                                                     data['data_samples'])], dtype=torch.float64)
        kind = torch.uint8 if logits.shape[1] <= 256 else torch.int16
        for sample, drawn, advantages, mean in zip(
                samples, actions.to(kind), leave_one_out(rewards), rewards.mean(1)):
            sample['data_samples'].set_data(dict(
                group_actions=drawn.clone(), group_advantages=advantages.float(),
                group_reward=mean.float()[None]))
        return rewards

    def _loss(self, own_loss: Callable[[Any, Any], Dict[str, torch.Tensor]], inputs: torch.Tensor,
              data_samples: Sequence[Any]) -> Dict[str, torch.Tensor]:
        """Return the losses of the anchor and of the reward."""
        batch = self._step()
        if batch is None:
            raise ValueError('GroupRewardTuning has no batch of dynamic sampling: expected it as '
                             'the score of a DynamicSamplingHook.')
        originals = self._originals[batch.turn]
        losses: Dict[str, torch.Tensor] = {}
        if self.anchor:
            data = self._model.data_preprocessor(
                self._collate([copy.deepcopy(each) for each in originals]), True)
            losses = {name: _scaled(value, self.anchor) if 'loss' in name else value
                      for name, value in own_loss(data['inputs'], data['data_samples']).items()}
        logits = self._logits(inputs)
        # The layers of a split model move what they are given, and labels meet logits here.
        device = logits.device
        valid = (_labels(data_samples) != self.ignore_index).to(device)
        advantages = torch.stack([each.group_advantages for each in data_samples]).to(device)
        actions = torch.stack([each.group_actions for each in data_samples]).to(device)
        terms = surrogate(logits, actions, advantages, valid, self.region)
        reward = torch.cat([each.group_reward for each in data_samples]).mean().to(device)
        reward = torch.nan_to_num(reward)
        gradient = terms.mean() * (batch.share * batch.loss_weight)
        losses['loss_reward'] = (1 - self.anchor) * (
            1 - reward + (gradient - gradient.detach()))
        losses['group_reward'] = reward
        return losses

    def _logits(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return logits of the size of the inputs, ``(N, C, H, W)``."""
        size = tuple(inputs.shape[-2:])
        metas = [dict(img_shape=size, pad_shape=size, ori_shape=size) for _ in inputs]
        logits = self._model.encode_decode(inputs, metas)
        if getattr(self._model.decode_head, 'gives_scores', False):
            logits = logits.clamp(min=_LEAST).log()  # whose softmax are the scores, normalized
        if logits.shape[1] == 1:  # one channel: the logit of the second of two classes
            logits = torch.cat([torch.zeros_like(logits), logits], 1)
        return logits


def _scaled(value: Any, factor: float) -> Any:
    """Return a loss, or a list of losses, times a factor."""
    return [factor * each for each in value] if isinstance(value, (list, tuple)) \
        else factor * value


def _labels(data_samples: Sequence[Any]) -> torch.Tensor:
    return torch.stack([each.gt_sem_seg.data[0] for each in data_samples]).long()


def _name(sample: Any) -> str:
    return str(sample.metainfo.get('img_path') or 'a tile')


def _warn_of_other_modes(model: nn.Module) -> None:
    """Warn of layers that compute something else in training mode than in evaluation mode."""
    names = sorted({
        type(each).__name__ for each in model.modules()
        if (isinstance(each, nn.modules.dropout._DropoutNd) and each.p > 0)
        or (isinstance(each, nn.modules.batchnorm._BatchNorm) and each.training)})
    if names:
        print_log(f'[GroupRewards] {", ".join(names)}: these layers compute something else in '
                  f'training than where label maps are drawn, so that the gradient of the reward '
                  f'is biased. Set dropout_ratio=0 and norm_eval=True.', logger='current', level=30)
