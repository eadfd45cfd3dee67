"""Checks of a config without a run: that it can be read, its folders of data, its model."""
from __future__ import annotations

import argparse
import copy
import os
import warnings
from typing import Any, Dict, Iterator, List, Optional

from mmengine.config import Config
from mmengine.optim import build_optim_wrapper
from mmengine.registry import MODELS, DefaultScope
from torch import nn

from mapsage.distributed import error_text
from mapsage.engine.config_mistakes import (
    explain_config_error,
    missing_trackers,
    misspelling_note,
    optimizer_mistake,
)
from mapsage.engine.encoder_rates import encoder_rate_warning
from mapsage.engine.env_cfg import ConfigError
from mapsage.engine.loading.input_checks import watch_inputs

from . import cli
from .environment_checks import Finding

LOADERS = ('train_dataloader', 'val_dataloader', 'test_dataloader')


def read_config(args: argparse.Namespace) -> Config:
    """Return the config of :func:`mapsage.commands.cli.load_config`.

    Raises:
        ConfigError: If it cannot be read. A config is a program, so any exception becomes one.
    """
    try:
        return cli.load_config(args)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f'{args.config} cannot be read: {error_text(error)}') from error


def build_model(cfg: Config) -> nn.Module:
    """Return the model of ``cfg``, on the CPU and without weights.

    Raises:
        ConfigError: If it cannot be built.
    """
    if not isinstance(cfg.get('model'), dict):
        raise ConfigError(f"the config's model must be a dict, got {cfg.get('model')!r}.")
    config = copy.deepcopy(cfg.model)
    if cfg.get('data_preprocessor') is not None:
        config.setdefault('data_preprocessor', cfg.data_preprocessor)
    try:
        with DefaultScope.overwrite_default_scope(cfg.get('default_scope', 'mmengine')), \
                warnings.catch_warnings():
            warnings.simplefilter('ignore')  # the run shows them
            return watch_inputs(MODELS.build(config))
    except Exception as error:
        raise ConfigError(f"the config's model cannot be built: "
                          f'{error_text(explain_config_error(error))}') from error


def check_data(cfg: Config) -> List[Finding]:
    """Return a finding for each file or folder that a dataset of ``cfg`` names and that is missing.

    Only training and validation data keep a training from starting.
    """
    findings: List[Finding] = []
    for loader in LOADERS:
        dataset = (cfg.get(loader) or {}).get('dataset')
        missing = [path for each in _datasets(dataset) for path in _missing(each)]
        level = 'note' if loader == 'test_dataloader' else 'problem'
        findings += [Finding(level, f'{loader}: {path} does not exist',
                             'put the data there, or point data_root and data_prefix at it '
                             '(docs/datasets.md)') for path in dict.fromkeys(missing)]
        if dataset is not None and not missing:
            findings.append(Finding('ok', f'{loader}: its folders exist'))
    return findings


def check_keys(cfg: Config) -> List[Finding]:
    """Return a note about keys that look like typos, and a problem for each missing tracker."""
    note = misspelling_note(cfg)
    return [Finding('note', text) for text in [note] if text] + [
        Finding('problem', text) for text in missing_trackers(cfg.get('visualizer'))]


def check_encoder_rate(cfg: Config, model: nn.Module) -> List[Finding]:
    """Return a note if the optimizer of ``cfg`` trains a pretrained encoder at too high a rate."""
    wrapper = cfg.get('optim_wrapper') or {}
    if not isinstance(wrapper.get('optimizer'), dict):  # none, or one for each part of the model
        return []
    # Neither the precision nor the device matters here.
    plain = {key: copy.deepcopy(value) for key, value in wrapper.items()
             if key in ('optimizer', 'constructor', 'paramwise_cfg')}
    plain['optimizer'].pop('fused', None)  # not every torch has it
    try:
        with DefaultScope.overwrite_default_scope(cfg.get('default_scope', 'mmengine')):
            built = build_optim_wrapper(model, dict(plain, type='OptimWrapper'))
    except Exception as error:  # of any part that the user names; the run itself will tell it whole
        reason = optimizer_mistake(plain) or error_text(explain_config_error(error))
        return [Finding('note', f'the optimizer cannot be built here: {reason}')]
    warning = encoder_rate_warning(model, built, cfg.get('load_from'))
    return [] if warning is None else [Finding('note', warning.text, warning.next_step)]


def _datasets(config: Any) -> Iterator[Dict[str, Any]]:
    """Yield the dataset configs in ``config``, out of whatever wraps them."""
    if isinstance(config, (list, tuple)):
        for each in config:
            yield from _datasets(each)
    elif isinstance(config, dict):
        inner = [config[key] for key in ('dataset', 'datasets') if key in config]
        if inner:
            yield from _datasets(inner)
        else:
            yield config


def _missing(dataset: Dict[str, Any]) -> Iterator[str]:
    root = dataset.get('data_root') or ''
    if '://' in root or dataset.get('backend_args'):
        return
    if root and not os.path.exists(root):
        yield root
        return
    prefixes: Dict[str, Any] = dataset.get('data_prefix') or {}
    paths: List[Optional[Any]] = [dataset.get('ann_file'), *prefixes.values()]
    for path in paths:
        if path and isinstance(path, str) and '://' not in path:
            whole = os.path.join(root, path)
            if not os.path.exists(whole):
                yield whole
