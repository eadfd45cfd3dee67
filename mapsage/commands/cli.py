"""What tools/train.py and tools/test.py share: options, config preparation, error reporting."""
from __future__ import annotations

import argparse
import faulthandler
import inspect
import logging
import os
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any, Callable, List, Mapping, Optional, Sequence, Set

import torch.distributed as dist
from mmengine.config import Config, DictAction
from mmengine.registry import METRICS, RUNNERS
from mmengine.runner import Runner

from mapsage.accelerator import AcceleratorError
from mapsage.console import accept_any_text, examples
from mapsage.distributed import (
    die_with_launcher,
    error_text,
    lost_ranks_named,
    tell_why,
)
from mapsage.distributed.launcher import ENCODERS_VARIABLE
from mapsage.distributed.nodes.heartbeat import leave_heartbeat
from mapsage.distributed.nodes.launcher_notes import (
    blamed_ranks,
    keep_descriptor,
    note_for_launcher,
)
from mapsage.engine.config_mistakes import explain_config_error
from mapsage.engine.env_cfg import ConfigError
from mapsage.errors import UserError
from mapsage.hooks import DeviceCheckError
from mapsage_launcher.nodes.elastic import BROKEN_FILE, FINAL_FILE
from mapsage_launcher.ranks.fork_server import freeze_imports
from mapsage_launcher.ranks.leftover_encoders import note_finished
from mapsage_launcher.shipped import ShippedError, find_config
from mapsage_launcher.stop_request import StoppedEarly

_RESUME_MODES = ('auto', 'must')


def build_parser(description: str, needs_config: bool = True,
                 doc: Optional[str] = None) -> argparse.ArgumentParser:
    """Return a parser with the options that training and testing share; they are MMSeg's.

    Args:
        description: What the program does.
        needs_config: Whether a config must be given.
        doc: Docstring with examples for the help.
    """
    parser = argparse.ArgumentParser(description=description, **examples(doc))
    parser.add_argument('config', nargs=None if needs_config else '?', help='path of the config '
                        'file, or the name of one that comes with MapSage')
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
        ConfigError: If there is no such file, and no shipped config of this name.
    """
    try:
        path = find_config(args.config)
    except ShippedError as error:
        raise ConfigError(str(error)) from error
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


def add_resume(parser: argparse.ArgumentParser) -> None:
    """Add ``--resume [must]``; its value is None, ``'auto'`` or ``'must'``."""
    parser.add_argument('--resume', nargs='?', const='auto', choices=_RESUME_MODES,
                        help='continue from the newest checkpoint of the work dir that can be '
                        'read; while there is none, start the run. `--resume must`: an error while '
                        'there is none')


def with_resume_mode(arguments: Optional[Sequence[str]]) -> List[str]:
    """Return the arguments with a mode behind a bare ``--resume``, in any order of arguments.

    argparse would take a config that follows it for the mode.

    Args:
        arguments: Arguments of a program; those of this process if None.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    return [part for word, following in zip(given, [*given[1:], ''])
            for part in (['--resume', 'auto'] if word == '--resume'
                         and following not in _RESUME_MODES else [word])]


def test_folder(cfg: Config, checkpoint: str) -> str:
    """Return where a test writes by default: a folder of its own, below that of its checkpoint.

    The work dir of a training keeps its config and its pictures then. A checkpoint that is
    downloaded, or whose folder cannot be written, has the folder below the config's work dir.
    """
    folder = os.path.dirname(os.path.abspath(checkpoint))
    own = '://' not in checkpoint and os.access(folder, os.W_OK)
    return str(Path(folder if own else cfg.work_dir) / 'test')


def write_masks_to(cfg: Config, folder: str) -> None:
    """Make the evaluator write predicted masks (uint8, PNG) into ``folder``, and keep them.

    Raises:
        ConfigError: If none of the test's metrics writes masks.
    """
    evaluators = cfg.test_evaluator if isinstance(cfg.test_evaluator, list) else [
        cfg.test_evaluator]
    for evaluator in evaluators:
        arguments = _metric_arguments(cfg, evaluator.get('type'))
        if 'output_dir' in arguments:
            evaluator.output_dir = folder
            if 'keep_results' in arguments:  # CityscapesMetric deletes the masks otherwise
                evaluator.keep_results = True
            return
    raise ConfigError(f'--out needs a metric with an output_dir in test_evaluator, such as '
                      f'IoUMetric, ConfusionMatrixMetric or CityscapesMetric, got {evaluators}.')


def test_calibration(cfg: Config) -> None:
    """Add ``CalibrationError`` to the metrics of the test, with its picture in the work dir."""
    evaluators = cfg.get('test_evaluator') or []
    evaluators = list(evaluators) if isinstance(evaluators, (list, tuple)) else [evaluators]
    given = next((each for each in evaluators if each.get('type') == 'CalibrationError'), None)
    if given is None:
        given = dict(type='CalibrationError')
        evaluators.append(given)
    given.setdefault('picture', str(Path(cfg.work_dir) / 'reliability.png'))
    cfg.test_evaluator = evaluators


