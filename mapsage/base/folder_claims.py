"""One writer at a time for the files of a folder: a training's work dir, a map, a feature cache.

A process claims names in a folder with a small locked file there, ``.claim-<8 hex digits>``. The
kernel releases the lock when the process ends (`file_locks.py`), so the claim of a dead process
blocks nobody; the next process removes its file. Clocks are never compared here; maps that jobs of
several machines share have leases (`mapsage/maps/ledger.py`).

The lock can fail in three ways:

- The file system has no locks (some FUSE and Lustre mounts): nothing is protected, and the caller
  gets a warning.
- Another machine's claim has no lock: its process has ended, or the file system's locks do not
  reach from one machine to the other. The caller gets a warning.
- A network file system keeps the lock of a dead machine: the error names the file to remove.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import time
import uuid
from pathlib import Path
from typing import IO, Any, Dict, Iterator, Mapping, Optional, Sequence, Set, TextIO, Tuple, Union

from mapsage.base.errors import UserError
from mapsage.base.file_locks import close_in_forks, lock
from mapsage.base.files import parse_json

_PREFIX = '.claim-'
# Number of characters of a claim that are read.
_LONGEST = 1 << 24
# Seconds to wait for the end of another process, which may have been killed a moment ago.
_PATIENCE = 5.0
# Mean seconds between two attempts; random, so that two processes do not collide again.
_PAUSE = 0.1
# Open files of this process's claims.
_locked: Set[IO] = set()
close_in_forks(_locked)

NO_LOCKS = (
    'the file system of {folder} has no locks: nobody notices if a second process writes there.'
)
_UNLOCKED = (
    '{folder} held the claim of {who}, without a lock: that process has ended. If it '
    'still runs, the locks of this file system do not reach from one machine to another, '
    'and two processes write there.'
)


class FolderClaimedError(UserError, ValueError):
    """Another process writes the files that this process wants to write."""

    on_every_rank = True


@contextlib.contextmanager
def claimed(
    folder: Union[str, Path],
    names: Sequence[str],
    advice: str,
    job: str = '',
    patience: Optional[float] = None,
) -> Iterator[str]:
    """Claim names in a folder while the block runs.

    Args:
        folder: Folder, which exists.
        names: Names of the files to write. Claims to different names do not exclude each other.
        advice: Sentence that tells the user what to do if another process has claimed a name.
        job: Name of the job; processes of the same job do not exclude each other. '' for no job.
        patience: Seconds to wait for another process to release a name; default: a few.

    Yields:
        A warning if the file system's locks may not protect the files; else ''.

    Raises:
        FolderClaimedError: If another process still has one of the names after a few seconds. The
            message has its host, process number and start.
        OSError: If the folder cannot be written.
    """
    folder = Path(folder)
    facts = dict(
        process_facts(),
        names=list(names),
        job=job,
    )
    deadline = time.monotonic() + (_PATIENCE if patience is None else patience)
    warning = ''
    while True:
        try:
            file = _create(folder, facts)
        except _NoLocksError:
            yield NO_LOCKS.format(folder=folder)
            return
        holder, ended = _find_holder(folder, file, facts)
        if ended and ended.get('host', facts['host']) != facts['host']:
            warning = _UNLOCKED.format(folder=folder, who=describe_process(ended))
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


def _create(folder: Path, facts: Mapping[str, object]) -> TextIO:
    """Return a new locked file with ``facts`` as its content."""
    while True:
        path = folder / f'{_PREFIX}{uuid.uuid4().hex[:8]}'
        file = open(str(path), 'x+', encoding='utf-8')
        _locked.add(file)
        try:
            locked = lock(file)
            if locked and path.exists():
                file.write(json.dumps(facts))
                file.flush()
                return file
        except OSError as error:
            _remove(file)
            raise _NoLocksError from error
        _remove(file)
        if locked is None:
            raise _NoLocksError
        # Else another process has just locked the file to remove it as the claim of a killed one.


def _remove(file: TextIO) -> None:
    """Remove a claim of this process before its lock is released."""
    # A process that was forked in the meantime has no claims (see `close_in_forks`).
    if file in _locked:
        with contextlib.suppress(OSError):
            os.unlink(file.name)
        _locked.discard(file)
        file.close()


def _find_holder(
    folder: Path,
    claim: TextIO,
    facts: Mapping[str, Any],
) -> Tuple[Optional[Dict[str, Any]], Dict[str, Any]]:
    """Look for another claim to one of the names; remove claims without a lock.

    Args:
        folder: The folder.
        claim: Claim of this process.
        facts: Facts of this process.

    Returns:
        Facts of a process that holds one of the names, or None; and facts of a removed claim to one
        of the names, or an empty dict.
    """
    ended: Dict[str, Any] = {}
    for path in sorted(folder.glob(f'{_PREFIX}*')):
        if str(path) == claim.name:
            continue
        try:
            # NFS gives an exclusive lock only if the file is open for writing.
            with open(path, 'r+', encoding='utf-8', errors='replace') as file:
                locked = lock(file)
                holder = parse_facts(file.read(_LONGEST))
                # Without a lock, its process was killed.
                if locked:
                    if set(holder.get('names', ())) & set(facts['names']):
                        ended = holder
                    path.unlink()
                if locked is not False:
                    continue
        # The file has been removed, or belongs to another user.
        except OSError:
            continue
        if facts['job'] and holder.get('job') == facts['job']:
            continue
        if not holder or set(holder.get('names', ())) & set(facts['names']):
            return dict(holder, file=path.name), ended
    return None, ended


def process_facts() -> Dict[str, Any]:
    """Return what a file says about the process that holds it: host, number, and the time now."""
    since = time.strftime('%Y-%m-%d %H:%M:%S %z')
    return dict(host=socket.gethostname(), process=os.getpid(), since=since)


def parse_facts(text: str) -> Dict[str, Any]:
    """Return the facts in a process's file; an empty dict if it has none, or is being written."""
    try:
        facts = parse_json(text)
    # The file is just being written.
    except ValueError:
        return {}
    if (
        not isinstance(facts, dict)
        or not isinstance(facts.get('names', []), list)
        or not all(isinstance(name, str) for name in facts.get('names', []))
    ):
        return {}
    return facts


def _describe(
    folder: Path, facts: Mapping[str, Any], holder: Mapping[str, Any], advice: str
) -> str:
    shared = [name for name in facts['names'] if name in holder.get('names', ())]
    if holder.get('host', facts['host']) != facts['host']:
        advice += (
            f' If {holder["host"]} is gone, its lock may outlive it on a network file '
            f'system: remove {holder["file"]} there.'
        )
    names = ', '.join(shared[:3]) + (f' and {len(shared) - 3} more' if len(shared) > 3 else '')
    return f'{folder} is in use: {describe_process(holder)}, writes {names or "into it"}. {advice}'


def describe_process(holder: Mapping[str, Any]) -> str:
    """Return what a message says about the process that holds a file."""
    return (
        f'process {holder["process"]} on {holder["host"]}, since {holder["since"]}'
        if {'process', 'host', 'since'} <= holder.keys()
        else 'a process that has just started'
    )
