"""Chooses windows to label next, or windows whose labels to check.

All windows of the inputs are measured with the model (`window_facts.py`), then ranked
(`ranking.py`). This module loads model and datasets, tells the user, and writes the files. One
process only.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Callable, Iterator, List, Optional, Sequence, TypeVar

import numpy as np
import shapely
from mmengine.model import revert_sync_batchnorm

from mapsage.base.progress import ProgressLine
from mapsage.commands.checkpoint_model import (
    choose_batch,
    choose_precision,
    choose_window,
    load_model_and_meta,
    start_accelerator,
)
from mapsage.commands.cli import LOADERS, read_config
from mapsage.distributed import local_rank
from mapsage.distributed.wrappers import place_module
from mapsage.engine.loading.data_checks import DataError
from mapsage.extras.labels.exclusions import Exclusions, split_reviews
from mapsage.extras.labels.known_labels import UNKNOWN, KnownLabels
from mapsage.extras.labels.outlines import middles_in_files, middles_on_ground, outlines
from mapsage.extras.labels.ranking import most_suspicious, most_uncertain
from mapsage.extras.labels.suggestion_pictures import draw_suggestions, sheets
from mapsage.extras.labels.suggestions import Suggestion, write_suggestions
from mapsage.extras.labels.window_facts import FileWindow, WindowFacts, WindowJudge
from mapsage.extras.labels.window_source import WindowCandidate, WindowSource
from mapsage.extras.viewer.decisions import WRONG_LABEL, WRONG_MAP, is_review
from mapsage.geo import GeoError
from mapsage.geo.passport import passport_of_checkpoint
from mapsage.maps.errors import PredictError
from mapsage.maps.inputs import Door, find_inputs
from mapsage.maps.model import check_labeling, place_settings
from mapsage.maps.places import find_places, open_places
from mapsage.maps.predictor import WindowPredictor
from mapsage.pictures.tiles import resize

from .pseudo_labels import build_labeled_dataset

_T = TypeVar('_T')


class LabelSuggestions:
    """Chooses the windows that the command line describes.

    Args:
        args: Options of tools/suggest_labels.py.
        say: Function that prints a line.
    """

    def __init__(self, args: argparse.Namespace, say: Callable[[str], None]) -> None:
        self._args, self._say, self._out = args, say, Path(args.out)
        self._cfg = read_config(args)
        check_labeling(self._cfg, 'suggest_labels.py')
        settings = place_settings(self._cfg)
        places = None if settings is None else open_places(settings)
        self._inputs = list(
            (
                find_inputs(args.inputs, args.allow_remote)
                if places is None
                else find_places(
                    places,
                    args.inputs,
                    {
                        '--bands': args.bands,
                        '--scale': args.scale,
                        '--gsd': args.gsd,
                        '--units': args.units,
                    },
                )
            ).values()
        )
        self._check_out()
        accelerator = start_accelerator(self._cfg, 'none')
        self._known = self._known_labels()
        reviews = [path for path in args.exclude if is_review(path)]
        first, decided = split_reviews(reviews, args.suspicious)
        self._exclusions = Exclusions(
            self._known,
            [path for path in args.exclude if path not in reviews],
            args.suspicious,
            decided,
            first,
        )
        model, self._classes, bands, meta = load_model_and_meta(self._cfg, args.checkpoint)
        passport, problem = passport_of_checkpoint(meta, args.checkpoint)
        if problem:
            say(f'note: {problem}')
        door = Door(passport, args.trust_scenes, say)
        bands, gsd = door.bands_of(bands, args.units, args.bands), door.gsd(args.gsd)
        window, _, window_origin = choose_window(self._cfg, args.window, 0)
        self._source = WindowSource(bands, window, args.scale, gsd, places)
        model = place_module(revert_sync_batchnorm(model), accelerator, local_rank())
        predictor = WindowPredictor(
            model,
            accelerator.device(local_rank()),
            window,
            0,
            1,
            args.tta,
            choose_precision(self._cfg, accelerator) if args.amp else None,
            say,
        )
        self._batch_size = choose_batch(
            args.batch_size, window, max(2, predictor.scores), accelerator, bands.count
        )
        self._judge = WindowJudge(model, predictor, len(self._classes.names), args.min_confidence)
        self._crs = self._common_crs()
        for path in self._inputs:
            with self._source.scene(path).raster as raster:
                scene = self._source.scene(path)
                door.examine(scene, scene.size != (raster.height, raster.width))
        door.report()
        say(
            f'{len(self._inputs)} input(s); windows of {window[1]}x{window[0]} pixels '
            f'({window_origin})'
            + ', each mirrored three times' * args.tta
            + f'; {accelerator.describe()}'
        )

    def run(self) -> int:
        """Measure all windows, choose, write the file and the pictures; return the exit status."""
        windows = [
            window
            for path in self._inputs
            for window in self._exclusions.candidates(self._source, path)
        ]
        if not windows:
            raise PredictError(self._explain_empty())
        facts = self._measure(windows)
        if not facts:
            raise PredictError('no window holds data: check the no-data values of the inputs.')
        self._write(self._choose(facts))
        return 0

    def _check_out(self) -> None:
        """Raise an error if a file cannot be written, or one of the user's would be replaced."""
        folder = self._out.absolute().parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise PredictError(f'cannot make the folder {folder} of --out: {error}.') from error
        if not os.access(str(folder), os.W_OK):
            raise PredictError(f'the folder {folder} of --out cannot be written: choose another.')
        if self._out.exists():
            raise PredictError(
                f'{self._out} exists, and may hold what you have drawn: choose '
                f'another --out, or remove it.'
            )
        real_inputs = {os.path.realpath(path): path for path in self._inputs}
        for picture in sheets(self._out, self._args.count):
            real_picture = os.path.realpath(picture)
            if real_picture in real_inputs:
                raise PredictError(
                    f'{picture}, the picture of the windows, would overwrite the '
                    f'input {real_inputs[real_picture]}. Choose another --out.'
                )

    def _known_labels(self) -> KnownLabels:
        """Return an index of the labels in the config's datasets.

        A dataset that cannot be read is a note only, unless its labels are to be checked.
        """
        datasets = []
        for loader in LOADERS:
            try:
                datasets.append(build_labeled_dataset(self._cfg, loader))
            except (DataError, GeoError, FileNotFoundError) as error:
                if self._args.suspicious:
                    raise
                self._say(
                    f'note: the labels of {loader} cannot be read ({error}): windows that '
                    f'are labeled there may be suggested; --exclude names their ground.'
                )
        return KnownLabels(*datasets)

    def _common_crs(self) -> Optional[str]:
        """Return the CRS of the GeoPackage, which is the first input's; None for a table."""
        if self._out.suffix.lower() == '.csv':
            return None
        systems = []
        for path in self._inputs:
            with self._source.scene(path).raster as raster:
                if raster.crs is None or not raster.is_georeferenced:
                    raise PredictError(
                        f'{path} has no CRS or no transform, so a window of it has '
                        f'no place in {self._out}. Georeference it, or write a '
                        f'table: --out {self._out.with_suffix(".csv")}'
                    )
                systems.append(raster.crs.to_wkt())
        return systems[0]

    def _explain_empty(self) -> str:
        first = self._inputs[0]
        if self._args.suspicious:
            return (
                f'no window of {len(self._inputs)} input(s), the first {first}, has labels '
                f'that could be checked: --suspicious compares with the datasets of the '
                f'config. Give its images or scenes.'
            )
        return (
            f'no window is left of {len(self._inputs)} input(s), the first {first}: all are '
            f'labeled already, or lie in --exclude. If pixels without a polygon are not '
            f'labeled, set outside=255 in the dataset; else give more images or scenes.'
        )

    def _measure(self, windows: Sequence[WindowCandidate]) -> List[WindowFacts]:
        """Return the model's measurements of the windows that hold data."""
        facts: List[WindowFacts] = []
        with ProgressLine(len(windows), 'measuring', self._say) as progress:
            for batch in _batches(self._source.read(windows), self._batch_size):
                with_data = [
                    (window, values, valid) for window, values, valid in batch if valid.any()
                ]
                if with_data:
                    labels = (
                        [self._read_labels(window.place, valid) for window, _, valid in with_data]
                        if self._args.suspicious
                        else None
                    )
                    facts += self._judge.measure(
                        np.stack([values for _, values, _ in with_data]),
                        [valid for _, _, valid in with_data],
                        [window.place for window, _, _ in with_data],
                        labels,
                    )
                progress.advance(len(batch))
        return facts

    def _read_labels(self, place: FileWindow, valid: np.ndarray) -> np.ndarray:
        """Return the labels of a window in the size in which the model sees it."""
        height, width = valid.shape
        return resize(self._known.read(*place), height, width, nearest=True)

    def _choose(self, facts: List[WindowFacts]) -> List[Suggestion]:
        args, names = self._args, self._classes.names
        boxes = [window.place for window in facts]
        polygons: List[Optional[shapely.Polygon]] = [None] * len(facts)
        if self._crs is not None:
            polygons = outlines(self._source, boxes, self._crs)
        leading = dict.fromkeys(
            self._exclusions.leading,
            f'the review says {WRONG_LABEL if args.suspicious else WRONG_MAP}',
        )
        if args.suspicious:
            suggestions = most_suspicious(facts, polygons, names, args.count, args.tta, leading)
            nothing = (
                f'no label is suspicious: nowhere in {len(facts)} windows is the model sure '
                f'({args.min_confidence:g}) of another class than the label.'
            )
            shortage = 'no other label is contradicted'
        else:
            middles = (
                middles_in_files(boxes)
                if self._crs is None
                else middles_on_ground(polygons, self._crs)
            )
            suggestions = most_uncertain(
                facts, polygons, middles, names, args.count, args.min_distance, args.tta, leading
            )
            nothing = (
                f'no window is uncertain: the model is sure of all {len(facts)}. Look at '
                f'its score on labeled data, or at labels it contradicts (--suspicious).'
            )
            shortage = (
                f'the others are certain, or closer than --min-distance '
                f'{args.min_distance:g} windows to these'
            )
        if not suggestions:
            raise PredictError(nothing)
        if len(suggestions) < args.count:
            self._say(f'{len(suggestions)} windows of {args.count}: {shortage}')
        return suggestions

    def _write(self, suggestions: List[Suggestion]) -> None:
        names, palette = self._classes.names, self._classes.palette.tolist()
        write_suggestions(self._out, suggestions, self._crs, names, palette)
        for number, suggestion in enumerate(suggestions, 1):
            self._say(
                f'{number:3}  {suggestion.score:.3f}  {suggestion.title}  {suggestion.reason}'
            )
        self._say(f'{self._out}: {len(suggestions)} windows')
        title, subtitle, classes = (
            ('labels to check', 'beside each, its labels', self._shown_labels)
            if self._args.suspicious
            else ('windows to label next', 'beside each, the prediction', self._shown_prediction)
        )
        try:
            pictures = draw_suggestions(
                self._out, suggestions, self._source, classes, names, palette, title, subtitle
            )
        except OSError as error:
            raise PredictError(
                f'{self._out} is written, and its picture cannot be: {error}.'
            ) from error
        for picture in pictures:
            self._say(f'{picture}: what they show')

    def _shown_labels(
        self, suggestion: Suggestion, values: np.ndarray, valid: np.ndarray
    ) -> np.ndarray:
        return self._read_labels(suggestion.place, valid)

    def _shown_prediction(
        self, suggestion: Suggestion, values: np.ndarray, valid: np.ndarray
    ) -> np.ndarray:
        height, width = valid.shape
        return np.where(valid, self._judge.predict(values)[:height, :width], UNKNOWN)


def _batches(items: Iterator[_T], size: int) -> Iterator[List[_T]]:
    batch: List[_T] = []
    for item in items:
        batch.append(item)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch
