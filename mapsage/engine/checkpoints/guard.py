"""What MapSage changes of a CheckpointHook: who takes part, when, and in which order."""
from __future__ import annotations

import functools
import os
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Callable, Iterator, List, Tuple

from mmengine.dist import is_main_process
from mmengine.hooks import CheckpointHook

from .background import Save
from .clock import SaveClock, parse_minutes

# The methods in which CheckpointHook removes files and saves. All ranks call them together.
_METHODS = ('_save_checkpoint_with_step', '_save_best_checkpoint')
_STEPS = ('after_train_iter', 'after_train_epoch', 'after_val_epoch')  # where it calls them
_POINTER = 'last_checkpoint'


def guard_saves(hook: CheckpointHook) -> None:
    """Let all ranks take part in what ``hook`` saves, and remove files after the save.

    MMEngine's hook removes the checkpoint that makes way before it writes the new one, so that a
    save that fails, or a process that is killed meanwhile, leaves none of the two. Where only the
    main process saves, see :meth:`SavingRunner.saving_together`.

    Three arguments of the hook are MapSage's:

    - ``background``: whether the training goes on while a checkpoint is written. True unless the
      hook writes elsewhere than on a disk of this machine, or is of a class that saves in its own
      way, since that may read the file it has just saved.
    - ``interval_minutes``: minutes after which a checkpoint is saved, beside ``interval``.
    - ``neighbor_copy``: whether the newest checkpoint is also kept in the memory of another machine
      where the machines share no disk, see :class:`~.neighbor.copies.NeighborCopies`.

    Args:
        hook: Hook that is registered with a :class:`SavingRunner`.

    Raises:
        ValueError: If one of its methods is wrapped in a decorator, such as ``master_only``, or one
            of the three arguments is none.
    """
    for name in (*_STEPS, *_METHODS):
        if hasattr(getattr(hook, name), '__wrapped__'):
            raise ValueError(
                f'{type(hook).__name__}.{name} is wrapped in a decorator such as master_only. All '
                f'ranks must call it, because they collect what the checkpoint holds of them: '
                f'remove the decorator. Only the main process writes the file anyway.')
    background = _background(hook)
    copied = _neighbor_copy(hook)
    minutes = parse_minutes(hook)  # all are taken out of the arguments that the hook passes on
    for name in _METHODS:
        setattr(hook, name, _guarded(hook, getattr(hook, name), background,
                                     copied and name == '_save_checkpoint_with_step'))
    if minutes is not None:
        SaveClock(hook, minutes * 60).attach()


def _background(hook: Any) -> bool:
    value = hook.args.pop('background', None)
    if not (value is None or value is True or value is False):
        raise ValueError(f'CheckpointHook(background={value!r}): expected True or False.')
    own = _saves_in_its_own_way(hook)
    elsewhere = _saves_elsewhere(hook)
    if value and (own or elsewhere):
        raise ValueError(
            f'{type(hook).__name__}(background=True): this hook ' + (
                'overrides how CheckpointHook saves' if own else
                'saves through a file backend (out_dir, backend_args)')
            + ', so its checkpoints are written while the training waits. Remove the argument.')
    return not (own or elsewhere or value is False)


def _saves_in_its_own_way(hook: Any) -> bool:
    return any(getattr(type(hook), name) is not getattr(CheckpointHook, name)
               for name in (*_STEPS, *_METHODS, '_save_checkpoint'))


def _neighbor_copy(hook: Any) -> bool:
    value = hook.args.pop('neighbor_copy', False)
    if value is not True and value is not False:
        raise ValueError(f'CheckpointHook(neighbor_copy={value!r}): expected True or False.')
    if value and _saves_elsewhere(hook):
        raise ValueError(f'{type(hook).__name__}(neighbor_copy=True): this hook saves through a '
                         f'file backend (out_dir, backend_args), where no machine of the training '
                         f'that is lost takes its checkpoints along. Remove the argument.')
    return value


