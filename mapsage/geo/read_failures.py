"""Why a window could not be read: damaged blocks, or a server that did not deliver.

GDAL says that a read failed, and not where. So the blocks of the window are examined one by one,
except where a server is at fault: it would keep every further request waiting, too.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Iterator, List, Sequence, Union

from rasterio.errors import RasterioIOError
from rasterio.windows import Window

from . import gdal_names, vsi
from .errors import Box, RasterBlockError, RemoteReadError
from .file_handles import FileHandles
from .gdal_files import gdal_environment

# Error texts that mean the bytes arrived but are damaged. rasterio 1.3 does not give the cause of a
# failed read; such an error counts as a fault of the server.
_DECODING = re.compile('decod|decompress|inflat', re.IGNORECASE)


@dataclass(frozen=True)
class BlockGrid:
    """The blocks in which a file stores its pixels.

    Attributes:
        width: Width of the scene in pixels.
        height: Height of the scene in pixels.
        rows: Height of a block in pixels.
        columns: Width of a block in pixels.
    """

    width: int
    height: int
    rows: int
    columns: int

    def meeting(self, window: Box) -> Iterator[Box]:
        """Yield the blocks that a window meets, cut at the edges of the scene."""
        column, row, width, height = window
        for top in range(row // self.rows * self.rows, row + height, self.rows):
            for left in range(column // self.columns * self.columns, column + width, self.columns):
                yield (
                    left,
                    top,
                    min(self.columns, self.width - left),
                    min(self.rows, self.height - top),
                )


@dataclass(frozen=True)
class FailedRead:
    """A window of a file that could not be read.

    Attributes:
        handles: Open files of the raster.
        is_remote: Whether the pixels come from a server.
        bands: Band numbers that were read, counted from 1.
        grid: Blocks of the file.
        window: Requested window, which lies inside the scene.
    """

    handles: FileHandles
    is_remote: bool
    bands: Sequence[int]
    grid: BlockGrid
    window: Box

    def explain(self, error: RasterioIOError) -> Union[RasterBlockError, RemoteReadError]:
        """Return the error to raise for a failed read.

        Args:
            error: Error that rasterio raised.
        """
        path = self.handles.path
        reason, cause = str(error.__cause__ or error), _first_cause(error)
        arrived = not self.is_remote or _DECODING.search(cause) is not None
        # If the server is at fault, reading block by block would wait for it again and again.
        damaged = self._damaged_blocks() if arrived else self._cut_blocks()
        if not (arrived or damaged):
            return RemoteReadError(
                f'{path}: the server did not deliver the window (column, row, width, height) '
                f'= {self.window} ({cause}). Try again; if it is slow, raise '
                f'GDAL_HTTP_LOW_SPEED_TIME={os.environ.get("GDAL_HTTP_LOW_SPEED_TIME")} and '
                f'GDAL_HTTP_TIMEOUT={os.environ.get("GDAL_HTTP_TIMEOUT")} seconds; if it is always '
                'the same window, the file may be damaged there: copy it here.'
            )
        shown = ', '.join(map(str, damaged[:4])) + (' ...' if len(damaged) > 4 else '')
        return RasterBlockError(
            f'{path}: the window (column, row, width, height) = {self.window} cannot be decoded, '
            f'damaged are {len(damaged)} block(s): {shown or "none if read singly"} ({reason}). '
            'Copy the file again, or compare its checksum with the source.',
            path,
            self.window,
            damaged,
            reason,
        )

    def _damaged_blocks(self) -> List[Box]:
        """Return the blocks in the window that cannot be decoded, by reading each of them."""
        damaged = []
        for box in self.grid.meeting(self.window):
            try:
                with gdal_environment(self.handles.path, self.is_remote):
                    self.handles.get().read(self.bands, window=Window(*box))
            except RasterioIOError:
                self.handles.drop()
                damaged.append(box)
        return damaged

    def _cut_blocks(self) -> List[Box]:
        """Return the blocks of a TIFF on a server that would lie behind the end of the file.

        The file is cut off if its table of blocks refers to bytes that the server does not have.
        """
        path = self.handles.path
        size = vsi.size_in(vsi.headers(gdal_names.remote_file(path)))
        if size is None or gdal_names.is_packed(path):
            return []
        cut = []
        for box in self.grid.meeting(self.window):
            for band in self.bands:
                offset, length = (
                    self.handles.get().get_tag_item(
                        f'BLOCK_{field}_{box[0] // self.grid.columns}_{box[1] // self.grid.rows}',
                        'TIFF',
                        bidx=band,
                    )
                    for field in ('OFFSET', 'SIZE')
                )
                if offset and length and int(offset) + int(length) > size:
                    cut.append(box)
                    break
        return cut


def _first_cause(error: BaseException) -> str:
    """Return the text of the error at the beginning of the chain of causes."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error)
