"""Tuning by rewards on real ranks: the filter changes nothing, nor does the number of processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Dict

import numpy as np
import pytest
import torch
from forked import fork_scenarios
from label_pairs import data_sample
from mmengine.model import BaseModel, ImgDataPreprocessor
from mmengine.registry import DATASETS, MODELS, TASK_UTILS
from sampling_ranks import Answers, answers_of
from torch import nn
from toy_runs import log_of, toy_train

SIDE, CLASSES = 8, 3


@MODELS.register_module(force=True)
class RewardedToy(BaseModel):
    def __init__(self) -> None:
        super().__init__(ImgDataPreprocessor())
        torch.manual_seed(1)
        self.decode_head = nn.Conv2d(3, CLASSES, 3, padding=1)

    def encode_decode(self, inputs: Any, batch_img_metas: Any) -> torch.Tensor:
        return self.decode_head(inputs)

    def loss(self, inputs: Any, data_samples: Any) -> Dict[str, torch.Tensor]:
        labels = torch.stack([each.gt_sem_seg.data[0] for each in data_samples]).long()
        loss = nn.functional.cross_entropy(
            self.decode_head(inputs), labels, ignore_index=255, reduction='sum'
        )
        return dict(loss_ce=loss / labels.numel())

    def forward(self, inputs: Any, data_samples: Any = None, mode: str = 'tensor') -> Any:
        return self.loss(inputs, data_samples) if mode == 'loss' else data_samples


@DATASETS.register_module(force=True)
class RewardedTiles(torch.utils.data.Dataset):
    """Every third tile has no label, so that all of its rewards are equal."""

    metainfo = dict(classes=('a', 'b', 'c'))

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> Dict[str, Any]:
        generator = torch.Generator().manual_seed(int(index))
        coarse = torch.randint(0, CLASSES, (4, 4), generator=generator)
        labels = coarse.repeat_interleave(2, 0).repeat_interleave(2, 1)
        if index % 3 == 0:
            labels[:] = 255
        image = torch.randn(3, SIDE, SIDE, generator=generator) + labels.clamp(max=3)
        sample = data_sample(labels, labels)
        sample.set_metainfo(dict(number=int(index), img_path=f'tile {int(index)}'))
        return dict(inputs=image, data_samples=sample)


@TASK_UTILS.register_module(force=True)
class OddReward:
    """``kind`` says what is odd about it."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __call__(self, predicted: np.ndarray, truth: np.ndarray) -> Any:
        rank = int(os.environ.get('RANK', 0))
        share = float((predicted == truth).mean())
        return {
            'nan': float('nan') if (truth != 255).any() else 1.0,
            'rank': share + rank,
            'last': share + (rank == 2) / 1024,
            'several': [share, share],
            # Of tiles alone, where ranks no longer compare their rewards.
            'late': [share] * 2 if rank == 1 and len(truth) == SIDE else share,
        }[self.kind]


def trained(
    folder: Path,
    processes: int,
    anchor: float = 0.25,
    rewards: Any = None,
    until: int = 0,
    **changes: Any,
) -> Any:
    """Return losses, weights and the log of a run of three virtual ranks."""
    if processes == 1:
        for name in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE'):
            os.environ.pop(name, None)
    torch.set_num_threads(1)
    hook = dict(
        type='DynamicSamplingHook',
        validity=dict(eps=0),
        max_age=0,
        interval=1,
        score=dict(
            type='GroupRewardTuning',
            maps=4,
            region=2,
            anchor=anchor,
            rewards=rewards
            or [dict(type='ComponentsFound', min_pixels=1), dict(type='PolygonCount')],
        ),
    )
    hook.update({name[5:]: value for name, value in changes.items() if name.startswith('hook_')})
    settings = {name: value for name, value in changes.items() if not name.startswith('hook_')}
    runner, record = toy_train(
        folder,
        **{
            'env_cfg.virtual_ranks': 3,
            'env_cfg.reduction': 'ordered',
            'model': dict(type='RewardedToy', _delete_=True),
            'custom_hooks': [hook],
            'train_dataloader.dataset': dict(type='RewardedTiles', _delete_=True),
            'train_dataloader.batch_size': 4,
            'optim_wrapper.optimizer.lr': 0.3,
            'val_dataloader': None,
            'val_evaluator': None,
            'val_cfg': None,
            'test_dataloader': None,
            'test_evaluator': None,
            'test_cfg': None,
            'default_hooks.checkpoint.interval': 2,
            'train_cfg': dict(by_epoch=False, max_iters=until or 4),
            **settings,
        },
    )
    state = getattr(runner.model, 'module', runner.model).state_dict()
    rank = int(os.environ.get('RANK', 0))
    return (
        record.losses,
        {name: value.tolist() for name, value in state.items()},
        '' if rank else log_of(runner),
    )


