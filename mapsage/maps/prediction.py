"""The prediction of all maps on this rank: plan, predict, assemble, summarize.

Every rank runs the same `Prediction`. Rank 0 plans and broadcasts the plan; each rank predicts its
strips; a map that one rank predicts completely is assembled at once, a shared one after all ranks
are done. An error of one rank ends all of them at the next `fail_together`, so no rank waits for a
rank that has failed. The work on one map is in `map_job.py`.
"""

from __future__ import annotations

import json
import time
from collections import ChainMap
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional

from mapsage.base.folder_claims import FolderClaimedError, claimed
from mapsage.base.progress import ProgressLine
from mapsage.geo import AreaOfInterest, is_remote
from mapsage.geo.change_classes import UNCHANGED

from .door import Door, as_in_training, choose_gsd
from .errors import BrokenInputError, PredictError
from .inputs import find_inputs, find_members
from .map_job import MapJob, MapSetup, ScenePlan, divide_among_ranks
from .map_model import MapModel, PlaceSource
from .options import MapOptions, class_indices
from .outputs import Outputs
from .places import find_places
from .planning import MapPlan, MapPlanner
from .strips import Waits
from .upload import Upload, local_folder

# Lines about damaged blocks that a map's summary shows at most.
_MOST_DAMAGE_LINES = 20


def find_map_inputs(options: MapOptions, places: Optional[PlaceSource]) -> Dict[str, str]:
    """Return the inputs of a prediction: name of a map -> path. A mosaic is a single input.

    Args:
        options: Options of the prediction.
        places: Places of a model of scene stacks; None for models of single scenes.
    """
    if places is not None:
        return find_places(
            places,
            options.inputs,
            {
                '--mosaic': options.mosaic,
                '--bands': options.bands,
                '--scale': options.scale,
                '--gsd': options.gsd,
                '--units': options.units,
            },
        )
    if options.mosaic:
        return {options.mosaic: options.mosaic}
    return find_inputs(options.inputs, options.allow_remote)


