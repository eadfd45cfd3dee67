"""Maps for an object store: written to a local folder first, and uploaded when they are finished.

GDAL writes rasters with seeks, which object stores do not have. The report of a map is uploaded
last, so a map whose report is in the store is complete there. Local files stay; they may be removed.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Mapping, Optional, Set

from mapsage.geo import as_vsi, content_of, is_remote, list_folder, remove_file, write_file

from .errors import PredictError
from .outputs import Outputs, is_done


def local_folder(out: str) -> Path:
    """Return the folder in which maps are written: ``out``, or one for a name in an object store.

    Example:
        >>> str(local_folder('s3://bucket/maps/'))
        's3-bucket-maps'
    """
    if not is_remote(out):
        return Path(out)
    return Path(re.sub(r'[\\/:]+', '-', out.strip('/')))


class Upload:
    """The folder of an object store that gets the maps.

    Args:
        out: Name of the folder: ``s3://bucket/maps/``, ``gs://...``, ``az://...``.

    Raises:
        PredictError: If nothing can be written to servers of this kind.
    """

    def __init__(self, out: str) -> None:
        self._name = out.rstrip('/') + '/'
        self._folder = as_vsi(self._name)
        if not re.match('/vsi(s3|gs|az|oss)/', self._folder):
            raise PredictError(
                f'--out {out}: expected a folder of this machine, or of an object store that can be '
                f'written (s3://, gs://, az://, oss://).'
            )
        self._present: Optional[Set[str]] = None

    def check(self) -> str:
        """Write and remove a small object; return a line for the user.

        Raises:
            PredictError: If the store refuses it.
        """
        probe = f'{self._folder}.mapsage-{os.urandom(8).hex()}'
        try:
            write_file(b'', probe)
            remove_file(probe)
        except OSError as error:
            raise PredictError(
                f'--out {self._name} cannot be written: {error}. Check its name, the credentials '
                f'and the endpoint.'
            ) from error
        self._present = set(list_folder(self._folder))
        return (
            f'maps are written to the folder {local_folder(self._name)}, and uploaded to '
            f'{self._name} when they are finished'
        )

    def has(self, outputs: Outputs, settings: Mapping[str, object]) -> bool:
        """Return whether the store has a map that was made with these settings.

        Its report is copied to the local folder, unless there is one.

        Raises:
            PredictError: In the cases of :func:`is_done`.
        """
        assert self._present is not None
        if not outputs.report.exists() and outputs.report.name in self._present:
            try:
                report = content_of(self._folder + outputs.report.name)
            except OSError as error:
                raise PredictError(f'{self._name}{outputs.report.name}: {error}.') from error
            outputs.report.write_bytes(report)
        present = self._present
        if not is_done(outputs, settings, lambda path: path.name in present):
            return False
        if outputs.polygons is not None and outputs.polygons.name not in present:
            raise PredictError(
                f'{self._name}{outputs.map.name} has no polygons there. Add --overwrite, or make '
                f'them of a local copy.'
            )
        return outputs.report.name in present

    def send(self, outputs: Outputs) -> None:
        """Upload the files of a finished map, the report last.

        Raises:
            PredictError: If a file does not arrive whole.
        """
        if self._present and outputs.report.name in self._present:
            # An earlier map is incomplete from now on.
            with suppress(OSError):
                remove_file(self._folder + outputs.report.name)
        for path in [*filter(os.path.exists, outputs.files()), outputs.report]:
            try:
                write_file(path, self._folder + path.name)
            except OSError as error:
                raise PredictError(
                    f'{path} was not uploaded to {self._name}: {error}. What is finished stays: '
                    f'the same command continues.'
                ) from error
