"""CheckpointHook in whose saves all ranks take part, and which removes old files after the save.

MMEngine's hook removes the oldest checkpoint and then writes the new one, on the main process only.
Here removals, the file ``last_checkpoint`` and log lines such as "best checkpoint saved" wait until
the new file is on the disk. `saving.py` prepares every CheckpointHook that is registered;
`background.py` carries out what was collected. Under another Runner the hook is MMEngine's.

With ``interval_minutes``, all ranks must save at the same iteration although their clocks differ.
So rank 0's clock decides, and its answer also says after how many iterations the ranks ask again.
That keeps the broadcasts rare: some 20 between two checkpoints instead of one per step.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import shutil
import tempfile
import time
import types
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import torch
from mmengine.dist import is_main_process
from mmengine.fileio import LocalBackend
from mmengine.hooks import CheckpointHook as HostCheckpointHook
from mmengine.hooks import Hook
from mmengine.registry import HOOKS

from mapsage.base.stand_ins import Delegate
from mapsage.distributed import Channel, SerialChannel, open_channel
from mapsage.engine.env_cfg import ConfigError
from mapsage.host.runner import HostRunner, MapSageRun, plain_model
from mapsage_launcher.extras import missing_extra

from .background import Save
from .files import SaveError


def parse_minutes(hook: HostCheckpointHook) -> Optional[float]:
    """Remove ``interval_minutes`` from a hook's extra arguments and return it.

    Raises:
        ValueError: If the value is not a positive number, or the hook counts epochs.
    """
    minutes = hook.args.pop('interval_minutes', None)
    if minutes is None:
        return None
    if isinstance(minutes, bool) or not isinstance(minutes, (int, float)) or not minutes > 0:
        raise ValueError(
            f'CheckpointHook(interval_minutes={minutes!r}): expected a number of '
            f'minutes above 0, or None.'
        )
    if hook.by_epoch:
        raise ValueError(
            f'CheckpointHook(interval_minutes={minutes!r}, by_epoch=True): such a checkpoint is '
            f'saved inside an epoch, and its file is named by the iteration. Set by_epoch=False; '
            f'an epoch-based run resumes inside the epoch. For files of epochs as well, add a '
            f'second CheckpointHook to custom_hooks.'
        )
    return float(minutes)


def steps_to_wait(left: float, elapsed: float, steps: int) -> int:
    """Return after how many more iterations to read the clock again; 0 if the time is up. Pure.

    The result is half of the iterations that seem to be left, because later iterations may be
    slower, and at most twice the iterations that were timed so far.

    Args:
        left: Seconds until the next checkpoint.
        elapsed: Seconds since the last checkpoint.
        steps: Iterations since the last checkpoint, at least 1.
    """
    if left <= 0:
        return 0
    return max(1, min(int(left * steps / max(elapsed, 1e-9) / 2), 2 * steps))


class SaveClock:
    """Tells when rank 0's clock says that the interval since the last save is over.

    Args:
        minutes: Time between two saves.

    Attributes:
        minutes: The argument of that name.
        steps: Iterations since the last save; the caller counts them.
    """

    def __init__(self, minutes: float) -> None:
        self.minutes = minutes
        self._channel: Channel = SerialChannel()
        self.restart()

    def open(self) -> None:
        """Begin a training. Collective."""
        self._channel = open_channel(purpose='save clock')
        self.restart()

    def restart(self) -> None:
        """Note that a checkpoint was saved now."""
        self._since, self.steps, self._ask_at = time.monotonic(), 0, 1

    def is_due(self) -> bool:
        """Return whether to save. Collective in some steps: all ranks count the same iterations."""
        if self.steps < self._ask_at:
            return False
        elapsed = time.monotonic() - self._since
        answer = torch.tensor([steps_to_wait(self.minutes * 60 - elapsed, elapsed, self.steps)])
        self._channel.broadcast(answer, self._channel.ranks[0])
        self._ask_at = self.steps + int(answer)
        return not answer.item()


# Methods in which CheckpointHook removes files and saves, and the methods that call them. All ranks
# call them together.
_SAVING_METHODS = (
    'after_train_iter',
    'after_train_epoch',
    'after_val_epoch',
    '_save_checkpoint',
    '_save_checkpoint_with_step',
    '_save_best_checkpoint',
)
_POINTER = 'last_checkpoint'


@HOOKS.register_module(name='CheckpointHook', force=True)
class CheckpointHook(HostCheckpointHook):
    """MMEngine's CheckpointHook for a :class:`~.saving.SavingRunner`.

    MMEngine's hook removes an old checkpoint before it writes the new one. If the save fails, or
    the process is killed in between, neither of the two exists. For saves by the main process only,
    see :meth:`SavingRunner.saving_together`.

    The hook removes or publishes files in its own folder only, whatever a resumed checkpoint says
    about earlier files: a checkpoint is a file of somebody, and the work dir may have been copied
    or moved since.

    Three arguments are MapSage's:

    - ``background``: Whether the training continues while a checkpoint is written. True by default,
      except if the hook writes through a file backend, or belongs to a class that overrides how
      CheckpointHook saves: such a class may read the file that it has just saved.
    - ``interval_minutes``: Minutes between two checkpoints, in addition to ``interval``.
    - ``neighbor_copy``: Whether another machine also keeps the newest checkpoint in its memory, for
      machines that share no disk. The extra ``elastic`` makes the copy.
    """

    # Set by MMEngine's hook, whose types mypy does not see.
    file_backend: Any
    best_ckpt_path: Optional[str]

    # Whether a SavingRunner has registered the hook.
    _prepared = False
    _clock: Optional[SaveClock] = None
    _neighbor_copy: Any = False
    # The save in progress.
    _pending: Optional[Save] = None

    def prepare(self) -> None:
        """Take MapSage's arguments out of those that MMEngine passes to ``save_checkpoint``.

        Raises:
            ValueError: If a decorator such as ``master_only`` wraps one of the hook's methods, or
                one of the three arguments has an invalid value.
        """
        if self._prepared:
            return
        overridden = self._overridden_methods()
        for name, method in overridden.items():
            if name != '_save_checkpoint' and inspect.unwrap(method) is not method:
                raise ValueError(
                    f'{type(self).__name__}.{name} is wrapped in a decorator such as master_only. '
                    f'All ranks must call it, because the checkpoint contains state of every rank: '
                    f'remove the decorator. Only the main process writes the file anyway.'
                )
        # A class that overrides how CheckpointHook saves may do more with the runner and the file.
        self._saves_otherwise = bool(overridden)
        uses_backend = (
            self.file_client_args is not None
            or self.backend_args is not None
            or '://' in str(self.out_dir)
        )
        background = self.args.pop('background', None)
        if not (background is None or background is True or background is False):
            raise ValueError(f'CheckpointHook(background={background!r}): expected True or False.')
        if background and (overridden or uses_backend):
            raise ValueError(
                f'{type(self).__name__}(background=True): this hook '
                + (
                    'overrides how CheckpointHook saves'
                    if overridden
                    else 'saves through a file backend (out_dir, backend_args)'
                )
                + ', so its checkpoints are written while the training waits. Remove the argument.'
            )
        self._background = not (overridden or uses_backend or background is False)
        self._neighbor_copy = self.args.pop('neighbor_copy', False)
        if self._neighbor_copy is not True and self._neighbor_copy is not False:
            raise ValueError(
                f'CheckpointHook(neighbor_copy={self._neighbor_copy!r}): expected True or False.'
            )
        if self._neighbor_copy and uses_backend:
            raise ValueError(
                f'{type(self).__name__}(neighbor_copy=True): this hook saves through a '
                f'file backend (out_dir, backend_args), so its checkpoints survive the '
                f'loss of any machine of the training. Remove the argument.'
            )
        missing = missing_extra('names', 'default_hooks.checkpoint.neighbor_copy')
        if self._neighbor_copy and missing:
            raise ConfigError(missing)
        minutes = parse_minutes(self)
        if minutes is not None:
            self._clock = SaveClock(minutes)
        self._prepared = True

    def _overridden_methods(self) -> Dict[str, Callable[..., object]]:
        """Return the saving methods that a user's class or mixin overrides."""
        known = (CheckpointHook, HostCheckpointHook, Hook, object)
        return {
            name: vars(kind)[name]
            for kind in type(self).__mro__
            if kind not in known
            for name in _SAVING_METHODS
            if name in vars(kind)
        }

    def before_train(self, runner: HostRunner) -> None:
        """Begin as MMEngine's hook does, with its own files only. Collective with a clock."""
        if not self._prepared:
            super().before_train(runner)
            return
        info, surplus = runner.message_hub.runtime_info, []
        if self.max_keep_ckpts > 0 and 'keep_ckpt_ids' in info:
            steps = info['keep_ckpt_ids']
            steps = [
                step for step in (steps if isinstance(steps, list) else []) if type(step) is int
            ]
            surplus, steps = steps[: -self.max_keep_ckpts], steps[-self.max_keep_ckpts :]
            info['keep_ckpt_ids'] = steps
        super().before_train(runner)
        backend = self.file_backend
        if is_main_process() and isinstance(backend, LocalBackend):
            self._check_free_space(runner)
        for step in surplus if is_main_process() else ():
            path = backend.join_path(self.out_dir, self.filename_tmpl.format(step))
            if backend.isfile(path):
                backend.remove(path)
        # The hook sets one of these two only if it has save_best.
        if vars(self).get('best_ckpt_path') is not None:
            self.best_ckpt_path = self._find_own_best(self.best_ckpt_path)
        for key, path in vars(self).get('best_ckpt_path_dict', {}).items():
            self.best_ckpt_path_dict[key] = self._find_own_best(path)
        if self._clock is not None:
            self._clock.open()

    def _check_free_space(self, runner: HostRunner) -> None:
        """Raise a SaveError if not even the weights of the model fit on the disk."""
        tensors = plain_model(runner).state_dict().values()
        # Optimizers whose state is not known here, and averaged weights, take more.
        needed = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        folder = Path(self.out_dir)
        free = shutil.disk_usage(
            next(path for path in (folder, *folder.absolute().parents) if path.exists())
        ).free
        if free < needed:
            raise SaveError(
                f'{self.out_dir} has {free / 1e6:,.1f} MB of free disk, and the weights of a '
                f'checkpoint alone take {needed / 1e6:,.1f} MB: free some, or write elsewhere with '
                f'--work-dir.'
            )

    def _find_own_best(self, path: object) -> Optional[str]:
        """Return the best checkpoint of this name in the hook's folder, or None."""
        template = re.escape(self.filename_tmpl.replace('/', '_'))
        pattern = 'best_.+_' + re.sub(r'\\\{.*?\\\}', r'\\d+', template)
        name = os.path.basename(path) if isinstance(path, str) else ''
        if not re.fullmatch(pattern, name):
            return None
        own_path: str = self.file_backend.join_path(self.out_dir, name)
        return own_path if self.file_backend.isfile(own_path) else None

    def after_train_iter(self, runner: HostRunner, *args: Any, **kwargs: Any) -> None:
        """Save if an interval of iterations or minutes is over. Collective then."""
        if self._clock is None:
            super().after_train_iter(runner, *args, **kwargs)
            return
        self._clock.steps += 1
        super().after_train_iter(runner, *args, **kwargs)
        if runner.iter + 1 >= self.save_begin and self._clock.is_due():
            runner.logger.info(
                f'Saving checkpoint at {runner.iter + 1} iterations, '
                f'{self._clock.minutes:g} minutes after the last one'
            )
            self._save_checkpoint(runner)

    def _save_checkpoint_with_step(self, runner: MapSageRun, *args: Any, **kwargs: Any) -> None:
        with self._saving(runner) as (pending, runner_view):
            super()._save_checkpoint_with_step(runner_view, *args, **kwargs)
            if self._neighbor_copy:
                pending.afterwards.append(functools.partial(runner.copy_checkpoint, self.last_ckpt))
        if self._clock is not None:
            self._clock.restart()

    def _save_best_checkpoint(self, runner: MapSageRun, *args: Any, **kwargs: Any) -> None:
        if self.save_best:
            with self._saving(runner) as (_, runner_view):
                super()._save_best_checkpoint(runner_view, *args, **kwargs)

    @contextmanager
    def _saving(self, runner: MapSageRun) -> Iterator[Tuple[Save, Any]]:
        """Collect what follows the writing of the block's checkpoints. Collective.

        In its saving methods MMEngine's hook removes files, writes ``last_checkpoint`` into the
        work dir, not atomically, and logs that the best checkpoint is saved. So in the block its
        file backend collects removals, and it sees a runner with another work dir and logger. A
        class that overrides how CheckpointHook saves may do more with the runner, so it gets the
        runner itself. An error in the block drops what was collected.

        Yields:
            What follows, and the runner for MMEngine's hook.
        """
        if self._pending is not None or not self._prepared:
            # A save inside a save, for which the outer one collects; or a run of MMEngine's Runner.
            yield self._pending or Save(), runner
            return
        with runner.saving_together(
            self._background
        ) as background_save, tempfile.TemporaryDirectory() as folder:
            self._pending = pending = Save() if background_save is None else background_save
            backend, removed_paths = self.file_backend, []  # type: Any, List[str]
            # Every checkpoint of this Runner is a file, so a folder of its name is not the run's.
            self.file_backend = Delegate(
                backend, remove=removed_paths.append, rmtree=lambda path: None
            )

            def report_later(*args: Any, **kwargs: Any) -> None:
                pending.afterwards.append(functools.partial(runner.logger.info, *args, **kwargs))

            try:
                yield (
                    pending,
                    runner
                    if self._saves_otherwise or not is_main_process()
                    else Delegate(
                        runner, work_dir=folder, logger=Delegate(runner.logger, info=report_later)
                    ),
                )
            finally:
                self.file_backend, self._pending = backend, None
            pointer = Path(folder, _POINTER)
            if pointer.exists():
                pending.pointers.append(
                    (os.path.join(runner.work_dir, _POINTER), pointer.read_text())
                )
            # The hook sets one of these two only if it has save_best.
            attributes = vars(self)
            current_paths = [
                self.last_ckpt,
                attributes.get('best_ckpt_path'),
                *attributes.get('best_ckpt_path_dict', {}).values(),
            ]
            pending.removals += [
                functools.partial(_remove, backend.remove, path, current_paths)
                for path in removed_paths
            ]
            if background_save is None:
                pending.carry_out()


