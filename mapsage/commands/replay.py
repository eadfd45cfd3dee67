"""Carry out a training up to one of its iterations again, and write down what happened in it."""
from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Sequence, Tuple

import torch
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.registry import RUNNERS
from mmengine.runner import CheckpointLoader

from mapsage.engine.checkpoints.resume import candidates_in, folders_of
from mapsage.engine.virtual_settings import COMPUTED_IN_A_REPLAY
from mapsage.errors import UserError
from mapsage.hooks import PreviewHook, ReproducibilityHook
from mapsage.hooks.gradients.step_recorder import StepDone, StepEnds, StepRecorder
from mapsage.hooks.reproducibility import META_KEY, differences

from .replay_files import StepFacts, write_step

# Hooks that write or remove checkpoints, or end a training whose numbers are not finite.
_LEFT_OUT = ('CheckpointHook', 'NonFiniteLossHook')


class ReplayError(UserError, ValueError):
    """An iteration cannot be carried out again."""


class _Start(NamedTuple):
    path: str
    iteration: int  # finished iterations
    meta: Dict[str, Any]


def replay(cfg: Config, iteration: int) -> Path:
    """Carry out iteration ``iteration`` of a run again and write down its batches and numbers.

    The training goes on from the last checkpoint before the iteration, in this process, which
    carries out all virtual ranks of the run. It validates nothing, saves no checkpoint and ends
    behind the iteration. All it writes is in ``WORK_DIR/replay/iter_N``; see
    :func:`~mapsage.commands.replay_files.write_step`. Of an iteration that fails, its batches are
    written.

    Args:
        cfg: Config of the run, with its work dir. It is not changed.
        iteration: Number of the iteration over the whole run, counted from 1 as in the log.

    Returns:
        The folder.

    Raises:
        ReplayError: If the work dir has no checkpoint before the iteration, the run ends before it,
            or a launcher has started several processes.
        VirtualRanksError: If the config asks for another number of virtual ranks than the
            checkpoint, or has something that needs a process for each.
    """
    if iteration < 1:
        raise ReplayError(f'--replay {iteration}: expected the number of an iteration, from 1 on.')
    if cfg.get('launcher', 'none') != 'none':
        raise ReplayError(
            f'--replay with the launcher {cfg.launcher!r}: one process carries out all virtual '
            f'ranks of the run. Start it without a launcher: python tools/train.py CONFIG '
            f'--replay {iteration}.')
    start = checkpoint_before(cfg.work_dir, iteration, folders_of(cfg, cfg.work_dir))
    prepared = _prepared(cfg, iteration, start)
    folder = Path(prepared.work_dir)
    runner = RUNNERS.build(prepared)
    runner.save_checkpoint = lambda *args, **kwargs: None  # whatever hooks there are
    recorder = StepRecorder(iteration)
    for hook in (_LimitCheck(iteration), recorder, StepEnds(recorder)):
        runner.register_hook(hook)
    _take_threads(runner, start.meta)
    runner.logger.info(f'replay: iterations {start.iteration + 1} to {iteration}, from '
                       f'{start.path}')
    try:
        runner.train()
    except StepDone:
        pass
    finally:
        if recorder.steps:
            write_step(folder, recorder.steps, _facts(runner, recorder, start))
            runner.logger.info(f'replay: iteration {iteration} is written to {folder}')
    return folder


def checkpoint_before(work_dir: str, iteration: int, folders: Sequence[str] = ()) -> _Start:
    """Return the last checkpoint of a run from which an iteration is still to come.

    Args:
        work_dir: Work dir of the run.
        iteration: Number of the iteration, counted from 1.
        folders: Where else the run has written checkpoints.

    Raises:
        ReplayError: If there is none. The message names those that are there.
    """
    usable: List[Tuple[int, str, Dict[str, Any]]] = []
    found: List[str] = []
    for path in candidates_in(work_dir, folders):
        name = os.path.basename(path)
        if name.startswith('iter_') and int(Path(path).stem[5:]) >= iteration:
            found.append(name)  # large files are not read for the number in their names
            continue
        try:
            meta = CheckpointLoader.load_checkpoint(path, map_location='cpu')['meta']
            done = int(meta['iter'])
        except (OSError, RuntimeError, KeyError, TypeError, ValueError) as error:
            found.append(f'{name} (cannot be read: {type(error).__name__})')
            continue
        found.append(f'{name} (after iteration {done})')
        if done < iteration:
            usable.append((done, path, meta))
    if not usable:
        raise ReplayError(
            f'--replay {iteration}: {work_dir} holds no checkpoint from before that iteration. It '
            f"holds {', '.join(found) or 'none at all'}. Give the --work-dir of the run, or train "
            f'again up to there with a checkpoint on the way (--cfg-options '
            f'default_hooks.checkpoint.interval=N default_hooks.checkpoint.max_keep_ckpts=-1, and '
            f"the seed in the run's log as randomness.seed).")
    done, path, meta = max(usable, key=lambda each: each[0])
    return _Start(path, done, meta)


