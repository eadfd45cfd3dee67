"""Choose the windows of images and scenes to label next, or whose labels are to be checked."""
from __future__ import annotations

import argparse
import functools
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import numpy as np
from mmengine.model import revert_sync_batchnorm

from mapsage.distributed import local_rank
from mapsage.drawing import LabeledImage, render_contact_sheet
from mapsage.drawing.canvas import save_png
from mapsage.drawing.tiles import resize
from mapsage.engine.env_cfg import parse_env_cfg
from mapsage.engine.loading.data_checks import DataError
from mapsage.engine.ranks import startup
from mapsage.geo import AreaOfInterest, GeoError, SceneArea
from mapsage.inference.errors import PredictError
from mapsage.inference.inputs import Scene, choose_size, find_inputs
from mapsage.inference.predictor import WindowPredictor
from mapsage.inference.progress import ProgressLine
from mapsage.inference.windows import window_starts
from mapsage.labeling import choice
from mapsage.labeling.known_labels import UNKNOWN, KnownLabels
from mapsage.labeling.suggestions import (
    Suggestion,
    in_sides,
    outline,
    overlap,
    read_table,
    reprojected,
    write_suggestions,
)
from mapsage.labeling.window_facts import Place, WindowFacts, WindowJudge, labeled_share
from mapsage.wrappers import place_module

from .config_checks import read_config
from .predict_checkpoint import choose_window, load_model
from .predict_compute import choose_batch, choose_precision
from .pseudo_labels import build_loaders

_DONE = 0.5  # share of a window from which on, if labeled or excluded, it is not suggested
_DOUBT = 0.005  # score below which a model is sure of a window
_LABELS = 0.01  # share of a window that must have a label for the label to be checked
_ON_A_SHEET = 24  # windows; a further sheet is begun then
_FAR = 1e6  # between windows of different files without coordinates, in sides of a window


@dataclass(frozen=True)
class _Window:
    """A window: its file's number, its place there, and that in the size that the model sees."""

    place: Place
    column: int
    row: int


