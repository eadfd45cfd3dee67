"""Changes how a CheckpointHook saves: all ranks take part, and old files go only after the save.

MMEngine's hook removes the oldest checkpoint and then writes the new one, on the main process only.
:func:`guard_saves` wraps the two saving methods of a hook, so that removals, the file
``last_checkpoint`` and log lines such as "best checkpoint saved" wait until the new file is on the
disk. While a wrapped method runs, the hook sees stand-ins for its file backend and for the runner,
defined at the end of this file. `saving.py` calls :func:`guard_saves`; `background.py` carries out
what was collected.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Iterator, List, Optional, Tuple, Union

from mmengine.dist import is_main_process
from mmengine.fileio import BaseStorageBackend
from mmengine.hooks import CheckpointHook
from mmengine.logging import MMLogger
from mmengine.utils import is_method_overridden

from mapsage.base.stand_ins import Delegate
from mapsage.host.runner import HostRunner

from .background import Save
from .clock import SaveClock, parse_minutes

if TYPE_CHECKING:
    from .saving import SavingRunner

# The methods in which CheckpointHook removes files and saves. All ranks call them together.
_SAVE_METHODS = ('_save_checkpoint_with_step', '_save_best_checkpoint')
# The methods that call them.
_HOOK_POINTS = ('after_train_iter', 'after_train_epoch', 'after_val_epoch')
_POINTER = 'last_checkpoint'


def guard_saves(hook: CheckpointHook) -> None:
    """Let all ranks take part in what ``hook`` saves, and remove old files after the save.

    MMEngine's hook removes an old checkpoint before it writes the new one. If the save fails, or
    the process is killed in between, neither of the two exists. For saves by the main process only,
    see :meth:`SavingRunner.saving_together`.

    The hook removes files in its own folder only, whatever a resumed checkpoint says about earlier
    files: see :func:`_keep_to_own_files`.

    Three arguments of the hook are MapSage's:

    - ``background``: Whether the training continues while a checkpoint is written. True by default,
      except if the hook writes through a file backend, or belongs to a class that overrides how
      CheckpointHook saves: such a class may read the file that it has just saved.
    - ``interval_minutes``: Minutes between two checkpoints, in addition to ``interval``.
    - ``neighbor_copy``: Whether another machine also keeps the newest checkpoint in its memory, for
      machines that share no disk. See :class:`~.neighbor.copies.NeighborCopies`.

    Args:
        hook: Hook that is registered with a :class:`SavingRunner`.

    Raises:
        ValueError: If a decorator such as ``master_only`` wraps one of the hook's methods, or one
            of the three arguments has an invalid value.
    """
    for name in (*_HOOK_POINTS, *_SAVE_METHODS):
        method = getattr(hook, name)
        if inspect.unwrap(method) is not method:
            raise ValueError(
                f'{type(hook).__name__}.{name} is wrapped in a decorator such as master_only. All '
                f'ranks must call it, because the checkpoint contains state of every rank: '
                f'remove the decorator. Only the main process writes the file anyway.'
            )
    background = _take_background(hook)
    copies_to_neighbor = _take_neighbor_copy(hook)
    # Like the two above: takes its argument out of those that the hook passes to save_checkpoint.
    minutes = parse_minutes(hook)
    hook._save_checkpoint_with_step = _guard(
        hook, hook._save_checkpoint_with_step, background, copies_to_neighbor
    )
    hook._save_best_checkpoint = _guard(
        hook, hook._save_best_checkpoint, background, copies_to_neighbor=False
    )
    _keep_to_own_files(hook)
    if minutes is not None:
        SaveClock(hook, minutes * 60).attach()


def _take_background(hook: CheckpointHook) -> bool:
    value = hook.args.pop('background', None)
    if not (value is None or value is True or value is False):
        raise ValueError(f'CheckpointHook(background={value!r}): expected True or False.')
    overrides_saves = _overrides_saves(hook)
    uses_backend = _uses_backend(hook)
    if value and (overrides_saves or uses_backend):
        raise ValueError(
            f'{type(hook).__name__}(background=True): this hook '
            + (
                'overrides how CheckpointHook saves'
                if overrides_saves
                else 'saves through a file backend (out_dir, backend_args)'
            )
            + ', so its checkpoints are written while the training waits. Remove the argument.'
        )
    return not (overrides_saves or uses_backend or value is False)


def _keep_to_own_files(hook: Any) -> None:
    """Let what a checkpoint says about earlier files lead to checkpoints in the hook's folder only.

    MMEngine's hook removes, or publishes, any path that a resumed checkpoint names as the best one.
    A checkpoint is a file of somebody, and the work dir may have been copied or moved since.
    """
    before_train = hook.before_train

    def keep_and_begin(runner: HostRunner, *args: Any, **kwargs: Any) -> None:
        info, surplus = runner.message_hub.runtime_info, []
        if hook.max_keep_ckpts > 0 and 'keep_ckpt_ids' in info:
            steps = info['keep_ckpt_ids']
            steps = [
                step for step in (steps if isinstance(steps, list) else []) if type(step) is int
            ]
            surplus, steps = steps[: -hook.max_keep_ckpts], steps[-hook.max_keep_ckpts :]
            info['keep_ckpt_ids'] = steps
        before_train(runner, *args, **kwargs)
        backend = hook.file_backend
        for step in surplus if is_main_process() else ():
            path = backend.join_path(hook.out_dir, hook.filename_tmpl.format(step))
            if backend.isfile(path):
                backend.remove(path)
        # The hook sets one of these two only if it has save_best.
        if vars(hook).get('best_ckpt_path') is not None:
            hook.best_ckpt_path = _find_own_best(hook, hook.best_ckpt_path)
        for key, path in vars(hook).get('best_ckpt_path_dict', {}).items():
            hook.best_ckpt_path_dict[key] = _find_own_best(hook, path)

    hook.before_train = keep_and_begin


def _find_own_best(hook: CheckpointHook, path: object) -> Optional[str]:
    """Return the best checkpoint of this name in the hook's folder, or None."""
    template = re.escape(hook.filename_tmpl.replace('/', '_'))
    pattern = 'best_.+_' + re.sub(r'\\\{.*?\\\}', r'\\d+', template)
    name = os.path.basename(path) if isinstance(path, str) else ''
    if not re.fullmatch(pattern, name):
        return None
    own_path = hook.file_backend.join_path(hook.out_dir, name)
    return own_path if hook.file_backend.isfile(own_path) else None


