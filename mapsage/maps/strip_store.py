"""Finished strips on disk, from which a stopped prediction continues.

A strip is written as soon as it is blended, under a folder name that depends on everything the map
depends on (`key_of`): strips of other settings can never be mixed into a map. `assembly.py` reads
the strips when all of them are finished. A crash may leave a damaged file, so reading
verifies the checksum and the shape.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import uuid
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Mapping

import numpy as np

from mapsage.base.files import atomic_write, parse_json

from .errors import PredictError
from .strips import Strip
from .windows import Grid

# Largest size in bytes of a strip's lines about unreadable blocks.
_MOST_DAMAGE = 1 << 26
# Fastest level of zlib; class maps compress well at any level.
_LEVEL = 1


def key_of(settings: Mapping[str, object]) -> str:
    """Return a short key of all settings of a map; different settings have different keys."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def remove_folder(folder: Path) -> None:
    """Remove a folder at once: what another job makes under its name meanwhile is a new folder."""
    removed = folder.with_name(f'{folder.name}.{uuid.uuid4().hex[:8]}')
    with suppress(FileNotFoundError):
        folder.rename(removed)
        shutil.rmtree(removed, ignore_errors=True)


class StripStore:
    """The finished strips of a map in a hidden folder beside the map.

    A strip is written atomically, and its checksum is verified when it is read.

    Args:
        folder: Folder of the strips; created with the first strip.
        grid: Windows of the scene.
        confidence: Whether strips have a confidence plane.
        probabilities: Number of probability planes of a strip; 0 for none.
    """

    def __init__(self, folder: Path, grid: Grid, confidence: bool, probabilities: int = 0) -> None:
        self.folder, self._grid = folder, grid
        self._confidence, self._probabilities = int(confidence), probabilities

    def remove_damaged(self) -> None:
        """Read all finished strips, and remove the damaged ones."""
        for number in filter(self.has, range(self._grid.strip_count)):
            try:
                self.read(number)
            except PredictError:
                self._path(number).unlink()

    def has(self, number: int) -> bool:
        """Return whether a strip is there, damaged or not."""
        return self._path(number).exists()

    def write(self, strip: Strip) -> None:
        """Write a strip.

        Raises:
            PredictError: If the disk is full or the folder cannot be written.
        """
        planes = [
            strip.classes,
            *([] if strip.confidence is None else [strip.confidence]),
            *([] if strip.probabilities is None else strip.probabilities),
        ]
        packer = zlib.compressobj(_LEVEL)
        packed = [packer.compress(json.dumps(strip.damage).encode() + b'\n')]
        # Plane by plane, so that only the packed pixels are in memory twice.
        for plane in planes:
            packed.append(packer.compress(plane.tobytes()))
        data = b''.join(packed) + packer.flush()
        path = self._path(strip.number)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            atomic_write(path, data)
        except OSError as error:
            raise PredictError(
                f'cannot write {path}: {error}. Free space there, or write elsewhere with --out. '
                f'What is finished stays: the same command continues.'
            ) from error

    def read(self, number: int) -> Strip:
        """Return a strip.

        Raises:
            PredictError: If it is missing or damaged.
        """
        start, stop = self._grid.strip(number)
        left, right = self._grid.span(number)
        path = self._path(number)
        try:
            first = 1 + self._confidence
            shape = (first + self._probabilities, stop - start, right - left)
            unpacker = zlib.decompressobj()
            # Limited, because a damaged file of a few bytes may unpack into gigabytes.
            most = int(np.prod(shape)) + _MOST_DAMAGE
            content = unpacker.decompress(path.read_bytes(), most)
            if not unpacker.eof:
                raise ValueError('it is cut off, or longer than a strip')
            head, pixels = content.split(b'\n', 1)
            planes = np.frombuffer(pixels, np.uint8).reshape(shape)
            damage = parse_json(head)
            if not isinstance(damage, list) or not all(isinstance(line, str) for line in damage):
                raise ValueError('it does not say what could not be read')
            return Strip(
                number,
                planes[0],
                planes[1] if self._confidence else None,
                damage,
                planes[first:] if self._probabilities else None,
            )
        except FileNotFoundError as error:
            raise PredictError(
                f'{path} is missing. With several ranks, --out must be on a storage '
                f'that all of them share.'
            ) from error
        except (OSError, ValueError, zlib.error) as error:
            raise PredictError(
                f'{path} is damaged ({error}). Start the same command again: it '
                f'predicts these rows again.'
            ) from error

    def remove(self) -> None:
        """Remove the folder with all strips."""
        remove_folder(self.folder)

    def _path(self, number: int) -> Path:
        return self.folder / f'strip{number:06d}'
