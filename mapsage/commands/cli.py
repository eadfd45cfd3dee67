"""What tools/train.py and tools/test.py share: options, config preparation, error reporting."""
from __future__ import annotations

import argparse
import difflib
import faulthandler
import logging
import os
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Callable, Optional, Sequence

import torch.distributed as dist
from mmengine.config import Config, DictAction
from mmengine.registry import RUNNERS
from mmengine.runner import Runner

from mapsage.accelerator import AcceleratorError
from mapsage.distributed import (
    BackendError,
    LauncherError,
    RankError,
    RankLostError,
    StrategyError,
    die_with_parent,
    error_text,
)
from mapsage.engine.data_checks import DataError
from mapsage.engine.env_cfg import ConfigError
from mapsage.engine.fork_server import freeze_imports
from mapsage.engine.resume import ResumeError
from mapsage.features import FeatureSourceError, RoleError, StreamingError
from mapsage.features.remote.roles import ENCODERS_VARIABLE
from mapsage.geo import GeoError, RasterBlockError
from mapsage.hooks import (
    DeviceCheckError,
    LoaderError,
    NonFiniteLossError,
)
from mapsage.inference.errors import PredictError
from mapsage.models import BackboneInputError, WeightsError
from mapsage.sampling import LockstepError, SampleMismatchError, ShortfallError
from mapsage.wrappers import CrossDeviceError, DeviceMapError

# Errors whose message is enough for the user; any other error is shown with its traceback.
_USER_ERRORS = (AcceleratorError, BackboneInputError, BackendError, ConfigError, CrossDeviceError,
                DataError, DeviceCheckError, DeviceMapError, FeatureSourceError, GeoError,
                LauncherError, LoaderError, LockstepError, NonFiniteLossError, PredictError,
                RankError, RankLostError, RasterBlockError, ResumeError, RoleError,
                SampleMismatchError, ShortfallError, StrategyError, StreamingError, WeightsError)


def build_parser(description: str, needs_config: bool = True) -> argparse.ArgumentParser:
    """Return a parser with the options that training and testing share; they are MMSeg's."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument('config', nargs=None if needs_config else '?',
                        help='path of the config file')
    parser.add_argument('--work-dir', help='where logs, checkpoints and pictures go (default: '
                        "the config's work_dir, else work_dirs/<config name>)")
    parser.add_argument('--accelerator', help='auto, cuda, gcu, gcu_t20, xla, cpu or sim (default: '
                        'env_cfg.accelerator of the config, else auto)')
    parser.add_argument('--cfg-options', nargs='+', action=DictAction, metavar='KEY=VALUE',
                        help='override settings of the config: model.backbone.depth=18 '
                        'key="[a,b]" key="[(a,b),(c,d)]"; quote, and no white space inside')
    parser.add_argument('--launcher', choices=['none', 'pytorch', 'slurm', 'mpi'], default='none',
                        help='what started this process (default: none)')
    parser.add_argument('--local_rank', '--local-rank', type=int,
                        help='for torch.distributed.launch; torchrun sets LOCAL_RANK instead')
    return parser


def load_config(args: argparse.Namespace) -> Config:
    """Return the config file merged with the command line.

    Raises:
        ConfigError: If the file does not exist.
    """
    path = Path(args.config)
    if not path.is_file():
        shipped = sorted(str(p) for p in Path('configs').glob('[!_]*/*.py'))
        near = difflib.get_close_matches(str(path), shipped, 1, cutoff=0.4)
        raise ConfigError(f'config file {path} does not exist.'
                          + (f' Did you mean {near[0]}?' if near else '')
                          + f" Shipped configs: {', '.join(shipped) or 'see configs/'}")
    if args.launcher == 'pytorch' and args.local_rank is not None:
        os.environ.setdefault('LOCAL_RANK', str(args.local_rank))
    cfg = Config.fromfile(str(path))
    cfg.launcher = args.launcher
    cfg.setdefault('runner_type', 'MapSageRunner')
    if args.cfg_options:
        cfg.merge_from_dict(args.cfg_options)
    if args.accelerator:
        choose_accelerator(cfg, args.accelerator, args.cfg_options or {})
    cfg.work_dir = args.work_dir or cfg.get('work_dir') or str(Path('work_dirs') / path.stem)
    return cfg


def choose_accelerator(cfg: Config, name: str, cfg_options: dict) -> None:
    """Put the accelerator of the command line into ``cfg``.

    The config's backend was written for the config's accelerator; unless the command line names a
    backend too, it makes way for ``'auto'``.
    """
    env_cfg = dict(cfg.get('env_cfg') or {})
    if env_cfg.get('accelerator', 'auto') != name \
            and 'env_cfg.dist_cfg.backend' not in cfg_options:
        env_cfg['dist_cfg'] = dict(env_cfg.get('dist_cfg') or {}, backend='auto')
    cfg.env_cfg = dict(env_cfg, accelerator=name)


def write_masks_to(cfg: Config, folder: str) -> None:
    """Make the evaluator write predicted masks (uint8 class indices, PNG) into ``folder``."""
    evaluators = cfg.test_evaluator if isinstance(cfg.test_evaluator, list) else [
        cfg.test_evaluator]
    writers = [evaluator for evaluator in evaluators
               if evaluator.type in ('IoUMetric', 'ConfusionMatrixMetric')]
    if not writers:
        raise ConfigError(f'--out needs an IoUMetric or a ConfusionMatrixMetric in test_evaluator, '
                          f'got {evaluators}.')
    writers[0].output_dir = folder


def write_pictures_to(cfg: Config, folder: str) -> None:
    """Draw every prediction into ``folder`` with MMSeg's visualization hook."""
    hook = dict(type='SegVisualizationHook', draw=True, interval=1)
    cfg.default_hooks = dict(cfg.get('default_hooks') or {}, visualization=hook)
    visualizer = cfg.get('visualizer') or dict(
        type='SegLocalVisualizer', name='visualizer', vis_backends=[dict(type='LocalVisBackend')])
    cfg.visualizer = dict(visualizer, save_dir=folder)