class Prediction:
    """This rank's share of a prediction.

    Creating one loads the model, plans all maps and claims their files for this process;
    :meth:`run` does the work. Both are collective.

    Args:
        options: Options of the prediction.
        model: Model, not loaded yet.
        say: Function that prints a line; called on rank 0 only.
        find_inputs: Function that returns the inputs, as :func:`find_map_inputs` does.

    Attributes:
        options: The options.
        model: The loaded model.
        setup: Settings of all maps.
    """

    def __init__(
        self,
        options: MapOptions,
        model: MapModel,
        say: Callable[[str], None],
        find_inputs: Callable[
            [MapOptions, Optional[PlaceSource]], Dict[str, str]
        ] = find_map_inputs,
    ) -> None:
        self.options, self.model = options, model
        self._rank = model.rank
        self._say = say if model.rank == 0 else lambda line: None
        self._folder = local_folder(options.out)
        with model.fail_together('preparing the prediction'), ExitStack() as stack:
            self._upload = Upload(options.out) if is_remote(options.out) else None
            area = None if options.aoi is None else AreaOfInterest(options.aoi)
            self._inputs = find_inputs(options, model.places)
            members = find_members(options.inputs, options.allow_remote) if options.mosaic else []
            if self._rank == 0:
                self._claim_files(stack)
            model.load()
            if model.passport_problem:
                self._say(f'note: {model.passport_problem}')
            options = replace(options, gsd=choose_gsd(options.gsd, model.passport))
            # Polygons of a map of change show what has changed.
            unchanged = [name for name in model.classes.names if name == UNCHANGED]
            self.setup = MapSetup(
                folder=self._folder,
                upload=self._upload,
                classes=model.classes,
                bands=as_in_training(model.bands, model.passport, options.units, options.bands),
                window=model.window,
                overlap=model.overlap,
                members=members,
                area=area,
                outlines=dict(
                    simplify=options.simplify,
                    min_area=options.min_area,
                    background=class_indices(
                        [*options.skip_class, *unchanged], model.classes.names
                    ),
                ),
                confidence=options.confidence,
                probabilities=options.probabilities,
                polygons=options.polygons,
                previews=options.previews,
                single_input=len(self._inputs) == 1,
                places=model.places,
            )
            self._describe()
            self._plan = (
                MapPlan()
                if self._rank > 0
                else MapPlanner(
                    options,
                    self.setup,
                    self._inputs,
                    model.settings(),
                    self._say,
                    Door(model.passport, options.trust_scenes, self._say),
                ).plan()
            )
            self._claims = stack.pop_all()
        # The plan of rank 0; the others have sent an empty one. Every rank computes as rank 0 has
        # decided, because trials near a bound could differ, and so could cards.
        texts = model.gather_texts(
            json.dumps(
                dict(
                    decisions=model.decisions,
                    scenes=[asdict(plan) for plan in self._plan.scenes],
                )
            )
        )
        shared = json.loads(texts[0])
        self._decisions: Dict[str, Any] = shared['decisions']
        plans = [ScenePlan(**plan) for plan in shared['scenes']]
        self._jobs = divide_among_ranks(plans, self.setup, model.world_size)
        for job in self._jobs:
            if job.strips_of(self._rank) or job.assembling_rank == self._rank:
                job.note_input_files()

    @property
    def mapped_inputs(self) -> Dict[str, str]:
        """Inputs that have a map in the end: name of the map -> path. Complete on rank 0 only."""
        return {
            name: path
            for name, path in self._inputs.items()
            if name not in self._plan.outside_area and name not in self._plan.broken
        }

    def run(self) -> List[str]:
        """Predict, write the maps, and tell the user about them.

        Returns:
            What the maps lack: damaged blocks, skipped inputs; empty on other ranks than 0.

        Raises:
            GeoError, PredictError: If a map cannot be made.
        """
        with self._claims:
            seconds = self._predict()
            with self.model.fail_together('writing the maps'):
                broken: Dict[str, str] = {}
                for job in self._jobs:
                    if job.is_shared and job.assembling_rank == self._rank:
                        with self._setting_aside(job, broken):
                            job.assemble()
            self._drop_broken(broken)
            return self._summarize(seconds) if self._rank == 0 else []

    @contextmanager
    def _setting_aside(self, job: MapJob, broken: Dict[str, str]) -> Iterator[None]:
        """Note a broken input in ``broken``: name of the map -> reason, if these are skipped."""
        try:
            yield
        except BrokenInputError as error:
            if not self.options.skip_broken:
                raise
            broken[job.plan.name] = str(error)

    def _drop_broken(self, broken: Mapping[str, str]) -> None:
        """Drop the jobs whose input is broken on any rank. Collective.

        Args:
            broken: Name of a map -> reason, as this rank has found.
        """
        reasons: Mapping[str, str] = ChainMap(
            *map(json.loads, self.model.gather_texts(json.dumps(broken)))
        )
        self._plan.broken.update(reasons)
        for job in self._jobs:
            if job.plan.name in reasons and job.assembling_rank == self._rank:
                job.strips.remove()
        self._jobs = [job for job in self._jobs if job.plan.name not in reasons]

    def _predict(self) -> float:
        """Predict this rank's strips, assemble maps that are not shared; return the seconds.

        Jobs whose input turns out to be broken are dropped on all ranks. Collective.
        """
        model = self.model
        ranks = '' if model.world_size == 1 else f' (rank 0 of {model.world_size})'
        windows = sum(job.count_windows(self._rank) for job in self._jobs)
        seconds, planned = 0.0, 0
        self._waits = Waits()
        broken: Dict[str, str] = {}
        with model.fail_together('predicting'), ProgressLine(
            windows, f'predicting{ranks}', self._say, self._rank == 0
        ) as progress:
            model.prepare(self._decisions)
            for job in self._jobs:
                planned += job.count_windows(self._rank)
                with self._setting_aside(job, broken):
                    if job.strips_of(self._rank):
                        start = time.monotonic()
                        waits = job.predict(
                            self._rank, model.predictor, model.batch_size, progress.advance
                        )
                        self._waits.reading += waits.reading
                        self._waits.writing += waits.writing
                        seconds += time.monotonic() - start
                    if not job.is_shared and job.assembling_rank == self._rank:
                        job.assemble()
                if job.plan.name in broken:
                    progress.advance(planned - progress.done)
        self._drop_broken(broken)
        return seconds

    def _claim_files(self, stack: ExitStack) -> None:
        """Keep other predictions from writing the same maps until the stack is closed."""
        folder = self._folder
        if self._upload is not None:
            self._say(self._upload.check())
        try:
            folder.mkdir(parents=True, exist_ok=True)
            warning = stack.enter_context(
                claimed(
                    folder,
                    [f'{name}.tif' for name in self._inputs],
                    'Wait for its end, stop it, or choose another --out.',
                )
            )
        except OSError as error:
            raise PredictError(f'--out {folder} cannot be made or written: {error}.') from error
        except FolderClaimedError as error:
            raise PredictError(str(error)) from error
        if warning:
            self._say(f'note: {warning}')

    def _describe(self) -> None:
        """Tell the user the inputs, the windows and the device."""
        setup, model = self.setup, self.model
        height, width = setup.window
        self._say(
            f'{len(self._inputs)} input(s), {len(setup.classes.names)} classes; windows of '
            f'{width}x{height} pixels ({model.window_origin}) that share {setup.overlap}, '
            f'{model.batch_size} at a time'
            + ', each mirrored three times' * self.options.tta
            + model.describe()
        )
        if setup.bands.ignored:
            self._say(
                f"note: {', '.join(setup.bands.ignored)} of the config's test pipeline is not done."
            )

    def _summarize(self, seconds: float) -> List[str]:
        """Tell the user about every map; return what the maps lack."""
        has_damage = False
        for name in self.mapped_inputs:
            outputs = self.setup.outputs_of(name)
            report = outputs.read_report()
            if report is None:
                raise PredictError(
                    f'{outputs.report} is missing. With several ranks, --out must '
                    f'be on a storage that all of them share.'
                )
            for line in describe_map(outputs, report):
                self._say(line)
            has_damage = has_damage or bool(report['damage'])
        for reason in self._plan.broken.values():
            self._say(f'skipped: {reason}')
        if not self.mapped_inputs and self._plan.broken:
            first, *more = self._plan.broken.values()
            raise PredictError(
                f'none of the {len(self._inputs)} input(s) has a map: {first}'
                + f' The other {len(more)} are listed above.' * bool(more)
            )
        world_size = self.model.world_size
        windows = sum(job.count_windows(rank) for job in self._jobs for rank in range(world_size))
        if windows and seconds:
            self._say(
                f'{windows} windows in {seconds:.1f} s on {world_size} rank(s): '
                f'{windows / seconds:.1f} windows/s'
            )
            self._say(self._waits.describe(seconds))
        gaps = ['damaged parts of the input are no data in the map(s)'] * has_damage
        if self._plan.broken:
            gaps.append(f'{len(self._plan.broken)} of {len(self._inputs)} input(s) skipped')
        return gaps


def describe_map(outputs: Outputs, report: Mapping[str, Any]) -> List[str]:
    """Return the lines that describe a finished map to the user."""
    pixels = sum(report['pixels'].values())
    shares = ', '.join(
        f'{name} {100 * count / pixels:.1f} %'
        for name, count in sorted(report['pixels'].items(), key=lambda item: -item[1])
        if count
    )
    pixels_in_area = pixels + report['no_data']
    no_data = 100 * report['no_data'] / max(1, pixels_in_area)
    files = ', '.join(report['files'])
    if report['polygons'] is not None:
        files += f' ({report["polygons"]} polygons)'
    lines = [
        '',
        f'{outputs.map}',
        f'  {report["width"]}x{report["height"]} pixels, {no_data:.1f} % without data',
        f'  {shares or "warning: no data anywhere"}',
        f'  in {outputs.map.parent}: {files}',
    ]
    if report.get('beside_aoi') is not None:
        share = 100 * pixels_in_area / (pixels_in_area + report['beside_aoi'])
        lines.insert(2, f'  masked to the area of interest, {share:.1f} % of the scene')
    return lines + [f'  warning: no data, {line}' for line in report['damage'][:_MOST_DAMAGE_LINES]]
