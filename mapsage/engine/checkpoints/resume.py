"""Chooses the checkpoint to resume from: the newest one of the run that can be read.

The file ``last_checkpoint`` names the newest checkpoint, but a process that was killed between
writing the two may have left a newer one, and a newest file may be damaged. So
:func:`candidates_in` lists all checkpoints, newest first, and :func:`choose_checkpoint` reads them
until one is whole. For machines that share no disk, `neighbor/copies.py` makes the choice among all
machines.
"""

from __future__ import annotations

import math
import os
import pickle
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

from mmengine.config import Config
from mmengine.runner import CheckpointLoader

from mapsage.base.errors import UserError
from mapsage.engine.guards.stop_hook import CHECKPOINT as STOPPED

# Files that a training writes: CheckpointHook's, and the one of StopHook.
_NAMES = re.compile(rf'^(?:(iter|epoch)_(\d+)\.pth|({re.escape(STOPPED)}))$')
# Entries of every checkpoint of a training. CheckpointHook may leave out the optimizer.
_ENTRIES = {'meta', 'state_dict', 'message_hub'}


class ResumeError(UserError, ValueError):
    """There is nothing to resume from."""


@dataclass(frozen=True)
class Choice:
    """The checkpoint from which a run resumes, and what to log about it.

    Attributes:
        path: Checkpoint to resume from. None if there is none yet: the run starts.
        seed: Seed of the run that wrote the checkpoint; None if the checkpoint does not have it.
        virtual_ranks: Number of virtual ranks of that run; None likewise.
        skipped: One line for each newer checkpoint that could not be read.
        notes: Lines for the log.
        iteration: Finished iterations; None if the checkpoint does not have the number.
        fast: Whether that run had the fast settings of a card.
    """

    path: Optional[str] = None
    seed: Optional[int] = None
    virtual_ranks: Optional[int] = None
    skipped: List[str] = field(default_factory=list)
    notes: List[str] = field(default_factory=list)
    iteration: Optional[int] = None
    fast: bool = False


def choose_checkpoint(
    work_dir: str,
    load_from: Optional[str] = None,
    mode: Union[bool, str] = True,
    folders: Sequence[str] = (),
) -> Choice:
    """Return the checkpoint to resume from, if there is one.

    A checkpoint of ``work_dir`` takes precedence over ``load_from``, which names what the run began
    with. So the same command with ``--resume`` can be queued again and again.

    Args:
        work_dir: Folder into which the run writes its checkpoints.
        load_from: Value of ``load_from`` in the config.
        mode: ``'auto'`` or ``'must'``, the values of ``--resume``, or True for ``resume`` in a
            config. If ``work_dir`` has no checkpoint, ``'auto'`` starts the run as without
            ``--resume``, and ``'must'`` is an error. True then resumes from ``load_from`` as
            MMEngine does, if that is a checkpoint of a training run on this machine. With True,
            ``load_from`` may also name an earlier checkpoint in ``work_dir``.
        folders: Other folders into which the run writes checkpoints, see :func:`folders_of`.

    Raises:
        ResumeError: If ``mode`` has another value, if there are checkpoints and none can be read,
            or if there is none although ``mode`` is ``'must'``.
    """
    if mode not in (True, 'auto', 'must'):
        raise ResumeError(f"resume={mode!r}: expected True, False, 'auto' or 'must'.")
    candidates = candidates_in(work_dir, folders)
    is_local = bool(load_from) and '://' not in str(load_from)
    # CheckpointHook may write into another folder, to which last_checkpoint leads.
    known = {work_dir, *folders, *(os.path.dirname(path) for path in candidates)}
    if mode is True and is_local and any(_is_in(str(load_from), folder) for folder in known):
        candidates.insert(0, str(load_from))
    if candidates:
        choice = _first_readable(candidates)
        return replace(choice, notes=not_read_again(load_from, choice))
    empty = f'{work_dir} holds no checkpoint (iter_N.pth or epoch_N.pth)'
    if mode == 'must':
        raise ResumeError(
            f'--resume must: {empty}. Start without it, or give the --work-dir of '
            f'the run to continue.'
        )
    if mode is True and is_local:
        try:
            return replace(
                read_choice(str(load_from)), notes=[f'{empty} yet: load_from is resumed']
            )
        except OnlyWeightsError:
            # The file has pretrained weights: the run starts with them.
            pass
    start = f'with the weights of load_from={load_from!r}' if load_from else 'from scratch'
    return Choice(
        notes=[
            f'nothing to resume: {empty} yet. The run starts {start}. '
            f'(--resume must makes this an error.)'
        ]
    )


