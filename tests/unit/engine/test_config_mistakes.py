"""Typos of a config become sentences with the nearest name."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from mmengine.config import Config
from mmengine.hooks import CheckpointHook
from mmengine.optim import OptimWrapper
from mmengine.registry import HOOKS, MODELS
from support import ROOT, launch, main_leg

from mapsage.commands.doctor.trial_run import run_obstacle
from mapsage.engine.config.mistakes import (
    check_clipping,
    check_settings,
    explain_config_error,
    missing_trackers,
    misspelt_keys,
    saving_mistake,
)
from mapsage.engine.env_cfg import ConfigError

SGD = dict(type='SGD', lr=0.1)


def optim(**settings: Any) -> dict:
    return dict(dict(type='OptimWrapper', optimizer=SGD), **settings)


@pytest.mark.usefixtures('own_environment')
@pytest.mark.parametrize(
    'key, value, words',
    [
        (
            'default_hooks',
            dict(checkpoint=dict(type='CheckpointHook', intervall=1)),
            "CheckpointHook has no setting 'intervall'. Did you mean 'interval'?",
        ),
        (
            'optim_wrapper',
            optim(optimizer=dict(type='AdamWW')),
            "optim_wrapper.optimizer.type='AdamWW' is no known optimizer. Did you mean 'AdamW'?",
        ),
        (
            'custom_hooks',
            [
                dict(
                    type='DynamicSamplingHook',
                    score=dict(type='LabelScore'),
                    validity=dict(low=0),
                    max_resample_time=2,
                )
            ],
            "DynamicSamplingHook has no setting 'max_resample_time'. "
            "Did you mean 'max_resample_times'?",
        ),
        (
            'optim_wrapper',
            optim(optimizer=dict(lr=0.1)),
            "optim_wrapper.optimizer={'lr': 0.1} has no type",
        ),
        (
            'optim_wrapper',
            optim(optimizer=dict(type='SGD', rl=0.1)),
            "SGD has no setting 'rl'. Did you mean 'lr'?",
        ),
        (
            'optim_wrapper',
            dict(type='OptimWrapper', optimiser=SGD),
            "optim_wrapper has no 'optimizer', but ['optimiser', 'type']. Did you mean 'optimizer'?",
        ),
        (
            'optim_wrapper',
            optim(type='OptimWraper'),
            "type='OptimWraper' is no known optim_wrapper. Did you mean 'OptimWrapper'?",
        ),
        (
            'optim_wrapper',
            optim(constructor='DefaultOptimWrapperConstructr'),
            "Did you mean 'DefaultOptimWrapperConstructor'?",
        ),
        (
            'optim_wrapper',
            optim(clip_grad=dict(max_normm=1)),
            "optim_wrapper.clip_grad: clip_grad_norm_ has no setting 'max_normm'. Did you mean "
            "'max_norm'?",
        ),
        ('custom_hooks', [dict(type='EMAHok')], "type='EMAHok' is no known hook. Did you mean"),
        (
            'custom_hooks',
            [dict(type='EMAHook', momentom=0.1)],
            "ExponentialMovingAverage has no setting 'momentom'. Did you mean 'momentum'?",
        ),
        (
            'param_scheduler',
            [dict(type='PloyLR', power=0.9, by_epoch=False)],
            "type='PloyLR' is no known parameter scheduler. Did you mean 'PolyLR'?",
        ),
        (
            'param_scheduler',
            [dict(type='PolyLR', powr=0.9, by_epoch=False)],
            "PolyLR has no setting 'powr'. Did you mean 'power'?",
        ),
        (
            'train_cfg',
            dict(type='IterBasedTrainLoop', max_iter=3),
            "IterBasedTrainLoop has no setting 'max_iter'. Did you mean 'max_iters'?",
        ),
        (
            'val_evaluator',
            dict(type='IoUMetrik'),
            "type='IoUMetrik' is no known metric. Did you mean 'IoUMetric'?",
        ),
    ],
)
def test_the_trial_run_names_a_typo(key: str, value: Any, words: str, tiny_config: Path) -> None:
    cfg = Config.fromfile(str(tiny_config))
    cfg.update(launcher='none', env_cfg=dict(accelerator='cpu'))
    cfg[key] = value
    assert words in str(run_obstacle(cfg))


def test_keys_that_a_training_needs(tiny_config: Path) -> None:
    cfg = Config.fromfile(str(tiny_config))
    check_settings(cfg)
    assert misspelt_keys(cfg) == {}
    cfg['train_dataloder'] = cfg.pop('train_dataloader')
    assert misspelt_keys(cfg) == {'train_dataloder': 'train_dataloader'}
    with pytest.raises(
        ConfigError,
        match='train_cfg and optim_wrapper, and no train_dataloader: .*'
        "needs all three.*the key 'train_dataloder', .*mean 'train_dataloader'",
    ):
        check_settings(cfg)
    cfg.pop('train_dataloder')
    with pytest.raises(ConfigError, match='no train_dataloader: '):
        check_settings(cfg)
    cfg.pop('train_cfg')
    cfg.pop('optim_wrapper')
    check_settings(cfg)  # a config of a test


@pytest.mark.parametrize(
    'key, meant',
    [
        ('train_dataloder', 'train_dataloader'),
        ('optim_wraper', 'optim_wrapper'),
        ('custom_hook', 'custom_hooks'),
        ('load_form', 'load_from'),
        ('modle', 'model'),
        ('param_schedulers', 'param_scheduler'),
        ('val_evaluators', 'val_evaluator'),
        ('env_cgf', 'env_cfg'),
        ('features_source', 'feature_source'),
    ],
)
def test_a_key_close_to_a_known_one(key: str, meant: str) -> None:
    assert misspelt_keys({key: 1}) == {key: meant}


@pytest.mark.parametrize(
    'path', sorted(str(path.relative_to(ROOT)) for path in (ROOT / 'configs').rglob('*.py'))
)
def test_no_key_of_a_shipped_config_is_taken_for_a_typo(path: str) -> None:
    """A user's own variables stand next to the settings at the top level."""
    assert misspelt_keys(Config.fromfile(str(ROOT / path))) == {}


