"""mapsage classify: a class map from embeddings and a few labels, with its confidence and scores."""

from __future__ import annotations

import argparse
import functools
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import numpy as np

from mapsage.base.folder_claims import claimed
from mapsage.base.progress import ProgressLine
from mapsage.geo import ClassMapWriter, MapInfo, stamp, write_cog
from mapsage.geo.cog import confidence_path, temporary_beside
from mapsage.maps.assembly import has_transform
from mapsage.maps.blending import NO_DATA
from mapsage.maps.inputs import find_inputs
from mapsage.maps.outputs import Outputs, is_done, remove_outdated, write_report
from mapsage.pictures.tiles import class_palette
from mapsage.version import __version__

from .classifiers import METHODS, Classifier
from .cross_validation import (
    FEWEST_BLOCKS,
    CrossValidation,
    as_record,
    as_table,
    assign_blocks,
    cross_validate,
)
from .embedding_file import EmbeddingFile, check_one_identity, tile_side, tiles
from .errors import EmbeddingError
from .labels import LabeledCells, read_labels

Say = Callable[[str], None]
# Blocks with labels of a class below which it may be missing where it is tested.
_FEWEST_OF_A_CLASS = 3
_print: Say = functools.partial(print, flush=True)


def classify(args: argparse.Namespace, say: Say = _print) -> int:
    """Make class maps as the command line says; return the exit status.

    Args:
        args: Options of mapsage classify.
        say: Function that prints a line.
    """
    inputs = find_inputs(args.embeddings)
    files = {name: EmbeddingFile(path) for name, path in inputs.items()}
    check_one_identity(list(files.values()))
    cells = read_labels(args.labels, list(files.values()), args.field, args.layer, args.most)
    _describe_labels(cells, args.labels, say)
    scores = _score(cells, args.block, say)
    folder = Path(args.out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EmbeddingError(f'--out {folder} cannot be made: {error}.') from error
    advice = 'Wait for its end, stop it, or choose another --out.'
    with claimed(folder, [f'{name}.tif' for name in files], advice):
        outputs = {name: _outputs_of(folder, name, file) for name, file in files.items()}
        settings = {name: _settings_of(file, args, cells.classes) for name, file in files.items()}
        left = {
            name: file
            for name, file in files.items()
            if args.overwrite or not is_done(outputs[name], settings[name])
        }
        for name in set(files) - set(left):
            say(f'{outputs[name].map} is there, made with the same settings: skipped')
        classifier = Classifier(args.method, cells.vectors, cells.labels, len(cells.classes))
        palette = class_palette(
            len(cells.classes), None if cells.palette is None else cells.palette.tolist()
        )
        for name, file in left.items():
            record = dict(
                settings=settings[name],
                method=args.method,
                labels={
                    each: int((cells.labels == index).sum())
                    for index, each in enumerate(cells.classes)
                },
                cross_validation={
                    result.method: as_record(result, cells.classes) for result in scores
                },
            )
            _write_map(file, classifier, cells.classes, palette, outputs[name], record, say)
    return 0


def _outputs_of(folder: Path, name: str, file: EmbeddingFile) -> Outputs:
    outputs = Outputs.of(folder, name, True, False, False, False, False)
    if outputs.map.absolute() == Path(file.path).absolute():
        raise EmbeddingError(
            f'the map {outputs.map} would overwrite its embedding. Choose another --out.'
        )
    return outputs


def _settings_of(
    file: EmbeddingFile, args: argparse.Namespace, classes: Sequence[str]
) -> Dict[str, Any]:
    """Return everything that a map depends on, in types of JSON."""
    return dict(
        mapsage=__version__,
        embedding=stamp(file.path),
        identity=file.identity,
        labels=stamp(args.labels),
        field=args.field,
        layer=args.layer,
        most=args.most,
        method=args.method,
        classes=list(classes),
    )


def _describe_labels(cells: LabeledCells, path: str, say: Say) -> None:
    counts = np.bincount(cells.labels, minlength=len(cells.classes))
    shown = ', '.join(f'{name} {count}' for name, count in zip(cells.classes, counts))
    say(f'{len(cells.labels)} labeled cells of {path}: {shown}')
    for count, state in (
        (cells.counts['outside'], 'lie outside the embeddings'),
        (cells.counts['data'], 'lie on cells without data'),
    ):
        if count:
            say(f'note: {count} label(s) {state} and are left out')


def _score(cells: LabeledCells, side: Optional[float], say: Say) -> List[CrossValidation]:
    """Return the scores of all methods, and show them."""
    blocks, side = assign_blocks(cells.places, side)
    count = int(blocks.max()) + 1
    if count < 2:
        say(
            f'note: all labels lie in one block of {side:g}, so there are no scores: label places '
            f'that are farther apart, or give a smaller --block.'
        )
        return []
    results = [
        cross_validate(method, cells.vectors, cells.labels, blocks, len(cells.classes))
        for method in METHODS
    ]
    say(
        f'spatial cross-validation by {count} blocks of {side:.4g} (units of the CRS), in percent '
        f'with intervals of 95 %:'
    )
    for line in as_table(results, cells.classes):
        say(line)
    pairs = np.unique(np.stack([cells.labels, blocks]), axis=1)
    for index, of_class in enumerate(np.bincount(pairs[0])):
        if of_class < _FEWEST_OF_A_CLASS:
            say(
                f'note: the labels of {cells.classes[index]} lie in {of_class} block(s), so its '
                f'scores are of a classifier that saw few of them or none.'
            )
    if count < FEWEST_BLOCKS:
        say(
            f'note: {count} blocks say little, and the intervals are rough: label more places that '
            f'are far apart.'
        )
    say(
        'These scores are of labels chosen by hand, not of the map: mapsage assess plan draws '
        'random points for that.'
    )
    return results


def _write_map(
    file: EmbeddingFile,
    classifier: Classifier,
    classes: Sequence[str],
    palette: np.ndarray,
    outputs: Outputs,
    record: Dict[str, Any],
    say: Say,
) -> None:
    """Write the map of an embedding, its confidence and its report."""
    raster = file.raster
    side, counts = tile_side(file.dims), np.zeros(256, np.int64)
    info = MapInfo(
        classes,
        palette.tolist(),
        raster.crs if raster.is_georeferenced else None,
        raster.transform if has_transform(raster) else None,
    )
    assert outputs.confidence is not None
    with temporary_beside(outputs.map) as folder:
        working = folder / 'map.tif'
        total = -(-raster.width // side) * -(-raster.height // side)
        with raster, ClassMapWriter(
            working, raster.width, raster.height, info, True
        ) as writer, ProgressLine(total, 'classifying', say) as progress:
            for row, labels, confidence in _classified_rows(file, classifier, side, progress):
                writer.write(row, labels, confidence)
                counts += np.bincount(labels.ravel(), minlength=256)
        remove_outdated(outputs)
        write_cog(working, outputs.map)
        write_cog(confidence_path(working), outputs.confidence)
    pixels = counts[: len(classes)]
    write_report(
        outputs.report,
        dict(
            record,
            width=raster.width,
            height=raster.height,
            pixels=dict(zip(classes, pixels.tolist())),
            no_data=int(counts[NO_DATA]),
            polygons=None,
            damage=[],
            files=[path.name for path in outputs.files()],
        ),
    )
    shares = ', '.join(
        f'{name} {100 * count / max(1, pixels.sum()):.1f} %' for name, count in zip(classes, pixels)
    )
    say(f'{outputs.map}: {shares}; confidence in {outputs.confidence.name}')


def _classified_rows(
    file: EmbeddingFile, classifier: Classifier, side: int, progress: ProgressLine
) -> Any:
    """Yield rows of tiles: first row, classes and confidence, each uint8 (rows, width)."""
    width, height = file.raster.width, file.raster.height
    planes: Tuple[np.ndarray, np.ndarray]
    for window in tiles(width, height, side):
        if window.col_off == 0:
            shape = window.height, width
            planes = np.full(shape, NO_DATA, np.uint8), np.full(shape, NO_DATA, np.uint8)
        vectors, valid = file.read_unit(window.col_off, window.row_off, window.width, window.height)
        if valid.any():
            best, probability = classifier.predict(vectors[:, valid].T)
            box = np.s_[:, window.col_off : window.col_off + window.width]
            planes[0][box][valid] = best
            planes[1][box][valid] = np.rint(100 * probability)
        progress.advance(1)
        if window.col_off + window.width == width:
            yield window.row_off, *planes
