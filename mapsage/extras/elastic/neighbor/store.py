"""Stores a machine's copy of the newest checkpoint: in memory if there is room, else on its disk.

A copy in memory is a file in ``/dev/shm``. It outlives the process that wrote it, and exists until
it is removed or the machine loses power. A copy that arrives is an :class:`Arrival`, and replaces
the previous copy only once it is whole. `link.py` and `relay.py` receive copies; `copies.py`
decides which copy a run resumes from.
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
from typing import List, Optional, Union

from mapsage.base.errors import UserError
from mapsage.base.files import atomic_write

# In the work dir. A copy in memory counts only as long as this folder names it.
FOLDER = '.neighbor_copy'
CHUNK_BYTES = 2**22
_MEMORY, _GROUPS = Path('/dev/shm'), Path('/sys/fs/cgroup')
# File in FOLDER that names the folder in memory.
_POINTER = 'memory'
# Name of a whole copy: <size>-<CRC-32>-<name of the checkpoint>.
_COPY = re.compile(r'^(\d+)-([0-9a-f]{8})-(.+)$')
_PARTIAL = '.partial'
_FILES = re.compile(rf'{_COPY.pattern}|[0-9a-f]{{32}}{re.escape(_PARTIAL)}')


class NoRoomError(UserError, OSError):
    """A machine has room for a copy neither in its memory nor on its disk."""


class DamagedCopyError(UserError, OSError):
    """A copy differs from the file that was sent."""


class CopyStore:
    """The copy of one work dir on one machine: at most one whole copy, and one that is arriving.

    Args:
        work_dir: Folder of the run on this machine's disk.
        memory: Folder where a tmpfs is mounted.
    """

    def __init__(self, work_dir: str, memory: Path = _MEMORY) -> None:
        self._disk, self._root = Path(work_dir, FOLDER), memory
        owner = f'{socket.gethostname()}:{os.path.realpath(work_dir)}'
        digest = hashlib.blake2b(owner.encode('utf-8', 'surrogateescape'), digest_size=6)
        self._prefix = f'mapsage-{os.getuid()}-{digest.hexdigest()}-'

    def copies(self) -> List[Path]:
        """Return the whole copies, the newest first, and remove those that are not whole."""
        whole = []
        for path in self._files():
            match = _COPY.match(path.name)
            with contextlib.suppress(OSError):
                if match and (path.stat().st_size, checksum_of(path)) == (
                    int(match.group(1)),
                    int(match.group(2), 16),
                ):
                    whole.append(path)
                else:
                    # A killed process left it unfinished, or it is damaged.
                    path.unlink()
        return sorted(whole, key=lambda path: path.stat().st_mtime_ns, reverse=True)

    def arrive(self, name: str, size: int) -> Arrival:
        """Return a new file to which a checkpoint is to be written.

        Args:
            name: Name of the checkpoint's file.
            size: Its size in bytes.

        Raises:
            NoRoomError: If there is no room for it.
            OSError: If a folder cannot be created.
        """
        in_memory, on_disk = self._free_memory(), _free(self._disk.parent)
        if size < in_memory:
            return Arrival(self, self._create_memory_folder(), os.path.basename(name), size)
        no_memory = (
            f'a copy of {megabytes(size)} has no room in the memory of {socket.gethostname()}: '
            f'{megabytes(in_memory)} are free for it in {self._root}'
        )
        if size < on_disk:
            self._disk.mkdir(exist_ok=True)
            return Arrival(
                self,
                self._disk,
                os.path.basename(name),
                size,
                f'{no_memory}, so it is kept on the disk, in {self._disk}',
            )
        raise NoRoomError(
            f'{no_memory}, and {megabytes(on_disk)} on the disk of {self._disk.parent}'
        )

    def remove_stale(self) -> None:
        """Remove copies that an earlier run in this work dir left and that no folder names now."""
        current = self._memory_folder()
        with contextlib.suppress(OSError):
            for folder in self._root.glob(f'{self._prefix}*'):
                if folder != current:
                    shutil.rmtree(str(folder), ignore_errors=True)

    def clear(self) -> None:
        """Remove everything."""
        shutil.rmtree(str(self._disk), ignore_errors=True)
        self.remove_stale()

    def drop(self) -> None:
        """Remove the whole copy, because another machine has a newer one."""
        self.keep_only(None)

    def keep_only(self, copy: Optional[Path]) -> None:
        """Remove all whole copies except ``copy``."""
        for path in self._files():
            if path != copy and not path.name.endswith(_PARTIAL):
                with contextlib.suppress(OSError):
                    path.unlink()

    def is_in_memory(self, path: Path) -> bool:
        """Return whether a copy lies in memory."""
        return path.parent != self._disk

    def _files(self) -> List[Path]:
        folders = [folder for folder in (self._memory_folder(), self._disk) if folder is not None]
        # Nothing else in these folders is the store's, nor is a folder that a link leads to.
        return [
            path
            for folder in folders
            if folder.is_dir() and not folder.is_symlink()
            for path in folder.iterdir()
            if _FILES.fullmatch(path.name)
        ]

    def _memory_folder(self) -> Optional[Path]:
        """Return this store's folder in memory; None if it does not exist or has another owner."""
        try:
            folder = self._root / (self._disk / _POINTER).read_text()
            facts = os.lstat(str(folder))
        except (OSError, ValueError):
            return None
        is_ours = folder.parent == self._root and folder.name.startswith(self._prefix)
        return (
            folder
            if is_ours and stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid()
            else None
        )

    def _create_memory_folder(self) -> Path:
        folder = self._memory_folder()
        if folder is None:
            folder = self._root / f'{self._prefix}{uuid.uuid4().hex}'
            folder.mkdir(mode=0o700)
            self._disk.mkdir(exist_ok=True)
            atomic_write(self._disk / _POINTER, folder.name.encode())
        return folder

    def _free_memory(self) -> int:
        """Return how many bytes a copy may take. Half of the available memory stays free."""
        return min(_free(self._root), _available_memory() // 2)


class Arrival:
    """A copy that is being written. Use :meth:`CopyStore.arrive`.

    Attributes:
        remark: Sentence about the location of the copy if it is not in memory; else empty.
    """

    def __init__(
        self, store: CopyStore, folder: Path, name: str, size: int, remark: str = ''
    ) -> None:
        self._store, self._name, self._left, self._size = store, name, size, size
        self._path = folder / f'{uuid.uuid4().hex}{_PARTIAL}'
        self._file = open(self._path, 'xb', buffering=0)
        self._crc, self.remark = 0, remark

    def write(self, data: Union[bytes, memoryview]) -> None:
        """Append bytes.

        Args:
            data: Next bytes of the file.

        Raises:
            OSError: If they cannot be written.
        """
        left = memoryview(data).cast('B')
        self._crc, self._left = zlib.crc32(left, self._crc), self._left - len(left)
        while len(left):
            left = left[self._file.write(left) :]

    def keep(self, checksum: int) -> Path:
        """Replace the previous copy by this one; return its path.

        Args:
            checksum: CRC-32 of the file that was sent.

        Raises:
            DamagedCopyError: If the copy is incomplete or has another checksum.
        """
        self._file.close()
        if self._left or self._crc != checksum:
            self.drop()
            raise DamagedCopyError(
                f'the copy of {self._name} that arrived on {socket.gethostname()} is not what was '
                f'sent: {self._left} of {self._size} bytes are missing, or its checksum '
                f'{self._crc:08x} is not {checksum:08x}'
            )
        path = self._path.with_name(f'{self._size}-{checksum:08x}-{self._name}')
        os.replace(str(self._path), str(path))
        self._store.keep_only(path)
        return path

    def drop(self) -> None:
        """Remove the copy, unless :meth:`keep` has succeeded."""
        self._file.close()
        with contextlib.suppress(OSError):
            self._path.unlink()


def checksum_of(path: Union[str, Path]) -> int:
    """Return the CRC-32 of a file."""
    crc = 0
    with open(path, 'rb', buffering=0) as file:
        while True:
            data = file.read(CHUNK_BYTES)
            if not data:
                return crc
            crc = zlib.crc32(data, crc)


def megabytes(size: int) -> str:
    """Format a number of bytes, such as ``'9.4 MB'``."""
    return f'{size / 1e6:,.1f} MB'


def _free(folder: Path) -> int:
    try:
        return shutil.disk_usage(str(folder)).free
    except OSError:
        # The folder does not exist.
        return 0


def _available_memory() -> int:
    """Return the bytes that this machine and this process's control group have left (proc(5))."""
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
        ('memory/memory.limit_in_bytes', 'memory/memory.usage_in_bytes', 'total_inactive_file'),
    ):
        # The files may be missing, and the limit may be 'max' instead of a number.
        with contextlib.suppress(OSError, ValueError, KeyError):
            most = int((_GROUPS / limit).read_text())
            facts = dict(
                line.split()
                for line in (_GROUPS / limit).with_name('memory.stat').read_text().splitlines()
            )
            left.append(most - int((_GROUPS / used).read_text()) + int(facts[reclaimed]))
    return left
