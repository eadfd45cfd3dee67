"""A sample from a labeled plan and a map: whether they fit, and which class each point has.

The map may be the plan's own, or another one of the same area: the strata stay the plan's, which is
why estimates by strata that are not the map's classes are needed.
"""

from __future__ import annotations

import difflib
from typing import List, NamedTuple, Optional, Sequence

import numpy as np

from .assessment import Sample
from .census import Advance, digest_of
from .errors import AssessError
from .map_reader import MapReader
from .plan_record import SIMPLE
from .points_file import LabeledPlan


class LabelOptions(NamedTuple):
    """What a user allows.

    Attributes:
        skip_unlabeled: Whether points without a label are left out.
        extra_classes: Reference classes that the map lacks.
    """

    skip_unlabeled: bool = False
    extra_classes: Sequence[str] = ()


def check_digest(plan: LabeledPlan, reader: MapReader, advance: Advance) -> None:
    """Check that a plan was made for a map.

    Raises:
        AssessError: If the map changed since, or is another one.
    """
    digest = digest_of(reader, advance)
    if digest != plan.record.digest:
        raise AssessError(
            f'{plan.path} was planned for {plan.record.map} (digest {plan.record.digest[:8]}), and '
            f'{reader.path} has other classes or another grid (digest {digest[:8]}). Name the map '
            'of the plan; with --other-map the points assess another map of the same area.'
        )


def sample_of_plan(
    plan: LabeledPlan, options: LabelOptions, reader: Optional[MapReader] = None
) -> Sample:
    """Return the sample that assesses the map of the plan.

    Args:
        plan: The plan.
        options: What the user allows.
        reader: The map of the plan, which knows the areas of pixels that plans of earlier versions
            do not; None to take the areas from the plan.

    Raises:
        AssessError: If labels are missing or unknown.
    """
    record, points = plan.record, plan.points
    names = _reference_names(record.class_names, options.extra_classes)
    labeled = _labeled(plan, options)
    reference = _reference_indices(plan, names, labeled)
    has_probability = record.probability is not None and points.probability.shape[1] > 0
    return Sample(
        points.stratum[labeled],
        points.mapped[labeled],
        reference,
        record.strata,
        np.array(record.area),
        np.array(record.pixels, float),
        np.array(record.composition) > 0,
        names,
        points.probability[labeled] if has_probability else None,
        np.array(record.probability) if has_probability else None,
        weights_of(plan, reader)[labeled],
    )


def sample_of_map(plan: LabeledPlan, reader: MapReader, options: LabelOptions) -> Sample:
    """Return the sample that assesses another map with the points of a plan.

    Raises:
        AssessError: If a point lies outside the map or where it has no class, the map has another
            CRS, or labels are missing or unknown.
    """
    mapped = classes_at(plan, reader)
    names = _reference_names(reader.class_names, options.extra_classes)
    labeled = _labeled(plan, options)
    record = plan.record
    # Which classes the other map has in a stratum is unknown: any.
    occurs = np.ones((len(record.strata), len(reader.class_names)), bool)
    return Sample(
        plan.points.stratum[labeled],
        mapped[labeled],
        _reference_indices(plan, names, labeled),
        record.strata,
        np.array(record.area),
        np.array(record.pixels, float),
        occurs,
        names,
        weights=weights_of(plan)[labeled],
    )


def weights_of(plan: LabeledPlan, reader: Optional[MapReader] = None) -> np.ndarray:
    """Return the weight of each point in the means of its stratum, ``(n,)``.

    It is the area of its pixel, since all pixels of a stratum had the same chance. In plans of
    earlier versions pixels were drawn one after the other with chances in proportion to area. The
    weight is then area by inclusion probability, which is ``1 - exp(-t area)`` (Rosen 1972), with
    the ``t`` for which the inverse probabilities of the points add up to the pixels of the stratum.

    Args:
        plan: The plan.
        reader: As in :func:`sample_of_plan`.
    """
    record, points = plan.record, plan.points
    if record.draw == SIMPLE:
        return points.area
    area = (
        points.area
        if reader is None
        else np.array(
            [
                reader.read((int(column), int(row), 1, 1)).pixel_area[0, 0]
                for column, row in zip(points.column, points.row)
            ]
        )
    )
    weights = area.copy()
    for number, pixels in enumerate(record.pixels):
        members = points.stratum == number
        # Where all pixels were drawn, the probability is 1.
        if 0 < members.sum() < pixels:
            scaled = area[members] / area[members].mean()
            low, high = 1e-12, 1e3
            for _ in range(100):
                middle = np.sqrt(low * high)
                inverse = (1 / -np.expm1(-middle * scaled)).sum()
                low, high = (middle, high) if inverse > pixels else (low, middle)
            weights[members] /= -np.expm1(-low * scaled)
    return weights


