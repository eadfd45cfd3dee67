"""The tables that `mapsage assess` prints: of a plan, of an assessment, of two maps."""

from __future__ import annotations

from typing import Sequence, Tuple

from mapsage.extras.assess.assessment import AREA, OVERALL, PRODUCERS, USERS, Assessment
from mapsage.extras.assess.comparison import FigureDifference
from mapsage.extras.assess.intervals import Z
from mapsage.extras.assess.map_reader import MapReader
from mapsage.extras.assess.page import AreaUnit, interval_text, percent
from mapsage.extras.assess.plan import Expectation, SurveyPlan

# Coverage below which a plan warns: the intervals of simulated surveys hold less often.
_LEAST_COVERAGE = 0.93


def print_plan(survey: SurveyPlan, reader: MapReader, path: str) -> None:
    """Print the strata of a survey, what it can be expected to show, and the next step."""
    record = survey.record
    unit = AreaUnit(record.unit, record.total_area)
    rows = [['stratum', f'area, {unit.name}', '% of the map', 'points']]
    rows += [
        [name, unit.format(share), percent(share), str(points)]
        for name, share, points in zip(record.strata, record.shares, record.points)
    ]
    _print_rows(rows)
    if record.threshold:
        say(f'doubtful: common classes where the confidence is below {record.threshold} %')
    source = (
        'the probabilities say'
        if reader.has_probabilities
        else 'the confidence says'
        if reader.has_confidence
        else 'guessed (80 % accuracy)'
    )
    say(
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
        say(
            f'warning: {item.class_name}: the 95 % interval (± 1.96 SE) would contain the true '
            f'area in {100 * item.coverage:.0f} % of such surveys; the report will print a wider, '
            'cautious one.'
        )
    if weak and not record.threshold:
        say(
            'A stratum of doubtful pixels helps most: make the map with mapsage predict '
            '--confidence (or --probabilities too), and plan again.'
            if not reader.has_confidence
            else 'A stratum of doubtful pixels helps most: plan with --doubtful-share 5.'
        )
    say(
        f'\n{path}: open it in QGIS beside imagery of the date of the map, and choose the class '
        "of every point in the field 'reference'."
    )
    say(f'Then: mapsage assess report {path} {record.map}')


def _coverage(item: Expectation) -> str:
    return f'{100 * item.coverage:.0f} %' + (' !' if item.coverage < _LEAST_COVERAGE else '')


def print_report(assessment: Assessment, unit: AreaUnit, mapped: Sequence[float]) -> None:
    """Print areas and accuracies.

    Args:
        assessment: Estimates of the map.
        unit: Unit of the areas.
        mapped: Share of each class on the map, in the order of the assessment.
    """
    overall = assessment.get(OVERALL)
    say(
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
    say('')
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
        say(
            f"{doubtful} user's and producer's accuracies have a '!', too: ± 1.96 SE must not be "
            'believed there. The page has a wider interval, and the reason.'
        )


def print_comparison(differences: Sequence[FigureDifference], caution: str) -> None:
    """Print the differences of two maps.

    Args:
        differences: Differences of the accuracies and areas.
        caution: What limits the estimates, or an empty text.
    """
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
    say('')
    _print_warnings(
        [(item.quantity, item.warning) for item in differences if item.quantity == OVERALL]
    )
    doubtful = sum(bool(item.warning) for item in differences if item.quantity != OVERALL)
    if doubtful:
        say(
            f"{doubtful} differences have a '!': the points cannot support the textbook interval, "
            'and a wider one is printed. The page has the reasons.'
        )
    if caution:
        say(caution)


def _print_warnings(warnings: Sequence[Tuple[str, str]]) -> None:
    for subject, warning in warnings:
        if warning:
            say(f'warning: {subject}: {warning}.')


def _print_rows(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        cells = [
            f'{row[0]:<{widths[0]}}',
            *(f'{cell:>{width}}' for cell, width in zip(row[1:], widths[1:])),
        ]
        say('  '.join(cells).rstrip())


def say(line: str) -> None:
    """Print a line immediately, also if stdout is a pipe."""
    print(line, flush=True)  # noqa: T201
