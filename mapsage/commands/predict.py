"""Predict maps of scenes, alone or with several ranks that share the strips of all of them."""
from __future__ import annotations

import argparse
import functools
import json
import os
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Protocol, Sequence, Tuple

from mapsage.folder_claims import FolderClaimedError, claimed
from mapsage.geo import AreaOfInterest, Mosaic, stamp
from mapsage.maps import outputs as results
from mapsage.maps.description import Bands, Classes
from mapsage.maps.errors import PredictError
from mapsage.maps.inputs import Scene, choose_size, find_inputs, find_members
from mapsage.maps.outputs import Outputs
from mapsage.maps.parts import Parts, key_of
from mapsage.maps.progress import ProgressLine
from mapsage.maps.strips import Predictor, count_windows, predict_strips
from mapsage.maps.windows import Grid, owners
from mapsage.version import __version__

from .report import refresh_report

PARTIAL = 3  # exit status: the maps are there, with holes where blocks could not be read


class MapModel(Protocol):
    """What a prediction asks of a model, whether a checkpoint's or an exported file's.

    Attributes:
        rank, world_size: This process among those that share the work.
        classes, bands: What it tells apart, and what it takes; known once it is loaded, as is all
            below.
        window, overlap, window_from: Height and width of windows, what neighbors share, in pixels,
            and who says so.
        predictor, batch_size: What computes, and how many windows at a time.
    """

    rank: int
    world_size: int
    classes: Classes
    bands: Bands
    window: Tuple[int, int]
    overlap: int
    window_from: str
    predictor: Predictor
    batch_size: int

    def load(self) -> None:
        """Read the weights."""

    def settings(self) -> Dict[str, Any]:
        """Return what of the model a map depends on, as JSON holds it."""

    def describe(self) -> str:
        """Return how it computes, the end of a line."""

    def together(self, what: str) -> Any:
        """Return a context in which an error of one rank is raised on all."""

    def share(self, text: str) -> str:
        """Return rank 0's text on every rank."""

    def note(self, text: str) -> None:
        """Let the launcher, if there is one, end its output with a text."""


@dataclass(frozen=True)
class Job:
    """An input and what is left to do for it; equal on all ranks.

    Attributes:
        name, path: Name of its outputs, and path of its file.
        height, width: Size in pixels that the model sees it in.
        settings: Everything that the map depends on.
        strips: Numbers of the strips that are not finished.
        owners: Rank that predicts each of these strips.
        kept: Columns of the windows that touch the area of interest, for each row of windows; None
            without one.
    """

    name: str
    path: str
    height: int
    width: int
    settings: Dict[str, Any]
    strips: List[int]
    owners: List[int]
    kept: Optional[List[List[int]]] = None

    @property
    def is_shared(self) -> bool:
        """Whether more than one rank predicts strips of it."""
        return len(set(self.owners)) > 1

    @property
    def assembler(self) -> int:
        """The rank that writes its outputs."""
        return self.owners[0] if self.owners else 0

    def strips_of(self, rank: int) -> List[int]:
        """Return the strips that a rank predicts."""
        return [strip for strip, owner in zip(self.strips, self.owners) if owner == rank]


