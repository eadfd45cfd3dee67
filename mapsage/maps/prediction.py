"""The prediction of all maps on this rank: plan, share, summarize.

Every rank runs the same `Prediction`. Rank 0 plans and broadcasts the plan. Then each rank claims
strips in the folder's ledger, like the ranks of other jobs (`sharing.py`), until all maps are
finished. An error of one rank ends its job once the rest of the maps is finished. The work on one
map is in `map_job.py`.

`MapPlanner` compares every existing output first, and opens every input that no other job has
planned, so that a mistake in the last of a hundred inputs is reported at once and not after an hour.
Its result, a `MapPlan`, holds the work that is left: finished maps are skipped, interrupted ones
continue from their strips.
"""

from __future__ import annotations

import json
import os
from collections import ChainMap
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple, cast

from mapsage.base.progress import ProgressLine
from mapsage.geo import AreaOfInterest, Mosaic, is_remote, stamp
from mapsage.geo.change_classes import UNCHANGED
from mapsage.version import __version__

from .assembly import has_transform
from .errors import PredictError
from .inputs import OWN_SIZE, Door, Scene, choose_size, find_inputs, find_members
from .ledger import Worker
from .map_job import MapJob, MapSetup, ScenePlan
from .map_model import MapModel, PlaceSource
from .options import MapOptions, class_indices
from .outputs import Outputs, Upload, add_polygons, local_folder
from .places import find_places
from .sharing import SharedWork, refuse_differences, run_length, shared_plan
from .strips import count_windows, key_of, remove_folder
from .windows import Grid


@dataclass
class MapPlan:
    """Work and inputs of a prediction; on rank 0 only.

    Attributes:
        scenes: Inputs whose maps are not finished.
        strips, windows: Number of strips with windows, and of windows, that are not finished.
        outside_area: Names of the inputs that the area of interest does not touch.
        broken: Name of an input that is skipped -> reason.
    """

    scenes: List[ScenePlan] = field(default_factory=list)
    strips: int = 0
    windows: int = 0
    outside_area: List[str] = field(default_factory=list)
    broken: Dict[str, str] = field(default_factory=dict)