def test_own_variables_are_no_typos() -> None:
    names = (
        'optimizer',
        'train_pipeline',
        'dataset',
        'data_root',
        'num_classes',
        'crop_size',
        'norm_cfg',
        'img_ratios',
        'tta_pipeline',
        'vis_backends',
        'max_iters',
        'log_config',
        'workflow',
        'checkpoint',
        'backbone',
        'ham_norm_cfg',
        'img_norm_cfg',
        'launcher',
        'train_dataset',
        'val_dataset',
        'checkpoint_config',
        'dist_params',
        'evaluator',
    )
    assert misspelt_keys(dict.fromkeys(names, 1)) == {}


def test_a_tracker_that_is_not_installed() -> None:
    backends = [dict(type='LocalVisBackend'), dict(type='WandbVisBackend')]
    (note,) = missing_trackers(dict(type='SegLocalVisualizer', vis_backends=backends), {'wandb'})
    assert 'WandbVisBackend needs the package wandb, which is not installed' in note
    assert 'pip install wandb' in note
    for backends in (dict(type='LocalVisBackend'), [], None):
        assert missing_trackers(dict(type='Visualizer', vis_backends=backends), {'wandb'}) == []
    assert missing_trackers(None, {'wandb'}) == []


class Faulty:
    """A user's class whose own code has the error, which only a traceback shows."""

    def __init__(self, width: int = 1) -> None:
        {}['type']


class Passing:
    """A user's class that passes a wrong argument of its own on."""

    def __init__(self, width: int = 1) -> None:
        dict.fromkeys(wrong=width)


@pytest.mark.parametrize('kind, error_type', [(Faulty, KeyError), (Passing, TypeError)])
def test_an_error_within_a_users_class_keeps_its_traceback(kind: Any, error_type: Any) -> None:
    with pytest.raises(error_type) as caught:
        HOOKS.build(dict(type=kind, width=2))
    assert explain_config_error(caught.value) is caught.value


@pytest.mark.parametrize(
    'config, words',
    [
        (dict(lr=1), r"\{'lr': 1\} has no type, which a model needs"),
        (dict(type='ResNett', depth=18), "type='ResNett' is no known model"),
        (
            dict(type='ImgDataPreprocessor', maen=[1]),
            "ImgDataPreprocessor has no setting 'maen'. Did you mean 'mean'",
        ),
        (
            dict(type='StackedLinearClsHead', num_classe=1),
            "'StackedLinearClsHead' is no known model",
        ),
        (
            dict(type='SegLovaszLoss'),
            r"'SegLovaszLoss' is gone: use .*type='LovaszLoss', reduction='none'",
        ),
        (dict(type='SegTverskyLoss', alpha=0.2), 'is gone: use .*TverskyLoss'),
        (dict(type='CompileReportHook'), 'is gone: .*TORCH_LOGS=graph_breaks,recompiles'),
    ],
)
def test_errors_of_a_registry(config: dict, words: str) -> None:
    with pytest.raises(Exception) as caught:
        MODELS.build(config)
    explained = explain_config_error(caught.value)
    assert isinstance(explained, ConfigError) and re.search(words, str(explained))


@MODELS.register_module(force=True)
class CallsAnother:
    """Its own mistake: it takes what it hands to a function that does not."""

    def __init__(self, eps: float = 0.1) -> None:
        def helper() -> None:
            """Takes nothing."""

        helper(eps=eps)  # type: ignore[call-arg]


@MODELS.register_module(force=True)
class OwnAndBase(torch.nn.BatchNorm2d):
    """It takes one argument and passes none on to its base class."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)


def test_a_mistake_within_a_class_is_not_one_of_the_config() -> None:
    with pytest.raises(TypeError) as caught:
        MODELS.build(dict(type='CallsAnother', eps=0.2))
    assert explain_config_error(caught.value) is caught.value


def test_arguments_of_a_base_class_count_where_they_are_passed_on() -> None:
    with pytest.raises(TypeError) as caught:
        MODELS.build(dict(type='OwnAndBase', channels=1, momentum=0.2))
    text = str(explain_config_error(caught.value))
    assert "has no setting 'momentum'" in text and 'channels' in text and "'momentum'?" not in text


def test_what_a_users_own_parts_read_is_theirs() -> None:
    class OwnClip(OptimWrapper):
        def _clip_grad(self) -> None:
            """Clip in a way of its own."""

    class OwnSaves(CheckpointHook):
        """Reads further settings itself."""

    optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)
    check_clipping(OwnClip(optimizer, clip_grad=dict(clip_factor=0.1)))
    with pytest.raises(ConfigError, match='clip_factor'):
        check_clipping(OptimWrapper(optimizer, clip_grad=dict(clip_factor=0.1)))
    assert saving_mistake([OwnSaves(interval=1, bucket='b')]) is None
    assert 'bucket' in str(saving_mistake([CheckpointHook(interval=1, bucket='b')]))


@main_leg
@pytest.mark.parametrize(
    'line, words',
    [
        ("optim_wrapper['optimizer']['type'] = 'AdamWW'", "Did you mean 'AdamW'?"),
        ("model['decode_head']['num_clases'] = 3", "'num_clases'. Did you mean 'num_classes'?"),
        ('del optim_wrapper', 'and no optim_wrapper: a training needs all three'),
        (
            "visualizer = dict(type='SegLocalVisualizer', vis_backends=[dict(type='AimVisBackend')])",
            'AimVisBackend needs the package aim',
        ),
        ("model['backbone']['in_channels'] = 4", 'takes images of 4 channels, and got 3'),
    ],
)
def test_a_training_ends_with_the_sentence(line: str, words: str, tiny_config: Path) -> None:
    tiny_config.write_text(tiny_config.read_text() + line + '\n')
    done = launch(
        command=[
            sys.executable,
            str(ROOT / 'tools/train.py'),
            str(tiny_config),
            '--work-dir',
            str(tiny_config.parent / 'work'),
        ]
    )
    assert done.status == 1 and words in done.output, done.output[-3000:]
    assert 'Traceback' not in done.output