class LabelSuggestions:
    """The windows that the command line asks for.

    Args:
        args: Options of tools/suggest_labels.py.
        say: Function that prints a line.
    """

    def __init__(self, args: argparse.Namespace, say: Callable[[str], None]) -> None:
        self._args, self._say, self._out = args, say, Path(args.out)
        self._cfg = read_config(args)
        if self._out.exists():
            raise PredictError(f'{self._out} exists, and may hold what you have drawn: choose '
                               f'another --out, or remove it.')
        if args.launcher != 'none':
            raise PredictError(f'--launcher {args.launcher}: windows are chosen by one process.')
        env = parse_env_cfg(self._cfg.get('env_cfg') or {}, self._cfg.get('model_wrapper_cfg'))
        startup.identify_process('none', env.port)
        accelerator = startup.choose_accelerator(env.accelerator)
        startup.join_ranks('none', accelerator, 'gloo', env.timeout)
        self._inputs = list(find_inputs(args.inputs).values())
        self._known = self._labels()
        self._tables = [place for path in args.exclude if path.lower().endswith('.csv')
                        for place in read_table(path)]
        self._areas = [AreaOfInterest(path) for path in args.exclude
                       if not path.lower().endswith('.csv')]
        model, self._classes, bands = load_model(self._cfg, args.checkpoint)
        self._bands = replace(bands, chosen=tuple(args.bands)) if args.bands else bands
        self._window, _, why = choose_window(self._cfg, args.window, 0)
        model = place_module(revert_sync_batchnorm(model), accelerator, local_rank())
        predictor = WindowPredictor(
            model, accelerator.device(local_rank()), self._window, 0, 1, args.tta,
            choose_precision(self._cfg, accelerator) if args.amp else None, say)
        self._batch = choose_batch(args.batch_size, self._window, max(2, predictor.scores),
                                   accelerator)
        self._judge = WindowJudge(model, predictor, len(self._classes.names), args.min_confidence)
        self._crs = self._common_crs()
        say(f'{len(self._inputs)} input(s); windows of {self._window[1]}x{self._window[0]} pixels '
            f'({why})' + ', each mirrored three times' * args.tta + f'; {accelerator.describe()}')

    def run(self) -> int:
        """Measure all windows, choose, and write the file and the picture."""
        windows = [self._windows(path) for path in self._inputs]
        total = sum(map(len, windows))
        if not total:
            raise PredictError(self._nothing_left())
        facts: List[WindowFacts] = []
        with ProgressLine(total, 'measuring', self._say, True) as progress:
            for path, here in zip(self._inputs, windows):
                for batch in (here[start:start + self._batch]
                              for start in range(0, len(here), self._batch)):
                    facts += self._measure(path, batch)
                    progress.advance(len(batch))
        if not facts:
            raise PredictError('no window holds data: check the no-data values of the inputs.')
        chosen = self._choose(facts)
        self._write(chosen)
        return 0

    def _labels(self) -> KnownLabels:
        """Return the labels that the config's datasets hold."""
        try:
            return KnownLabels(*build_loaders(self._cfg))
        except (DataError, GeoError, FileNotFoundError) as error:
            if self._args.suspicious:
                raise
            self._say(f'note: the labels of the config cannot be read ({error}): windows that are '
                      f'labeled already may be suggested; --exclude names their ground.')
            return KnownLabels()

    def _common_crs(self) -> Optional[str]:
        """Return the CRS of the first input, in which the GeoPackage is; None for a table."""
        if self._out.suffix.lower() == '.csv':
            return None
        for path in self._inputs:
            with self._scene(path).raster as raster:
                if not raster.is_georeferenced:
                    raise PredictError(f'{path} has no CRS or no transform, so a window of it has '
                                       f'no place in {self._out}. Georeference it, or write a '
                                       f'table: --out {self._out.with_suffix(".csv")}')
                first = getattr(self, '_first_crs', None) or raster.crs.to_wkt()  # type: ignore
                self._first_crs = first
        return self._first_crs

    def _scene(self, path: str) -> Scene:
        scene = Scene(path, self._bands)
        size, _ = choose_size(scene, self._bands.resize, self._args.scale, self._args.gsd)
        return scene if size == scene.size else Scene(path, self._bands, size)

    def _windows(self, path: str) -> List[_Window]:
        """Return the windows of an input that may be chosen."""
        scene = self._scene(path)
        with scene.raster as raster:
            areas = [area.of_scene(raster) for area in self._areas]
            places = list(_grid(scene, path, self._window))
            return [window for window in places if not self._is_done(window.place, areas)]

    def _is_done(self, place: Place, areas: Sequence[SceneArea]) -> bool:
        """Return whether a window is excluded, or has labels already, or none to be checked."""
        box = place[1:]
        here = place._replace(path=os.path.realpath(place.path))
        if any(table.path == here.path and overlap(here, table) >= _DONE
               for table in self._tables):
            return True
        if any(area.meets(*box) and area.mask(*box).mean() >= _DONE for area in areas):
            return True
        share = labeled_share(self._known.read(place.path, *box)) if place.path in self._known \
            else 0.0
        return share < _LABELS if self._args.suspicious else share >= _DONE

    def _nothing_left(self) -> str:
        first = self._inputs[0]
        if self._args.suspicious:
            return (f"no window of {len(self._inputs)} input(s), the first {first}, has labels "
                    f"that could be checked: --suspicious compares with the datasets of the "
                    f"config. Give its images or scenes.")
        return (f'no window is left of {len(self._inputs)} input(s), the first {first}: all are '
                f'labeled already, or lie in --exclude. If pixels without a polygon are not '
                f'labeled, set outside=255 in the dataset; else give more images or scenes.')

    def _measure(self, path: str, batch: Sequence[_Window]) -> List[WindowFacts]:
        scene = self._scene(path)
        with scene.raster:
            read = [scene.read(each.column, each.row, self._window)[:2] for each in batch]
        kept = [number for number, (_, valid) in enumerate(read) if valid.any()]
        if not kept:
            return []
        labels = None
        if self._args.suspicious:
            labels = [_resized(self._known.read(path, *batch[n].place[1:]), read[n][1])
                      for n in kept]
        return self._judge.measure(np.stack([read[n][0] for n in kept]),
                                   [read[n][1] for n in kept], [batch[n].place for n in kept],
                                   labels)

    def _choose(self, facts: List[WindowFacts]) -> List[Suggestion]:
        suspicious, names = self._args.suspicious, self._classes.names
        pixels = np.sum([each.pixels for each in facts], 0)
        weights = choice.class_weights(pixels)
        if suspicious:
            scores = np.array([each.contradicted / (each.place.width * each.place.height)
                               for each in facts])
        else:
            scores = np.array([float(each.doubt @ weights) for each in facts])
            scores[scores < _DOUBT] = 0
        polygons = self._polygons(facts)
        positions = self._positions(facts, polygons)
        order = choice.choose(
            np.round(scores, 6), positions, self._args.count,
            0 if suspicious else self._args.min_distance,
            None if suspicious else np.stack([each.feature for each in facts]))
        if not order:
            raise PredictError(
                f'no label is suspicious: nowhere in {len(facts)} windows is the model sure '
                f'({self._args.min_confidence:g}) of another class than the label.' if suspicious
                else f'no window is uncertain: the model is sure of all {len(facts)}. Look at its '
                f'score on labeled data, or at labels it contradicts (--suspicious).')
        if len(order) < self._args.count:
            self._say(f'{len(order)} windows of {self._args.count}: ' + (
                'no other label is contradicted' if suspicious else
                f'the others are certain, or closer than --min-distance '
                f'{self._args.min_distance:g} windows to these'))
        share = pixels / max(1, pixels.sum())
        found = []
        for number in order:
            each, polygon = facts[number], polygons[number]
            main = each.mistaken[0] if suspicious else int((each.doubt * weights).argmax())
            found.append(Suggestion(
                each.place, polygon, float(scores[number]), names[main],
                _reason(each, names, main, float(share[main]), suspicious, self._args.tta),
                each.margin, each.disagreement if self._args.tta else None))
        return found

    def _polygons(self, facts: Sequence[WindowFacts]) -> List[Optional[object]]:
        """Return the outlines of the windows in the common CRS; Nones for a table."""
        if self._crs is None:
            return [None] * len(facts)
        found: List[Optional[object]] = []
        rasters: Dict[str, Tuple[object, str]] = {}
        for each in facts:
            if each.place.path not in rasters:
                with self._scene(each.place.path).raster as raster:
                    assert raster.crs is not None  # that was checked
                    rasters[each.place.path] = raster, raster.crs.to_wkt()
            raster, crs = rasters[each.place.path]  # type: ignore[assignment]
            found.append(reprojected(outline(raster, each.place), crs, self._crs))
        return found

    def _positions(self, facts: Sequence[WindowFacts], polygons: Sequence[Optional[object]]
                   ) -> np.ndarray:
        """Return the middles of the windows in sides of a window."""
        if self._crs is not None:
            return in_sides(polygons, self._crs)
        numbers = {path: number for number, path in enumerate(self._inputs)}
        return np.array([(
            numbers[each.place.path] * _FAR + (each.place.column + each.place.width / 2) / max(
                each.place.width, 1),
            (each.place.row + each.place.height / 2) / max(each.place.height, 1))
            for each in facts])

    def _write(self, found: List[Suggestion]) -> None:
        self._out.parent.mkdir(parents=True, exist_ok=True)
        names, palette = self._classes.names, self._classes.palette.tolist()
        write_suggestions(self._out, found, self._crs, names, palette)
        for number, each in enumerate(found, 1):
            place = each.place
            self._say(f'{number:3}  {each.score:.3f}  {os.path.basename(place.path)} '
                      f'({place.column}, {place.row})  {each.reason}')
        self._say(f'{self._out}: {len(found)} windows')
        for start in range(0, len(found), _ON_A_SHEET):
            page = f'_{start // _ON_A_SHEET + 1}' if start else ''
            picture = self._out.with_name(f'{self._out.stem}{page}.png')
            some = [self._picture(number, each) for number, each in enumerate(
                found[start:start + _ON_A_SHEET], start + 1)]
            title = 'labels to check' if self._args.suspicious else 'windows to label next'
            save_png(str(picture), render_contact_sheet(
                some, names, palette, title, 'beside each, its labels' if self._args.suspicious
                else 'beside each, the prediction'))
            self._say(f'{picture}: pictures of {len(some)} of them')

    def _picture(self, number: int, found: Suggestion) -> LabeledImage:
        place, scene = found.place, self._scene(found.place.path)
        with scene.raster as raster:
            column = round(place.column * scene.size[1] / raster.width)
            row = round(place.row * scene.size[0] / raster.height)
            values, valid, _ = scene.read(column, row, self._window)
        height, width = valid.shape
        if self._args.suspicious:
            labels = _resized(self._known.read(place.path, *place[1:]), valid)
        else:
            labels = np.where(valid, self._judge.predict(values)[:height, :width], UNKNOWN)
        image = values[:, :height, :width].transpose(1, 2, 0)
        if self._bands.like_opencv:
            image = image[..., ::-1]
        return LabeledImage(image, labels, f'{number}  {os.path.basename(place.path)} '
                            f'({place.column}, {place.row})  {found.reason}')


