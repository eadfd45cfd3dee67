"""tools/train.py --replay: repeat a training up to one iteration, and record that iteration.

One process resumes from the last checkpoint before the iteration and runs all virtual ranks of the
run, so the numbers are the run's own if the conditions are the same (`StepFacts.differences`). The
work dir of the run is not changed, apart from its folder `replay`. The files of the recorded step
are written by `replay_files.py`.
"""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple, Sequence, cast

import torch
from mmengine.config import Config
from mmengine.hooks import EarlyStoppingHook, Hook
from mmengine.registry import PARAM_SCHEDULERS, RUNNERS
from mmengine.runner import CheckpointLoader, Runner
from mmengine.utils import is_method_overridden
from torch.utils.data import DataLoader

from mapsage.base.errors import UserError
from mapsage.engine.checkpoints.resume import candidates_in, folders_of
from mapsage.engine.display import PreviewHook
from mapsage.engine.extensions import EXTENSIONS
from mapsage.engine.guards import ReproducibilityHook
from mapsage.engine.guards.reproducibility import META_KEY, differences
from mapsage.extras.forensics.step_recorder import StepDone, StepEnds, StepRecorder
from mapsage.host.dataset_parts import metainfo_of

from .replay_files import StepFacts, write_step

# Hooks that write or remove checkpoints, or end a training with a loss that is not finite.
_LEFT_OUT = ('CheckpointHook', 'NonFiniteLossHook')
# Packages whose hooks leave the training alone in a validation, but for EarlyStoppingHook.
_PACKAGES = ('mapsage', 'mmengine', 'mmseg')
_VALIDATION_POINTS = (
    'before_val',
    'before_val_epoch',
    'before_val_iter',
    'after_val_iter',
    'after_val_epoch',
    'after_val',
)


class ReplayError(UserError, ValueError):
    """An iteration cannot be repeated."""


class _Start(NamedTuple):
    """Checkpoint from which the replay starts.

    Attributes:
        path: Path of the checkpoint.
        iteration: Number of iterations finished in it.
        meta: Its ``meta``.
    """

    path: str
    iteration: int
    meta: Dict[str, Any]


def replay(cfg: Config, iteration: int) -> Path:
    """Repeat a run up to an iteration, and write the batches and numbers of that iteration.

    The training continues from the last checkpoint before the iteration, in this process, which
    runs all virtual ranks. It saves no checkpoint and ends after the iteration. It validates only
    if something in the run follows the scores: a scheduler, EarlyStoppingHook or a hook of the
    user.
    All files are in ``WORK_DIR/replay/iter_N``; see
    :func:`~mapsage.extras.forensics.replay_files.write_step`. If the iteration fails, its batches
    are still written.

    Args:
        cfg: Config of the run, with its work dir. It is not changed.
        iteration: Number of the iteration over the whole run, counted from 1 as in the log.

    Returns:
        The folder of the files.

    Raises:
        ReplayError: If the work dir has no checkpoint before the iteration, the run ends before it,
            or a launcher has started several processes.
        VirtualRanksError: If the config sets another number of virtual ranks than the checkpoint,
            or a setting that needs a process for each virtual rank.
    """
    if iteration < 1:
        raise ReplayError(f'--replay {iteration}: expected the number of an iteration, from 1 on.')
    if cfg.get('launcher', 'none') != 'none':
        raise ReplayError(
            f'--replay with the launcher {cfg.launcher!r}: one process carries out all virtual '
            f'ranks of the run. Start it without a launcher: python tools/train.py CONFIG '
            f'--replay {iteration}.'
        )
    start = checkpoint_before(cfg.work_dir, iteration, folders_of(cfg, cfg.work_dir))
    replay_cfg = _replay_config(cfg, iteration, start)
    folder = Path(replay_cfg.work_dir)
    runner = RUNNERS.build(replay_cfg)
    # A hook of the user may save checkpoints, too.
    runner.save_checkpoint = lambda *args, **kwargs: None
    if not _follows_scores(runner):
        runner._val_loop = None
    recorder = StepRecorder(iteration)
    for hook in (_LimitCheck(iteration), recorder, StepEnds(recorder)):
        runner.register_hook(hook)
    _set_threads(runner, start.meta)
    runner.logger.info(
        f'replay: iterations {start.iteration + 1} to {iteration}, from {start.path}'
    )
    try:
        runner.train()
        raise ReplayError(
            f'--replay {iteration}: the run ended after iteration {runner.iter}, '
            f'since a hook stopped it. Give an iteration up to there.'
        )
    except StepDone:
        pass
    finally:
        if recorder.steps:
            write_step(folder, recorder.steps, _step_facts(runner, recorder, start))
            runner.logger.info(f'replay: iteration {iteration} is written to {folder}')
    return folder


def checkpoint_before(work_dir: str, iteration: int, folders: Sequence[str] = ()) -> _Start:
    """Return the last checkpoint of a run before an iteration.

    Args:
        work_dir: Work dir of the run.
        iteration: Number of the iteration, counted from 1.
        folders: Further folders into which the run has written checkpoints.

    Raises:
        ReplayError: If no such checkpoint exists. The message lists the existing checkpoints.
    """
    usable: List[_Start] = []
    descriptions: List[str] = []
    for path in candidates_in(work_dir, folders):
        name = os.path.basename(path)
        if name.startswith('iter_') and int(Path(path).stem[5:]) >= iteration:
            # The name tells the number, so the large file need not be read.
            descriptions.append(name)
            continue
        try:
            meta = CheckpointLoader.load_checkpoint(path, map_location='cpu')['meta']
            done = int(meta['iter'])
        except (OSError, RuntimeError, KeyError, TypeError, ValueError) as error:
            descriptions.append(f'{name} (cannot be read: {type(error).__name__})')
            continue
        descriptions.append(f'{name} (after iteration {done})')
        if done < iteration:
            usable.append(_Start(path, done, meta))
    if not usable:
        raise ReplayError(
            f'--replay {iteration}: {work_dir} holds no checkpoint from before that iteration. It '
            f'holds {", ".join(descriptions) or "none at all"}. Give the --work-dir of the run, or '
            f'train again up to there with a checkpoint on the way (--cfg-options '
            f'default_hooks.checkpoint.interval=N default_hooks.checkpoint.max_keep_ckpts=-1, and '
            f"the seed in the run's log as randomness.seed)."
        )
    return max(usable, key=lambda start: start.iteration)