class OnlyWeightsError(ValueError):
    """A file has weights, but not the state of a training run."""


# Errors of reading a file that is not a checkpoint from which a run can resume.
UNREADABLE = (OSError, RuntimeError, OnlyWeightsError, pickle.UnpicklingError)


def not_read_again(load_from: Optional[str], choice: Choice) -> List[str]:
    """Return a line for the log if a resumed run began with the weights of ``load_from``."""
    return (
        [f'load_from={load_from!r} is not read again: the run began with it']
        if load_from and load_from != choice.path
        else []
    )


def read_choice(path: str) -> Choice:
    """Read a whole checkpoint, to find out whether it is readable, and return it as a choice.

    Raises:
        OSError, RuntimeError, OnlyWeightsError, pickle.UnpicklingError: If a run cannot resume from
            it.
    """
    checkpoint = CheckpointLoader.load_checkpoint(path, 'cpu', 'silent')
    meta = _read_meta(checkpoint, path)
    return Choice(
        path,
        meta.get('seed'),
        meta.get('virtual_ranks'),
        iteration=meta.get('iter'),
        fast=meta.get('fast') is True,
    )


def _first_readable(paths: Sequence[str]) -> Choice:
    skipped: List[str] = []
    for path in paths:
        try:
            return replace(read_choice(path), skipped=skipped)
        except UNREADABLE as error:
            skipped.append(f'{type(error).__name__}: {error}')
    raise ResumeError(
        f'--resume: none of the {len(paths)} checkpoint(s) can be read. ' + ' | '.join(skipped)
    )


def _is_in(path: str, folder: str) -> bool:
    return os.path.isfile(path) and os.path.realpath(
        os.path.dirname(path) or '.'
    ) == os.path.realpath(folder)


def batches_done(epoch: int, iteration: int, info: Mapping[str, Any]) -> Tuple[int, int]:
    """Return how many batches of an unfinished epoch are done, and the length of an epoch. Pure.

    Args:
        epoch: Finished epochs, ``meta['epoch']`` of the checkpoint.
        iteration: Finished iterations, ``meta['iter']``.
        info: Values that ``RuntimeInfoHook`` wrote into the message hub of the checkpoint:
            ``max_iters``, ``max_epochs``.

    Returns:
        Finished batches, 0 if the checkpoint was saved between two epochs, and batches per epoch.
    """
    length = int(info.get('max_iters', 0)) // max(1, int(info.get('max_epochs', 1)))
    done = iteration - epoch * length
    return (done, length) if 0 < done <= length else (0, length)


def folders_of(cfg: Config, work_dir: str) -> List[str]:
    """Return the local folders, other than ``work_dir``, into which the hooks of a config save.

    A ``CheckpointHook(out_dir=...)`` appends the last component of ``work_dir``.
    """
    hooks = [*(cfg.get('default_hooks') or {}).values(), *(cfg.get('custom_hooks') or ())]
    out_dirs = [
        str(hook['out_dir'])
        for hook in hooks
        if isinstance(hook, dict) and hook.get('out_dir') is not None
    ]
    return [
        os.path.join(out_dir, os.path.basename(work_dir.rstrip(os.sep)))
        for out_dir in out_dirs
        if '://' not in out_dir
    ]


