"""Choose the checkpoint to resume from: the newest one of the run that can be read."""
from __future__ import annotations

import math
import os
import pickle
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, List, Mapping, Optional, Sequence, Tuple, Union

from mmengine.config import Config
from mmengine.runner import CheckpointLoader, find_latest_checkpoint

from mapsage.errors import UserError
from mapsage.hooks.ranks.stop_hook import CHECKPOINT as STOPPED

# What a training writes: files of CheckpointHook, and that of StopHook.
_NAMES = re.compile(rf'^(?:(iter|epoch)_(\d+)\.pth|({re.escape(STOPPED)}))$')


class ResumeError(UserError, ValueError):
    """There is nothing to resume from."""


@dataclass(frozen=True)
class Choice:
    """What a run that may be resumed begins with.

    Attributes:
        path: Checkpoint to resume from; None if there is none yet and the run starts.
        seed: The seed of the run that wrote it, if it says.
        virtual_ranks: The number of virtual ranks of that run, if it says.
        skipped: One line for each newer checkpoint that could not be read.
        notes: Lines for the log.
        iteration: Finished iterations, if the checkpoint says.
    """

    path: Optional[str] = None
    seed: Optional[int] = None
    virtual_ranks: Optional[int] = None
    skipped: List[str] = field(default_factory=list)
    notes: List[str] = field(default_factory=list)
    iteration: Optional[int] = None


def choose_checkpoint(work_dir: str, load_from: Optional[str] = None,
                      mode: Union[bool, str] = True, folders: Sequence[str] = ()) -> Choice:
    """Return the checkpoint to resume from, if there is one.

    A checkpoint of ``work_dir`` comes before ``load_from``, which names what the run began with. So
    a command with ``--resume`` can be queued again and again.

    Args:
        work_dir: Where the run writes its checkpoints.
        load_from: Value of ``load_from`` in the config.
        mode: ``'auto'`` or ``'must'``, the values of ``--resume``, or True: ``resume`` of a config.
            While ``work_dir`` holds nothing, ``'auto'`` starts the run as without ``--resume``,
            ``'must'`` is an error, and True resumes from ``load_from`` as MMEngine does, if that
            is a checkpoint of a training run on this machine. With True, ``load_from`` may also
            name an earlier checkpoint in ``work_dir``.
        folders: Where else the run writes checkpoints: :func:`folders_of`.

    Raises:
        ResumeError: If ``mode`` is another value, if there are checkpoints and none can be read,
            or if there is none and there must be one.
    """
    if mode not in (True, 'auto', 'must'):
        raise ResumeError(f"resume={mode!r}: expected True, False, 'auto' or 'must'.")
    candidates = candidates_in(work_dir, folders)
    local = bool(load_from) and '://' not in str(load_from)
    # CheckpointHook may have another folder for its files; last_checkpoint leads there.
    known = {work_dir, *folders, *(os.path.dirname(path) for path in candidates)}
    if mode is True and local and any(_is_in(str(load_from), folder) for folder in known):
        candidates.insert(0, str(load_from))
    if candidates:
        choice = _first_readable(candidates)
        return replace(choice, notes=not_read_again(load_from, choice))
    empty = f'{work_dir} holds no checkpoint (iter_N.pth or epoch_N.pth)'
    if mode == 'must':
        raise ResumeError(f'--resume must: {empty}. Start without it, or give the --work-dir of '
                          f'the run to continue.')
    if mode is True and local:
        try:
            return replace(read_choice(str(load_from)),
                           notes=[f'{empty} yet: load_from is resumed'])
        except WeightsAlone:
            pass  # pretrained weights: the run starts with them
    start = f'with the weights of load_from={load_from!r}' if load_from else 'from scratch'
    return Choice(notes=[f'nothing to resume: {empty} yet. The run starts {start}. '
                         f'(--resume must makes this an error.)'])


class WeightsAlone(ValueError):
    """A file holds no training run."""


# What reading a checkpoint raises if it is none that can be resumed.
UNREADABLE = (OSError, RuntimeError, WeightsAlone, pickle.UnpicklingError)


def not_read_again(load_from: Optional[str], choice: Choice) -> List[str]:
    """Return a line for the log if the run that goes on began with other weights."""
    return [f'load_from={load_from!r} is not read again: the run began with it'] \
        if load_from and load_from != choice.path else []


def read_choice(path: str) -> Choice:
    """Return a checkpoint as a choice; it is read to see whether it can be.

    Raises:
        OSError, RuntimeError, WeightsAlone, pickle.UnpicklingError: If it cannot be resumed.
    """
    checkpoint = CheckpointLoader.load_checkpoint(path, map_location='cpu')
    meta = _meta(checkpoint, path)
    return Choice(path, meta.get('seed'), meta.get('virtual_ranks'), iteration=meta.get('iter'))


def _first_readable(paths: Sequence[str]) -> Choice:
    skipped: List[str] = []
    for path in paths:
        try:
            return replace(read_choice(path), skipped=skipped)
        except UNREADABLE as error:
            skipped.append(f'{type(error).__name__}: {error}')
    raise ResumeError(
        f'--resume: none of the {len(paths)} checkpoint(s) can be read. ' + ' | '.join(skipped))


