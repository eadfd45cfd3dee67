"""Where a machine keeps its copy of the newest checkpoint: in memory, else on its disk.

The memory is that of ``/dev/shm``. A file there lies in memory and outlives the process that wrote
it: it goes when it is removed, or when the machine loses its power.
"""
from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import socket
import stat
import uuid
import zlib
from pathlib import Path
from typing import Any, List, Optional

from mapsage.atomic_write import atomic_write
from mapsage.errors import UserError

FOLDER = '.neighbor_copy'  # in the work dir; a copy counts as long as it is there
CHUNK_BYTES = 2**22
_MEMORY, _GROUPS = Path('/dev/shm'), Path('/sys/fs/cgroup')
_POINTER = 'memory'  # file in FOLDER that names the folder in the memory
# A whole copy: its size, its CRC-32 and the checkpoint's own name.
_COPY = re.compile(r'^(\d+)-([0-9a-f]{8})-(.+)$')
_PARTIAL = '.partial'


class NoRoomError(UserError, OSError):
    """A machine has room for a copy neither in its memory nor on its disk."""


class DamagedCopyError(UserError, OSError):
    """What arrived is not what was sent."""


class CopyStore:
    """The copy of one machine and one work dir: one that is whole, and one that arrives.

    Args:
        work_dir: The run's folder on this machine's own disk.
        memory: Where a tmpfs is mounted.
    """

    def __init__(self, work_dir: str, memory: Path = _MEMORY) -> None:
        self._disk, self._root = Path(work_dir, FOLDER), memory
        place = f'{socket.gethostname()}:{os.path.realpath(work_dir)}'
        digest = hashlib.blake2b(place.encode('utf-8', 'surrogateescape'), digest_size=6)
        self._prefix = f'mapsage-{os.getuid()}-{digest.hexdigest()}-'

    def copies(self) -> List[Path]:
        """Return the copies that are whole, the last one first; others are removed."""
        found = []
        for path in self._files():
            match = _COPY.match(path.name)
            with contextlib.suppress(OSError):
                if match and (path.stat().st_size, checksum_of(path)) == (
                        int(match.group(1)), int(match.group(2), 16)):
                    found.append(path)
                else:  # of a process that was killed, or damaged
                    path.unlink()
        return sorted(found, key=lambda path: path.stat().st_mtime_ns, reverse=True)

    def arrive(self, name: str, size: int) -> Arrival:
        """Return the file into which a checkpoint is to be written.

        Args:
            name: Name of the checkpoint's file.
            size: Its size in bytes.

        Raises:
            NoRoomError: If there is no room for it.
            OSError: If a folder cannot be made.
        """
        in_memory, on_disk = self._free_memory(), _free(self._disk.parent)
        if size < in_memory:
            return Arrival(self, self._memory_folder(), os.path.basename(name), size)
        what = (f'a copy of {megabytes(size)} has no room in the memory of {socket.gethostname()}: '
                f'{megabytes(in_memory)} are free for it in {self._root}')
        if size < on_disk:
            self._disk.mkdir(exist_ok=True)
            return Arrival(self, self._disk, os.path.basename(name), size,
                           f'{what}, so it is kept on the disk, in {self._disk}')
        raise NoRoomError(f'{what}, and {megabytes(on_disk)} on the disk of {self._disk.parent}')

    def remove_stale(self) -> None:
        """Remove what an earlier run in this work dir has left, whose folder is gone since."""
        kept = self._memory()
        with contextlib.suppress(OSError):
            for folder in self._root.glob(f'{self._prefix}*'):
                if folder != kept:
                    shutil.rmtree(str(folder), ignore_errors=True)

    def clear(self) -> None:
        """Remove everything."""
        shutil.rmtree(str(self._disk), ignore_errors=True)
        self.remove_stale()

    def drop(self) -> None:
        """Remove the whole copy: a newer one is elsewhere."""
        self._keep_only(None)

    def is_in_memory(self, path: Path) -> bool:
        """Return whether a copy lies in memory."""
        return path.parent != self._disk

    def _keep_only(self, kept: Optional[Path]) -> None:
        for path in self._files():
            if path != kept and not path.name.endswith(_PARTIAL):
                with contextlib.suppress(OSError):
                    path.unlink()

    def _files(self) -> List[Path]:
        folders = [folder for folder in (self._memory(), self._disk) if folder is not None]
        return [path for folder in folders if folder.is_dir() for path in folder.iterdir()
                if path != self._disk / _POINTER]

    def _memory(self) -> Optional[Path]:
        """Return this store's folder in the memory; None if there is none, or not of this user."""
        try:
            folder = self._root / (self._disk / _POINTER).read_text()
            facts = os.lstat(str(folder))
        except (OSError, ValueError):
            return None
        ours = folder.parent == self._root and folder.name.startswith(self._prefix)
        return folder if ours and stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid() \
            else None

    def _memory_folder(self) -> Path:
        folder = self._memory()
        if folder is None:
            folder = self._root / f'{self._prefix}{uuid.uuid4().hex}'
            folder.mkdir(mode=0o700)
            self._disk.mkdir(exist_ok=True)
            atomic_write(self._disk / _POINTER, folder.name.encode())
        return folder

    def _free_memory(self) -> int:
        """Return the bytes that a copy may take; half of what is available stays for others."""
        return min(_free(self._root), _available_memory() // 2)


class Arrival:
    """A copy that is being written. Use :meth:`CopyStore.arrive`.

    Attributes:
        remark: Words about where it goes, if that is not the memory; else empty.
    """

    def __init__(self, store: CopyStore, folder: Path, name: str, size: int,
                 remark: str = '') -> None:
        self._store, self._name, self._left, self._size = store, name, size, size
        self._path = folder / f'{uuid.uuid4().hex}{_PARTIAL}'
        self._file: Any = open(self._path, 'xb', buffering=0)
        self._crc, self.remark = 0, remark

    def write(self, data: Any) -> None:
        """Add bytes. OSError if they cannot be written."""
        left = memoryview(data).cast('B')
        self._crc, self._left = zlib.crc32(left, self._crc), self._left - len(left)
        while len(left):
            left = left[self._file.write(left):]

    def keep(self, checksum: int) -> Path:
        """Let the copy take the place of the one before; return its path.

        Raises:
            DamagedCopyError: If it is not complete, or has another checksum.
        """
        self._file.close()
        if self._left or self._crc != checksum:
            self.drop()
            raise DamagedCopyError(
                f'the copy of {self._name} that arrived on {socket.gethostname()} is not what was '
                f'sent: {self._left} of {self._size} bytes are missing, or its checksum '
                f'{self._crc:08x} is not {checksum:08x}')
        kept = self._path.with_name(f'{self._size}-{checksum:08x}-{self._name}')
        os.replace(str(self._path), str(kept))
        self._store._keep_only(kept)
        return kept

    def drop(self) -> None:
        """Give up, if it is not kept."""
        self._file.close()
        with contextlib.suppress(OSError):
            self._path.unlink()


def checksum_of(path: Any) -> int:
    """Return the CRC-32 of a file."""
    crc = 0
    with open(path, 'rb', buffering=0) as file:
        while True:
            data = file.read(CHUNK_BYTES)
            if not data:
                return crc
            crc = zlib.crc32(data, crc)


def megabytes(size: int) -> str:
    """Return a number of bytes in words."""
    return f'{size / 1e6:,.1f} MB'


def _free(folder: Path) -> int:
    try:
        return shutil.disk_usage(str(folder)).free
    except OSError:  # there is no such folder
        return 0


def _available_memory() -> int:
    """Return the bytes that this process's machine and control group can still give (proc(5))."""
    try:
        lines = Path('/proc/meminfo').read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if 'MemAvailable' in line)
    except (OSError, StopIteration):
        return 0
    return max(0, min([free, *_left_in_groups()]))


def _left_in_groups() -> List[int]:
    """Return what the memory limits of containers and batch systems leave (cgroups(7))."""
    left = []
    for limit, used, reclaimed in (
            ('memory.max', 'memory.current', 'inactive_file'),
            ('memory/memory.limit_in_bytes', 'memory/memory.usage_in_bytes',
             'total_inactive_file')):
        with contextlib.suppress(OSError, ValueError, KeyError):  # none, or 'max'
            most = int((_GROUPS / limit).read_text())
            facts = dict(line.split() for line in
                         (_GROUPS / limit).with_name('memory.stat').read_text().splitlines())
            left.append(most - int((_GROUPS / used).read_text()) + int(facts[reclaimed]))
    return left