def suggest(args: argparse.Namespace,
            say: Callable[[str], None] = functools.partial(print, flush=True)) -> int:
    """Choose what the command line asks for and return the exit status.

    Args:
        args: Options of tools/suggest_labels.py.
        say: Function that prints a line.

    Raises:
        PredictError: If there is nothing to choose; the message says why.
    """
    return LabelSuggestions(args, say).run()


def _grid(scene: Scene, path: str, window: Tuple[int, int]) -> Iterator[_Window]:
    """Yield the windows of a scene, as few as cover it, in the size that the model sees it in."""
    height, width = scene.size
    down, across = scene.raster.height / height, scene.raster.width / width
    for row in window_starts(height, window[0], 0):
        for column in window_starts(width, window[1], 0):
            left, top = round(column * across), round(row * down)
            right = min(scene.raster.width, round((column + window[1]) * across))
            bottom = min(scene.raster.height, round((row + window[0]) * down))
            yield _Window(Place(path, left, top, max(1, right - left), max(1, bottom - top)),
                          column, row)


def _resized(labels: np.ndarray, like: np.ndarray) -> np.ndarray:
    """Return labels in the size that the model sees the window in."""
    height, width = like.shape
    return resize(labels, height, width, nearest=True)


def _reason(facts: WindowFacts, names: Sequence[str], main: int, share: float, suspicious: bool,
            tta: bool) -> str:
    if suspicious:
        label, says = facts.mistaken
        part = 100 * facts.contradicted / max(1, facts.labeled)
        return f'labeled {names[label]}, the model is sure of {names[says]}: {part:.0f} % of labels'
    one, other = facts.rivals
    text = f'{names[one]} or {names[other]}'
    if share < 1 / len(names) / 2:
        text += f', rare {names[main]} ({100 * share:.1f} %)'
    return text + (f', mirror images disagree on {100 * facts.disagreement:.0f} %' if tta else '')