def _is_in(path: str, folder: str) -> bool:
    return os.path.isfile(path) and os.path.realpath(os.path.dirname(path) or '.') \
        == os.path.realpath(folder)


def batches_done(epoch: int, iteration: int, info: Mapping[str, Any]) -> Tuple[int, int]:
    """Return how many batches of an unfinished epoch a checkpoint has behind it, and of how many.

    Args:
        epoch: Finished epochs, ``meta['epoch']`` of the checkpoint.
        iteration: Finished iterations, ``meta['iter']``.
        info: What ``RuntimeInfoHook`` wrote into its message hub: ``max_iters``, ``max_epochs``.

    Returns:
        Two numbers; the first is 0 if the checkpoint was saved between two epochs.
    """
    length = int(info.get('max_iters', 0)) // max(1, int(info.get('max_epochs', 1)))
    done = iteration - epoch * length
    return (done, length) if 0 < done <= length else (0, length)


def folders_of(cfg: Config, work_dir: str) -> List[str]:
    """Return the local folders into which the hooks of a config save, where they have another one.

    ``CheckpointHook(out_dir=...)`` appends the last part of ``work_dir``.
    """
    given = [*(cfg.get('default_hooks') or {}).values(), *(cfg.get('custom_hooks') or ())]
    found = [str(hook['out_dir']) for hook in given
             if isinstance(hook, dict) and hook.get('out_dir') is not None]
    return [os.path.join(out_dir, os.path.basename(work_dir.rstrip(os.sep)))
            for out_dir in found if '://' not in out_dir]


def candidates_in(work_dir: str, more: Sequence[str] = ()) -> List[str]:
    """Return the checkpoints of ``work_dir`` and the folders ``more``, the last written first.

    ``last_checkpoint`` may lead to another folder, whose checkpoints count as well.

    ``last_checkpoint`` names the last one, unless the process was killed between the two. So a file
    that is newer than ``last_checkpoint`` comes first if it also has more iterations: in a work dir
    that was copied, every file may be newer.
    """
    pointer = os.path.join(work_dir, 'last_checkpoint')
    last = find_latest_checkpoint(work_dir) if os.path.isfile(pointer) else ''
    folders = dict.fromkeys([work_dir, *more, *([os.path.dirname(last)] if last else [])])
    paths = sorted((str(path) for folder in folders for path in Path(folder).glob('*.pth')
                    if _NAMES.search(path.name)), key=_number, reverse=True)
    if not last or not os.path.isfile(last):
        return _most_iterations_first(paths)
    # The same file may be listed under another path, so files are compared, not names.
    paths = [path for path in paths if not os.path.samefile(path, last)]
    since = os.stat(pointer).st_mtime_ns
    # In a copy of a work dir it leads to the original, where the training may have gone on.
    copied = os.path.isfile(os.path.join(work_dir, os.path.basename(last)))
    newer = [path for path in paths if os.stat(path).st_mtime_ns > since
             and (_kind(path) != _kind(last) or _number(path) > _number(last))
             and (not copied or Path(path).parent == Path(work_dir))]
    return list(dict.fromkeys([*_most_iterations_first([*newer, last]), *paths]))


def _most_iterations_first(paths: List[str]) -> List[str]:
    """Bring the checkpoint with the most iterations to the front of those sorted by number.

    Files are read only where their names do not tell: one of each kind.
    """
    firsts = list({_kind(path): path for path in reversed(paths)}.values())
    if len(firsts) < 2:
        return paths
    first = max(reversed(firsts), key=_iterations)
    return list(dict.fromkeys([first, *paths]))


def _kind(path: str) -> Optional[str]:
    match = _NAMES.search(os.path.basename(path))
    return (match.group(1) or match.group(3)) if match else None


def _number(path: str) -> int:
    match = _NAMES.search(os.path.basename(path))
    return int(match.group(2) or -1) if match else -1


def _iterations(path: str) -> float:
    """Return how many iterations a checkpoint has behind it; infinity if it cannot be read.

    One that cannot be read comes first, and is skipped with its reason.
    """
    try:
        return float(CheckpointLoader.load_checkpoint(path, map_location='cpu')['meta']['iter'])
    except (OSError, RuntimeError, KeyError, TypeError, ValueError, pickle.UnpicklingError):
        return math.inf


def _meta(checkpoint: Any, path: str) -> dict:
    parts = {'meta', 'state_dict', 'message_hub'}  # CheckpointHook may leave out the optimizer
    if not isinstance(checkpoint, dict) or not parts <= set(checkpoint):
        raise WeightsAlone(
            f"{path} is no checkpoint of a training run (those hold {', '.join(sorted(parts))}): "
            f'use load_from without --resume for weights alone')
    meta = checkpoint['meta']
    if not isinstance(meta, dict) or not all(
            meta.get(name) is None or type(meta[name]) is int
            for name in ('seed', 'virtual_ranks', 'iter')):
        raise RuntimeError(f'checkpoint {path} is damaged: its meta is {str(meta)[:80]}, expected '
                           f'whole numbers as seed, virtual_ranks and iter')
    return meta