def explain_weights(plan: LabeledPlan) -> str:
    """Return a sentence on a plan whose inclusion probabilities were approximations, or ''."""
    points = plan.points
    if plan.record.draw == SIMPLE or not any(
        np.ptp(points.inclusion[members]) > 0.01 * points.inclusion[members].mean()
        for members in (points.stratum == number for number in range(len(plan.record.strata)))
        if members.any()
    ):
        return ''
    return (
        f'{plan.path} was drawn by MapSage {plan.record.version} with chances in proportion to '
        'the area of the pixels. The inclusion probabilities in it are approximations, which '
        'are wrong where most pixels of a stratum were drawn. The estimates use better ones, '
        'computed from the areas; a new plan has exact ones.'
    )


def classes_at(plan: LabeledPlan, reader: MapReader) -> np.ndarray:
    """Return the index of the class of a map at each point, int64 ``(n,)``.

    Raises:
        AssessError: If a point lies outside the map, or where it has no class.
    """
    pixels = np.floor(reader.pixels_at(np.stack([plan.points.x, plan.points.y], 1))).astype(int)
    size = reader.raster.width, reader.raster.height
    outside = np.flatnonzero(((pixels < 0) | (pixels >= size)).any(1))
    if len(outside):
        first = outside[0]
        raise AssessError(
            f'{len(outside)} of {len(pixels)} points of {plan.path} lie outside {reader.path} '
            f'({size[0]} x {size[1]} pixels), such as point {first + 1} at column '
            f'{pixels[first, 0]}, row {pixels[first, 1]}. Name a map of the same area, in the CRS '
            f'of {plan.record.map}.'
        )
    classes = np.array(
        [reader.read((int(x), int(y), 1, 1)).classes[0, 0] for x, y in pixels], np.int64
    )
    empty = np.flatnonzero(classes < 0)
    if len(empty):
        raise AssessError(
            f'{reader.path} has no class at {len(empty)} of {len(classes)} points of {plan.path}, '
            f'such as point {empty[0] + 1}. Estimates are for the area of the plan, so the map '
            'must cover it: fill the gaps, or make a plan for this map.'
        )
    return classes


def _reference_names(class_names: Sequence[str], extra: Sequence[str]) -> List[str]:
    return [*class_names, *(name for name in dict.fromkeys(extra) if name not in class_names)]


def _labeled(plan: LabeledPlan, options: LabelOptions) -> np.ndarray:
    """Return the indices of the points that count."""
    labeled = np.array([label is not None for label in plan.reference])
    missing = np.flatnonzero(~labeled)
    if len(missing) and not options.skip_unlabeled:
        raise AssessError(
            f'{len(missing)} of {len(labeled)} points of {plan.path} have no label, such as point '
            f'{missing[0] + 1}. Label them; if they cannot be labeled for reasons that have '
            'nothing to do with the class, leave them out with --skip-unlabeled.'
        )
    return np.flatnonzero(labeled)


def _reference_indices(plan: LabeledPlan, names: Sequence[str], labeled: np.ndarray) -> np.ndarray:
    index = {name: number for number, name in enumerate(names)}
    labels = [str(plan.reference[number]) for number in labeled]
    unknown = sorted({label for label in labels if label not in index})
    if unknown:
        first = labeled[labels.index(unknown[0])]
        near = difflib.get_close_matches(unknown[0], names, 1)
        raise AssessError(
            f'{plan.path}: point {first + 1} has the label {unknown[0]!r}, which the map lacks; '
            f'expected one of {", ".join(names)}.'
            + (f' Did you mean {near[0]!r}?' if near else '')
            + f' If the class is real, add --extra-class {unknown[0]!r}: it gets an area.'
        )
    return np.array([index[label] for label in labels], np.int64)