def _metric_arguments(cfg: Config, kind: Any) -> Set[str]:
    with METRICS.switch_scope_and_registry(cfg.get('default_scope', 'mmseg')) as registry:
        metric = registry.get(kind) if isinstance(kind, str) else kind
    return set(inspect.signature(metric).parameters) if callable(metric) else set()


def draw_predictions(cfg: Config, folder: Optional[str], show: bool, wait_time: float) -> None:
    """Draw every prediction with the config's visualization hook, else with MMSeg's.

    Args:
        cfg: Config of the test.
        folder: Folder of the pictures; None to write none.
        show: Whether to show each prediction in a window, which needs a display. As in MMSeg,
            nothing is written then.
        wait_time: Seconds for which a window is shown.

    Raises:
        ConfigError: If ``show`` is set and there is no display.
    """
    if show and sys.platform == 'linux' and not (
            os.environ.get('DISPLAY') or os.environ.get('WAYLAND_DISPLAY')):
        raise ConfigError('--show needs a display, and this session has none (DISPLAY is not set). '
                          'Use --show-dir DIR to write the pictures instead.')
    hooks = dict(cfg.get('default_hooks') or {})
    hook = dict(hooks.get('visualization') or dict(type='SegVisualizationHook', interval=1))
    hook.update(draw=True)
    if show:
        hook.update(show=True, wait_time=wait_time)
    cfg.default_hooks = dict(hooks, visualization=hook)
    visualizer = dict(cfg.get('visualizer') or dict(
        type='SegLocalVisualizer', name='visualizer', vis_backends=[dict(type='LocalVisBackend')]))
    if folder:
        visualizer['save_dir'] = folder
    cfg.visualizer = visualizer


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
        die_with_launcher()
        keep_descriptor()
        if os.environ.get('RANK', '0') != '0':
            warnings.simplefilter('ignore')  # rank 0 shows the same ones
    accept_any_text()
    faulthandler.enable()  # a crash in native code says where
    freeze_imports()
    try:
        with lost_ranks_named('this command'):
            status = main(None)
        leave_heartbeat()
        if not status:
            note_finished()
    except StoppedEarly as stopped:
        leave_heartbeat()
        note_finished()
        status = int(stopped.code or 0)
    except KeyboardInterrupt:
        status = 130  # 128 + SIGINT, as a shell reports it
    except Exception as caught:  # the outermost frame: everything is reported, and the status is 1
        error = explain_config_error(_without_worker_traceback(caught))
        tell_why(error)
        text = error_text(error)
        note_for_launcher(text, _kind(error), blamed_ranks(error))
        rank = os.environ.get('RANK')
        where = '' if rank is None else f'[rank {rank}] '
        try:
            if isinstance(error, UserError):
                print(f'{where}{text}', file=sys.stderr, flush=True)
            else:
                traceback.print_exc()
        except (OSError, ValueError):  # nobody reads stderr any more
            pass
        status = 1
    _leave(status or 0)


def _kind(error: BaseException, environ: Mapping[str, str] = os.environ) -> str:
    """Return what an error tells the launcher, a kind of ``note_for_launcher``."""
    if isinstance(error, AcceleratorError):
        return BROKEN_FILE
    if isinstance(error, DeviceCheckError) and not error.compared \
            and ENCODERS_VARIABLE not in environ:  # with encoders, ranks are not counted by nodes
        nodes = {rank // int(environ.get('LOCAL_WORLD_SIZE', 1)) for rank in error.problems}
        if len(nodes) == 1:
            return BROKEN_FILE if nodes == {int(environ.get('GROUP_RANK', 0))} else ''
    return FINAL_FILE if isinstance(error, UserError) and error.final else ''


def _leave(status: int) -> None:
    """Exit; a rank of several exits without the interpreter's shutdown.

    During that shutdown gloo's threads sometimes abort the process (``terminate called without an
    active exception``). And after an error or Ctrl-C the process group would wait for other ranks,
    which may still be in a collective, or be destroyed while NCCL uses it.
    """
    if not dist.is_initialized() and ENCODERS_VARIABLE not in os.environ:
        sys.exit(status)
    try:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):  # a full disk, or nobody reads any more
        pass
    finally:
        os._exit(status)


def _without_worker_traceback(error: Exception) -> Exception:
    """Return a user error as it was before a loader's worker wrapped it in its own traceback."""
    mark = f'{type(error).__name__}: '
    if not isinstance(error, UserError):
        return error
    try:
        text = str(error)
    except Exception:  # a faulty __str__; error_text copes with it
        return error
    wrapped = text.startswith('Caught ') and mark in text
    return type(error)(text.rsplit(mark, 1)[1].strip()) if wrapped else error