class Prediction:
    """This rank's part in the prediction that the command line asks for.

    Args:
        args: Options of tools/predict.py.
        say: Function that prints a line; called on rank 0 only.
    """

    _with_previews = True

    def __init__(self, args: argparse.Namespace, say: Callable[[str], None]) -> None:
        self._args = args
        self._folder = Path(args.out)
        self._model = model = open_model(args, say)
        self._rank, self._world_size = model.rank, model.world_size
        self._say = say if self._rank == 0 else lambda line: None
        with self._together('preparing the prediction'), ExitStack() as stack:
            self._area = None if args.aoi is None else AreaOfInterest(args.aoi)
            self._beside: List[str] = []  # inputs that the area does not touch; on rank 0
            self._broken: Dict[str, str] = {}  # why an input is skipped, by name; on rank 0
            self._members = find_members(args.inputs, args.allow_remote) if args.mosaic else []
            self._inputs = self.find_inputs()
            if self._rank == 0:
                self._claim(stack)
            model.load()
            self._classes, bands = model.classes, model.bands
            self._bands = replace(bands, chosen=tuple(args.bands)) if args.bands else bands
            self._outlines = dict(simplify=args.simplify, min_area=args.min_area,
                                  background=class_indices(args.skip_class, self._classes.names))
            self._window, self._overlap = model.window, model.overlap
            self._predictor, self._batch_size = model.predictor, model.batch_size
            self._describe()
            jobs = self._plan() if self._rank == 0 else []
            self._claims = stack.pop_all()
        self._jobs = self._share(jobs)
        self._seconds = 0.0

    def run(self) -> int:
        """Predict, write the outputs, and return the exit status."""
        with self._claims:
            return self._run()

    def _run(self) -> int:
        mine = sum(count_windows(self._grid(job), job.strips_of(self._rank)) for job in self._jobs)
        ranks = '' if self._world_size == 1 else f' (rank 0 of {self._world_size})'
        with self._together('predicting'):
            with ProgressLine(mine, f'predicting{ranks}', self._say, self._rank == 0) as progress:
                for job in self._jobs:
                    self._predict(job, progress)
        with self._together('writing the maps'):
            for job in self._jobs:
                if job.is_shared and job.assembler == self._rank:
                    self._assemble(job)
        return self._summarize() if self._rank == 0 else 0

    def find_inputs(self) -> Dict[str, str]:
        """Return the inputs by the names of their outputs."""
        mosaic = self._args.mosaic
        if mosaic:
            return {mosaic: mosaic}
        return find_inputs(self._args.inputs, self._args.allow_remote)

    def _claim(self, stack: ExitStack) -> None:
        """Keep other predictions from writing the same maps, until the stack is closed."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            warning = stack.enter_context(claimed(
                self._folder, [f'{name}.tif' for name in self._inputs],
                'Wait for its end, stop it, or choose another --out.'))
        except OSError as error:
            raise PredictError(f'--out {self._folder} cannot be made or written: {error}.'
                               ) from error
        except FolderClaimedError as error:
            raise PredictError(str(error)) from error
        if warning:
            self._say(f'note: {warning}')

    def _together(self, what: str) -> Any:
        return self._model.together(what)

    def _describe(self) -> None:
        height, width = self._window
        self._say(f'{len(self._inputs)} input(s), {len(self._classes.names)} classes; windows of '
                  f'{width}x{height} pixels ({self._model.window_from}) that share '
                  f'{self._overlap}, {self._batch_size} at a time'
                  + ', each mirrored three times' * self._args.tta
                  + self._model.describe())
        if self._bands.ignored:
            self._say(f"note: {', '.join(self._bands.ignored)} of the config's test pipeline is "
                      f'not done.')

    def _plan(self) -> List[Job]:
        """Look at every input and output before the first window is predicted."""
        common = dict(
            mapsage=__version__, **self._model.settings(), classes=list(self._classes.names),
            palette=self._classes.palette.tolist(), window=list(self._window),
            overlap=self._overlap, bands=list(self._bands.chosen or ()),
            tta=self._args.tta, confidence=self._args.confidence,
            aoi=None if self._area is None else self._area.key,
            **(dict(mosaic=True) if self._members else {}),
            **(dict(probabilities=True) if self._args.probabilities else {}))
        self._check_names()
        jobs, in_pixels, gap = [], [], ''
        sizes: Dict[str, List[str]] = {}  # what is said of the size of the inputs
        for name, scene in self._open_inputs().items():
            path = self._inputs[name]
            if isinstance(scene.raster, Mosaic):
                self._say(scene.raster.describe())
            size, why = choose_size(scene, self._bands.resize, self._args.scale, self._args.gsd)
            with scene.raster as raster:
                settings = dict(common, input=[stamp(file) for file in raster.files()],
                                size=list(size), **raster.facts())
            kept = self._windows_in_area(scene, size)
            if kept is not None and not any(kept):
                self._beside.append(name)
                continue
            sizes.setdefault(why, []).append(
                f'{path} in {size[1]}x{size[0]} pixels' if size != scene.size else path)
            outputs = self._outputs(name)
            if not self._args.overwrite and results.is_done(outputs, settings):
                self._say(f'{outputs.map} is there, made with the same settings: skipped '
                          f'(--overwrite makes it again)')
                results.add_polygons(outputs, self._classes, self._outlines)
                continue
            job = Job(name, path, *size, settings, [], [], kept)
            if not results.has_transform(raster):
                in_pixels.append(path)
                gap = raster.georeference_gap
            elif not raster.is_georeferenced:
                self._say(f'note: {path} has coordinates and no CRS; so has its map, and its '
                          f'polygons have areas in pixels only.')
            done = set(self._parts(job).finished())
            strips = [number for number in range(len(self._grid(job).rows)) if number not in done]
            if done:
                self._say(f'{path}: continues, {len(done)} of {len(done) + len(strips)} strips '
                          f'are finished')
            jobs.append(replace(job, strips=strips))
        for why, seen in sizes.items():
            if why != 'its own size':
                self._say(f'the model sees {seen[0]}' + f' and {len(seen) - 1} more'
                          * (len(seen) > 1) + f' ({why})')
        if in_pixels:
            self._say(f'note: {in_pixels[0]}'
                      + f' and {len(in_pixels) - 1} more' * (len(in_pixels) > 1)
                      + f' {gap}: its map is in pixels.')
        self._say_of_area(jobs)
        return jobs

    def _open_inputs(self) -> Dict[str, Scene]:
        """Open every input before the first is predicted; return those that can be mapped.

        Raises:
            PredictError: If one cannot be mapped, unless such are to be skipped; if none can.
        """
        scenes: Dict[str, Scene] = {}
        for name, path in self._inputs.items():
            try:
                scenes[name] = self._scene(path)
            except PredictError as error:
                self._broken[name] = str(error)
        skips = self._args.skip_broken and scenes
        if self._broken and not skips:
            if len(self._inputs) == 1:
                raise PredictError(*self._broken.values())
            raise PredictError(f'{len(self._broken)} of {len(self._inputs)} input(s) cannot be '
                               f'mapped: {" ".join(self._broken.values())}'
                               + ' --skip-broken maps the others.' * bool(scenes))
        for reason in self._broken.values():
            self._say(f'note: skipped: {reason}')
        return scenes

    def _windows_in_area(self, scene: Scene, size: Tuple[int, int]) -> Optional[List[List[int]]]:
        """Return which columns of each row of windows touch the area; None without an area."""
        if self._area is None:
            return None
        area = self._area.of_scene(scene.raster).resized(size)
        grid, (height, width) = Grid(*size, self._window, self._overlap), self._window
        return [[column for column in grid.columns if area.meets(column, row, width, height)]
                for row in grid.rows]

    def _say_of_area(self, jobs: List[Job]) -> None:
        if self._area is None:
            return
        for name in self._beside:
            with self._scene(self._inputs[name]).raster as raster:
                line = self._area.beside(raster)
            if len(self._beside) + len(self._broken) == len(self._inputs):
                raise PredictError(f'{line}. Check that the files belong together and that each '
                                   f'has the CRS it was made in.')
            self._say(f'note: {line}: it is left out.')
        for job in jobs:
            grid = self._grid(job)
            self._say(f'{job.path}: {sum(map(len, job.kept or []))} of '
                      f'{len(grid.rows) * len(grid.columns)} windows touch {self._area.path}')

    def _check_names(self) -> None:
        files: Dict[str, str] = {os.path.abspath(path): path
                                 for path in self._members or self._inputs.values()}
        for name, path in self._inputs.items():
            for file in self._outputs(name).files():
                where = os.path.abspath(file)
                if where in files:
                    raise PredictError(f'the output {file} of {path} would overwrite '
                                       f'{files[where]}. Choose another --out.')
                files[where] = f'an output of {path}'

    def _share(self, jobs: List[Job]) -> List[Job]:
        """Tell all ranks rank 0's jobs, and which rank does what."""
        text = self._model.share(json.dumps([asdict(job) for job in jobs]))
        jobs = [Job(**job) for job in json.loads(text)]
        # A strip without windows is written, too, which takes little time and not none.
        costs = [100 * len(grid.columns_of(strip)) + 1
                 for job in jobs for grid in [self._grid(job)] for strip in job.strips]
        ranks = iter(owners(costs, self._world_size))
        return [replace(job, owners=[next(ranks) for _ in job.strips]) for job in jobs]

    def _predict(self, job: Job, progress: ProgressLine) -> None:
        strips = job.strips_of(self._rank)
        if strips:
            start_time = time.monotonic()
            scene = self._scene(job.path, (job.height, job.width))
            parts = self._parts(job)
            with scene.raster:
                predict_strips(scene, self._grid(job), strips, self._predictor,
                               self._batch_size, self._args.confidence, parts.write,
                               progress.advance, self._args.probabilities)
            self._seconds += time.monotonic() - start_time
        if not job.is_shared and job.assembler == self._rank:
            self._assemble(job)

    def _assemble(self, job: Job) -> None:
        with self._scene(job.path).raster as raster:
            results.assemble(self._outputs(job.name), job.settings, raster, self._grid(job),
                             self._parts(job), self._classes, self._outlines,
                             None if self._area is None else self._area.of_scene(raster))

    def _summarize(self) -> int:
        status = 0
        for name in self._inputs:
            if name in self._beside or name in self._broken:
                continue
            outputs = self._outputs(name)
            report = outputs.read_report()
            if report is None:
                raise PredictError(f'{outputs.report} is missing. With several ranks, --out must '
                                   f'be on a storage that all of them share.')
            for line in summary(outputs, report):
                self._say(line)
            if report['damage']:
                status = PARTIAL
        windows = sum(count_windows(self._grid(job), job.strips_of(rank))
                      for job in self._jobs for rank in range(self._world_size))
        if windows and self._seconds:
            self._say(f'{windows} windows in {self._seconds:.1f} s on {self._world_size} rank(s): '
                      f'{windows / self._seconds:.1f} windows/s')
        reasons = ['damaged parts of the input are no data in the map(s)'] * (status == PARTIAL) + [
            f'{len(self._broken)} of {len(self._inputs)} input(s) skipped'] * bool(self._broken)
        if reasons:
            status = PARTIAL
            text = f'partial: {"; ".join(reasons)}; status {status}'
            self._say(text)
            self._model.note(text)
        refresh_report(self._folder.parent, self._say)
        return status

    def _scene(self, path: str, size: Optional[Tuple[int, int]] = None) -> Scene:
        return Scene(path, self._bands, size, self._members)

    def _outputs(self, name: str) -> Outputs:
        return Outputs.of(self._folder, name, self._args.confidence, self._args.polygons,
                          alone=len(self._inputs) == 1,
                          probabilities=self._args.probabilities, preview=self._with_previews)

    def _parts(self, job: Job) -> Parts:
        folder = self._outputs(job.name).parts(key_of(job.settings))
        return Parts(folder, self._grid(job), self._args.confidence,
                     len(self._classes.names) if self._args.probabilities else 0)

    def _grid(self, job: Job) -> Grid:
        kept = None if job.kept is None else tuple(map(tuple, job.kept))
        return Grid(job.height, job.width, self._window, self._overlap, kept)