def _overrides_saves(hook: CheckpointHook) -> bool:
    return any(
        is_method_overridden(name, CheckpointHook, hook)
        for name in (*_HOOK_POINTS, *_SAVE_METHODS, '_save_checkpoint')
    )


def _take_neighbor_copy(hook: CheckpointHook) -> bool:
    value = hook.args.pop('neighbor_copy', False)
    if value is not True and value is not False:
        raise ValueError(f'CheckpointHook(neighbor_copy={value!r}): expected True or False.')
    if value and _uses_backend(hook):
        raise ValueError(
            f'{type(hook).__name__}(neighbor_copy=True): this hook saves through a '
            f'file backend (out_dir, backend_args), so its checkpoints survive the '
            f'loss of any machine of the training. Remove the argument.'
        )
    return value


def _uses_backend(hook: CheckpointHook) -> bool:
    return (
        hook.file_client_args is not None
        or hook.backend_args is not None
        or '://' in str(hook.out_dir)
    )


def _guard(
    hook: CheckpointHook, save: Callable[..., None], background: bool, copies_to_neighbor: bool
) -> Callable[..., None]:
    def send_copy(runner: SavingRunner, path: str) -> None:
        if runner.neighbor_copies is not None:
            runner.neighbor_copies.send(path)

    def guarded(runner: SavingRunner, *args: Any, **kwargs: Any) -> None:
        if save.__name__ == '_save_best_checkpoint' and not hook.save_best:
            return
        with runner.saving_together(background) as background_save:
            pending = Save() if background_save is None else background_save
            if isinstance(hook.file_backend, _RemovalCollector):
                # A save inside a save: the outer one collects.
                save(runner, *args, **kwargs)
            else:
                with _collecting_removals(hook, pending), _collecting_pointer(
                    hook, runner, pending
                ) as view:
                    save(view, *args, **kwargs)
            if copies_to_neighbor:
                pending.afterwards.append(functools.partial(send_copy, runner, hook.last_ckpt))
            if background_save is None:
                pending.carry_out()

    return guarded