class MapPlanner:
    """Looks at all inputs and outputs, tells the user about them, and collects the work.

    Args:
        options: Options of the prediction.
        setup: Settings of all maps.
        inputs: Name of a map -> path of its input.
        model_settings: Settings of the model that a map depends on.
        say: Function that prints a line.
        door: Compares inputs with the passport of the model.
    """

    def __init__(
        self,
        options: MapOptions,
        setup: MapSetup,
        inputs: Mapping[str, str],
        model_settings: Mapping[str, Any],
        say: Callable[[str], None],
        door: Door,
    ) -> None:
        self._door = door
        self._options, self._setup, self._inputs = options, setup, inputs
        self._model_settings, self._say = model_settings, say
        self._plan = MapPlan()
        self._shared: Mapping[str, Mapping[str, Any]] = {}

    def plan(self, shared: Mapping[str, Mapping[str, Any]] = MappingProxyType({})) -> MapPlan:
        """Return the plan.

        Args:
            shared: Scenes that other jobs work on, by name of the map; they are not opened again.

        Raises:
            PredictError: If an input cannot be mapped, an output would overwrite another file, or
                another job makes a map otherwise.
        """
        self._check_output_names()
        self._shared = shared
        sizes: Dict[str, List[str]] = {}
        pixel_maps: List[Scene] = []
        scenes = self._open_inputs()
        for name in self._inputs:
            if name in self._plan.broken:
                continue
            scene = scenes.get(name)
            plan = self._reuse(name) if scene is None else self._plan_scene(name, scene, sizes)
            if plan is None or self._is_done(plan):
                continue
            if scene is not None and not has_transform(scene.raster):
                pixel_maps.append(scene)
            elif scene is not None and not scene.raster.is_georeferenced:
                self._say(
                    f'note: {plan.path} has coordinates and no CRS; so has its map, and its '
                    f'polygons have areas in pixels only.'
                )
            if scene is not None:
                self._door.examine(scene, (plan.height, plan.width) != scene.size)
            self._count_unfinished(plan)
            self._plan.scenes.append(plan)
        self._door.report()
        self._report_sizes(sizes)
        self._report_pixel_maps(pixel_maps)
        self._report_area()
        return self._plan

    def _reuse(self, name: str) -> Optional[ScenePlan]:
        """Return the plan that another job made for an input; None without one for the same files."""
        fields = self._shared.get(name)
        if fields is None:
            return None
        try:
            plan = replace(ScenePlan(**fields), path=self._inputs[name], outdated=None)
            size = plan.height, plan.width
            is_same = stamp(plan.path) in plan.settings['input']
        except (KeyError, TypeError):
            return None
        return plan if is_same and all(type(side) is int and side > 0 for side in size) else None

    def _plan_scene(
        self, name: str, scene: Scene, sizes: Dict[str, List[str]]
    ) -> Optional[ScenePlan]:
        """Return the plan of an input; None if the area of interest does not touch it.

        Args:
            name: Name of the map.
            scene: The input.
            sizes: Origin of the size in which the model sees inputs -> texts about these inputs;
                the input is added.
        """
        path = self._inputs[name]
        if isinstance(scene.raster, Mosaic):
            self._say(scene.raster.describe())
        for line in [] if self._setup.places is None else self._setup.places.describe(path):
            self._say(f'note: {line}')
        size, origin = choose_size(
            scene,
            self._setup.bands.resize,
            self._options.scale,
            cast(Optional[float], self._options.gsd),
        )
        with scene.raster as raster:
            settings = dict(
                self.common_settings(),
                input=[stamp(file) for file in raster.files()],
                size=list(size),
                **raster.facts(),
            )
        window_columns = self._columns_in_area(scene, size)
        if window_columns is not None and not any(window_columns):
            self._plan.outside_area.append(name)
            return None
        sizes.setdefault(origin, []).append(
            f'{path} in {size[1]}x{size[0]} pixels' if size != scene.size else path
        )
        if name in self._shared:
            refuse_differences(
                settings, self._shared[name].get('settings', {}), f'Another job makes {name} now.'
            )
        report = self._setup.outputs_of(name).report
        # A map that is there is made again only by --overwrite, or if one of its files is missing.
        outdated = stamp(str(report)) if report.exists() else None
        return ScenePlan(name, path, *size, settings, window_columns, outdated)

    def _is_done(self, plan: ScenePlan) -> bool:
        """Return whether a map is there and stays."""
        outputs = self._setup.outputs_of(plan.name)
        if self._options.overwrite or not self._setup.is_done(outputs, plan.settings):
            return False
        self._say(
            f'{outputs.map} is there, made with the same settings: skipped '
            f'(--overwrite makes it again)'
        )
        # A map in an object store may have no local copy.
        if outputs.map.exists():
            add_polygons(
                outputs, self._setup.classes, self._setup.outlines, self._setup.dates_of(plan.path)
            )
        # Left behind by a job that was killed between its last two actions.
        remove_folder(outputs.strip_folder(key_of(plan.settings)))
        return True

    def _count_unfinished(self, plan: ScenePlan) -> None:
        """Count the strips that nobody has finished; damaged ones are removed."""
        job = MapJob(plan, self._setup)
        if plan.name not in self._shared:
            job.strips.remove_damaged()
        missing, total = job.missing(), job.grid.strip_count
        self._plan.strips += sum(bool(job.grid.columns_of(strip)) for strip in missing)
        self._plan.windows += count_windows(job.grid, missing)
        if len(missing) < total:
            self._say(
                f'{plan.path}: continues, {total - len(missing)} of {total} strips are finished'
            )

    def common_settings(self) -> Dict[str, Any]:
        """Return the settings that all maps depend on, in types of JSON.

        Options that came later are in it only if they are used, so that maps of earlier versions
        keep their key.
        """
        options, setup = self._options, self._setup
        return dict(
            mapsage=__version__,
            **self._model_settings,
            classes=list(setup.classes.names),
            palette=setup.classes.palette.tolist(),
            window=list(setup.window),
            overlap=setup.overlap,
            bands=list(setup.bands.chosen or ()),
            tta=options.tta,
            confidence=options.confidence,
            aoi=None if setup.area is None else setup.area.key,
            **(dict(mosaic=True) if setup.members else {}),
            **(dict(probabilities=True) if options.probabilities else {}),
        )

    def _open_inputs(self) -> Dict[str, Scene]:
        """Open the inputs that no other job has planned; return those that can be mapped, by name.

        Raises:
            PredictError: If an input cannot be mapped and is not to be skipped, or no input can.
        """
        scenes: Dict[str, Scene] = {}
        broken = self._plan.broken
        for name, path in self._inputs.items():
            if self._reuse(name) is not None:
                continue
            try:
                scenes[name] = self._setup.open_scene(path)
            except PredictError as error:
                broken[name] = str(error)
        if broken and not (self._options.skip_broken and len(broken) < len(self._inputs)):
            if len(self._inputs) == 1:
                raise PredictError(*broken.values())
            raise PredictError(
                f'{len(broken)} of {len(self._inputs)} input(s) cannot be '
                f'mapped: {" ".join(broken.values())}'
                + ' --skip-broken maps the others.'
                * (len(broken) < len(self._inputs))
            )
        for reason in broken.values():
            self._say(f'note: skipped: {reason}')
        return scenes

    def _columns_in_area(self, scene: Scene, size: Tuple[int, int]) -> Optional[List[List[int]]]:
        """Return the columns of the windows that touch the area, for each row of windows."""
        if self._setup.area is None:
            return None
        area = self._setup.area.of_scene(scene.raster).resized(size)
        height, width = self._setup.window
        grid = Grid(*size, self._setup.window, self._setup.overlap)
        return [
            [column for column in grid.columns if area.meets(column, row, width, height)]
            for row in grid.rows
        ]

    def _check_output_names(self) -> None:
        """Raise an error if an output would overwrite an input or an output of another input."""
        files: Dict[str, str] = {
            os.path.abspath(path): path for path in self._setup.members or self._inputs.values()
        }
        for name, path in self._inputs.items():
            for file in self._setup.outputs_of(name).files():
                absolute = os.path.abspath(file)
                if absolute in files:
                    raise PredictError(
                        f'the output {file} of {path} would overwrite '
                        f'{files[absolute]}. Choose another --out.'
                    )
                files[absolute] = f'an output of {path}'

    def _report_sizes(self, sizes: Mapping[str, List[str]]) -> None:
        for origin, inputs in sizes.items():
            if origin != OWN_SIZE:
                self._say(f'the model sees {inputs[0]}{_and_more(inputs)} ({origin})')

    def _report_pixel_maps(self, scenes: List[Scene]) -> None:
        if scenes:
            self._say(
                f'note: {scenes[0].path}{_and_more(scenes)} '
                f'{scenes[-1].raster.georeference_gap}: its map is in pixels.'
            )

    def _report_area(self) -> None:
        """Tell which inputs and how many windows the area of interest touches."""
        area, plan = self._setup.area, self._plan
        if area is None:
            return
        for name in plan.outside_area:
            with self._setup.open_scene(self._inputs[name]).raster as raster:
                line = area.describe_miss(raster)
            if len(plan.outside_area) + len(plan.broken) == len(self._inputs):
                raise PredictError(
                    f'{line}. Check that the files belong together and that each '
                    f'has the CRS it was made in.'
                )
            self._say(f'note: {line}: it is left out.')
        for scene in plan.scenes:
            grid = Grid(scene.height, scene.width, self._setup.window, self._setup.overlap)
            self._say(
                f'{scene.path}: {sum(map(len, scene.window_columns or []))} of '
                f'{len(grid.rows) * len(grid.columns)} windows touch {area.path}'
            )


def _and_more(items: List[Any]) -> str:
    return f' and {len(items) - 1} more' if len(items) > 1 else ''


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
