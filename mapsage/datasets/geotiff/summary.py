"""What a ``GeoTiffDataset`` logs at the start of a run: its content, and what looks like a mistake.

Each function from `_scenes` to `_leaks` yields messages on one subject; `summarize` collects them.
Little is read, so the figures of large scenes are estimates from samples.
"""

from __future__ import annotations

import logging
import math
import os
from collections import Counter
from typing import Any, Container, Dict, Iterator, List, Sequence, Tuple

import numpy as np

from mapsage.geo import (
    BurntLabels,
    GeoError,
    Raster,
    RasterBlockError,
    RasterLabels,
    hidden_data_band,
    pixel_side,
)
from mapsage.geo.passport import compare_scenes, describe_mixture
from mapsage.geo.statistics import spread_square

from .dataset import GeoTiffDataset

Message = Tuple[int, str]
"""A level of ``logging``, and a text."""

# Largest number of scenes, values or colors that a text names.
_SHOWN = 5
# Largest number of scenes for which the text gives the number of polygons of each.
_LISTED = 8
# Number of squares that are read from label rasters, and their side in pixels. Rasters that have
# fewer pixels than these squares are read whole.
_SQUARES, _SIDE = 64, 256
# Number of scenes that are examined for an alpha band, and of label files for a color table.
_EXAMINED = 4
# The meters of a block, and of a pixel in its projection, are known to within 1 %.
_EXACT = 0.99
# Largest difference of color values (0 to 255) that counts as the same color.
_NEAR = 16


def summarize(dataset: GeoTiffDataset) -> List[Message]:
    """Return messages on scenes, windows, polygons and class shares of a dataset, and warnings.

    Little is read, however large the scenes are: 64 squares of 256 pixels, spread over all label
    rasters. Class shares of polygons are computed from their areas.

    Args:
        dataset: Dataset with its windows loaded.
    """
    messages: List[Message] = []
    for subject in (_scenes, _labels, _mixed_types, _mixed_pixels, _hidden_bands, _leaks):
        try:
            messages += subject(dataset)
        # Only a warning: training ends with the same error if it needs the damaged window.
        except (GeoError, RasterBlockError) as error:
            messages.append((logging.WARNING, str(error)))
    return messages


def _scenes(dataset: GeoTiffDataset) -> Iterator[Message]:
    scenes = dataset.scene_facts
    yield (
        logging.INFO,
        (
            f'{_title(dataset)}: {len(scenes)} scene(s), {dataset.describe_images()}, '
            + (
                f'{len(dataset):,} windows of {dataset.window} pixels'
                if dataset.windows is None
                else f'random windows of {dataset.window} pixels, {len(dataset):,} an epoch'
            )
        ),
    )
    missed = 1 - (dataset.window / dataset.stride) ** 2
    if missed > 0:
        yield (
            logging.WARNING,
            f'{_title(dataset)}: stride={dataset.stride} is larger than window={dataset.window}, so '
            f'about {100 * missed:.0f} % of the pixels and their labels lie in no window and count '
            f'nowhere: set stride={dataset.window} or less.',
        )
    small = [scene for scene in scenes if min(scene['scene_shape']) < dataset.window]
    if small:
        height, width = small[0]['scene_shape']
        yield (
            logging.WARNING,
            f'{_title(dataset)}: window={dataset.window} is larger than {len(small)} of '
            f'{len(scenes)} scene(s), the first is {small[0]["scene"]} of {width} x {height} '
            f'pixels. The rest of each window is 0 and ignored: set window={min(height, width)} or '
            f'less, or join the scenes (gdalbuildvrt).',
        )


def _title(dataset: GeoTiffDataset) -> str:
    """Return the name of a dataset in messages: its class and its first scene."""
    return (
        f'{type(dataset).__name__} {os.path.join(dataset.data_root or "", dataset.scenes[0])}'
        + f' and {len(dataset.scenes) - 1} more' * (len(dataset.scenes) > 1)
    )


def _labels(dataset: GeoTiffDataset) -> Iterator[Message]:
    burnt = [scene for scene in dataset.scene_facts if isinstance(scene['labels'], BurntLabels)]
    rasters = [scene for scene in dataset.scene_facts if isinstance(scene['labels'], RasterLabels)]
    if not burnt and not rasters:
        yield logging.INFO, f'{_title(dataset)}: no labels'
    if burnt:
        yield from _polygons(dataset, burnt)
    if rasters:
        yield from _rasters(dataset, rasters)
        yield from _color_tables(dataset, rasters)


