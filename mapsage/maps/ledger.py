"""The ledger of a folder of maps: which worker computes which strips, for any number of jobs.

A worker is one rank of a job, with a locked file in the hidden folder ``.ledger``. A claim is a file
that names its worker, made with ``O_EXCL``, which is atomic on NFS too. On one machine the kernel's
lock says whether a worker lives. Between machines its lease does: the worker renews the time of its
file, and the age is the difference of two times that the file server has set, so no machine's clock
counts. A worker that was stopped for longer than its lease is a new one from then on: its claims
belong to nobody, whether they were taken over or not. What the claims are for is in `sharing.py`.
"""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
import uuid
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Callable, Dict, Iterator, Optional, Sequence, Set, Type

from mapsage.base.file_locks import close_in_forks, lock
from mapsage.base.files import atomic_write, parse_json
from mapsage.base.folder_claims import (
    FolderClaimedError,
    claimed,
    describe_process,
    parse_facts,
    process_facts,
)

from .errors import PredictError
from .outputs import writing
from .strips import remove_folder

# Seconds after which another machine's worker that has not renewed its file has lost its claims.
# Longer than attributes of a file are cached by default on NFS (60 s).
LEASE_SECONDS = 120.0
# Seconds between two looks at the claims of others.
PAUSE_SECONDS = 0.5
_FOLDER = '.ledger'
_ADVICE = 'Wait for its end, stop it, or choose another --out.'
_WORKER = re.compile(r'worker-([0-9a-f]{8})\.\d+\.[0-9a-f]{8}')
# Characters of a worker's file that are read.
_LONGEST = 1 << 12
# Open files of this process's workers.
_locked: Set[IO] = set()
close_in_forks(_locked)


class LapsedError(Exception):
    """This worker was stopped for longer than its lease, so others may have its claims."""


