"""Files of a map: their names, the report, what an earlier prediction left of them, and their upload.

The report (`NAME.json`) is written last, so a map whose report exists is complete. It lists the
files of the map and the settings it depends on: only files in this list may be replaced or removed,
everything else in the folder belongs to somebody else. `assembly.py` writes the rasters.

GDAL writes rasters with seeks, which object stores do not have. Maps for a store are written to a
local folder first, and `Upload` sends them when they are finished, the report last.
"""

from __future__ import annotations

import json
import os
import re
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Set

from mapsage.base.files import atomic_write, parse_json
from mapsage.geo import (
    as_vsi,
    confidence_path,
    content_of,
    is_remote,
    list_folder,
    probabilities_path,
    remove_file,
    write_file,
)
from mapsage.geo.change_classes import UNCHANGED, transition_of
from mapsage.geo.change_fields import ChangeFields
from mapsage.geo.polygons import write_polygons

from .description import Classes
from .errors import PredictError
from .strips import key_of


@dataclass(frozen=True)
class Outputs:
    """Paths of the files of one map.

    Attributes:
        map: The class map, ``NAME.tif``.
        confidence: ``NAME_confidence.tif``, or None.
        polygons: ``NAME.gpkg``, or None.
        preview: ``NAME_preview.png``; for a single input ``preview.png``, unless another map has
            this file; or None.
        report: ``NAME.json``: settings of the map, its files, and how many pixels each class has.
        probabilities: ``NAME_probabilities.tif``, or None.
    """

    map: Path
    confidence: Optional[Path]
    polygons: Optional[Path]
    preview: Optional[Path]
    report: Path
    probabilities: Optional[Path] = None

    @classmethod
    def of(
        cls,
        folder: Path,
        name: str,
        confidence: bool,
        polygons: bool,
        single_input: bool,
        probabilities: bool = False,
        preview: bool = True,
    ) -> Outputs:
        """Return the paths for the input ``name``.

        Args:
            folder: Folder of the maps.
            name: Name of the input's outputs, without a suffix.
            confidence, polygons, probabilities, preview: Whether the map has this file.
            single_input: Whether the prediction has no other input.
        """
        map_path = folder / f'{name}.tif'
        outputs = cls(
            map_path,
            Path(confidence_path(map_path)) if confidence else None,
            folder / f'{name}.gpkg' if polygons else None,
            folder / f'{name}_preview.png' if preview else None,
            folder / f'{name}.json',
            Path(probabilities_path(map_path)) if probabilities else None,
        )
        short = folder / 'preview.png'
        if (
            preview
            and single_input
            and (not short.exists() or short.name in outputs.reported_files())
        ):
            outputs = replace(outputs, preview=short)
        return outputs

    def files(self) -> List[Path]:
        """Return the paths of all files except the report."""
        return [
            path
            for path in (self.map, self.confidence, self.probabilities, self.polygons, self.preview)
            if path is not None
        ]

    def strip_folder(self, key: str) -> Path:
        """Return the hidden folder of the finished strips of a map with the settings' key."""
        return self.map.with_name(f'.{self.map.stem}.{key}')

    def reported_files(self) -> List[str]:
        """Return the file names in the report of an earlier prediction; empty without a report."""
        report = self.read_report()
        return [] if report is None else report['files']

    def read_report(self) -> Optional[Dict[str, Any]]:
        """Return the report, or None if it does not exist or is invalid."""
        try:
            report = parse_json(self.report.read_text(encoding='utf-8'))
        except (OSError, ValueError):
            return None
        # Listed files may be removed, so a name must not lead out of this folder.
        is_report = (
            isinstance(report, dict)
            and isinstance(report.get('settings'), dict)
            and isinstance(report.get('files'), list)
            and all(
                isinstance(name, str) and Path(name).name == name != '' and '\0' not in name
                for name in report['files']
            )
        )
        return report if is_report else None


