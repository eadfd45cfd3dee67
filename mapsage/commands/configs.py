"""Configs and models for commands that do not train: errors name the config, nothing is loaded.

A config is a program, and its model may be any class, so building either may raise any exception.
Both functions turn it into a `ConfigError` for the user.
"""

from __future__ import annotations

import argparse
import copy
import warnings

from mmengine.config import Config
from mmengine.registry import MODELS, DefaultScope
from torch import nn

from mapsage.distributed import error_text
from mapsage.engine.config_mistakes import explain_config_error
from mapsage.engine.env_cfg import ConfigError
from mapsage.engine.loading.input_checks import watch_inputs

from . import cli

LOADERS = ('train_dataloader', 'val_dataloader', 'test_dataloader')


def read_config(args: argparse.Namespace) -> Config:
    """Return the config of :func:`mapsage.commands.cli.load_config`.

    Raises:
        ConfigError: If the config cannot be read.
    """
    try:
        return cli.load_config(args)
    except ConfigError:
        raise
    # A config is a Python file, which may raise anything.
    except Exception as error:
        raise ConfigError(f'{args.config} cannot be read: {error_text(error)}') from error


def build_model(cfg: Config) -> nn.Module:
    """Return the model of a config, on the CPU and with its initial parameters.

    Raises:
        ConfigError: If the model cannot be built.
    """
    if not isinstance(cfg.get('model'), dict):
        raise ConfigError(f"the config's model must be a dict, got {cfg.get('model')!r}.")
    config = copy.deepcopy(cfg.model)
    if cfg.get('data_preprocessor') is not None:
        config.setdefault('data_preprocessor', cfg.data_preprocessor)
    try:
        with DefaultScope.overwrite_default_scope(
            cfg.get('default_scope', 'mmengine')
        ), warnings.catch_warnings():
            # The run shows these warnings.
            warnings.simplefilter('ignore')
            return watch_inputs(MODELS.build(config))
    # A user's model may raise anything.
    except Exception as error:
        raise ConfigError(
            f"the config's model cannot be built: {error_text(explain_config_error(error))}"
        ) from error