def refused(folder: Path, processes: int, **changes: Any) -> str:
    try:
        trained(folder, processes, **changes)
    except Exception as error:  # any, for its text
        return f'{type(error).__name__}: {error}'
    return ''


def unfiltered(folder: Path) -> Any:
    return trained(folder, 3, hook_max_resample_times=0, hook_shortfall='fallback')


def filtered(folder: Path) -> Any:
    return trained(folder, 3, hook_max_resample_times=0, hook_shortfall='shrink')


def in_turns(folder: Path, processes: int) -> Any:
    return trained(folder, processes, hook_shortfall='pad')


def resumed(folder: Path) -> Any:
    trained(folder, 3, hook_shortfall='pad', until=2)
    return trained(folder, 3, hook_shortfall='pad', resume=True)


def odd(folder: Path, kind: str, processes: int) -> str:
    return refused(folder, processes, rewards=[dict(type='OddReward', kind=kind)])


def nothing(folder: Path) -> Any:
    return trained(folder, 3, rewards=[dict(type='OddReward', kind='nan')])


def not_a_segmentor(folder: Path) -> str:
    return refused(
        folder,
        1,
        **{
            'model': dict(type='ToyRegression', _delete_=True),
            'train_dataloader.dataset': dict(type='ToyNumbers', length=16, _delete_=True),
        },
    )


def run_scenarios(folder: Path) -> Dict[str, Any]:
    scenarios: Dict[str, Any] = {
        'unfiltered': (unfiltered, 3, folder / 'unfiltered'),
        'filtered': (filtered, 3, folder / 'filtered'),
        'resumed': (resumed, 3, folder / 'resumed'),
        'nan': (nothing, 3, folder / 'nan'),
        'several': (odd, 1, folder / 'several', 'several', 1),
        **{kind: (odd, 3, folder / kind, kind, 3) for kind in ('rank', 'last', 'late')},
        'no segmentor': (not_a_segmentor, 1, folder / 'no segmentor'),
    }
    scenarios.update(
        {f'in {each}': (in_turns, each, folder / f'in {each}', each) for each in (1, 2, 3)}
    )
    return fork_scenarios(scenarios, folder / 'forked')


@pytest.fixture(scope='module')
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    return answers_of(run_scenarios, tmp_path_factory.mktemp('rewards'))


def test_the_filter_changes_nothing(answers: Answers) -> None:
    """Dropped tiles have no gradient of the reward; the anchor has the whole batch."""
    kept = answers.of('filtered')
    whole = answers.of('unfiltered')
    assert 'shortfalls: shrink 1' in kept[0][2] and 'dropped: no_spread' in kept[0][2]
    assert 'shortfalls: fallback 1' in whole[0][2]
    for name, value in whole[0][1].items():
        np.testing.assert_allclose(kept[0][1][name], value, rtol=0, atol=1e-5)
    start = nn.Module.state_dict(RewardedToy())
    moved = max(
        float(np.abs(np.array(value) - start[name].numpy()).max())
        for name, value in whole[0][1].items()
    )
    assert moved > 0.05


@pytest.mark.parametrize('processes', [1, 2])
def test_any_number_of_processes_has_the_same_bits(processes: int, answers: Answers) -> None:
    expected, found = answers.of('in 3')[0], answers.of(f'in {processes}')[0]
    assert found[:2] == expected[:2] and len(set(expected[0])) == 4
    assert '[DynSample] Resample #1/3' in expected[2]


def test_a_resumed_run_has_the_same_bits(answers: Answers) -> None:
    expected, found = answers.of('in 3')[0], answers.of('resumed')[0]
    assert found[0] == expected[0][2:] and found[1] == expected[1]


def test_rewards_that_are_not_finite_are_left_out_with_a_word(answers: Answers) -> None:
    losses, weights, log = answers.of('nan')[0]
    assert np.isfinite(losses).all() and all(np.isfinite(each).all() for each in weights.values())
    assert 'the reward OddReward is nan for tile ' in log and 'not_finite' in log


def test_odd_rewards_are_refused(answers: Answers) -> None:
    [text] = answers.of('several')
    assert 'the reward OddReward returned [' in text and 'expected one number' in text
    for text in answers.of('rank'):
        assert text.startswith('LockstepError') and 'rank 1: maps=4' in text
    for text in answers.of('last'):
        assert text.startswith('LockstepError') and 'rank 2: maps=4' in text
    for rank, text in enumerate(answers.of('late')):
        met = '' if rank == 1 else 'RankError: rank 1 failed in fetching or scoring samples: '
        assert text.startswith(f'{met}ValueError: the reward OddReward returned [')
        assert 'expected one number for a label map of shape (8, 8)' in text
    [text] = answers.of('no segmentor')
    assert 'ToyRegression has no encode_decode' in text
