"""tools/assess.py: plan a survey of a map, report its areas and accuracies, compare two maps.

The estimates are made by `mapsage/extras/assess/`, which needs neither PyTorch nor the MM packages.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import List, Sequence, Tuple

import numpy as np

from mapsage.extras.assess.assessment import AREA, OVERALL, PRODUCERS, USERS, Assessment, assess
from mapsage.extras.assess.comparison import compare
from mapsage.extras.assess.errors import AssessError
from mapsage.extras.assess.intervals import Z
from mapsage.extras.assess.labeled_sample import (
    LabelOptions,
    check_digest,
    explain_weights,
    sample_of_map,
    sample_of_plan,
)
from mapsage.extras.assess.map_reader import MapReader, default_companion
from mapsage.extras.assess.page import (
    AreaUnit,
    interval_text,
    percent,
    write_assessment,
    write_comparison,
)
from mapsage.extras.assess.plan import Expectation, PlanOptions, SurveyPlan, make_plan
from mapsage.extras.assess.points_file import read_labeled_plan, write_plan
from mapsage.geo import confidence_path, probabilities_path
from mapsage.maps.progress import ProgressLine

# Coverage below which a plan warns: the intervals of simulated surveys hold less often.
_LEAST_COVERAGE = 0.93


def plan(args: argparse.Namespace) -> None:
    """Draw the points of a survey and print what it can be expected to show.

    Raises:
        AssessError: If the map or the options do not allow a plan.
        GeoError: If a file cannot be read.
    """
    if Path(args.out).exists():
        raise AssessError(
            f'{args.out} exists and may hold labels, so it is not replaced; name '
            'another file with --out, or move this one away.'
        )
    reader = MapReader(
        args.map,
        args.confidence or default_companion(args.map, confidence_path(args.map)),
        args.probabilities or default_companion(args.map, probabilities_path(args.map)),
        args.nodata,
    )
    options = PlanOptions(
        args.points,
        args.half_width,
        args.target,
        args.allocation,
        args.minimum,
        args.doubtful_share / 100,
        args.seed,
    )
    with ProgressLine(2 * len(reader.boxes()), 'map', _say) as progress:
        survey = make_plan(reader, options, progress.advance)
    write_plan(args.out, survey.record, survey.points, survey.crs)
    _print_plan(survey, reader, args.out)


def report(args: argparse.Namespace) -> None:
    """Write and print the areas and accuracies of a map.

    Raises:
        AssessError: If points and map do not allow an estimate.
        GeoError: If the map cannot be read.
    """
    labeled = read_labeled_plan(args.points)
    options = LabelOptions(args.skip_unlabeled, args.extra_class)
    reader = MapReader(args.map, nodata=args.nodata)
    if args.other_map:
        sample = sample_of_map(labeled, reader, options)
        with ProgressLine(len(reader.boxes()), 'map', _say) as progress:
            mapped = _mapped_shares(reader, progress)
    else:
        with ProgressLine(len(reader.boxes()), 'map', _say) as progress:
            check_digest(labeled, reader, progress.advance)
        sample = sample_of_plan(labeled, options, reader)
        mapped = labeled.record.mapped_shares.tolist()
    assessment = assess(sample)
    mapped = [*mapped, *[0.0] * (len(assessment.class_names) - len(mapped))]
    caution = explain_weights(labeled)
    paths = write_assessment(
        _stem(args), Path(args.map).name, assessment, labeled.record, mapped, caution
    )
    _print_report(assessment, AreaUnit(labeled.record.unit, assessment.total_area), mapped)
    if caution:
        _say(caution)
    _say('')
    for path in paths:
        _say(str(path))


def compare_maps(args: argparse.Namespace) -> None:
    """Write and print the differences of two maps.

    Raises:
        AssessError: If points and maps do not allow a comparison.
        GeoError: If a map cannot be read.
    """
    labeled = read_labeled_plan(args.points)
    options = LabelOptions(args.skip_unlabeled, args.extra_class)
    readers = [MapReader(path, nodata=args.nodata) for path in (args.first, args.second)]
    # A class of one map is a possible reference class for the other.
    names = [name for reader in readers for name in reader.class_names if reader.has_names]
    options = options._replace(extra_classes=[*options.extra_classes, *names])
    differences = compare(*(sample_of_map(labeled, reader, options) for reader in readers))
    rows = [['', 'first', 'second', 'first - second', '95 % interval', '']]
    rows += [
        [
            f'{item.quantity} {item.class_name}'.strip(),
            percent(item.first),
            percent(item.second),
            f'{100 * item.value:+.2f}',
            f'{100 * item.low:+.2f} to {100 * item.high:+.2f}' + (' !' if item.warning else ''),
            ('', 'first is better', 'second is better')[item.better],
        ]
        for item in differences
    ]
    _print_rows(rows)
    _say('')
    _print_warnings(
        [(item.quantity, item.warning) for item in differences if item.quantity == OVERALL]
    )
    doubtful = sum(bool(item.warning) for item in differences if item.quantity != OVERALL)
    if doubtful:
        _say(
            f"{doubtful} differences have a '!': the points cannot support the textbook interval, "
            'and a wider one is printed. The page has the reasons.'
        )
    if explain_weights(labeled):
        _say(explain_weights(labeled))
    stem = _stem(args, '_comparison')
    for path in write_comparison(stem, args.first, args.second, differences):
        _say(str(path))


def _mapped_shares(reader: MapReader, progress: ProgressLine) -> List[float]:
    area = np.zeros(len(reader.class_names))
    for window in reader.windows():
        valid = window.classes >= 0
        weights = window.pixel_area[valid]
        area += np.bincount(window.classes[valid], weights, len(area))
        progress.advance(1)
    return (area / area.sum()).tolist()


def _stem(args: argparse.Namespace, ending: str = '_assessment') -> Path:
    """Return the path of the output files without suffix."""
    if args.out:
        path = Path(args.out)
        return path.with_suffix('') if path.suffix.lower() == '.html' else path
    points = Path(args.points)
    return points.with_name(points.stem + ending)


def _print_plan(survey: SurveyPlan, reader: MapReader, path: str) -> None:
    record = survey.record
    unit = AreaUnit(record.unit, record.total_area)
    rows = [['stratum', f'area, {unit.name}', '% of the map', 'points']]
    rows += [
        [name, unit.format(share), percent(share), str(points)]
        for name, share, points in zip(record.strata, record.shares, record.points)
    ]
    _print_rows(rows)
    if record.threshold:
        _say(f'doubtful: common classes where the confidence is below {record.threshold} %')
    source = (
        'the probabilities say'
        if reader.has_probabilities
        else 'the confidence says'
        if reader.has_confidence
        else 'guessed (80 % accuracy)'
    )
    _say(
        f'\nIf the errors are as {source}, {sum(record.points)} points give the overall '
        f'accuracy to ± {percent(survey.overall)} %, and these areas (% of the map):'
    )
    rows = [['class', 'area', '1.96 SE', 'interval holds in']]
    head = survey.without_doubtful
    if head:
        rows[0].append('without the doubtful stratum')
    for number, item in enumerate(survey.expectations):
        rows.append(
            [item.class_name, percent(item.share), f'± {percent(item.half_width)}', _coverage(item)]
        )
        if head:
            rows[-1].append(f'± {percent(head[number].half_width)}, {_coverage(head[number])}')
    _print_rows(rows)
    weak = [item for item in survey.expectations if item.coverage < _LEAST_COVERAGE]
    for item in weak:
        _say(
            f'warning: {item.class_name}: the 95 % interval (± 1.96 SE) would contain the true '
            f'area in {100 * item.coverage:.0f} % of such surveys; the report will print a wider, '
            'cautious one.'
        )
    if weak and not record.threshold:
        _say(
            'A stratum of doubtful pixels helps most: make the map with mapsage predict '
            '--confidence (or --probabilities too), and plan again.'
            if not reader.has_confidence
            else 'A stratum of doubtful pixels helps most: plan with --doubtful-share 5.'
        )
    _say(
        f'\n{path}: open it in QGIS beside imagery of the date of the map, and choose the class '
        "of every point in the field 'reference'."
    )
    _say(f'Then: mapsage assess report {path} {record.map}')


def _coverage(item: Expectation) -> str:
    return f'{100 * item.coverage:.0f} %' + (' !' if item.coverage < _LEAST_COVERAGE else '')


def _print_report(assessment: Assessment, unit: AreaUnit, mapped: Sequence[float]) -> None:
    overall = assessment.get(OVERALL)
    _say(
        f'overall accuracy {percent(overall.value)} ± {percent(Z * overall.error)} %, 95 % '
        f'interval {interval_text(overall)} %\n'
    )
    rows = [
        [
            'class',
            f'map, {unit.name}',
            f'area, {unit.name}',
            '1.96 SE',
            '95 % interval',
            "user's, %",
            "producer's, %",
        ]
    ]
    for name, share in zip(assessment.class_names, mapped):
        area = assessment.get(AREA, name)
        accuracies = [
            next(
                (
                    f'{percent(result.value, 1)} ± {percent(Z * result.error, 1)}'
                    + (' !' if result.warning else '')
                    for result in assessment.results
                    if (result.quantity, result.class_name) == (quantity, name)
                ),
                '',
            )
            for quantity in (USERS, PRODUCERS)
        ]
        rows.append(
            [
                name,
                unit.format(share),
                unit.format(area.value),
                f'± {unit.format(Z * area.error)}',
                f'{unit.format(area.low)} to '
                f'{unit.format(area.high)}' + (' !' if area.warning else ''),
                *accuracies,
            ]
        )
    _print_rows(rows)
    _say('')
    _print_warnings(
        [
            (f'{result.quantity} {result.class_name}'.strip(), result.warning)
            for result in assessment.results
            if result.quantity in (AREA, OVERALL)
        ]
    )
    doubtful = sum(
        bool(result.warning)
        for result in assessment.results
        if result.quantity in (USERS, PRODUCERS)
    )
    if doubtful:
        _say(
            f"{doubtful} user's and producer's accuracies have a '!', too: ± 1.96 SE must not be "
            'believed there. The page has a wider interval, and the reason.'
        )


def _print_warnings(warnings: Sequence[Tuple[str, str]]) -> None:
    for subject, warning in warnings:
        if warning:
            _say(f'warning: {subject}: {warning}.')


def _print_rows(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        cells = [
            f'{row[0]:<{widths[0]}}',
            *(f'{cell:>{width}}' for cell, width in zip(row[1:], widths[1:])),
        ]
        _say('  '.join(cells).rstrip())


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201