def candidates_in(work_dir: str, more: Sequence[str] = ()) -> List[str]:
    """Return the checkpoints in ``work_dir`` and in the folders ``more``, newest first.

    ``last_checkpoint`` may lead to another folder; the checkpoints of that folder are included. If
    a work dir was copied or moved, its ``last_checkpoint`` leads to the original. So a file of the
    same name in ``work_dir`` comes first, unless the run writes into the other folder.

    ``last_checkpoint`` names the newest checkpoint, unless the process was killed between writing
    the two. So a file that is newer than ``last_checkpoint`` precedes it, but only if it also has
    more iterations: in a copied work dir every file may be newer.
    """
    pointer = os.path.join(work_dir, 'last_checkpoint')
    last = ''
    if os.path.isfile(pointer):
        last = Path(pointer).read_text(encoding='utf-8', errors='surrogateescape').strip()
    local = os.path.join(work_dir, os.path.basename(last))
    if os.path.isfile(local) and not any(_is_in(last, folder) for folder in more):
        last = local
    folders = dict.fromkeys([work_dir, *more, *([os.path.dirname(last)] if last else [])])
    paths = sorted(
        (
            str(path)
            for folder in folders
            for path in Path(folder).glob('*.pth')
            if _NAMES.search(path.name)
        ),
        key=_number,
        reverse=True,
    )
    if not last or not os.path.isfile(last):
        return _most_iterations_first(paths)
    # Files are compared, not names: the same file may be listed under another path.
    paths = [path for path in paths if not os.path.samefile(path, last)]
    since = os.stat(pointer).st_mtime_ns
    newer = [
        path
        for path in paths
        if os.stat(path).st_mtime_ns > since
        and (_kind(path) != _kind(last) or _number(path) > _number(last))
    ]
    return list(dict.fromkeys([*_most_iterations_first([*newer, last]), *paths]))


def _most_iterations_first(paths: List[str]) -> List[str]:
    """Move the checkpoint with the most iterations to the front of paths that are sorted by number.

    Names of one kind (iter_N, epoch_N) are ordered by their numbers. So at most one file of each
    kind is read, and none if there is only one kind.
    """
    first_of_each_kind = list({_kind(path): path for path in reversed(paths)}.values())
    if len(first_of_each_kind) < 2:
        return paths
    first = max(reversed(first_of_each_kind), key=_iterations)
    return list(dict.fromkeys([first, *paths]))


def _kind(path: str) -> Optional[str]:
    match = _NAMES.search(os.path.basename(path))
    return (match.group(1) or match.group(3)) if match else None


def _number(path: str) -> int:
    match = _NAMES.search(os.path.basename(path))
    return int(match.group(2) or -1) if match else -1


def _iterations(path: str) -> float:
    """Return the finished iterations of a checkpoint; infinity if it cannot be read.

    An unreadable checkpoint thereby comes first, and is skipped with its reason.
    """
    try:
        return float(CheckpointLoader.load_checkpoint(path, 'cpu', 'silent')['meta']['iter'])
    except (OSError, RuntimeError, KeyError, TypeError, ValueError, pickle.UnpicklingError):
        return math.inf


def _read_meta(checkpoint: object, path: str) -> Dict[str, Any]:
    if not isinstance(checkpoint, dict) or not _ENTRIES <= set(checkpoint):
        raise OnlyWeightsError(
            f'{path} is not the checkpoint of a training run, which has the entries '
            f'{", ".join(sorted(_ENTRIES))}. To begin with its weights, use load_from without '
            f'--resume'
        )
    meta = checkpoint['meta']
    if not isinstance(meta, dict) or not all(
        meta.get(name) is None or type(meta[name]) is int
        for name in ('seed', 'virtual_ranks', 'iter', 'epoch')
    ):
        raise RuntimeError(
            f'checkpoint {path} is damaged: its meta is {str(meta)[:80]}, expected '
            f'whole numbers as seed, virtual_ranks, iter and epoch'
        )
    return meta