def _saves_elsewhere(hook: Any) -> bool:
    return hook.file_client_args is not None or hook.backend_args is not None \
        or '://' in str(hook.out_dir)


def _guarded(hook: Any, save: Callable[..., None], background: bool,
             copied: bool) -> Callable[..., None]:
    def copy(runner: Any, path: Any) -> None:
        if runner.neighbor_copies is not None:
            runner.neighbor_copies.send(path)

    def guarded(runner: Any, *args: Any, **kwargs: Any) -> None:
        if save.__name__ == '_save_best_checkpoint' and not hook.save_best:
            return
        with runner.saving_together(background) as later:
            todo = Save() if later is None else later
            if isinstance(hook.file_backend, _RemovesLater):  # a save within a save
                save(runner, *args, **kwargs)
            else:
                with _removing_later(hook, todo), _pointer_later(hook, runner, todo) as view:
                    save(view, *args, **kwargs)
            if copied:
                todo.afterwards.append(functools.partial(copy, runner, hook.last_ckpt))
            if later is None:
                todo.carry_out()

    return guarded


@contextmanager
def _removing_later(hook: Any, todo: Save) -> Iterator[None]:
    """Let the hook's file backend remove files at the end, and none if an error ends the block."""
    backend = hook.file_backend
    hook.file_backend = noted = _RemovesLater(backend)
    try:
        yield
    finally:
        hook.file_backend = backend
    kept = [hook.last_ckpt, getattr(hook, 'best_ckpt_path', None),
            *getattr(hook, 'best_ckpt_path_dict', {}).values()]
    todo.removals += [functools.partial(_remove, remove, path, kept)
                      for remove, path in noted.removals]


def _remove(remove: Callable[[str], Any], path: str, kept: List[Any]) -> None:
    if not any(_is_same(path, each) for each in kept if each):
        with suppress(FileNotFoundError):  # another run in this folder was first
            remove(path)


class _RemovesLater:
    """A file backend that collects removals instead of making them."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.removals: List[Tuple[Callable[[str], Any], str]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def remove(self, path: str) -> None:
        self.removals.append((self._backend.remove, path))

    def rmtree(self, path: str) -> None:
        self.removals.append((self._backend.rmtree, path))


@contextmanager
def _pointer_later(hook: Any, runner: Any, todo: Save) -> Iterator[Any]:
    """Yield the runner as the hook shall see it, so that nothing names a file before it is there.

    MMEngine's hook writes ``last_checkpoint`` into ``runner.work_dir`` right after its save, and
    in a way that a killed process leaves an empty one. A class that saves in its own way may do
    more with the runner, and gets it as it is.
    """
    if _saves_in_its_own_way(hook) or not is_main_process():
        yield runner
        return
    with tempfile.TemporaryDirectory() as folder:
        yield _SavesElsewhere(runner, folder, todo.afterwards)
        written = Path(folder, _POINTER)
        if written.exists():
            todo.pointers.append((os.path.join(runner.work_dir, _POINTER), written.read_text()))


class _SavesElsewhere:
    """A runner with another ``work_dir``, and with a logger that collects calls of ``info``."""

    def __init__(self, runner: Any, work_dir: str, reports: List[Callable[[], Any]]) -> None:
        self._runner, self.work_dir = runner, work_dir
        self.logger = _ReportsLater(runner.logger, reports)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


class _ReportsLater:
    """A logger that collects what is done, such as that the best checkpoint is saved."""

    def __init__(self, logger: Any, reports: List[Callable[[], Any]]) -> None:
        self._logger, self._reports = logger, reports

    def __getattr__(self, name: str) -> Any:
        return getattr(self._logger, name)

    def info(self, *args: Any, **kwargs: Any) -> None:
        self._reports.append(functools.partial(self._logger.info, *args, **kwargs))


def _is_same(path: str, other: str) -> bool:
    """Return whether two paths mean one file; a file was saved again under its own name then."""
    return path == other or (os.path.exists(path) and os.path.exists(other)
                             and os.path.samefile(path, other))
