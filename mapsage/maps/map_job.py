"""One map: the scene, its grid of windows, its finished strips and its files.

Rank 0 plans a job (`planning.py`) and sends its `ScenePlan` to all ranks as JSON; every rank builds
the same `MapJob` from it. `MapJob.predict` stores this rank's strips, `MapJob.assemble` makes the
files from the strips of all ranks. The scene is opened twice, in two sizes: in the model's size for
the prediction, in its own size for the files.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from mapsage.geo import AreaOfInterest, GeoError, is_remote, stamp

from .assembly import assemble
from .description import Bands, Classes
from .errors import BrokenInputError, PredictError
from .inputs import Scene
from .map_model import PlaceSource, Predictor
from .outputs import Outputs, is_done
from .reading import most_readers
from .strip_store import StripStore, key_of
from .strips import Strip, Waits, count_windows, predict_strips
from .upload import Upload
from .windows import Grid, assign_ranks


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
        strips: Numbers of the strips that are not finished.
        strip_ranks: Rank that predicts each of these strips.
        window_columns: First columns of the windows that touch the area of interest, for each row
            of windows; None without an area.
    """

    name: str
    path: str
    height: int
    width: int
    settings: Dict[str, Any]
    strips: List[int]
    strip_ranks: List[int]
    window_columns: Optional[List[List[int]]] = None


class MapJob:
    """The work on one map on this rank.

    Args:
        plan: Input and unfinished strips.
        setup: Settings of all maps.

    Attributes:
        plan: The plan.
        grid: Windows of the scene, in the size in which the model sees it.
        outputs: Paths of the map's files.
        strips: Finished strips on disk.
    """

    def __init__(self, plan: ScenePlan, setup: MapSetup) -> None:
        self.plan, self._setup = plan, setup
        self.grid = _grid_of(plan, setup)
        self.outputs = setup.outputs_of(plan.name)
        self._noted_files: Dict[str, List[Any]] = {}
        self.strips = StripStore(
            self.outputs.strip_folder(key_of(plan.settings)),
            self.grid,
            setup.confidence,
            len(setup.classes.names) if setup.probabilities else 0,
        )

    @property
    def is_shared(self) -> bool:
        """Whether several ranks predict strips of this map."""
        return len(set(self.plan.strip_ranks)) > 1

    @property
    def assembling_rank(self) -> int:
        """The rank that writes the files of this map."""
        return self.plan.strip_ranks[0] if self.plan.strip_ranks else 0

    def strips_of(self, rank: int) -> List[int]:
        """Return the numbers of the strips that a rank predicts."""
        return [
            strip
            for strip, strip_rank in zip(self.plan.strips, self.plan.strip_ranks)
            if strip_rank == rank
        ]

    def count_windows(self, rank: int) -> int:
        """Return the number of windows that a rank reads for this map."""
        return count_windows(self.grid, self.strips_of(rank))

    def predict(
        self, rank: int, predictor: Predictor, batch_size: int, advance: Callable[[int], None]
    ) -> Waits:
        """Predict and store the strips of this rank.

        Args:
            rank: This rank.
            predictor: The model.
            batch_size: Largest number of windows in a batch.
            advance: Function that receives the number of windows done since the last call.

        Returns:
            How long the model waited for readers and writer.

        Raises:
            BrokenInputError: If the input cannot be read any more, or has changed.
        """
        scene = self._open((self.plan.height, self.plan.width))
        with scene.raster:
            return predict_strips(
                scene,
                self.grid,
                self.strips_of(rank),
                predictor,
                batch_size,
                self._setup.confidence,
                self._store,
                advance,
                self._setup.probabilities,
                most_readers(scene),
            )

    def assemble(self) -> None:
        """Write the files of the map from its strips, and remove the strips.

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

    def _store(self, strip: Strip) -> None:
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


def divide_among_ranks(
    plans: Sequence[ScenePlan], setup: MapSetup, world_size: int
) -> List[MapJob]:
    """Assign the strips of all plans to ranks and return the jobs, equal on every rank."""
    grids = [_grid_of(plan, setup) for plan in plans]
    # The 1 is for writing a strip, which also takes a little time without any window.
    costs = [
        100 * len(grid.columns_of(strip)) + 1
        for plan, grid in zip(plans, grids)
        for strip in plan.strips
    ]
    ranks = iter(assign_ranks(costs, world_size))
    return [
        MapJob(replace(plan, strip_ranks=[next(ranks) for _ in plan.strips]), setup)
        for plan in plans
    ]


def _grid_of(plan: ScenePlan, setup: MapSetup) -> Grid:
    columns = plan.window_columns
    return Grid(
        plan.height,
        plan.width,
        setup.window,
        setup.overlap,
        None if columns is None else tuple(map(tuple, columns)),
    ).bounded(len(setup.classes.names))