class Worker:
    """This rank's entry in the ledger of a folder, while a ``with`` block runs.

    Args:
        folder: Folder of the maps; made if it is missing.
        names: Names of the job's maps; rank 0 claims them for processes without a ledger: an
            earlier version of MapSage, or ``mapsage classify``.
        job: Name of the job, eight hexadecimal digits; '' for a new one.
        rank: Rank of this process in the job.

    Attributes:
        job: Name of the job.
        windows: Number of windows that this worker has computed.
    """

    def __init__(
        self, folder: Path, names: Sequence[str] = (), job: str = '', rank: int = 0
    ) -> None:
        self._folder, self._rank = folder / _FOLDER, rank
        self._files = [f'{name}.tif' for name in names]
        self._claim = ExitStack()
        self.job = job or uuid.uuid4().hex[:8]
        self.windows = 0
        self._plan: Optional[Path] = None
        # The claim of `exclusive`.
        self._start: Optional[Path] = None
        self._counts: Dict[str, int] = {}
        self._counted = 0.0
        self._mutex, self._end = threading.Lock(), threading.Event()

    def __enter__(self) -> Worker:
        with writing(self._folder.parent):
            self._register()
            try:
                claim = claimed(self._folder.parent, self._files, _ADVICE, job=_FOLDER)
                if self._files:
                    self._claim.enter_context(claim)
            except FolderClaimedError as error:
                self.close()
                raise PredictError(str(error)) from error
        self._count()
        self._counts_at_start = sum(self._counts.values())
        threading.Thread(target=self._renew_often, name='lease', daemon=True).start()
        return self

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        self.close()

    def close(self) -> None:
        """Leave the ledger: this worker's claims belong to nobody."""
        self._end.set()
        with self._mutex, self._claim, suppress(OSError):
            self._remove_file()
            if self._plan is not None:
                self._plan.unlink()
            # Refused while others are in it.
            self._folder.rmdir()

    def has_lapsed(self) -> bool:
        """Return whether this worker's lease has run out, so that others may have its claims."""
        if _seconds() - self._renewed > LEASE_SECONDS / 2:
            self._renew()
        return self._has_lapsed

    def check(self) -> None:
        """Check that this worker's claims are its own; called before every write.

        Raises:
            LapsedError: If its lease has run out.
        """
        if self.has_lapsed():
            raise LapsedError

    def restart(self) -> None:
        """Become a new worker, without claims."""
        with self._mutex, writing(self._folder):
            self._remove_file()
            self._register()

    def claim(self, folder: Path, name: str) -> Optional[Path]:
        """Claim something that one worker does; return the claim, None if a living worker has it.

        Args:
            folder: Folder of the claim; made if it is missing.
            name: What is claimed.

        Raises:
            LapsedError: If this worker's lease has run out.
            PredictError: If the folder cannot be written.
        """
        self.check()
        number = 0
        with writing(folder / name):
            while True:
                claim = folder / f'{name}.{number}'
                try:
                    folder.mkdir(parents=True, exist_ok=True)
                    file = open(claim, 'x', encoding='utf-8')
                except FileNotFoundError:
                    # Another worker has just removed the folder.
                    number = 0
                    continue
                except FileExistsError:
                    if self._is_claimed(claim):
                        return None
                    # What a worker has left behind gets a new claim with the next number, because
                    # two workers that removed the old one could each remove the other's new one.
                    number += 1
                    continue
                try:
                    with file:
                        file.write(self._name)
                except OSError:
                    claim.unlink()
                    raise
                return claim

    def release(self, claim: Path) -> None:
        """Give a claim back, unless it may belong to another worker by now."""
        with suppress(LapsedError, FileNotFoundError):
            self.check()
            claim.unlink()

    @contextmanager
    def exclusive(self, say: Callable[[str], None]) -> Iterator[None]:
        """Hold the claim under which jobs begin and end one after the other.

        Args:
            say: Function that prints a line, if another job lets this one wait.
        """
        claim, waits = None, 0
        while claim is None:
            try:
                claim = self.claim(self._folder, 'start')
            except LapsedError:
                self.restart()
                continue
            # A job that has ended may have removed the ledger, and with it this worker's file.
            if claim is not None and not self._path.exists():
                self.release(claim)
                self.restart()
                claim = None
            elif claim is None:
                if waits == 4:
                    say(f'waiting for another job that plans its maps in {self._folder.parent}')
                time.sleep(PAUSE_SECONDS)
                waits += 1
        self._start = claim
        try:
            yield
        finally:
            self.release(claim)

    def publish(self, plan: Dict[str, Any]) -> None:
        """Store the plan of this job for those that come later."""
        self._plan = self._folder / f'plan-{self.job}.json'
        with writing(self._plan):
            atomic_write(self._plan, json.dumps(plan).encode())

    def plans(self) -> Dict[str, Any]:
        """Return the plans of the other living jobs by a description of the job.

        Files of dead workers are removed. An unreadable plan is None.
        """
        plans: Dict[str, Any] = {}
        for path in sorted(self._folder.glob('worker-*')):
            match = _WORKER.fullmatch(path.name)
            if match is None or match.group(1) == self.job:
                continue
            if not self._is_alive(path.name):
                # Files of another user stay.
                with suppress(OSError):
                    path.unlink()
                continue
            plan = self._folder / f'plan-{match.group(1)}.json'
            if plan.exists():
                who = describe_process(_read_facts(path))
                plans[who] = None
                with suppress(OSError, ValueError):
                    plans[who] = parse_json(plan.read_bytes())
        return plans

    def leave(self) -> bool:
        """Remove the ledger unless other workers live; return whether it was removed.

        The caller is in a block of :meth:`exclusive`.
        """
        # It removes the workers' files of the dead.
        self.plans()
        workers = self._folder.glob('worker-*')
        living = {path.name[len('worker-') :].split('.')[0] for path in workers}
        if living <= {self.job}:
            remove_folder(self._folder)
            return True
        # With what else the dead have left here, whoever closes last could not remove the folder.
        for path in list(self._folder.iterdir()):
            if path != self._start and not any(job in path.name for job in living):
                with suppress(OSError):
                    path.unlink()
        return False

    def worker_count(self) -> int:
        """Return the number of workers, this one included; the dead may count for a while."""
        return max(1, len(list(self._folder.glob('worker-*'))))

    def windows_of_all(self) -> int:
        """Return the number of windows that all workers have computed since this one began."""
        if _seconds() - self._counted > 2:
            self._counted = _seconds()
            self._count()
        return self.windows + sum(self._counts.values()) - self._counts_at_start

    def _count(self) -> None:
        """Read the numbers of windows of the other ranks; those of ranks that have left stay."""
        for path in self._folder.glob('worker-*'):
            windows = str(_read_facts(path).get('windows'))
            # The stem names job and rank, which a new worker of the rank keeps.
            if path.stem != Path(self._name).stem and windows.isdecimal():
                self._counts[path.stem] = int(windows)

    def _register(self) -> None:
        """Make and lock the file of this worker."""
        while True:
            self._name = f'worker-{self.job}.{self._rank}.{uuid.uuid4().hex[:8]}'
            self._path = self._folder / self._name
            self._folder.mkdir(parents=True, exist_ok=True)
            # A job that ends may remove the folder in between; NFS may make the file, lose its reply
            # and refuse the repeated call.
            with suppress(FileNotFoundError, FileExistsError):
                self._file = open(self._path, 'x+', encoding='utf-8')
                self._set_time()
                break
        _locked.add(self._file)
        lock(self._file)
        self._facts = process_facts()
        self._write_facts()
        self._renewed, self._has_lapsed = _seconds(), False

    def _remove_file(self) -> None:
        # A process that was forked in the meantime has no workers (see `close_in_forks`).
        if self._file in _locked:
            with suppress(OSError):
                self._path.unlink()
            _locked.discard(self._file)
            self._file.close()

    def _write_facts(self) -> None:
        # Always of one length, so that a full disk has room for it.
        facts = dict(self._facts, machine=_machine(), windows=f'{self.windows:012d}')
        os.pwrite(self._file.fileno(), json.dumps(facts).encode(), 0)

    def _renew_often(self) -> None:
        while not self._end.wait(LEASE_SECONDS / 8):
            self._renew()

    def _renew(self) -> None:
        """Renew the lease, or find out that it has run out."""
        with self._mutex:
            if self._has_lapsed or self._file.closed:
                return
            start, before = _seconds(), self._time
            try:
                # A full disk does not end a lease.
                with suppress(OSError):
                    self._write_facts()
                self._set_time()
                elapsed = max(start - self._renewed, self._time - before)
            except FileNotFoundError:
                elapsed = LEASE_SECONDS
            except OSError:
                # The file server does not answer; whether this lasts too long is seen later.
                return
            self._has_lapsed = elapsed >= LEASE_SECONDS
            self._renewed = start

    def _set_time(self) -> None:
        """Let the file server set the time of this worker's file, and read its clock from it."""
        os.utime(self._path)
        self._time = os.stat(self._path).st_mtime
        self._server_ahead = self._time - _seconds()

    def _is_claimed(self, claim: Path) -> bool:
        """Return whether a claim is a living worker's."""
        try:
            with open(claim, encoding='utf-8', errors='replace') as file:
                name, state = file.read(_LONGEST), os.fstat(file.fileno())
        except FileNotFoundError:
            # Its worker has just given it back.
            return True
        except PermissionError as error:
            raise PredictError(
                f'{claim} cannot be read: {error}. Jobs of several users share a folder of maps if '
                f'both may read and write there: set umask 002 and a common group.'
            ) from error
        if _WORKER.fullmatch(name):
            return self._is_alive(name)
        # Its worker writes its name now, or was killed before it did.
        return self._is_fresh(state)

    def _is_alive(self, name: str) -> bool:
        """Return whether a worker lives: by its lock on this machine, by its lease elsewhere."""
        path = self._folder / name
        try:
            # NFS asks the server for the attributes of a file that is opened.
            with open(path, encoding='utf-8', errors='replace') as file:
                if parse_facts(file.read(_LONGEST)).get('machine') == _machine():
                    locked = lock(file, shared=True)
                    if locked is not None:
                        return not locked
                state = os.fstat(file.fileno())
        except FileNotFoundError:
            return False
        except PermissionError:
            state = os.stat(path)
        return self._is_fresh(state)

    def _is_fresh(self, state: os.stat_result) -> bool:
        """Return whether a file was changed within a lease, by the clock of the file server."""
        self.check()
        return _seconds() + self._server_ahead - state.st_mtime < LEASE_SECONDS


def _read_facts(path: Path) -> Dict[str, Any]:
    try:
        return parse_facts(path.read_text(encoding='utf-8', errors='replace')[:_LONGEST])
    except OSError:
        return {}


def _seconds() -> float:
    """Return the seconds since the machine started, sleep included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _machine() -> str:
    """Return what tells this start of this machine's kernel, and with it its locks, from others."""
    try:
        return Path('/proc/sys/kernel/random/boot_id').read_text().strip()
    except OSError:
        return socket.gethostname()