def _polygons(dataset: GeoTiffDataset, scenes: Sequence[Dict[str, Any]]) -> Iterator[Message]:
    counts: Dict[str, int] = {}
    areas: Counter = Counter()
    by_class: Counter = Counter()
    counted_by_class: Counter = Counter()
    pixels = sum(
        scene['part'].pixels if scene['part'] else math.prod(scene['scene_shape'])
        for scene in scenes
    )
    for scene in scenes:
        height, width = scene['scene_shape']
        indices, counted = scene['labels'].cover(width, height, scene['part'])
        counts[scene['scene']] = len(indices)
        by_class.update(indices.tolist())
        counted_by_class.update(indices[counted > 0].tolist())
        areas.update(dict(enumerate(np.bincount(indices, counted).tolist())))
    areas[dataset.outside] += max(0.0, pixels - sum(areas.values()))
    kind = 'polygon' if dataset.point_radius is None else 'point'
    if dataset.split is None:
        by_scene = (
            ', '.join(f'{os.path.basename(path)} {count:,}' for path, count in counts.items())
            if len(counts) <= _LISTED
            else f'{min(counts.values()):,} to {max(counts.values()):,} each'
        )
        summary = f'{sum(counts.values()):,} {kind}(s) in its scenes ({by_scene})'
        sample = f'{kind} or scene'
    else:
        by_name = ', '.join(
            f'{name} {counted_by_class[index]:,}'
            for index, name in enumerate(dataset.file_classes())
        )
        sample = (
            f'{sum(counted_by_class.values()):,} of {sum(counts.values()):,} {kind}(s) count in '
            f'part {dataset.split.part!r}'
        )
        summary = f'{sample} ({by_name})'
    yield (
        logging.INFO,
        (
            f'{_title(dataset)}: {summary}; shares by the areas of {kind}s: '
            f'{_shares(dataset, areas, pixels, set(counted_by_class), kind)}'
        ),
    )
    yield from _absent_classes(dataset, areas, sample, by_class)
    yield from (
        (logging.INFO, vector.guess) for vector in dataset.vector_labels.values() if vector.guess
    )
    defaults = sum(vector.defaults for vector in dataset.vector_labels.values())
    if defaults:
        name = dataset.default_class
        if isinstance(name, int):
            name = dict(enumerate(dataset.file_classes())).get(name, 'ignored')
        yield (
            logging.INFO,
            f'{_title(dataset)}: {defaults:,} feature(s) without a class are {name!r} '
            f'(default_class): their file has no field {dataset.class_field!r}, or it is empty',
        )
    bare = [path for path, count in counts.items() if not count]
    if bare:
        classes = dataset.file_classes()
        fate = (
            'they are ignored'
            if dataset.outside == dataset.ignore_index
            else f'all their pixels have the class {classes[dataset.outside]!r}'
        )
        yield (
            logging.WARNING,
            f'no {kind} lies in {len(bare)} of {len(scenes)} scene(s), and {fate}: '
            f'{_some(bare)}. If they are not labeled, leave them out of scenes=, or give their '
            f'label files.',
        )


def _rasters(dataset: GeoTiffDataset, scenes: Sequence[Dict[str, Any]]) -> Iterator[Message]:
    boxes = list(_boxes([scene['scene_shape'] for scene in scenes]))
    by_value: Counter = Counter()
    counted_by_value: Counter = by_value if dataset.split is None else Counter()
    pixels = 0
    for number, box in boxes:
        labels, labeled = scenes[number]['labels'].read(*box)
        by_value.update(_count_values(labels[labeled]))
        if dataset.split is None:
            pixels += labels.size
            continue
        in_part = scenes[number]['part'].mask(*box)
        pixels += int(in_part.sum())
        counted_by_value.update(_count_values(labels[labeled & in_part]))
    shift = int(dataset.reduce_zero_label)
    unlabeled = [dataset.ignore_index] + [0] * shift
    by_class, areas = (
        Counter(
            {
                value - shift: float(count)
                for value, count in counter.items()
                if value not in unlabeled
            }
        )
        for counter in (by_value, counted_by_value)
    )
    ignored = pixels - sum(areas.values())
    known = range(len(dataset.file_classes()))
    sample = f'{len(boxes)} squares of {_SIDE} pixels' if len(boxes) > len(scenes) else 'all pixels'
    if dataset.split is not None:
        sample += f' in part {dataset.split.part!r}'
    if ignored:
        areas[dataset.ignore_index] = ignored
    yield (
        logging.INFO,
        (
            f'{_title(dataset)}: {len(scenes)} label raster(s); shares, from {sample}: '
            f'{_shares(dataset, areas, pixels, set(known))}'
        ),
    )
    yield from _absent_classes(dataset, areas, sample, by_class)
    unknown = sorted(
        value + shift for value in by_class if value not in known and value != dataset.ignore_index
    )
    if unknown:
        yield (
            logging.WARNING,
            f'label rasters hold {_some(unknown)}, which {len(known)} classes ({shift} to '
            f'{len(known) - 1 + shift}) do not have; training ends at the first such window. '
            f'Correct the labels, or the classes in metainfo.',
        )
    if pixels and ignored == pixels:
        yield (
            logging.WARNING,
            f'no pixel of the label rasters has a label ({sample} examined, the first file is '
            f'{scenes[0]["labels"].path}): check their no-data value and label_nodata=.',
        )


