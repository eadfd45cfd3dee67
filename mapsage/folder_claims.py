"""One writer at a time for what a folder holds: a training's work dir, a map, a feature cache.

A process that writes claims names in the folder with a small locked file beside them,
``.claim-<8 hex digits>``. The kernel drops the lock when the process ends, however it ends, so what
a killed process leaves behind stops nobody; whoever comes next removes it. No clock is compared.

``flock`` works between the processes of a machine, and through NFS (Linux 2.6.12 and later) and
SMB between machines. A file system without locks (some FUSE and Lustre mounts) protects nothing,
which the caller is told. So it is if a claim of another machine has no lock: its process has ended,
or the locks of this file system do not reach from one machine to the other. A network file system
may keep the lock of a machine that is gone; the error then says which file to remove.
"""
from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import socket
import time
import uuid
from pathlib import Path
from typing import Any, Dict, Iterator, Optional, Sequence, Set, Tuple

from mapsage.errors import UserError
from mapsage.json_text import parse_json

_PREFIX = '.claim-'
_LONGEST = 1 << 16  # characters of a claim that are read
_PATIENCE = 5.0  # seconds in which a process that was killed a moment ago is gone
_PAUSE = 0.1  # seconds on average: two processes that see each other try again at other times
_locked: Set[Any] = set()  # open files of the claims of this process

NO_LOCKS = ('the file system of {folder} has no locks: nobody notices if a second process writes '
            'there.')
_UNLOCKED = ('{folder} held the claim of {who}, without a lock: that process has ended. If it '
             'still runs, the locks of this file system do not reach from one machine to another, '
             'and two processes write there.')


class FolderClaimedError(UserError, ValueError):
    """Another process writes what this one was about to write."""

    on_every_rank = True


@contextlib.contextmanager
def claimed(folder: Any, names: Sequence[str], advice: str, job: str = '') -> Iterator[str]:
    """Claim names in a folder while the block runs.

    Args:
        folder: Folder, which exists.
        names: What will be written there. Claims with other names go on side by side.
        advice: What the user can do if another process has one of them, as a sentence.
        job: Name of the job; processes of one job do not stop each other. '' for no job.

    Yields:
        A warning where the file system may have no locks that protect; else ''.

    Raises:
        FolderClaimedError: If another process has claimed one of the names: with its host, number
            and start. It is waited for a few seconds first, since it may have been killed.
        OSError: If the folder cannot be written.
    """
    folder = Path(folder)
    facts = dict(names=list(names), host=socket.gethostname(), process=os.getpid(),
                 since=time.strftime('%Y-%m-%d %H:%M:%S %z'), job=job)
    deadline = time.monotonic() + _PATIENCE
    warning = ''
    while True:
        try:
            file = _create(folder, facts)
        except _NoLocksError:
            yield NO_LOCKS.format(folder=folder)
            return
        holder, ended = _other_claims(folder, file, facts)
        if ended and ended.get('host', facts['host']) != facts['host']:
            warning = _UNLOCKED.format(folder=folder, who=_describe_holder(ended))
        if holder is None:
            break
        _remove(file)
        if time.monotonic() > deadline:
            raise FolderClaimedError(_describe(folder, facts, holder, advice))
        time.sleep(random.SystemRandom().uniform(0, 2 * _PAUSE))
    try:
        yield warning
    finally:
        _remove(file)


class _NoLocksError(Exception):
    """The file system has no locks."""


def _create(folder: Path, facts: Dict[str, Any]) -> Any:
    """Return a new file that is locked and holds ``facts``."""
    while True:
        path = folder / f'{_PREFIX}{uuid.uuid4().hex[:8]}'
        file = open(str(path), 'x+', encoding='utf-8')
        _locked.add(file)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists():
                file.write(json.dumps(facts))
                file.flush()
                return file
        except BlockingIOError:  # another process has just taken it for that of a killed one
            pass
        except OSError as error:
            _remove(file)
            raise _NoLocksError from error
        _remove(file)


def _remove(file: Any) -> None:
    """Remove a claim of this process, while its lock still says that it is one."""
    if file in _locked:  # not in a process that was forked meanwhile
        with contextlib.suppress(OSError):
            os.unlink(file.name)
        _locked.discard(file)
        file.close()


def _other_claims(folder: Path, own: Any, facts: Dict[str, Any],
                  ) -> Tuple[Optional[Dict[str, Any]], Dict[str, Any]]:
    """Return the facts of another claim to one of the names, or None; remove those without a lock.

    The second value has the facts of one that was removed.
    """
    ended: Dict[str, Any] = {}
    for path in sorted(folder.glob(f'{_PREFIX}*')):
        if str(path) == own.name:
            continue
        try:
            # NFS gives an exclusive lock to those alone who may write.
            with open(path, 'r+', encoding='utf-8', errors='replace') as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    text = file.read(_LONGEST)
                else:  # of a process that was killed
                    left = _parse(file.read(_LONGEST))
                    if set(left.get('names', ())) & set(facts['names']):
                        ended = left
                    path.unlink()
                    continue
        except OSError:  # it has been removed, or is another user's
            continue
        holder = _parse(text)
        if facts['job'] and holder.get('job') == facts['job']:
            continue
        if not holder or set(holder.get('names', ())) & set(facts['names']):
            return dict(holder, file=path.name), ended
    return None, ended


def _parse(text: str) -> Dict[str, Any]:
    try:
        facts = parse_json(text)
    except ValueError:  # it is being written
        return {}
    if not isinstance(facts, dict) or not isinstance(facts.get('names', []), list) \
            or not all(isinstance(name, str) for name in facts.get('names', [])):
        return {}
    return facts


def _describe(folder: Path, facts: Dict[str, Any], holder: Dict[str, Any], advice: str) -> str:
    shared = [name for name in facts['names'] if name in holder.get('names', ())]
    if holder.get('host', facts['host']) != facts['host']:
        advice += (f" If {holder['host']} is gone, its lock may outlive it on a network file "
                   f"system: remove {holder['file']} there.")
    what = ', '.join(shared[:3]) + (f' and {len(shared) - 3} more' if len(shared) > 3 else '')
    return (f'{folder} is in use: {_describe_holder(holder)}, writes {what or "into it"}. '
            f'{advice}')


def _describe_holder(holder: Dict[str, Any]) -> str:
    return (f"process {holder['process']} on {holder['host']}, since {holder['since']}"
            if {'process', 'host', 'since'} <= holder.keys() else 'a process that has just started')


def _let_go() -> None:
    """Close what the parent of this process has claimed.

    A loader's worker, forked meanwhile, would keep the lock when its parent is killed.
    """
    for file in _locked:
        file.close()
    _locked.clear()


os.register_at_fork(after_in_child=_let_go)