def use_tta(cfg: Config) -> None:
    """Test with the config's ``tta_model`` and ``tta_pipeline``.

    Raises:
        ConfigError: If it has none.
    """
    missing = [key for key in ('tta_model', 'tta_pipeline') if key not in cfg]
    if missing:
        raise ConfigError(f"--tta needs {' and '.join(missing)} in the config, as in MMSeg's.")
    cfg.test_dataloader.dataset.pipeline = cfg.tta_pipeline
    cfg.tta_model.module = cfg.model
    cfg.model = cfg.tta_model


def stream_features(cfg: Config, encoders: int) -> None:
    """Set ``feature_source`` to ``'Streamed'`` with so many encoder ranks; 0 removes it."""
    source = dict(cfg.get('feature_source') or {})
    if encoders == 0:
        if source.get('type') == 'Streamed':
            cfg.pop('feature_source')
        return
    kept = source if source.get('type', 'Streamed') == 'Streamed' else {}
    cfg.feature_source = dict(kept, type='Streamed', encoders=encoders)


def build_runner(cfg: Config) -> Runner:
    """Build the runner a config names in ``runner_type``."""
    return RUNNERS.build(cfg)


def run(main: Callable[[Optional[Sequence[str]]], Optional[int]]) -> None:
    """Run an entry point; print an error once, clearly, and exit with status 1.

    The return value of ``main`` is the exit status; None means 0.

    Under torchrun the error also goes to the launcher, which ends its output with the error of the
    rank that failed first. This process dies with the launcher.
    """
    if 'TORCHELASTIC_RUN_ID' in os.environ:
        die_with_parent()
        if os.environ.get('RANK', '0') != '0':
            warnings.simplefilter('ignore')  # rank 0 shows the same ones
    faulthandler.enable()  # a crash in native code says where
    freeze_imports()
    try:
        status = main(None)
    except KeyboardInterrupt:
        sys.exit(130)  # 128 + SIGINT, as a shell reports it
    except Exception as caught:  # the outermost frame: everything is reported, and the status is 1
        error = _without_worker_traceback(caught)
        text = error_text(error)
        note_for_launcher(text)
        rank = os.environ.get('RANK')
        where = '' if rank is None else f'[rank {rank}] '
        if isinstance(error, _USER_ERRORS):
            print(f'{where}{text}', file=sys.stderr, flush=True)
        else:
            traceback.print_exc()
        status = 1
    _leave(status or 0)


def note_for_launcher(text: str) -> None:
    """Write down why this rank failed; tools/launch.py prints the earliest such note at its end."""
    folder = os.environ.get('MAPSAGE_ERROR_NOTES')
    if folder:
        name = f"{time.time_ns()}-{os.environ.get('RANK', '0')}"
        Path(folder, name).write_text(text, encoding='utf-8')


def _leave(status: int) -> None:
    """Exit; a rank of several exits without the interpreter's shutdown.

    During that shutdown gloo's threads sometimes abort the process (``terminate called without an
    active exception``). And after an error the process group would wait for other ranks, which may
    still be in a collective.
    """
    if not dist.is_initialized() and ENCODERS_VARIABLE not in os.environ:
        sys.exit(status)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _without_worker_traceback(error: Exception) -> Exception:
    """Return a user error as it was before a loader's worker wrapped it in its own traceback."""
    mark = f'{type(error).__name__}: '
    if not isinstance(error, (ConfigError, DataError)) or mark not in str(error):
        return error
    return type(error)(str(error).rsplit(mark, 1)[1].strip())
