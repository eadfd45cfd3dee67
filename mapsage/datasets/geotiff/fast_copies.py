"""A folder of fast copies of scenes and label rasters, which runs and ranks share.

A copy is a folder `NAME-<path>-<content>` with `NAME.tif` and `source.json`. Its name depends on
path, size and time of change of the source, so a changed source gets a new copy. A copy is written
under another name and renamed, so whatever has the final name is complete. The processes that need
copies divide them by claims (`mapsage/base/folder_claims.py`), which end with their process. How a copy
is written is in `mapsage/geo/fast_copy.py`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import re
import shutil
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

from mapsage.base.file_locks import lock
from mapsage.base.files import parse_json
from mapsage.base.folder_claims import FolderClaimedError, claimed
from mapsage.geo import (
    GeoError,
    NotCopiedError,
    Raster,
    estimate_copy_bytes,
    output_name,
    stamp,
    without_secrets,
    write_fast_copy,
)

from .copy_progress import CopyProgress

DEFAULT_SIZE = '100G'

# Format of the copies. It is part of their names, so copies of another format are not read.
_FORMAT = 1
_SOURCE = 'source.json'
_PARTIAL = '.partial-'
# Name of the folder of a copy: name of the source, hash of its path, hash of its content.
_COPY = re.compile(r'.+-[0-9a-f]{8}-[0-9a-f]{16}', re.DOTALL)
_IN_USE = '.in-use'
_SIZE = re.compile(r'(\d+(?:\.\d+)?)\s*([KMGT]?)B?', re.IGNORECASE)
_UNITS = {'': 1, 'K': 10**3, 'M': 10**6, 'G': 10**9, 'T': 10**12}
# Mean seconds between two looks at the copies that other processes make.
_PAUSE = 0.3
# Locked files that tell other processes not to remove copies, by folder. They stay open until the
# process ends.
_in_use: Dict[Path, int] = {}


class FastCopyError(GeoError):
    """The copies cannot be made as requested; nothing is left half written."""


@dataclass(frozen=True)
class FastCopy:
    """A copy that a source needs.

    Attributes:
        source: Path of the raster, or a name that GDAL opens.
        folder: Folder of the copy; it exists if the copy is complete.
        stamps: Stamps of all files of the source.
    """

    source: str
    folder: Path
    stamps: List[List[Any]]

    @property
    def path(self) -> Path:
        """Path of the copied raster."""
        return self.folder / f'{output_name(self.source)}.tif'

    def is_complete(self) -> bool:
        """Return whether the copy exists and has the size that was written."""
        size = _description(self.folder).get('bytes')
        try:
            return size is not None and self.path.stat().st_size == size
        except OSError:
            return False


@dataclass
class FastCopyReport:
    """The result of :meth:`FastCopies.make`.

    Attributes:
        copies: Path of the copy, by the path of its source.
        originals: Reason why a source is read itself, by its path.
        written: Number of copies that this process wrote.
        dropped: Number of copies of changed sources that this process removed.
    """

    copies: Dict[str, str]
    originals: Dict[str, str]
    written: int = 0
    dropped: int = 0


class FastCopies:
    """Copies of rasters in a folder of bounded size.

    Args:
        folder: Folder of the copies, created if necessary.
        max_size: Largest size of the folder in bytes, or a text such as ``'100G'`` (10^9 bytes).

    Raises:
        FastCopyError: If ``max_size`` is not a size.
    """

    def __init__(self, folder: str, max_size: object = DEFAULT_SIZE) -> None:
        self.folder = Path(os.path.abspath(os.path.expanduser(str(folder))))
        self.max_size = _parse_size(max_size)

    @classmethod
    def of_config(cls, config: object) -> FastCopies:
        """Return the copies that ``fast_copy=dict(folder=..., max_size=...)`` of a dataset means.

        Raises:
            FastCopyError: If the config has other keys, or no folder.
        """
        if (
            not isinstance(config, Mapping)
            or not isinstance(config.get('folder'), str)
            or not config.keys() <= {'folder', 'max_size'}
        ):
            raise FastCopyError(
                f"fast_copy={config!r}, expected dict(folder='...'), with or "
                f"without max_size='{DEFAULT_SIZE}'."
            )
        return cls(**config)

    def plan(self, sources: Sequence[str]) -> Tuple[List[FastCopy], Dict[str, str]]:
        """Return the copies of sources, complete or not, and why other sources have none.

        Args:
            sources: Paths of rasters, or names that GDAL opens.
        """
        wanted, originals = [], {}
        for source in dict.fromkeys(sources):
            copy = self._copy_of(source)
            if copy is None:
                originals[source] = 'nothing tells when its content changes'
            else:
                wanted.append(copy)
        return wanted, originals

    def make(
        self, sources: Sequence[str], say: Optional[Callable[[str], None]] = None
    ) -> FastCopyReport:
        """Make the copies that are missing, together with other processes that need them.

        Args:
            sources: Paths of rasters, or names that GDAL opens.
            say: Function that prints a line about the progress; None to show nothing. On a terminal
                a bar is shown in place of the lines.

        Raises:
            FastCopyError: If the copies need more than ``max_size`` or the free space, and nothing
            was
                written; or if the folder cannot be written.
            GeoError: If the disk is full in the meantime, or a source changes or is damaged.
        """
        wanted, originals = self.plan(sources)
        report = FastCopyReport({}, originals)
        report.dropped = self._drop_changed(wanted)
        missing = [copy for copy in wanted if not copy.is_complete()]
        if missing:
            self._create_folder()
            self._remove_abandoned()
            sizes = _estimate(missing, originals)
            self._check_room(missing, sizes)
            missing = [copy for copy in missing if copy.source in sizes]
            sources = [copy.source for copy in missing]
            with CopyProgress(sources, self.folder, say) as progress, _write_errors(self.folder):
                report.written = self._make_missing(missing, progress, originals)
        report.copies.update(
            (copy.source, str(copy.path)) for copy in wanted if copy.source not in originals
        )
        self._mark_in_use()
        return report

    def missing_bytes(self, sources: Sequence[str]) -> Tuple[int, int]:
        """Return how many copies are missing, and about how many bytes they need.

        Raises:
            FastCopyError: If there is no room for them.
        """
        wanted, originals = self.plan(sources)
        missing = [copy for copy in wanted if not copy.is_complete()]
        sizes = _estimate(missing, originals)
        self._check_room(missing, sizes)
        return len(sizes), sum(sizes.values())

    def _copy_of(self, source: str) -> Optional[FastCopy]:
        """Return the copy of a source, or None if a change of the source would not be noticed."""
        with Raster(source, keep_open=True) as raster:
            facts, files = raster.facts(), raster.files()
        try:
            stamps = [stamp(path) for path in files]
        except OSError:
            return None
        # A stamp of one value is the name of the file only.
        if any(len(file_stamp) < 2 for file_stamp in stamps):
            return None
        path_key, content_key = (
            hashlib.sha256(json.dumps(key).encode()).hexdigest()[:length]
            for key, length in ((stamps[0][0], 8), ([_FORMAT, facts, stamps], 16))
        )
        return FastCopy(
            source, self.folder / f'{output_name(source)}-{path_key}-{content_key}', stamps
        )

    def _create_folder(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            probe = self.folder / f'.probe-{uuid.uuid4().hex}'
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise FastCopyError(
                f'fast copies are missing, and {self.folder} cannot be written ({error}). Name a '
                'folder that can be written in fast_copy=dict(folder=...), or let a user who may '
                'write it run `mapsage prepare scenes`.'
            ) from error

    def _remove_abandoned(self) -> None:
        """Remove what killed processes left: partial copies that no process claims."""
        for partial in self.folder.glob(f'{_PARTIAL}*'):
            name = partial.name[len(_PARTIAL) :].rpartition('-')[0]
            if not _COPY.fullmatch(name):
                continue
            with contextlib.suppress(FolderClaimedError), claimed(
                self.folder, [name], '', patience=0.0
            ):
                shutil.rmtree(str(partial), ignore_errors=True)

    def _check_room(self, missing: List[FastCopy], sizes: Mapping[str, int]) -> None:
        """Check that there is room for copies.

        Args:
            missing: Copies to make.
            sizes: Bytes that they need, by source.

        Raises:
            FastCopyError: If they exceed ``max_size`` or the free space.
        """
        existing = {folder.name: _size(folder) for folder in self._existing()}
        # Another process may have completed a copy in the meantime, which then counts once.
        needs = [
            sizes[copy.source]
            for copy in missing
            if copy.source in sizes and copy.folder.name not in existing
        ]
        needed, count, used = sum(needs), len(needs), sum(existing.values())
        if used + needed > self.max_size:
            raise FastCopyError(
                f'{count} fast cop{"y" if count == 1 else "ies"} need about {needed:,} bytes, and '
                f'{self.folder} has {used:,} bytes of others: together more than max_size = '
                f'{self.max_size:,} bytes. Set fast_copy=dict(folder=..., max_size='
                f"'{-(-(used + needed) // 10**9)}G'), or remove copies there that no run needs. "
                'Nothing was written.'
            )
        parent = next(folder for folder in (self.folder, *self.folder.parents) if folder.is_dir())
        # The bytes of a partial copy are among those that it needs.
        free = shutil.disk_usage(str(parent)).free + sum(
            _size(partial) for partial in self.folder.glob(f'{_PARTIAL}*')
        )
        if needed > free:
            raise FastCopyError(
                f'{count} fast cop{"y" if count == 1 else "ies"} need about {needed:,} bytes, and '
                f'{free:,} bytes are free in {parent}. Free space there, or name a folder on '
                'another disk in fast_copy=dict(folder=...). Nothing was written.'
            )

    def _make_missing(
        self, missing: List[FastCopy], progress: CopyProgress, originals: Dict[str, str]
    ) -> int:
        """Write copies until all exist, and wait for those that other processes write.

        Returns:
            The number of copies that this process wrote.
        """
        written = 0
        while missing:
            waiting, holder = [], ''
            for copy in missing:
                if not copy.is_complete():
                    try:
                        with claimed(self.folder, [copy.folder.name], '', patience=0.0):
                            # Another process may have written it before this one had the claim.
                            if not copy.is_complete():
                                self._write(copy, progress)
                                written += 1
                    except FolderClaimedError as error:
                        waiting.append(copy)
                        holder = str(error)
                        continue
                    except NotCopiedError as error:
                        originals[copy.source] = str(error)
                progress.finish(copy.source)
            if waiting:
                progress.show(f'waiting: {holder.strip()}')
                time.sleep(random.SystemRandom().uniform(0, 2 * _PAUSE))
            missing = waiting
        return written

    def _write(self, copy: FastCopy, progress: CopyProgress) -> None:
        """Write a copy under another name and rename it; this process has its claim."""
        partial = self.folder / f'{_PARTIAL}{copy.folder.name}-{uuid.uuid4().hex[:8]}'
        path = partial / copy.path.name
        try:
            with _write_errors(self.folder):
                partial.mkdir()
            write_fast_copy(copy.source, path, lambda count: progress.copied(copy.source, count))
            if self._copy_of(copy.source) != copy:
                raise FastCopyError(
                    f'{copy.source} changed while it was copied. Start again when it is complete.'
                )
            with _write_errors(self.folder):
                self._check_written(copy, path.stat().st_size)
                description = dict(
                    source=copy.stamps[0][0], stamps=copy.stamps, bytes=path.stat().st_size
                )
                (partial / _SOURCE).write_text(json.dumps(description), encoding='utf-8')
                for file in partial.iterdir():
                    _flush(file)
                # What is there is damaged, or its locks do not reach this machine.
                if copy.folder.exists():
                    self._remove(copy.folder)
                os.rename(str(partial), str(copy.folder))
        finally:
            shutil.rmtree(str(partial), ignore_errors=True)

    def _check_written(self, copy: FastCopy, size: int) -> None:
        """Check the bound again with the real size, because the first check had an estimate."""
        used = sum(_size(folder) for folder in self._existing())
        if used + size > self.max_size:
            raise FastCopyError(
                f'the fast copy of {copy.source} has {size:,} bytes, more than estimated: with '
                f'{used:,} bytes of others in {self.folder} it exceeds max_size = '
                f'{self.max_size:,}. Raise max_size; the copies that are complete stay.'
            )

    def _existing(self) -> List[Path]:
        """Return the folders of complete copies."""
        return [
            path.parent
            for path in sorted(self.folder.glob(f'[!.]*/{_SOURCE}'))
            if _COPY.fullmatch(path.parent.name)
        ]

    def _drop_changed(self, wanted: List[FastCopy]) -> int:
        """Remove copies whose source has changed, unless another run uses the folder.

        Returns:
            The number of removed copies.
        """
        current = {copy.stamps[0][0]: copy.folder.name for copy in wanted}
        with self._exclusive() as alone:
            changed = [
                folder for folder in self._existing() if alone and _has_changed(folder, current)
            ]
            for folder in changed:
                self._remove(folder)
        return len(changed)

    def _remove(self, folder: Path) -> None:
        """Remove a copy; at no time does its name belong to an incomplete copy."""
        hidden = self.folder / f'{_PARTIAL}{folder.name}-{uuid.uuid4().hex[:8]}'
        with contextlib.suppress(FileNotFoundError):
            os.rename(str(folder), str(hidden))
        shutil.rmtree(str(hidden), ignore_errors=True)

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[bool]:
        """Return a context with whether no process, this one included, uses the copies."""
        descriptor, alone = -1, False
        # There may be no folder, or it cannot be written.
        with contextlib.suppress(OSError):
            descriptor = os.open(str(self.folder / _IN_USE), os.O_RDONLY | os.O_CREAT, 0o666)
            alone = bool(lock(descriptor))
        try:
            yield alone
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    def _mark_in_use(self) -> None:
        """Keep other processes from removing copies while this process runs."""
        if self.folder in _in_use:
            return
        # In a folder that cannot be written nobody removes copies, or the file system has no locks.
        with contextlib.suppress(OSError):
            descriptor = os.open(str(self.folder / _IN_USE), os.O_RDONLY | os.O_CREAT, 0o666)
            _in_use[self.folder] = descriptor
            lock(descriptor, shared=True, wait=True)


def _estimate(missing: Sequence[FastCopy], originals: Dict[str, str]) -> Dict[str, int]:
    """Return about how many bytes copies need, by source; without those that cannot be made."""
    sizes = {}
    for copy in missing:
        try:
            sizes[copy.source] = estimate_copy_bytes(copy.source)
        except NotCopiedError as error:
            originals[copy.source] = str(error)
    return sizes


def _has_changed(folder: Path, current: Mapping[str, str]) -> bool:
    """Return whether the source of a copy has changed.

    Args:
        folder: Folder of the copy.
        current: Folder names of the copies that sources have now, by the name in the source's
        stamp.
    """
    description = _description(folder)
    if current.get(str(description.get('source')), folder.name) != folder.name:
        return True
    try:
        return any(
            os.path.exists(old[0]) and stamp(old[0]) != old for old in description.get('stamps', ())
        )
    # The description is not what this module writes, or the source has just been removed.
    except (OSError, TypeError, IndexError, KeyError):
        return False


def _description(folder: Path) -> Dict[str, Any]:
    """Return what ``source.json`` of a copy holds; empty without a valid file."""
    try:
        description = parse_json((folder / _SOURCE).read_text(encoding='utf-8'))
    except (OSError, ValueError):
        return {}
    return description if isinstance(description, dict) else {}


def _size(folder: Path) -> int:
    """Return the bytes of the files of a copy; another process may just remove it."""
    size = 0
    with contextlib.suppress(OSError):
        size += sum(path.stat().st_size for path in folder.iterdir())
    return size


def _flush(file: Path) -> None:
    """Write a file to the disk, so that a power failure leaves no incomplete copy."""
    descriptor = os.open(str(file), os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _write_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FastCopyError(
            f'cannot write into {folder}: {error}. Free space there or give write '
            'permission; the copies that are complete stay.'
        ) from error


def _parse_size(value: object) -> int:
    """Return a size in bytes.

    Raises:
        FastCopyError: If the value is not a number, or a number with K, M, G or T.
    """
    match = _SIZE.fullmatch(str(value).strip())
    if isinstance(value, bool) or match is None:
        raise FastCopyError(f"max_size={value!r}, expected bytes or a text such as '100G'.")
    return int(float(match.group(1)) * _UNITS[match.group(2).upper()])


def describe_report(report: FastCopyReport, folder: Path) -> List[str]:
    """Return lines about what was copied and what was not."""
    lines = [
        f'{len(report.copies)} raster(s) are read from their fast copies in {folder}'
        + (f'; {report.dropped} of changed sources were removed' if report.dropped else '')
    ]
    lines += [
        f'no fast copy of {without_secrets(source)}: {reason}'
        for source, reason in report.originals.items()
    ]
    return lines
