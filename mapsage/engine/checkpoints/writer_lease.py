"""At most one part of a job writes into the work dir: the part that started last.

A node that was frozen during a save may wake up when the other nodes have continued without it, and
would then write an old checkpoint over a newer one. So the writing process leaves a token in the work
dir when it starts, and before it renames a file it checks that the token is still there. No clock is
involved. If a process freezes between this check and the rename, one old file may still appear: it
is whole, and newer files stay.
"""

from __future__ import annotations

import json
import os
import socket
from typing import Dict, Optional

from mapsage.base.errors import UserError
from mapsage.base.files import atomic_write

_FILE = '.writer'
_lease: Dict[str, str] = {}  # this process's: path of the file, and the word


class SupersededError(UserError, RuntimeError):
    """Another start of this job writes into the work dir now."""


def take_lease(work_dir: str) -> None:
    """Become the process that writes into ``work_dir``; one that was it before may not any more.

    Nothing happens if this process has become it before: it may have lost the lease since.
    """
    path = os.path.join(work_dir, _FILE)
    if _lease.get('path') == path:
        return
    word = json.dumps(
        dict(host=socket.gethostname(), process=os.getpid(), word=os.urandom(8).hex())
    )
    atomic_write(path, word.encode())
    _lease.update(path=path, word=word)


def check_writer() -> None:
    """Call it before a file takes its place in the work dir.

    Raises:
        SupersededError: If another process has taken the lease since this one did. Nothing happens
            in a process that has taken none.
    """
    if not _lease:
        return
    word = _read(_lease['path'])
    if word is not None and word != _lease['word']:
        raise SupersededError(
            f'{_lease["path"]} names another writer, {word}: the rest of the job has gone on '
            f'without this process ({socket.gethostname()}, {os.getpid()}), which was frozen or '
            f'cut off. It writes nothing more.'
        )


def _read(path: str) -> Optional[str]:
    try:
        with open(path, encoding='utf-8') as file:
            return file.read()
    except FileNotFoundError:  # removed by hand: nobody else has come
        return None