def _replay_config(cfg: Config, iteration: int, start: _Start) -> Config:
    """Return the config of the replay: the run's, without tests and with another work dir."""
    cfg = copy.deepcopy(cfg)
    cfg.work_dir = str(Path(cfg.work_dir) / 'replay' / f'iter_{iteration}')
    cfg.resume, cfg.load_from = True, start.path
    cfg.test_dataloader = cfg.test_cfg = cfg.test_evaluator = None
    for extension in EXTENSIONS:
        extension.prepare_replay(cfg)
    hooks = {
        name: hook
        for name, hook in (cfg.get('default_hooks') or {}).items()
        if not _is_left_out(hook)
    }
    # Without StopHook, a signal ends the replay at once.
    cfg.default_hooks = dict(hooks, checkpoint=None, non_finite_loss=None, stop=None, report=None)
    cfg.custom_hooks = [hook for hook in cfg.get('custom_hooks') or () if not _is_left_out(hook)]
    if cfg.get('visualizer'):
        # Backends may write to other folders, or send to a tracking server.
        cfg.visualizer.vis_backends = None
    cfg.env_cfg = dict(cfg.get('env_cfg') or {}, cross_check=None)
    if cfg.env_cfg.get('virtual_ranks') is None:
        # Set explicitly, so that a config that rules out virtual ranks in one process is an error.
        cfg.env_cfg.virtual_ranks = _virtual_ranks(start)
    return cfg


def _follows_scores(runner: Runner) -> bool:
    """Return whether the training of a run may depend on its validations."""
    schedulers = runner.param_schedulers or []
    groups = (
        schedulers.values()
        if isinstance(schedulers, dict) and 'type' not in schedulers
        else [schedulers]
    )
    configs = [
        config
        for group in groups
        for config in (group if isinstance(group, (list, tuple)) else [group])
    ]
    kinds = [config.get('type') if isinstance(config, dict) else type(config) for config in configs]
    return any(
        getattr(
            PARAM_SCHEDULERS.get(kind) if isinstance(kind, str) else kind, 'need_val_args', False
        )
        for kind in kinds
    ) or any(
        isinstance(hook, EarlyStoppingHook)
        or type(hook).__module__.split('.')[0] not in _PACKAGES
        and any(is_method_overridden(point, Hook, hook) for point in _VALIDATION_POINTS)
        for hook in runner.hooks
    )


def _virtual_ranks(start: _Start) -> int:
    """Return the number of virtual ranks of the run that wrote a checkpoint."""
    count = start.meta.get('virtual_ranks')
    if count is None:
        raise ReplayError(
            f'{start.path} does not say how many virtual ranks its run had. Give the number of '
            f'processes that wrote it (of head replicas, if heads were split): --cfg-options '
            f'env_cfg.virtual_ranks=N.'
        )
    return int(count)


def _is_left_out(hook: object) -> bool:
    """Return whether a hook, or the config of one, is not part of a replay."""
    kind = hook.get('type') if isinstance(hook, dict) else type(hook)
    name = kind if isinstance(kind, str) else getattr(kind, '__name__', '')
    return name.rsplit('.', 1)[-1] in _LEFT_OUT


def _set_threads(runner: Runner, meta: Mapping[str, Any]) -> None:
    """Use as many threads as the run, because the bits on a CPU depend on their number."""
    threads = {
        group['facts'].get('threads')
        for group in meta.get(META_KEY) or ()
        if group['facts'].get('device', '').startswith('cpu')
    }
    number = threads.pop() if len(threads) == 1 else None
    if number and int(number) != torch.get_num_threads():
        runner.logger.info(
            f'replay: {number} thread(s), as the run had, instead of {torch.get_num_threads()}'
        )
        torch.set_num_threads(int(number))


def _step_facts(runner: Runner, recorder: StepRecorder, start: _Start) -> StepFacts:
    hook = next((hook for hook in runner.hooks if isinstance(hook, ReproducibilityHook)), None)
    changes = None
    if hook is not None and hook.before:
        changes = [str(difference) for difference in differences(hook.before, hook.now or [])]
    dataset = cast(DataLoader, runner.train_dataloader).dataset
    return StepFacts(
        iteration=recorder.iteration,
        checkpoint=start.path,
        learning_rate=recorder.learning_rate,
        differences=changes,
        metainfo=metainfo_of(dataset),
        bgr='rgb'
        not in [hook.input_channel_order for hook in runner.hooks if isinstance(hook, PreviewHook)],
    )


class _LimitCheck(Hook):
    """Raises an error if the iteration comes after the end of the run."""

    def __init__(self, iteration: int) -> None:
        self.iteration = iteration

    def before_train(self, runner: Runner) -> None:
        if self.iteration > runner.max_iters:
            raise ReplayError(
                f'--replay {self.iteration}: the run has {runner.max_iters} '
                f'iterations. Give one of them, counted over all epochs.'
            )
