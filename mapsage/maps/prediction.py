"""The prediction of all maps on this rank: plan, share, summarize.

Every rank runs the same `Prediction`. Rank 0 plans and broadcasts the plan. Then each rank claims
strips in the folder's ledger, like the ranks of other jobs (`sharing.py`), until all maps are
finished. An error of one rank ends its job once the rest of the maps is finished. The work on one
map is in `map_job.py`.
"""

from __future__ import annotations

import json
from collections import ChainMap
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence

from mapsage.base.progress import ProgressLine
from mapsage.geo import AreaOfInterest, is_remote
from mapsage.geo.change_classes import UNCHANGED

from .door import Door
from .errors import PredictError
from .inputs import find_inputs, find_members
from .ledger import Worker
from .map_job import MapJob, MapSetup, ScenePlan
from .map_model import MapModel, PlaceSource
from .options import MapOptions, class_indices
from .outputs import Outputs
from .places import find_places
from .planning import MapPlan, MapPlanner
from .sharing import SharedWork, run_length, shared_plan
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

    Creating one loads the model, plans all maps and enters the ledger of their folder; :meth:`run`
    does the work. Both are collective.

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
                if self._upload is not None:
                    self._say(self._upload.check())
                self._worker = stack.enter_context(Worker(self._folder, list(self._inputs)))
            model.load()
            if model.passport_problem:
                self._say(f'note: {model.passport_problem}')
            door = Door(model.passport, options.trust_scenes, self._say)
            options = replace(options, gsd=door.gsd(options.gsd))
            # Polygons of a map of change show what has changed.
            unchanged = [name for name in model.classes.names if name == UNCHANGED]
            self.setup = MapSetup(
                folder=self._folder,
                upload=self._upload,
                classes=model.classes,
                bands=door.bands_of(model.bands, options.units, options.bands),
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
            shared: Dict[str, Any] = {}
            self._plan = MapPlan()
            if self._rank == 0:
                planner = MapPlanner(
                    options, self.setup, self._inputs, model.settings(), self._say, door
                )
                with self._worker.exclusive(self._say):
                    shared = self._plan_maps(planner)
            self._entry = stack.pop_all()
        # The plan of rank 0; the others have sent an empty one. Every rank computes as rank 0 has
        # decided, because trials near a bound could differ, and so could cards.
        shared = json.loads(model.gather_texts(json.dumps(shared))[0])
        self._decisions: Dict[str, Any] = shared['decisions']
        self._windows = shared['windows']
        self._jobs = [
            MapJob(ScenePlan(**plan), self.setup, shared['run_length']) for plan in shared['scenes']
        ]
        for job in self._jobs:
            job.note_input_files()
        if self._rank > 0:
            self._worker = Worker(self._folder, job=shared['job'], rank=self._rank)
            self._entry.enter_context(self._worker)

    def _plan_maps(self, planner: MapPlanner) -> Dict[str, Any]:
        """Plan the maps as the other living jobs have decided, and store the plan for later ones."""
        options, setup, model, worker = self.options, self.setup, self.model, self._worker
        settings = json.loads(
            json.dumps(
                dict(
                    planner.common_settings(),
                    outlines=setup.outlines,
                    polygons=setup.polygons,
                    previews=setup.previews,
                    out=options.out if is_remote(options.out) else None,
                )
            )
        )
        plans = worker.plans()
        names = list(self._inputs)
        peers = shared_plan(plans, names, settings, model.required, options.overwrite)
        if peers:
            self._say(f'shares its maps with {", ".join(plans)}')
        self._plan = planner.plan(peers.get('scenes', {}))
        shared = dict(
            names=names,
            settings=settings,
            decisions=peers.get('decisions', dict(model.decisions)),
            run_length=peers.get('run_length', run_length(self._plan.strips, model.world_size)),
            scenes=[asdict(plan) for plan in self._plan.scenes],
        )
        worker.publish(shared)
        return dict(shared, job=worker.job, windows=self._plan.windows)

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
        with self._entry:
            work = self._predict()
            texts = self.model.gather_texts(
                json.dumps(
                    dict(broken=work.broken, windows=self._worker.windows, seconds=work.seconds)
                )
            )
            ranks = [json.loads(text) for text in texts]
            self._plan.broken.update(ChainMap(*(rank['broken'] for rank in ranks)))
            if self._rank > 0:
                return []
            with self._worker.exclusive(self._say):
                if self._worker.leave():
                    for job in self._jobs:
                        if job.plan.name in self._plan.broken:
                            job.strips.remove()
            return self._summarize(work, ranks)

    def _predict(self) -> SharedWork:
        """Work on the maps until all are finished. Collective."""
        model, options = self.model, self.options
        with model.fail_together('predicting'), ProgressLine(
            self._windows, 'predicting', self._say, self._rank == 0
        ) as progress:
            model.prepare(self._decisions)
            begin = (options.shard + self._rank / model.world_size) / options.shards
            work = SharedWork(self._worker, begin, model.predictor, model.batch_size, progress)
            work.finish(self._jobs, options.skip_broken)
        return work

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

    def _summarize(self, work: SharedWork, ranks: Sequence[Mapping[str, Any]]) -> List[str]:
        """Tell the user about every map and the work of the ranks; return what the maps lack."""
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
        windows = sum(rank['windows'] for rank in ranks)
        slowest = max(rank['seconds'] for rank in ranks)
        if windows and slowest:
            self._say(
                f'{windows} windows in {slowest:.1f} s on {len(ranks)} rank(s): '
                f'{windows / slowest:.1f} windows/s'
            )
        # The others may have left no strip to this rank.
        if work.seconds:
            self._say(work.waits.describe(work.seconds))
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