def _count_values(labels: np.ndarray) -> Dict[int, int]:
    """Return the number of pixels of each value."""
    values, counts = np.unique(labels, return_counts=True)
    return dict(zip(values.tolist(), counts.tolist()))


def _absent_classes(
    dataset: GeoTiffDataset, areas: Counter, sample: str, by_class: Counter
) -> Iterator[Message]:
    """Yield a warning if classes do not occur in the dataset's part of the scenes.

    Args:
        dataset: Dataset with the names of the classes.
        areas: Pixels of the part by class index.
        sample: Text that says what was counted.
        by_class: Pixels or polygons of all parts by class index.
    """
    classes = dataset.file_classes()
    absent = [index for index in range(len(classes)) if not areas[index]]
    if not absent or len(absent) == len(classes):
        return
    advice = 'Check the labels, or take the class out of metainfo.'
    if dataset.split is not None and any(by_class[index] for index in absent):
        advice = (
            'Other parts of the split have such labels: set another seed, a larger share or smaller '
            'blocks in the split of all datasets.'
        )
    yield (
        logging.WARNING,
        f'{_title(dataset)}: no labels of {", ".join(classes[index] for index in absent)} '
        f'({sample}). A class that does not occur is not learned and gets no score, so a mean over '
        f'the classes looks better than it is. {advice}',
    )


def _boxes(shapes: Sequence[Tuple[int, int]]) -> Iterator[Tuple[int, Tuple[int, int, int, int]]]:
    """Yield the number of a scene and a window of it: all scenes whole, or squares in them."""
    if sum(height * width for height, width in shapes) <= _SQUARES * _SIDE**2:
        for number, (height, width) in enumerate(shapes):
            yield number, (0, 0, width, height)
        return
    for square in range(_SQUARES):
        number = square * len(shapes) // _SQUARES
        yield number, spread_square(square, shapes[number], _SIDE)


def _shares(
    dataset: GeoTiffDataset,
    areas: Counter,
    pixels: float,
    drawn: Container[int],
    kind: str = 'polygon',
) -> str:
    """Return text on the share of each class.

    Args:
        dataset: Dataset with the names of the classes.
        areas: Pixels by class index.
        pixels: Number of all pixels.
        drawn: Class indices that have a polygon.
        kind: ``'polygon'`` or ``'point'``.
    """
    dataset.class_shares = {
        name: areas[index] / max(pixels, 1) for index, name in enumerate(dataset.file_classes())
    }
    texts = []
    for index, name in enumerate(dataset.file_classes()):
        bare = index not in drawn and (index != dataset.outside or not areas[index])
        texts.append(f'{name} {100 * areas[index] / max(pixels, 1):.3g} %' + f' (no {kind})' * bare)
    ignored = areas[dataset.ignore_index]
    return ', '.join(texts) + (
        f', ignored {100 * ignored / max(pixels, 1):.3g} %' if ignored else ''
    )


def _color_tables(dataset: GeoTiffDataset, scenes: Sequence[Dict[str, Any]]) -> Iterator[Message]:
    """Yield a warning if label files have other colors than metainfo.

    Different colors often mean that the classes are in a different order.
    """
    for labels in {scene['labels'].path: scene['labels'] for scene in scenes[:_EXAMINED]}.values():
        texts = list(_color_differences(dataset, labels.colors()))
        if texts:
            yield (
                logging.WARNING,
                f'labels {labels.path} have a color table that disagrees with metainfo: '
                f'{"; ".join(texts[:_SHOWN])}{"; ..." if len(texts) > _SHOWN else ""}. Values '
                f'decide, not colors: check that metainfo has the classes in the order of the '
                f'file.',
            )
            return