def predict(args: argparse.Namespace,
            say: Callable[[str], None] = functools.partial(print, flush=True)) -> int:
    """Predict what the command line asks for and return the exit status.

    Args:
        args: Options of tools/predict.py.
        say: Function that prints a line; called on rank 0 only.

    Returns:
        0, or 3 when parts of an input could not be read, or inputs were skipped.
    """
    return Prediction(args, say).run()


def open_model(args: argparse.Namespace, say: Callable[[str], None]) -> MapModel:
    """Return the model that the command line names, on this rank, not loaded yet."""
    if args.model is not None:
        from .predict_exported import ExportedModel
        return ExportedModel(args)
    from .predict_checkpoint import CheckpointModel  # which needs PyTorch
    return CheckpointModel(args, say)


def class_indices(chosen: Sequence[str], names: Sequence[str]) -> List[int]:
    """Return the indices of classes, in order.

    Raises:
        PredictError: If there is no class of one of these names.
    """
    unknown = [name for name in chosen if name not in names]
    if unknown:
        raise PredictError(f"--skip-class {', '.join(unknown)}: the classes are "
                           f"{', '.join(names)}.")
    return sorted({list(names).index(name) for name in chosen})


def summary(outputs: Outputs, report: Dict[str, Any]) -> List[str]:
    """Return the lines that describe a finished map to the user."""
    total = sum(report['pixels'].values())
    shares = ', '.join(f'{name} {100 * count / total:.1f} %' for name, count
                       in sorted(report['pixels'].items(), key=lambda item: -item[1]) if count)
    inside = total + report['no_data']
    no_data = 100 * report['no_data'] / max(1, inside)
    files = ', '.join(report['files'])
    if report['polygons'] is not None:
        files += f" ({report['polygons']} polygons)"
    lines = ['', f'{outputs.map}', f"  {report['width']}x{report['height']} pixels, "
             f'{no_data:.1f} % without data', f"  {shares or 'warning: no data anywhere'}",
             f'  in {outputs.map.parent}: {files}']
    if report.get('beside_aoi') is not None:
        share = 100 * inside / (inside + report['beside_aoi'])
        lines.insert(2, f'  masked to the area of interest, {share:.1f} % of the scene')
    return lines + [f'  warning: no data, {line}' for line in report['damage'][:20]]