def prepare_saves(hook: HostCheckpointHook) -> None:
    """Let a hook of any class save as :class:`CheckpointHook`, and prepare it.

    Args:
        hook: Hook that is registered with a :class:`~.saving.SavingRunner`.

    Raises:
        ValueError: As :meth:`CheckpointHook.prepare`.
    """
    kind = type(hook)
    if not issubclass(kind, CheckpointHook):
        # A class of the user derives from MMEngine's. The class of the object is replaced, because
        # the user may have built the object, and may change it or look for it among the hooks.
        hook.__class__ = (
            CheckpointHook
            if kind is HostCheckpointHook
            else types.new_class(
                kind.__name__,
                (CheckpointHook, kind),
                exec_body=lambda names: names.update(__module__=kind.__module__),
            )
        )
    assert isinstance(hook, CheckpointHook)
    hook.prepare()


def _remove(remove: Callable[[str], object], path: str, current_paths: List[Optional[str]]) -> None:
    if not any(_is_same_file(path, current) for current in current_paths if current):
        # Another run in this folder may have removed the file first.
        with suppress(FileNotFoundError):
            remove(path)


def _is_same_file(first: str, second: str) -> bool:
    """Return whether two paths mean one file. Then the hook saved again under the same name."""
    return first == second or (
        os.path.exists(first) and os.path.exists(second) and os.path.samefile(first, second)
    )