@contextmanager
def _collecting_removals(hook: CheckpointHook, pending: Save) -> Iterator[None]:
    """Collect the files that the hook removes in the block; an error in the block drops them."""
    backend = hook.file_backend
    hook.file_backend = collector = _RemovalCollector(backend)
    try:
        yield
    finally:
        hook.file_backend = backend
    # The hook sets one of these two only if it has save_best.
    attributes = vars(hook)
    current_paths = [
        hook.last_ckpt,
        attributes.get('best_ckpt_path'),
        *attributes.get('best_ckpt_path_dict', {}).values(),
    ]
    pending.removals += [
        functools.partial(_remove, remove, path, current_paths)
        for remove, path in collector.removals
    ]


def _remove(remove: Callable[[str], object], path: str, current_paths: List[Optional[str]]) -> None:
    if not any(_is_same_file(path, current) for current in current_paths if current):
        # Another run in this folder may have removed the file first.
        with suppress(FileNotFoundError):
            remove(path)


class _RemovalCollector(Delegate):
    """A file backend that collects removals instead of carrying them out."""

    original: BaseStorageBackend

    def __init__(self, backend: BaseStorageBackend) -> None:
        super().__init__(backend)
        self.removals: List[Tuple[Callable[[str], object], str]] = []

    def remove(self, path: str) -> None:
        self.removals.append((self.original.remove, path))

    def rmtree(self, path: str) -> None:
        """Do nothing: every checkpoint of this Runner is a file, so the folder is not the run's."""


@contextmanager
def _collecting_pointer(
    hook: CheckpointHook, runner: SavingRunner, pending: Save
) -> Iterator[Union[SavingRunner, _RunnerView]]:
    """Yield the runner as the hook sees it, so that no file names a checkpoint too early.

    MMEngine's hook writes ``last_checkpoint`` into ``runner.work_dir`` right after its save, and
    not atomically: a killed process leaves an empty file. A class that overrides how CheckpointHook
    saves may do more with the runner, so it gets the runner itself.
    """
    if _overrides_saves(hook) or not is_main_process():
        yield runner
        return
    with tempfile.TemporaryDirectory() as folder:
        yield _RunnerView(runner, folder, pending.afterwards)
        written = Path(folder, _POINTER)
        if written.exists():
            pending.pointers.append((os.path.join(runner.work_dir, _POINTER), written.read_text()))


class _RunnerView(Delegate):
    """A runner with another ``work_dir``, and with a logger that collects calls of ``info``."""

    def __init__(
        self, runner: SavingRunner, work_dir: str, reports: List[Callable[[], object]]
    ) -> None:
        super().__init__(runner)
        self.work_dir = work_dir
        self.logger = _ReportCollector(runner.logger, reports)


class _ReportCollector(Delegate):
    """A logger that delays reports such as "the best checkpoint is saved" until they are true."""

    def __init__(self, logger: MMLogger, reports: List[Callable[[], object]]) -> None:
        super().__init__(logger)
        self._reports = reports

    def info(self, *args: Any, **kwargs: Any) -> None:
        self._reports.append(functools.partial(self.original.info, *args, **kwargs))


def _is_same_file(first: str, second: str) -> bool:
    """Return whether two paths mean one file. Then the hook saved again under the same name."""
    return first == second or (
        os.path.exists(first) and os.path.exists(second) and os.path.samefile(first, second)
    )