def _color_differences(
    dataset: GeoTiffDataset, table: Dict[int, Tuple[int, int, int]]
) -> Iterator[str]:
    """Yield text on each difference between a file's color table and the palette.

    Args:
        dataset: Dataset with the palette.
        table: Color table of a label file, RGB by value.
    """
    colored = [value for value, color in table.items() if len(set(color)) > 1]
    # A table of shades of gray says nothing about classes.
    if not colored:
        return
    classes, shift = dataset.file_classes(), int(dataset.reduce_zero_label)
    palette = (dataset.METAINFO if dataset.METAINFO.get('classes') else dataset._metainfo).get(
        'palette'
    )
    colors = [tuple(map(int, color)) for color in palette or ()][: len(classes)]
    for index, color in enumerate(colors):
        file_color = table.get(index + shift)
        if file_color is not None and _differ(file_color, color):
            same = [
                classes[number]
                for number, class_color in enumerate(colors)
                if not _differ(file_color, class_color)
            ]
            yield (
                f'value {index + shift} is {file_color} there'
                + (f', which is the color of {same[0]!r}' if same else '')
                + f', and {classes[index]!r} is {color} here'
            )
    # Some programs fill all 256 entries with colors; such entries are not classes.
    for value in colored if len(colored) < 200 else ():
        if value >= len(classes) + shift and value != dataset.ignore_index:
            yield f'value {value} is {table[value]} there, and no class here'


def _differ(color_a: Sequence[int], color_b: Sequence[int]) -> bool:
    return max(abs(a - b) for a, b in zip(color_a, color_b)) > _NEAR


def _mixed_types(dataset: GeoTiffDataset) -> Iterator[Message]:
    if len(dataset.dtypes) > 1:
        types = ', '.join(f'{dtype} ({path})' for dtype, path in dataset.dtypes.items())
        yield (
            logging.WARNING,
            f'scenes differ in their type of values: {types}. One mean and deviation is used for '
            f'all: convert them to one type and scale, or make a dataset for each type.',
        )


def _mixed_pixels(dataset: GeoTiffDataset) -> Iterator[Message]:
    """Yield what shows that the pixels of scenes are not of one kind."""
    for sensor, source in dataset.pixel_sources.items():
        texts = compare_scenes(source.facts, source.sampled)
        # A dataset of stacks has logged how its images differ, by sensor.
        for text in texts if sensor else [*describe_mixture(source.facts), *texts]:
            yield logging.WARNING, f'{_title(dataset)}: {text}'


def _hidden_bands(dataset: GeoTiffDataset) -> Iterator[Message]:
    for scene in dataset.scene_facts[:_EXAMINED]:
        raster = Raster(scene['scene'], scene['bands'])
        bands, hidden = list(raster.bands), hidden_data_band(raster)
        if hidden is not None:
            yield (
                logging.WARNING,
                f'band {hidden} of {scene["scene"]} is tagged as alpha, so that it is no input '
                f'(bands={bands}) and hides pixels where it is 0; but it holds more than a mask, '
                f'as an infrared band does. bands={[*bands, hidden]} makes it an input; '
                f'gdal_edit.py -colorinterp_{hidden} undefined takes the tag away.',
            )
            return


def _leaks(dataset: GeoTiffDataset) -> Iterator[Message]:
    """Yield a warning if blocks or margin are smaller than a window.

    Training windows then show most of the ground that the scored part consists of.
    """
    if dataset.split is None or dataset.split.part == 'train':
        return
    blocks, window = dataset.split.blocks, dataset.window
    pixel = (
        1.0
        if blocks.unit == 'pixels'
        else max(pixel_side(Raster(scene['scene'])) for scene in dataset.scene_facts[:_EXAMINED])
    )
    size, margin = blocks.size / pixel, blocks.margin / pixel
    small, narrow = size < _EXACT * window, margin < _EXACT * window / 2
    reasons = [
        f'blocks of {blocks.size:g} {blocks.unit} are {size:.3g} pixels, less than a window '
        f'of {window}'
    ] * small + [
        f'margin={blocks.margin:g} {blocks.unit} is {margin:.3g} pixels, less than half a '
        f'window of {window}'
    ] * narrow
    if reasons:
        advice = (
            f'size={2 * window * pixel:.4g} or more (two windows), ' * small
            + f'margin={math.ceil(window * pixel / 2)} or more'
        )
        yield (
            logging.WARNING,
            f'split: {"; ".join(reasons)}. Windows of training show ground that part '
            f'{dataset.split.part!r} is scored on, so that scores may be better than on new '
            f'ground. Set {advice} in the split of all datasets, a smaller window, or use other '
            f'scenes (docs/reference/datasets.md).',
        )


def _some(things: Sequence[object]) -> str:
    """Return text with the first few of some values."""
    return ', '.join(map(str, things[:_SHOWN])) + (', ...' if len(things) > _SHOWN else '')
