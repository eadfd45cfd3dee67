"""Plan the maps of a prediction on rank 0, before the first window is predicted.

Every existing output is compared first, and every input is opened that no other job has planned, so
that a mistake in the last of a hundred inputs is reported at once and not after an hour. The result,
a `MapPlan`, holds the work that is left: finished maps are skipped, interrupted ones continue from
their strips.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple, cast

from mapsage.geo import Mosaic, stamp
from mapsage.version import __version__

from .assembly import has_transform
from .door import Door
from .errors import PredictError
from .inputs import OWN_SIZE, Scene, choose_size
from .map_job import MapJob, MapSetup, ScenePlan
from .options import MapOptions
from .outputs import add_polygons
from .sharing import refuse_differences
from .strip_store import key_of, remove_folder
from .strips import count_windows
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
