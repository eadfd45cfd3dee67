"""Choose the windows of images and scenes to label next, or whose labels are to be checked."""
from __future__ import annotations

import argparse
import functools
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, Iterator, List, Optional, Sequence

import numpy as np
from mmengine.config import Config
from mmengine.model import revert_sync_batchnorm

from mapsage.accelerator import Accelerator
from mapsage.distributed import local_rank
from mapsage.drawing.tiles import resize
from mapsage.engine.env_cfg import parse_env_cfg
from mapsage.engine.loading.data_checks import DataError
from mapsage.engine.ranks import startup
from mapsage.geo import GeoError
from mapsage.labeling.exclusions import Exclusions
from mapsage.labeling.known_labels import UNKNOWN, KnownLabels
from mapsage.labeling.outlines import middles_in_files, middles_on_ground, outlines
from mapsage.labeling.ranking import most_suspicious, most_uncertain
from mapsage.labeling.suggestion_pictures import draw_suggestions, sheets
from mapsage.labeling.suggestions import Suggestion, write_suggestions
from mapsage.labeling.window_facts import WindowFacts, WindowJudge
from mapsage.labeling.window_source import WindowCandidate, WindowSource
from mapsage.maps.errors import PredictError
from mapsage.maps.inputs import find_inputs
from mapsage.maps.predictor import WindowPredictor
from mapsage.maps.progress import ProgressLine
from mapsage.viewer.decisions import WRONG_LABEL, WRONG_MAP, is_review
from mapsage.wrappers import place_module

from .config_checks import LOADERS, read_config
from .predict_checkpoint import choose_window, load_model
from .predict_compute import choose_batch, choose_precision
from .pseudo_labels import build_dataset_of
from .review_decisions import split_reviews


