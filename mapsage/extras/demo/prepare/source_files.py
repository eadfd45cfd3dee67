"""The files of a provider's delivery, either unpacked or in the zip archives as shipped.

`list_files` lists both in the same form, so the layouts need not know about archives. An archive in
an archive is not opened; the error message asks the user to unpack it.
"""

from __future__ import annotations

import shutil
import tempfile
import zipfile
import zlib
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, Iterator, List, Optional, Pattern, Sequence, Tuple

from mapsage.base.errors import UserError

# Number of names that an error message lists.
_SHOWN = 5

# More than any file of the deliveries: the largest images have 200 MB.
_MOST_BYTES = 1 << 30

# Prefix of the temporary folders of unpacked files.
EXTRACTED = '.extracted-'


class PrepareError(UserError, ValueError):
    """The delivery or the output folder is not as expected; the message says what is expected."""


@dataclass(frozen=True)
class SourceFile:
    """A file of the delivery.

    Attributes:
        path: Path of the file, or of the archive that contains it.
        member: Name in the archive; None for a plain file.
        location: Path below the source folder, with ``/``; an archive counts as a folder.
    """

    path: Path
    member: Optional[str]
    location: str

    def __str__(self) -> str:
        return str(self.path) if self.member is None else f'{self.path}: {self.member}'

    def read(self) -> bytes:
        """Return the whole content; the checksum in an archive is verified.

        Raises:
            PrepareError: If the archive is corrupt at this file, encrypted, or packed with an
                unknown method, or the file is larger than any of the deliveries.
        """
        if self.member is None:
            _check_size(self, self.path.stat().st_size)
            with _reading(self):
                return self.path.read_bytes()
        with _reading(self), zipfile.ZipFile(str(self.path)) as archive:
            # Never more than this is unpacked, whatever the archive contains.
            _check_size(self, archive.getinfo(self.member).file_size)
            return archive.read(self.member)

    @contextmanager
    def on_disk(self, folder: Path) -> Iterator[Path]:
        """Return a context with the path of a plain file.

        A file in an archive is unpacked below ``folder``, and removed at the end of the context.

        Raises:
            PrepareError: For the same reasons as in ``read``.
        """
        if self.member is None:
            yield self.path
            return
        with tempfile.TemporaryDirectory(prefix=EXTRACTED, dir=str(folder)) as temporary:
            copy = Path(temporary) / Path(self.member).name
            with _reading(self), zipfile.ZipFile(str(self.path)) as archive:
                _check_size(self, archive.getinfo(self.member).file_size)
                with archive.open(self.member) as packed, copy.open('wb') as unpacked:
                    shutil.copyfileobj(packed, unpacked, 1 << 20)
            yield copy


def _check_size(file: SourceFile, size: int) -> None:
    if size > _MOST_BYTES:
        raise PrepareError(
            f'{file} has {size / 1e9:,.1f} GB, expected an image of at most '
            f'{_MOST_BYTES / 1e9:,.1f} GB; it is not a file of the delivery'
        )


@contextmanager
def _reading(file: SourceFile) -> Iterator[None]:
    """Turn the errors of the zip modules into a PrepareError that names the file."""
    try:
        yield
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise PrepareError(
            f'{file} cannot be unpacked ({error}); the archive is damaged, download it again'
        ) from error
    except MemoryError as error:
        raise PrepareError(
            f'{file} does not fit into the free memory; run again with fewer '
            f'--workers, or on a machine with more memory'
        ) from error
    # Encrypted files raise RuntimeError, and unknown methods NotImplementedError, a subclass.
    except RuntimeError as error:
        raise PrepareError(
            f'{file} cannot be unpacked here ({error}); unpack the archive with '
            'another program, and give the folder with the files'
        ) from error


def list_files(source: Path) -> List[SourceFile]:
    """Return the files of ``source`` (a folder or one archive), including those in zip archives.

    Raises:
        PrepareError: If ``source`` does not exist or an archive cannot be read.
    """
    if not source.exists():
        raise PrepareError(
            f'{source} does not exist; give the folder of the downloaded archives, '
            'or of what they unpack to'
        )
    plain = [source] if source.is_file() else sorted(p for p in source.rglob('*') if p.is_file())
    base = source.parent if source.is_file() else source
    files = []
    for path in plain:
        location = path.relative_to(base).as_posix()
        if path.suffix.lower() != '.zip':
            files.append(SourceFile(path, None, location))
            continue
        try:
            with zipfile.ZipFile(str(path)) as archive:
                names = [info.filename for info in archive.infolist() if not info.is_dir()]
        except (zipfile.BadZipFile, EOFError) as error:
            raise PrepareError(
                f'{path} ({path.stat().st_size} bytes) is not a complete zip archive ({error}); '
                'the download was probably cut off, fetch it again'
            ) from error
        except NotImplementedError as error:
            raise PrepareError(
                f'{path} cannot be read here ({error}); unpack it with another '
                'program, and give the folder with the files'
            ) from error
        files += [SourceFile(path, name, f'{location}/{name}') for name in names]
    return files


def select(files: Sequence[SourceFile], pattern: Pattern[str]) -> Dict[Tuple[str, ...], SourceFile]:
    """Return the files whose location matches ``pattern`` up to its end, by the match's groups.

    If a file exists both unpacked and in an archive, the unpacked file is taken.

    Raises:
        PrepareError: If two unpacked files, or two files in archives, match with the same groups.
    """
    selected: Dict[Tuple[str, ...], SourceFile] = {}
    for file in files:
        match = pattern.search(file.location)
        if match is None or match.end() != len(file.location):
            continue
        earlier = selected.setdefault(match.groups(), file)
        if (earlier.member is None) == (file.member is None) and earlier is not file:
            raise PrepareError(
                f'{earlier} and {file} are both {"_".join(match.groups())}; keep '
                'one of them in the source folder'
            )
        if file.member is None:
            selected[match.groups()] = file
    return selected


def some(names: Sequence[str]) -> str:
    """Return text with the first names and the number of further names, for a message."""
    rest = len(names) - _SHOWN
    return ', '.join(names[:_SHOWN]) + (f' and {rest} more' if rest > 0 else '')


def nothing_found(source: Path, files: Sequence[SourceFile], expected: str) -> PrepareError:
    """Return the error for a source without the expected files; it lists the existing files."""
    archives = sorted({str(f.path.name) for f in files if f.member})
    inner = sorted(
        {
            f'{f.path.name}: {f.member}'
            for f in files
            if f.member and f.member.lower().endswith('.zip')
        }
    )
    folders = sorted({f.location.rsplit('/', 1)[0] for f in files if '/' in f.location})
    hint = f' Unpack the archives in the archive first: {some(inner)}.' if inner else ''
    return PrepareError(
        f'{source} holds no {expected}. It holds {len(files)} files, archives: '
        f'{some(archives) or "none"}; folders: {some(folders) or "none"}.{hint} '
        'docs/reference/datasets.md says what to download.'
    )