def _prepared(cfg: Config, iteration: int, start: _Start) -> Config:
    """Return the config of the replay: the run's, without validation and with its own folder."""
    cfg = copy.deepcopy(cfg)
    cfg.work_dir = str(Path(cfg.work_dir) / 'replay' / f'iter_{iteration}')
    cfg.resume, cfg.load_from = True, start.path
    cfg.val_dataloader = cfg.val_cfg = cfg.val_evaluator = None
    cfg.test_dataloader = cfg.test_cfg = cfg.test_evaluator = None
    if (cfg.get('feature_source') or {}).get('type') in COMPUTED_IN_A_REPLAY:
        cfg.pop('feature_source')
    hooks = {name: hook for name, hook in (cfg.get('default_hooks') or {}).items()
             if not _is_left_out(hook)}
    # Without StopHook a signal ends the replay at once.
    cfg.default_hooks = dict(hooks, checkpoint=None, non_finite_loss=None, stop=None, report=None)
    cfg.custom_hooks = [hook for hook in cfg.get('custom_hooks') or () if not _is_left_out(hook)]
    if cfg.get('visualizer'):
        cfg.visualizer.vis_backends = None  # which may write or send elsewhere
    cfg.env_cfg = dict(cfg.get('env_cfg') or {})
    if cfg.env_cfg.get('virtual_ranks') is None:
        # Asked for, so that a config with which one process cannot have them is an error.
        cfg.env_cfg.virtual_ranks = _virtual_ranks(start)
    return cfg


def _virtual_ranks(start: _Start) -> int:
    count = start.meta.get('virtual_ranks')
    if count is None:
        raise ReplayError(
            f'{start.path} does not say how many virtual ranks its run had. Give the number of '
            f'processes that wrote it (of head replicas, if heads were split): --cfg-options '
            f'env_cfg.virtual_ranks=N.')
    return int(count)


def _is_left_out(hook: Any) -> bool:
    kind = hook.get('type') if isinstance(hook, dict) else type(hook)
    name = kind if isinstance(kind, str) else getattr(kind, '__name__', '')
    return name.rsplit('.', 1)[-1] in _LEFT_OUT


def _take_threads(runner: Any, meta: Dict[str, Any]) -> None:
    """Compute with as many threads as the run, since the bits on the CPU depend on them."""
    threads = {group['facts'].get('threads') for group in meta.get(META_KEY) or ()
               if group['facts'].get('device', '').startswith('cpu')}
    number = threads.pop() if len(threads) == 1 else None
    if number and int(number) != torch.get_num_threads():
        runner.logger.info(f'replay: {number} thread(s), as the run had, instead of '
                           f'{torch.get_num_threads()}')
        torch.set_num_threads(int(number))


def _facts(runner: Any, recorder: StepRecorder, start: _Start) -> StepFacts:
    hook = next((each for each in runner.hooks if isinstance(each, ReproducibilityHook)), None)
    before, now = (hook.before, hook.now) if hook is not None else (None, None)
    return StepFacts(
        iteration=recorder.iteration, checkpoint=start.path, learning_rate=recorder.learning_rate,
        differences=None if not before else [str(each) for each in differences(before, now or [])],
        metainfo=dict(getattr(runner.train_dataloader.dataset, 'metainfo', None) or {}),
        bgr='rgb' not in [hook.input_channel_order for hook in runner.hooks
                          if isinstance(hook, PreviewHook)])


class _LimitCheck(Hook):
    """Hook that refuses an iteration behind the end of the run."""

    def __init__(self, iteration: int) -> None:
        self.iteration = iteration

    def before_train(self, runner: Any) -> None:
        if self.iteration > runner.max_iters:
            raise ReplayError(f'--replay {self.iteration}: the run has {runner.max_iters} '
                              f'iterations. Give one of them, counted over all epochs.')
