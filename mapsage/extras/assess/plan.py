"""A stratified random sample of a map, and what a survey with it can be expected to show.

`make_plan` reads the map twice: for the census, and to draw the points. From the expected errors of
the map it also simulates surveys with the chosen numbers of points, so that the user learns before
labeling whether the interval of a rare class would hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import List, Optional

import numpy as np

from mapsage.geo import read_classes
from mapsage.version import __version__

from .allocation import allocate, expected_error, required_points
from .census import Advance, MapCensus, take_census
from .draw import DrawnPoints, draw_points
from .errors import AssessError
from .estimators import Survey, estimate_mean
from .intervals import Z
from .map_reader import MapReader
from .plan_record import SIMPLE, PlanRecord
from .points_file import DesignPoints
from .strata import Strata, build_strata

# Simulated surveys: the coverage is then known to within 1 %.
_SURVEYS = 2000


@dataclass(frozen=True)
class PlanOptions:
    """What a user may choose.

    Attributes:
        points: Number of points; None to derive it from ``half_width``.
        half_width: Wanted half-width of the 95 % interval, as a share of the area or accuracy.
        target: Class for whose area ``half_width`` and the allocation ``'neyman'`` are; None for
            the overall accuracy.
        allocation: A word of ``ALLOCATIONS``.
        minimum: Fewest points in a stratum, for ``'balanced'``.
        doubtful_share: Largest share of the map in the doubtful stratum; 0 for none.
        seed: Seed of the draw.
    """

    points: Optional[int] = None
    half_width: Optional[float] = None
    target: Optional[str] = None
    allocation: str = 'balanced'
    minimum: int = 50
    doubtful_share: float = 0.05
    seed: int = 0


@dataclass(frozen=True)
class Expectation:
    """What a survey is expected to say about the area of a class, if the model's errors are true.

    Attributes:
        class_name: Name of the class.
        share: Expected share of the area.
        half_width: Expected half-width of the interval of 95 %.
        coverage: Share of simulated surveys whose textbook interval contains ``share``.
    """

    class_name: str
    share: float
    half_width: float
    coverage: float


@dataclass(frozen=True)
class SurveyPlan:
    """A finished plan.

    Attributes:
        record: The record for the points' file.
        points: The points.
        crs: CRS of the map as WKT, or None.
        overall: Expected half-width of the overall accuracy.
        expectations: An entry for each class.
        without_doubtful: The same for equally many points without the doubtful stratum; empty if
            there is no such stratum.
    """

    record: PlanRecord
    points: DesignPoints
    crs: Optional[str]
    overall: float
    expectations: List[Expectation]
    without_doubtful: List[Expectation]


def make_plan(reader: MapReader, options: PlanOptions, advance: Advance) -> SurveyPlan:
    """Draw a sample from a map.

    Args:
        reader: The map.
        options: What the user chose.
        advance: Function that counts finished windows; the map is read twice.

    Raises:
        AssessError: If the map or the options do not allow a plan.
    """
    census = take_census(reader, advance)
    target = _target_index(census, options.target)
    strata = build_strata(census, options.doubtful_share)
    points = _points_of_strata(strata, options, target)
    drawn = draw_points(reader, strata, points, options.seed, advance)
    record = _build_record(reader, census, strata, points, options)
    doubtful = strata.threshold > 0
    plain = build_strata(census, 0) if doubtful else strata
    plain_points = _points_of_strata(plain, options, target, int(points.sum()))
    right = np.einsum('hkk->h', strata.joint)
    return SurveyPlan(
        record,
        _as_design(reader, strata, points, drawn),
        reader.crs,
        Z * expected_error(strata.shares, np.sqrt(right * (1 - right)), points),
        expect_areas(strata, points, census.class_names),
        expect_areas(plain, plain_points, census.class_names) if doubtful else [],
    )


def expect_areas(strata: Strata, points: np.ndarray, class_names: List[str]) -> List[Expectation]:
    """Simulate surveys and return what they say about the area of each class.

    Args:
        strata: Strata with the expected errors of the map.
        points: Points of each stratum, ``(H,)``.
        class_names: Names of the classes.
    """
    random = np.random.Generator(np.random.PCG64(0))
    truth = np.einsum('h,hmk->k', strata.shares, strata.joint)
    expectations = []
    for number, name in enumerate(class_names):
        shares = np.clip(strata.joint[:, :, number].sum(1), 0, 1)
        sampled = random.binomial(points, shares, (_SURVEYS, len(points)))
        counts = np.stack([sampled, points - sampled], -1).astype(float)
        estimate = estimate_mean(
            Survey(counts, strata.shares, strata.pixels.astype(float)),
            np.broadcast_to(np.array([1.0, 0.0]), (_SURVEYS, 2)),
        )
        half = Z * np.sqrt(estimate.variance)
        expectations.append(
            Expectation(
                name,
                float(truth[number]),
                float(half.mean()),
                float((abs(estimate.value - truth[number]) <= half + 1e-12).mean()),
            )
        )
    return expectations


def _target_index(census: MapCensus, target: Optional[str]) -> Optional[int]:
    if target is None:
        return None
    if target not in census.class_names:
        raise AssessError(
            f'--target {target}: the map has the classes '
            f'{", ".join(census.class_names)}; name one of them.'
        )
    return census.class_names.index(target)


def _points_of_strata(
    strata: Strata, options: PlanOptions, target: Optional[int], points: Optional[int] = None
) -> np.ndarray:
    share = (
        np.einsum('hkk->h', strata.joint) if target is None else strata.joint[:, :, target].sum(1)
    )
    # A model that is sure of everything is not believed: the deviation stays above 0.1.
    deviations = np.maximum(np.sqrt(np.clip(share * (1 - share), 0, None)), 0.1)
    points = options.points if points is None else points
    if points is None:
        assert options.half_width is not None, 'the command gives points or a half-width'
        points = required_points(
            options.allocation, options.half_width, strata.shares, deviations, options.minimum
        )
    return allocate(
        options.allocation,
        points,
        strata.shares,
        deviations,
        options.minimum,
        strata.pixels.tolist(),
    )


def _build_record(
    reader: MapReader, census: MapCensus, strata: Strata, points: np.ndarray, options: PlanOptions
) -> PlanRecord:
    probability = None
    if census.probability is not None:
        member = strata.table[None] == np.arange(len(strata.names))[:, None, None]
        probability = (
            np.einsum('hkl,klr->hkr', member, census.probability) / strata.area[:, None, None]
        ).tolist()
    colors = {entry['name']: entry['color'] for entry in read_classes(reader.path)}
    return PlanRecord(
        reader.path,
        census.digest,
        census.unit,
        census.class_names,
        [tuple(colors.get(name, (127, 127, 127))) for name in census.class_names],
        strata.names,
        strata.area.tolist(),
        strata.pixels.tolist(),
        points.tolist(),
        strata.composition.tolist(),
        probability,
        options.allocation,
        strata.threshold,
        options.seed,
        __version__,
        SIMPLE,
    )


def _as_design(
    reader: MapReader, strata: Strata, points: np.ndarray, drawn: DrawnPoints
) -> DesignPoints:
    inclusion = (points / strata.pixels)[drawn.stratum]
    x, y = reader.positions(drawn.column, drawn.row).T
    return DesignPoints(
        drawn.stratum,
        drawn.mapped,
        inclusion,
        drawn.column,
        drawn.row,
        x,
        y,
        drawn.probability,
        drawn.area,
    )
