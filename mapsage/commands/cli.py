"""Config preparation and error reporting of tools/train.py, tools/test.py and others.

`run` is the outermost frame of every program that needs PyTorch: it prints a user's mistake once
and without a traceback, tells the launcher and the other ranks, and exits. The functions above it
apply the options of `options.py` to a config.

A config is a program, and its model may be any class, so building either may raise any exception.
For commands that do not train, :func:`read_config` and :func:`build_model` turn it into a
`ConfigError` for the user.
"""

from __future__ import annotations

import argparse
import copy
import faulthandler
import logging
import os
import sys
import traceback
import warnings
from pathlib import Path
from typing import Callable, Mapping, Optional, Sequence

import torch.distributed as dist
from mmengine.config import Config
from mmengine.registry import MODELS, RUNNERS, DefaultScope
from mmengine.runner import Runner
from torch import nn

from mapsage.accelerator import AcceleratorError
from mapsage.base.console import accept_any_text
from mapsage.base.errors import UserError
from mapsage.distributed import (
    die_with_launcher,
    error_text,
    lost_ranks_named,
    tell_why,
)
from mapsage.distributed.launcher import ENCODERS_VARIABLE
from mapsage.distributed.launcher_notes import (
    blamed_ranks,
    keep_descriptor,
    note_for_launcher,
)
from mapsage.distributed.lost_ranks import leave_watches
from mapsage.engine.config import explain_config_error
from mapsage.engine.config.file import merge_options, read_config_file
from mapsage.engine.env_cfg import ConfigError
from mapsage.engine.guards import DeviceCheckError
from mapsage.engine.loading.input_checks import watch_inputs
from mapsage_launcher.rank_notes import BROKEN_FILE, FINAL_FILE
from mapsage_launcher.ranks.fork_server import freeze_imports
from mapsage_launcher.ranks.leftover_encoders import note_finished
from mapsage_launcher.shipped import ShippedError, find_config
from mapsage_launcher.stop_request import StoppedEarly

from . import cli
from .options import add_resume, build_parser, with_resume_mode  # noqa: F401


def load_config(args: argparse.Namespace) -> Config:
    """Return the config file merged with the command line.

    Raises:
        ConfigError: If the argument is neither a file nor the name of a shipped config, or if the
            file cannot be read.
    """
    try:
        path = find_config(args.config)
    except ShippedError as error:
        raise ConfigError(str(error)) from error
    if args.launcher == 'pytorch' and args.local_rank is not None:
        os.environ.setdefault('LOCAL_RANK', str(args.local_rank))
    cfg = read_config_file(path)
    cfg.launcher = args.launcher
    cfg.setdefault('runner_type', 'MapSageRunner')
    if args.cfg_options:
        merge_options(cfg, args.cfg_options)
    # Library users build the namespace themselves.
    if getattr(args, 'verbose', False):
        cfg.log_level = 'DEBUG'
    if args.accelerator:
        choose_accelerator(cfg, args.accelerator, args.cfg_options or {})
    cfg.work_dir = args.work_dir or cfg.get('work_dir') or str(Path('work_dirs') / path.stem)
    return cfg


def choose_accelerator(cfg: Config, name: str, cfg_options: dict) -> None:
    """Set the accelerator of the command line in ``cfg``.

    The config's communication backend was chosen for the config's accelerator, so another
    accelerator gets ``'auto'``, unless the command line names a backend, too.
    """
    env_cfg = dict(cfg.get('env_cfg') or {})
    if env_cfg.get('accelerator', 'auto') != name and 'env_cfg.dist_cfg.backend' not in cfg_options:
        env_cfg['dist_cfg'] = dict(env_cfg.get('dist_cfg') or {}, backend='auto')
    cfg.env_cfg = dict(env_cfg, accelerator=name)


def build_runner(cfg: Config) -> Runner:
    """Build the runner that a config names in ``runner_type``."""
    return RUNNERS.build(cfg)


def run(main: Callable[[Optional[Sequence[str]]], Optional[int]]) -> None:
    """Run an entry point and exit with the status it returns (None: 0), or 1 after an error.

    An error is printed once. Under torchrun it also goes to the launcher, which ends its output
    with the error of the rank that failed first. This process dies with the launcher.
    """
    if 'TORCHELASTIC_RUN_ID' in os.environ:
        die_with_launcher()
        keep_descriptor()
        if os.environ.get('RANK', '0') != '0':
            # Rank 0 shows the same warnings.
            warnings.simplefilter('ignore')
    accept_any_text()
    # A crash in native code prints its stack.
    faulthandler.enable()
    freeze_imports()
    try:
        with lost_ranks_named('this command'):
            status = main(None)
        leave_watches()
        if not status:
            note_finished()
    except StoppedEarly as stopped:
        leave_watches()
        note_finished()
        status = int(stopped.code or 0)
    except KeyboardInterrupt:
        # 128 + SIGINT, as a shell reports it.
        status = 130
    # This is the outermost frame. Any error is reported and ends the process with status 1.
    except Exception as caught:
        error = explain_config_error(_without_worker_traceback(caught))
        tell_why(error)
        text = error_text(error)
        note_for_launcher(text, _kind(error), blamed_ranks(error))
        rank = os.environ.get('RANK')
        prefix = '' if rank is None else f'[rank {rank}] '
        try:
            if isinstance(error, UserError):
                print(f'{prefix}{text}', file=sys.stderr, flush=True)
            else:
                traceback.print_exc()
        # The reader of stderr is gone.
        except (OSError, ValueError):
            pass
        status = 1
    _leave(status or 0)


def _kind(error: BaseException, environ: Mapping[str, str] = os.environ) -> str:
    """Return the kind of an error for ``note_for_launcher``: broken device, final, or empty."""
    if isinstance(error, AcceleratorError):
        return BROKEN_FILE
    # With encoder ranks, a rank's number does not tell its machine.
    if (
        isinstance(error, DeviceCheckError)
        and not error.compared
        and ENCODERS_VARIABLE not in environ
    ):
        nodes = {rank // int(environ.get('LOCAL_WORLD_SIZE', 1)) for rank in error.problems}
        # One of two cards that disagree computes wrong numbers, so the job continues without both.
        if len(nodes) == 1 or error.suspects_all:
            return BROKEN_FILE if int(environ.get('GROUP_RANK', 0)) in nodes else ''
    return FINAL_FILE if isinstance(error, UserError) and error.final else ''


def _leave(status: int) -> None:
    """Exit. In a run of several ranks, skip the interpreter's shutdown.

    During the shutdown, gloo's threads sometimes abort the process (``terminate called without an
    active exception``). After an error or Ctrl-C, the process group would also wait for other ranks
    that are still in a collective, or be destroyed while NCCL uses it.
    """
    if not dist.is_initialized() and ENCODERS_VARIABLE not in os.environ:
        sys.exit(status)
    try:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    # The disk is full, or the reader of the output is gone.
    except (OSError, ValueError):
        pass
    finally:
        os._exit(status)


def _without_worker_traceback(error: Exception) -> Exception:
    """Return a user error without the traceback that a loader's worker has put into its message."""
    mark = f'{type(error).__name__}: '
    if not isinstance(error, UserError):
        return error
    try:
        text = str(error)
    # The __str__ of the error is faulty and may raise anything; `error_text` reports it.
    except Exception:
        return error
    wrapped = text.startswith('Caught ') and mark in text
    return type(error)(text.rsplit(mark, 1)[1].strip()) if wrapped else error


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
