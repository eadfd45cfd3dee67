"""Errors of scenes, maps and vector files, and the two types that name what was requested.

Every message names the file. A damaged file (`RasterBlockError`) and a server that does not answer
(`RemoteReadError`) are different errors, because the next step of the user differs;
`read_failures.py` decides which one a failed read is.
"""

from __future__ import annotations

import os
from typing import Any, Sequence, Tuple, Union

from mapsage.base.errors import UserError

PathName = Union[str, 'os.PathLike[str]']
"""Path of a file, or a name that GDAL opens."""

Box = Tuple[int, int, int, int]
"""A window in pixels: column, row, width, height."""


class GeoError(UserError, ValueError):
    """A scene, map or vector file cannot be used as requested; the message names the file."""


class RemoteReadError(GeoError):
    """A server did not deliver part of a scene; the message names both."""


class RasterBlockError(UserError, RuntimeError):
    """A window of a scene cannot be decoded, because the file is damaged.

    Attributes:
        path: Path of the file.
        window: Requested window: (column, row, width, height) in pixels.
        blocks: Damaged blocks, each (column, row, width, height) in pixels of the scene.
        reason: Error message of GDAL.
    """

    def __init__(
        self,
        message: str,
        path: str = '',
        window: Box = (0, 0, 0, 0),
        blocks: Sequence[Box] = (),
        reason: str = '',
    ) -> None:
        super().__init__(message)
        self.path, self.window, self.blocks, self.reason = path, window, list(blocks), reason

    def __reduce__(self) -> Tuple[Any, ...]:
        return type(self), (str(self), self.path, self.window, self.blocks, self.reason)