def is_done(
    outputs: Outputs,
    settings: Mapping[str, object],
    exists: Callable[[Path], bool] = Path.exists,
) -> bool:
    """Return whether the map exists and was made with these settings.

    Args:
        outputs: Paths of the map's files.
        settings: Everything that the map depends on.
        exists: Function that returns whether there is a file of the map.

    Raises:
        PredictError: If a file of the map exists but does not belong to it, or the map was made
            with other settings.
    """
    key = key_of(settings)
    # Looked for before the report: another job may write the report and remove the folder now.
    has_strips = outputs.strip_folder(key).exists()
    report = outputs.read_report()
    # Without a report, a folder of strips shows that these files are from an interrupted run.
    if report is not None or not has_strips:
        known = set(outputs.reported_files())
        if report is not None:
            known.add(outputs.report.name)
        foreign = [
            path
            for path in (*outputs.files(), outputs.report)
            if exists(path) and path.name not in known
        ]
        if foreign:
            raise PredictError(
                f'{foreign[0]} exists, and was not made with this map. Choose '
                f'another --out, or add --overwrite.'
            )
    if report is None:
        return False
    if key_of(report['settings']) != key:
        reported = report['settings']
        different = [
            name for name in {**settings, **reported} if settings.get(name) != reported.get(name)
        ]
        raise PredictError(
            f'{outputs.map} was made with another {", ".join(different)}. Choose '
            f'another --out, or add --overwrite.'
        )
    return all(
        path is None or exists(path)
        for path in (outputs.map, outputs.confidence, outputs.probabilities)
    )


def add_polygons(
    outputs: Outputs, classes: Classes, outlines: Mapping[str, Any], dates: Sequence[str] = ()
) -> None:
    """Write the polygons of a finished map, unless it has polygons with the same options.

    ``dates`` are those of a pair of images, as ISO text.
    """
    report, path = outputs.read_report(), outputs.polygons
    if (
        report is None
        or path is None
        or (path.exists() and path.name in report['files'] and report.get('outlines') == outlines)
    ):
        return
    report['polygons'] = write_polygons(
        outputs.map,
        path,
        classes.names,
        palette=classes.palette.tolist(),
        further=change_fields(outputs, classes, dates),
        **outlines,
    )
    report['outlines'] = outlines
    report['files'] = [file.name for file in outputs.files()]
    write_report(outputs.report, report)


def change_fields(
    outputs: Outputs, classes: Classes, dates: Sequence[str]
) -> Optional[ChangeFields]:
    """Return the further fields of polygons of a map of change; None for another map.

    Args:
        outputs: Paths of the map's files.
        classes: Classes of the map.
        dates: Dates of the images, as ISO text; not used unless there are two.
    """
    if UNCHANGED not in classes.names:
        return None
    first, second = dates if len(dates) == 2 else ('', '')
    return ChangeFields(
        [transition_of(name) for name in classes.names], (first, second), outputs.confidence
    )


def remove_outdated(outputs: Outputs) -> None:
    """Remove an earlier map's report, and its files that the new map does not replace.

    The report is removed first, because the map is incomplete from now on.
    """
    report = outputs.read_report()
    if report is not None:
        outputs.report.unlink()
        # A report of somebody may list any file of the folder.
        possible = Outputs.of(outputs.map.parent, outputs.map.stem, True, True, False, True).files()
        removable = {path.name for path in possible} | {'preview.png'}
        for name in set(report['files']) & removable - {path.name for path in outputs.files()}:
            path = outputs.map.with_name(name)
            if path.exists():
                path.unlink()


def write_report(path: Path, report: Mapping[str, object]) -> None:
    """Write a report, which marks its map as complete."""
    with writing(path):
        atomic_write(path, (json.dumps(report, indent=1) + '\n').encode())


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError of the block into a PredictError with the next step."""
    try:
        yield
    except OSError as error:
        raise PredictError(
            f'cannot write {path}: {error}. Free space there, or write elsewhere '
            f'with --out. What is finished stays: the same command '
            f'continues.'
        ) from error


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
