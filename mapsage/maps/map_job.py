"""One map: the scene, its grid of windows, its finished strips and its files.

Rank 0 plans a job (`prediction.py`) and sends its `ScenePlan` to all ranks as JSON; every rank builds
the same `MapJob` from it. `MapJob.predict` stores strips, `MapJob.assemble` makes the files from all
strips; which rank of which job does that is decided in `sharing.py`. The scene is opened in two
sizes: in the model's size for the prediction, in its own size for the files.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from mapsage.geo import AreaOfInterest, GeoError, is_remote, stamp

from .assembly import assemble
from .description import Bands, Classes
from .errors import BrokenInputError, PredictError
from .inputs import Scene
from .map_model import PlaceSource, Predictor
from .outputs import Outputs, Upload, is_done
from .reading import most_readers
from .strips import Strip, StripStore, Waits, key_of, predict_strips
from .windows import Grid


@dataclass(frozen=True)
class MapSetup:
    """Settings that all maps of a prediction have in common; equal on all ranks.

    Attributes:
        folder: Folder of the maps.
        classes, bands: Classes of the maps, and bands that are read from scenes.
        window, overlap: Height and width of windows, and pixels that neighbors share.
        members: Files of the mosaic; empty if every input has its own map.
        area: Area of interest, or None.
        outlines: Options of :func:`mapsage.geo.polygons.write_polygons`.
        confidence, probabilities, polygons, previews: Whether maps have these files.
        single_input: Whether there is one map only.
        places: Places of a model of scene stacks, or None.
        upload: Object store that gets the finished maps, or None.
    """

    folder: Path
    classes: Classes
    bands: Bands
    window: Tuple[int, int]
    overlap: int
    members: Sequence[str]
    area: Optional[AreaOfInterest]
    outlines: Dict[str, Any]
    confidence: bool
    probabilities: bool
    polygons: bool
    previews: bool
    single_input: bool
    places: Optional[PlaceSource] = None
    upload: Optional[Upload] = None

    def is_done(self, outputs: Outputs, settings: Mapping[str, object]) -> bool:
        """Return whether a map is finished where the user wants it.

        Raises:
            PredictError: In the cases of :func:`mapsage.maps.outputs.is_done`.
        """
        if self.upload is None:
            return is_done(outputs, settings)
        if self.upload.has(outputs, settings):
            return True
        if is_done(outputs, settings):
            self.upload.send(outputs)
            return True
        return False

    def open_scene(self, path: str, size: Optional[Tuple[int, int]] = None) -> Scene:
        """Return an opened input, in the size in which the model sees it; default: its own."""
        return Scene(
            path, self.bands, size, self.members, None if self.places is None else self.places.open
        )

    def dates_of(self, path: str) -> List[str]:
        """Return the dates of the images of an input as ISO text; empty for a single scene."""
        return [] if self.places is None else self.places.dates(path)

    def outputs_of(self, name: str) -> Outputs:
        """Return the paths of the files of a map."""
        return Outputs.of(
            self.folder,
            name,
            self.confidence,
            self.polygons,
            self.single_input,
            self.probabilities,
            self.previews,
        )


@dataclass(frozen=True)
class ScenePlan:
    """An input, and the work that is left for its map; equal on all ranks.

    Attributes:
        name: Name of the map, without a suffix.
        path: Path of the input.
        height, width: Size in pixels in which the model sees the input.
        settings: Everything that the map depends on.
        window_columns: First columns of the windows that touch the area of interest, for each row
            of windows; None without an area.
        outdated: What :func:`mapsage.geo.stamp` says of the report of an earlier map, which is made
            again; None to keep a finished map.
    """

    name: str
    path: str
    height: int
    width: int
    settings: Dict[str, Any]
    window_columns: Optional[List[List[int]]] = None
    outdated: Optional[List[Any]] = None


class MapJob:
    """The work on one map on this rank.

    Args:
        plan: The input.
        setup: Settings of all maps.
        run_length: Number of strips of a run, about.

    Attributes:
        plan: The plan.
        grid: Windows of the scene, in the size in which the model sees it.
        outputs: Paths of the map's files.
        strips: Finished strips on disk.
    """

    def __init__(self, plan: ScenePlan, setup: MapSetup, run_length: int = 1) -> None:
        self.plan, self._setup, self._run_length = plan, setup, run_length
        self.grid = _grid_of(plan, setup)
        self.outputs = setup.outputs_of(plan.name)
        self._noted_files: Dict[str, List[Any]] = {}
        self.strips = StripStore(
            self.outputs.strip_folder(key_of(plan.settings)),
            self.grid,
            setup.confidence,
            len(setup.classes.names) if setup.probabilities else 0,
        )

    @functools.cached_property
    def runs(self) -> List[Sequence[int]]:
        """Strips that are claimed together: about equally many, below each other."""
        rows = len(self.grid.rows)
        parts = max(1, round(rows / self._run_length))
        return [
            range(block + rows * part // parts, block + rows * (part + 1) // parts)
            for block in range(0, self.grid.strip_count, rows)
            for part in range(parts)
        ]

    def is_finished(self) -> bool:
        """Return whether a job has finished the map."""
        report = self.outputs.report
        # An earlier map that is made again does not count.
        return report.exists() and stamp(str(report)) != self.plan.outdated

    def missing(self, strips: Optional[Sequence[int]] = None) -> List[int]:
        """Return the strips that nobody has finished, of the numbers ``strips`` or of all."""
        numbers = range(self.grid.strip_count) if strips is None else strips
        return [number for number in numbers if not self.strips.has(number)]

    def predict(
        self,
        strips: Sequence[int],
        predictor: Predictor,
        batch_size: int,
        advance: Callable[[int], None],
        check: Callable[[], None],
    ) -> Waits:
        """Predict and store strips.

        Args:
            strips: Numbers of the strips.
            predictor: The model.
            batch_size: Largest number of windows in a batch.
            advance: Function that receives the number of windows done since the last call.
            check: Function that raises an error if nothing may be written any more.

        Returns:
            How long the model waited for readers and writer.

        Raises:
            BrokenInputError: If the input cannot be read any more, or has changed.
        """
        scene = self._open((self.plan.height, self.plan.width))
        scene.dtypes = predictor.dtypes
        with scene.raster:
            return predict_strips(
                scene,
                self.grid,
                strips,
                predictor,
                batch_size,
                self._setup.confidence,
                functools.partial(self._store, check),
                advance,
                self._setup.probabilities,
                most_readers(scene),
            )

    def assemble(self, check: Callable[[], None]) -> None:
        """Write the files of the map from its strips, and remove the strips.

        Args:
            check: Function that raises an error if nothing may be written any more.

        Raises:
            BrokenInputError: As :meth:`predict`.
        """
        setup = self._setup
        with self._open().raster as raster:
            assemble(
                self.outputs,
                self.plan.settings,
                raster,
                self.grid,
                self.strips,
                setup.classes,
                setup.outlines,
                None if setup.area is None else setup.area.of_scene(raster),
                setup.dates_of(self.plan.path),
                # A place shows one image of a sensor, whose bands are not those of the model.
                None if setup.places is not None else setup.bands.shown,
                check,
            )
        if setup.upload is not None:
            setup.upload.send(self.outputs)

    def note_input_files(self) -> None:
        """Note the state of the input's files, which must not change before the map is written."""
        self._noted_files = {name: stamp(name) for name, *_ in self._local_files()}

    def _local_files(self) -> List[List[Any]]:
        """Return the planned stamps of the input's files that are not on a server."""
        return [planned for planned in self.plan.settings['input'] if not is_remote(planned[0])]

    def _open(self, size: Optional[Tuple[int, int]] = None) -> Scene:
        """Open the input, which must still be what was planned."""
        try:
            scene = self._setup.open_scene(self.plan.path, size)
        except (GeoError, PredictError) as error:
            self._check_unchanged()
            raise BrokenInputError(str(error)) from error
        self._check_unchanged()
        return scene

    def _store(self, check: Callable[[], None], strip: Strip) -> None:
        check()
        # Checked after the strip was read, so that no strip of another content is stored.
        self._check_unchanged()
        self.strips.write(strip)

    def _check_unchanged(self) -> None:
        """Raise an error if a file of the input is not what it was.

        Sizes are compared with the plan, times on this rank only: machines may have copies.
        """
        for planned in self._local_files():
            name, current = planned[0], stamp(planned[0])
            if current[1:2] == planned[1:2] and current == self._noted_files.get(name, current):
                continue
            path = self.plan.path
            subject = path if name == os.path.abspath(path) else f'{path}: its file {name}'
            event = (
                'was removed'
                if not current[1:]
                else (
                    f'changed from {planned[1]:,} to {current[1]:,} bytes'
                    if planned[1:2] != current[1:2]
                    else 'was written again'
                )
            )
            raise BrokenInputError(
                f'{subject} {event} after the prediction was planned. Start the '
                f'same command again once it is complete.'
            )


def _grid_of(plan: ScenePlan, setup: MapSetup) -> Grid:
    columns = plan.window_columns
    return Grid(
        plan.height,
        plan.width,
        setup.window,
        setup.overlap,
        None if columns is None else tuple(map(tuple, columns)),
    ).bounded(len(setup.classes.names))