class LabelSuggestions:
    """The windows that the command line asks for.

    Args:
        args: Options of tools/suggest_labels.py.
        say: Function that prints a line.
    """

    def __init__(self, args: argparse.Namespace, say: Callable[[str], None]) -> None:
        self._args, self._say, self._out = args, say, Path(args.out)
        self._cfg = read_config(args)
        self._inputs = list(find_inputs(args.inputs, args.allow_remote).values())
        self._check_out()
        accelerator = _start(self._cfg)
        self._known = self._labels()
        reviews = [path for path in args.exclude if is_review(path)]
        first, decided = split_reviews(reviews, args.suspicious)
        self._exclusions = Exclusions(
            self._known, [path for path in args.exclude if path not in reviews], args.suspicious,
            decided, first)
        model, self._classes, bands = load_model(self._cfg, args.checkpoint)
        bands = replace(bands, chosen=tuple(args.bands)) if args.bands else bands
        window, _, why = choose_window(self._cfg, args.window, 0)
        self._source = WindowSource(bands, window, args.scale, args.gsd)
        model = place_module(revert_sync_batchnorm(model), accelerator, local_rank())
        predictor = WindowPredictor(
            model, accelerator.device(local_rank()), window, 0, 1, args.tta,
            choose_precision(self._cfg, accelerator) if args.amp else None, say)
        self._batch = choose_batch(args.batch_size, window, max(2, predictor.scores), accelerator)
        self._judge = WindowJudge(model, predictor, len(self._classes.names), args.min_confidence)
        self._crs = self._common_crs()
        say(f'{len(self._inputs)} input(s); windows of {window[1]}x{window[0]} pixels '
            f'({why})' + ', each mirrored three times' * args.tta + f'; {accelerator.describe()}')

    def run(self) -> int:
        """Measure all windows, choose, and write the file and the picture."""
        windows = [window for path in self._inputs
                   for window in self._exclusions.candidates(self._source, path)]
        if not windows:
            raise PredictError(self._nothing_left())
        facts = self._measure(windows)
        if not facts:
            raise PredictError('no window holds data: check the no-data values of the inputs.')
        self._write(self._choose(facts))
        return 0

    def _check_out(self) -> None:
        """Refuse a folder that cannot be written, and to replace what was drawn, or an image."""
        folder = self._out.absolute().parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise PredictError(f'cannot make the folder {folder} of --out: {error}.') from error
        if not os.access(str(folder), os.W_OK):
            raise PredictError(f'the folder {folder} of --out cannot be written: choose another.')
        if self._out.exists():
            raise PredictError(f'{self._out} exists, and may hold what you have drawn: choose '
                               f'another --out, or remove it.')
        mine = {os.path.realpath(path): path for path in self._inputs}
        for picture in sheets(self._out, self._args.count):
            if os.path.realpath(picture) in mine:
                raise PredictError(f'{picture}, the picture of the windows, would overwrite the '
                                   f'input {mine[os.path.realpath(picture)]}. Choose another '
                                   f'--out.')

    def _labels(self) -> KnownLabels:
        """Return the labels that the config's datasets hold."""
        found = []
        for loader in LOADERS:
            try:
                found.append(build_dataset_of(self._cfg, loader))
            except (DataError, GeoError, FileNotFoundError) as error:
                if self._args.suspicious:
                    raise
                self._say(f'note: the labels of {loader} cannot be read ({error}): windows that '
                          f'are labeled there may be suggested; --exclude names their ground.')
        return KnownLabels(*found)

    def _common_crs(self) -> Optional[str]:
        """Return the CRS of the first input, in which the GeoPackage is; None for a table."""
        if self._out.suffix.lower() == '.csv':
            return None
        found = []
        for path in self._inputs:
            with self._source.scene(path).raster as raster:
                if not raster.is_georeferenced:
                    raise PredictError(f'{path} has no CRS or no transform, so a window of it has '
                                       f'no place in {self._out}. Georeference it, or write a '
                                       f'table: --out {self._out.with_suffix(".csv")}')
                assert raster.crs is not None  # it is georeferenced
                found.append(raster.crs.to_wkt())
        return found[0]

    def _nothing_left(self) -> str:
        first = self._inputs[0]
        if self._args.suspicious:
            return (f"no window of {len(self._inputs)} input(s), the first {first}, has labels "
                    f"that could be checked: --suspicious compares with the datasets of the "
                    f"config. Give its images or scenes.")
        return (f'no window is left of {len(self._inputs)} input(s), the first {first}: all are '
                f'labeled already, or lie in --exclude. If pixels without a polygon are not '
                f'labeled, set outside=255 in the dataset; else give more images or scenes.')

    def _measure(self, windows: Sequence[WindowCandidate]) -> List[WindowFacts]:
        """Return what the model thinks of the windows that hold data."""
        facts: List[WindowFacts] = []
        with ProgressLine(len(windows), 'measuring', self._say) as progress:
            for batch in _batches(self._source.read(windows), self._batch):
                full = [each for each in batch if each[2].any()]
                if full:
                    labels = [self._labels_of(window, valid) for window, _, valid in full] \
                        if self._args.suspicious else None
                    facts += self._judge.measure(
                        np.stack([values for _, values, _ in full]),
                        [valid for _, _, valid in full],
                        [window.place for window, _, _ in full], labels)
                progress.advance(len(batch))
        return facts

    def _labels_of(self, window: Any, valid: np.ndarray) -> np.ndarray:
        """Return the labels of a window in the size that the model sees it in."""
        height, width = valid.shape
        return resize(self._known.read(*window.place), height, width, nearest=True)

    def _choose(self, facts: List[WindowFacts]) -> List[Suggestion]:
        args, names, places = self._args, self._classes.names, [each.place for each in facts]
        polygons: List[Any] = [None] * len(facts)
        if self._crs is not None:
            polygons = outlines(self._source, places, self._crs)
        leading = dict.fromkeys(
            self._exclusions.leading,
            f'the review says {WRONG_LABEL if args.suspicious else WRONG_MAP}')
        if args.suspicious:
            found = most_suspicious(facts, polygons, names, args.count, args.tta, leading)
            none = (f'no label is suspicious: nowhere in {len(facts)} windows is the model sure '
                    f'({args.min_confidence:g}) of another class than the label.')
            few = 'no other label is contradicted'
        else:
            middles = middles_in_files(places) if self._crs is None else middles_on_ground(
                polygons, self._crs)
            found = most_uncertain(facts, polygons, middles, names, args.count,
                                   args.min_distance, args.tta, leading)
            none = (f'no window is uncertain: the model is sure of all {len(facts)}. Look at its '
                    f'score on labeled data, or at labels it contradicts (--suspicious).')
            few = (f'the others are certain, or closer than --min-distance '
                   f'{args.min_distance:g} windows to these')
        if not found:
            raise PredictError(none)
        if len(found) < args.count:
            self._say(f'{len(found)} windows of {args.count}: {few}')
        return found

    def _write(self, found: List[Suggestion]) -> None:
        names, palette = self._classes.names, self._classes.palette.tolist()
        write_suggestions(self._out, found, self._crs, names, palette)
        for number, each in enumerate(found, 1):
            self._say(f'{number:3}  {each.score:.3f}  {each.title}  {each.reason}')
        self._say(f'{self._out}: {len(found)} windows')
        title, beside, classes = (
            'labels to check', 'beside each, its labels', self._shown_labels) \
            if self._args.suspicious else (
                'windows to label next', 'beside each, the prediction', self._shown_prediction)
        try:
            pictures = draw_suggestions(self._out, found, self._source, classes, names, palette,
                                        title, beside)
        except OSError as error:
            raise PredictError(f'{self._out} is written, and its picture cannot be: '
                               f'{error}.') from error
        for picture in pictures:
            self._say(f'{picture}: what they show')

    def _shown_labels(self, found: Suggestion, values: np.ndarray,
                      valid: np.ndarray) -> np.ndarray:
        return self._labels_of(found, valid)

    def _shown_prediction(self, found: Suggestion, values: np.ndarray,
                          valid: np.ndarray) -> np.ndarray:
        height, width = valid.shape
        return np.where(valid, self._judge.predict(values)[:height, :width], UNKNOWN)


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


def _start(cfg: Config) -> Accelerator:
    """Start the accelerator that the config names, for this process only."""
    env = parse_env_cfg(cfg.get('env_cfg') or {}, cfg.get('model_wrapper_cfg'))
    startup.identify_process('none', env.port)
    accelerator = startup.choose_accelerator(env.accelerator)
    startup.join_ranks('none', accelerator, 'gloo', env.timeout)
    return accelerator


def _batches(items: Iterator[Any], size: int) -> Iterator[List[Any]]:
    batch: List[Any] = []
    for each in items:
        batch.append(each)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch
