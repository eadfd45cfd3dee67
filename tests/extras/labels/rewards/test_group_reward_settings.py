"""Settings that would bias the gradient of a reward are refused with the reason."""

from __future__ import annotations

from typing import Any, Dict, List

import numpy as np
import pytest
import torch
from mmengine.model import revert_sync_batchnorm
from small_segmentors import batch, resnet_fcn

from mapsage.extras.labels.rewards import GroupRewardTuning, PolygonCount, group_reward_tuning
from mapsage.sampling.hooks import DynamicSamplingHook

SCORE = dict(type='GroupRewardTuning', rewards=[dict(type='PolygonCount')])
GOOD: Dict[str, Any] = dict(score=SCORE, validity=dict(eps=0), max_age=0)


@pytest.mark.parametrize(
    ('changes', 'told'),
    [
        (dict(validity=dict(low=0.1)), r'validity=dict\(low=0.1\).*Expected dict\(eps=0\)'),
        (dict(validity=dict(eps=0, high=0.9)), 'it would drop tiles that have a gradient'),
        (dict(max_age=1), 'max_age=1: surplus tiles .* earlier model. Set max_age=0'),
        (dict(group_size=2), 'group_size=2: a tile with its label maps is a group'),
        (dict(keep_fraction=0.3), 'keep_fraction=0.3: a tile without spread has no gradient'),
        (dict(prefetch=True), 'prefetch=True with GroupRewardTuning'),
        (dict(score=dict(SCORE, maps=1)), 'maps=1: .* a group of one has none'),
        (dict(score=dict(SCORE, region=0)), 'region=0'),
        (dict(score=dict(SCORE, anchor=1.0)), 'anchor=1.0'),
        (dict(score=dict(SCORE, rewards=[])), r'rewards=\[\], expected one or more'),
        (
            dict(score=dict(SCORE, weights=[1, 2])),
            r'1 reward function\(s\) and the weights \[1, 2\]',
        ),
        (
            dict(score=dict(SCORE, weights=[float('nan')])),
            r'the weights \[nan\], expected a number',
        ),
        (dict(score=dict(SCORE, rewards=['PolygonCount'])), "'PolygonCount', expected a config"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes: Any, told: str) -> None:
    DynamicSamplingHook(**GOOD)
    with pytest.raises(ValueError, match=told):
        DynamicSamplingHook(**dict(GOOD, **changes))


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> List[str]:
    lines: List[str] = []
    monkeypatch.setattr(group_reward_tuning, 'print_log', lambda text, **_: lines.append(text))
    return lines


def test_a_spread_that_is_asked_for_warns_of_its_bias(said: List[str]) -> None:
    DynamicSamplingHook(**dict(GOOD, validity=dict(eps=0.1)))
    assert 'which is then biased' in said[0]


def test_a_segmentor_of_mmseg_has_both_terms_in_its_loss(said: List[str]) -> None:
    torch.manual_seed(0)
    model = revert_sync_batchnorm(resnet_fcn())
    seen = []

    def share(predicted: np.ndarray, truth: np.ndarray) -> float:
        assert (predicted[truth == 255] == 255).all() and predicted.shape == truth.shape
        seen.append(predicted)
        return PolygonCount()(predicted, truth)

    tuning = GroupRewardTuning([share], maps=3, region=8)
    tuning.bind(
        model,
        lambda samples: {
            key: [each[key] for each in samples] for key in ('inputs', 'data_samples')
        },
    )
    assert 'BatchNorm' in said[0] and 'these layers compute something else' in said[0]
    data = batch()
    samples = [
        dict(inputs=image, data_samples=sample)
        for image, sample in zip(data['inputs'], data['data_samples'])
    ]
    tuning.begin_batch(0, True)
    rewards = tuning(samples)
    assert rewards.shape == (2, 3) and len(seen) == 6 and model.training
    with pytest.raises(ValueError, match='no batch of dynamic sampling'):
        model.loss(torch.stack(data['inputs']).float(), data['data_samples'])
    tuning.follow(lambda: Step())
    ready = model.data_preprocessor(data, True)
    losses = model.loss(ready['inputs'], ready['data_samples'])
    assert float(losses['loss_reward'].detach()) == pytest.approx(
        0.5 * (1 - float(rewards.mean())), rel=1e-5
    )
    assert any('loss_ce' in name for name in losses)
    assert float(losses['reward/share']) == pytest.approx(float(rewards.mean()))
    assert float(losses['reward_spread/share']) == pytest.approx(
        float(rewards.std(1, unbiased=False).mean())
    )
    losses['loss_reward'].backward()
    assert any(bool(each.grad.any()) for each in model.parameters() if each.grad is not None)


class Step:
    slot, share, loss_weight = 0, 0.5, 1.0
