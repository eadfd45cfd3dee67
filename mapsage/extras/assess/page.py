"""The files of an assessment: an HTML page with one picture, and a CSV table.

The words follow the good-practice papers (Olofsson et al. 2014, Stehman and Foody 2019):
estimated error matrix in proportions of area, user's and producer's accuracy, standard error.
"""

from __future__ import annotations

import base64
import csv
import io
import math
from pathlib import Path
from typing import List, Sequence, Tuple

from mapsage.base.files import atomic_write
from mapsage.pictures.report.charts import text
from mapsage.pictures.report.page import page
from mapsage.pictures.report.sections import section, table

from .area_plot import AreaLine, render_areas
from .assessment import AREA, LABELS_ONLY, OVERALL, PRODUCERS, USERS, Assessment, Result
from .comparison import FigureDifference
from .errors import AssessError
from .intervals import Z
from .plan_record import PlanRecord

_UNKNOWN = '–'


class AreaUnit:
    """The unit in which areas are printed: hectares, square meters for small maps, or pixels.

    Args:
        unit: Unit of the plan, ``'m2'`` or ``'px'``.
        total: Area of the map in this unit.
    """

    def __init__(self, unit: str, total: float) -> None:
        in_hectares = unit == 'm2' and total >= 1e5
        self.name = 'pixels' if unit == 'px' else 'ha' if in_hectares else 'm²'
        self._factor = total / (1e4 if in_hectares else 1)

    def value(self, share: float) -> float:
        """Return the area of a share of the map."""
        return share * self._factor

    def format(self, share: float) -> str:
        """Return the area of a share of the map as text."""
        area = self.value(share)
        return f'{area:,.0f}' if abs(area) >= 1000 else f'{area:,.2f}'


def write_assessment(
    stem: Path,
    title: str,
    assessment: Assessment,
    record: PlanRecord,
    mapped: Sequence[float],
    caution: str = '',
) -> List[Path]:
    """Write the page, the table and the picture of an assessment.

    Args:
        stem: Path of the files without their suffixes.
        title: Heading of the page.
        assessment: The estimates.
        record: The plan.
        mapped: Share of the area that each class has on the map; 0 for other reference classes.
        caution: Sentence on the plan, or ''.

    Returns:
        Paths of the page, the table and the picture.

    Raises:
        AssessError: If a file cannot be written.
    """
    import cv2

    unit = AreaUnit(record.unit, assessment.total_area)
    lines = []
    for name, share in zip(assessment.class_names, mapped):
        area = assessment.get(AREA, name)
        lines.append(
            AreaLine(
                name,
                unit.value(area.value),
                unit.value(area.low),
                unit.value(area.high),
                unit.value(share),
                bool(area.warning),
            )
        )
    pixels = render_areas(lines, unit.name, 'Estimated area of each class', title)
    encoded, data = cv2.imencode('.png', pixels[:, :, ::-1])
    assert encoded, 'OpenCV encodes any picture of 8 bits'
    picture = data.tobytes()
    url = f'data:image/png;base64,{base64.b64encode(picture).decode("ascii")}'
    html = page(
        title,
        [
            _summary(assessment, record, unit),
            section('Area', f'<img src="{url}" alt="areas">' + _areas(assessment, unit, mapped)),
            _accuracies(assessment),
            _matrix(assessment, record),
            _warnings(assessment.results),
            _design(assessment, record, unit, text(caution)),
        ],
        f'How right is the map: {title}',
    )
    return _write(stem, html, assessment_table(assessment, unit), picture)


def write_comparison(
    stem: Path, first: str, second: str, differences: Sequence[FigureDifference]
) -> List[Path]:
    """Write the page and the table of a comparison; return their paths.

    Raises:
        AssessError: If a file cannot be written.
    """
    rows = [
        [
            text(f'{item.quantity} {item.class_name}'.strip()),
            percent(item.first),
            percent(item.second),
            f'{100 * item.value:+.2f}',
            f'{100 * item.error:.2f}',
            f'{100 * item.low:+.2f} to {100 * item.high:+.2f}',
            _verdict(item),
        ]
        for item in differences
    ]
    head = ['', 'first map', 'second map', 'first − second', 'SE', '95 % interval', '']
    notes = ''.join(
        f'<li>{text(item.quantity)} {text(item.class_name)}: {text(item.warning)}.</li>'
        for item in differences
        if item.warning
    )
    html = page(
        'Two maps compared',
        [
            table([['First map', text(first)], ['Second map', text(second)]], kind='facts'),
            section(
                'Accuracy in percent',
                table(rows, head, 'figures'),
                'Estimated from the same points, so the errors that the maps share cancel. A map '
                'is better if the interval of the difference excludes 0.',
            ),
            section('Warnings', f'<ul>{notes}</ul>' if notes else ''),
        ],
    )
    columns = [
        [
            'quantity',
            'class',
            'first',
            'second',
            'difference',
            'standard_error',
            'low',
            'high',
            'better',
            'warning',
        ]
    ]
    columns += [
        [
            item.quantity,
            item.class_name,
            *map(_number, (item.first, item.second, item.value, item.error, item.low, item.high)),
            ('', 'first', 'second')[item.better],
            item.warning,
        ]
        for item in differences
    ]
    return _write(stem, html, _as_csv(columns))


def assessment_table(assessment: Assessment, unit: AreaUnit) -> str:
    """Return the estimates as CSV: shares, and areas in the unit of the page."""
    rows = [
        [
            'quantity',
            'class',
            'value',
            'standard_error',
            'textbook_half_width',
            'low',
            'high',
            'area',
            'area_standard_error',
            'area_low',
            'area_high',
            'area_unit',
            'warning',
        ]
    ]
    for result in assessment.results:
        areas = [''] * 5
        if result.quantity in (AREA, LABELS_ONLY):
            areas = [
                *(
                    _number(unit.value(value))
                    for value in (result.value, result.error, result.low, result.high)
                ),
                unit.name,
            ]
        rows.append(
            [
                result.quantity,
                result.class_name,
                *map(
                    _number, (result.value, result.error, Z * result.error, result.low, result.high)
                ),
                *areas,
                result.warning,
            ]
        )
    return _as_csv(rows)


def percent(value: float, digits: int = 2) -> str:
    """Return a share in percent as text; a dash for NaN."""
    return _UNKNOWN if math.isnan(value) else f'{100 * value:.{digits}f}'


def interval_text(result: Result) -> str:
    """Return the interval of a share in percent as text."""
    return f'{percent(result.low)} to {percent(result.high)}' + (' !' if result.warning else '')


def _verdict(difference: FigureDifference) -> str:
    return (
        'no difference beyond chance',
        '<b>the first is better</b>',
        '<b>the second is better</b>',
    )[difference.better]


def _summary(assessment: Assessment, record: PlanRecord, unit: AreaUnit) -> str:
    overall = assessment.get(OVERALL)
    return table(
        [
            ['Map', text(record.map)],
            [
                'Overall accuracy',
                f'{percent(overall.value)} ± {percent(Z * overall.error)} % '
                f'(95 % interval {interval_text(overall)} %)',
            ],
            ['Mapped area', f'{unit.format(1)} {text(unit.name)}'],
            [
                'Points',
                f'{assessment.points.sum()} in {len(record.strata)} strata, drawn at random '
                f'({text(record.allocation)} allocation, seed {record.seed})',
            ],
            [
                'Estimator',
                'stratified, model-assisted with the probabilities of the map'
                if record.probability is not None
                and any(result.quantity == LABELS_ONLY for result in assessment.results)
                else 'stratified (Stehman 2014)',
            ],
        ],
        kind='facts',
    )


def _areas(assessment: Assessment, unit: AreaUnit, mapped: Sequence[float]) -> str:
    has_both = any(result.quantity == LABELS_ONLY for result in assessment.results)
    rows = []
    for name, share in zip(assessment.class_names, mapped):
        area = assessment.get(AREA, name)
        row = [
            text(name),
            unit.format(share),
            f'<b>{unit.format(area.value)}</b>',
            f'± {unit.format(Z * area.error)}',
            unit.format(area.error),
            f'{unit.format(area.low)} to {unit.format(area.high)}' + (' !' if area.warning else ''),
            percent(area.value),
        ]
        if has_both:
            only = [
                result
                for result in assessment.results
                if (result.quantity, result.class_name) == (LABELS_ONLY, name)
            ]
            row.append(f'± {unit.format(Z * only[0].error)}' if only else '')
        rows.append(row)
    head = [
        'class',
        f'on the map, {text(unit.name)}',
        f'estimated area, {text(unit.name)}',
        '1.96 SE',
        'SE',
        '95 % interval',
        '% of the map',
    ]
    return table(rows, head + ['from labels only'] * has_both, 'figures')


def _accuracies(assessment: Assessment) -> str:
    rows = []
    for name in assessment.class_names:
        row = [text(name)]
        for quantity in (USERS, PRODUCERS):
            results = [
                result
                for result in assessment.results
                if (result.quantity, result.class_name) == (quantity, name)
            ]
            row += [
                cell
                for result in results
                for cell in (
                    f'<b>{percent(result.value)}</b>',
                    f'± {percent(Z * result.error)}',
                    interval_text(result),
                )
            ] or [_UNKNOWN, '', '']
        rows.append(row)
    head = [
        'class',
        "user's accuracy",
        '1.96 SE',
        '95 % interval',
        "producer's accuracy",
        '1.96 SE',
        '95 % interval',
    ]
    return section(
        'Accuracy in percent',
        table(rows, head, 'figures'),
        "User's accuracy: of the area that the map gives to a class, the share that has "
        "it. Producer's accuracy: of the area that has a class, the share that the map "
        'shows.',
    )


def _matrix(assessment: Assessment, record: PlanRecord) -> str:
    names = list(map(text, assessment.class_names))
    rows = [
        [
            text(name),
            *(
                f'{100 * value:.2f} <small>({count})</small>'
                for value, count in zip(shares, counts)
            ),
            f'{100 * shares.sum():.2f}',
        ]
        for name, shares, counts in zip(
            assessment.class_names, assessment.matrix, assessment.counts
        )
    ]
    rows.append(['total', *(f'{100 * value:.2f}' for value in assessment.matrix.sum(0)), '100.00'])
    return section(
        'Estimated error matrix',
        table(rows, ['map \\ reference', *names, 'total'], 'figures'),
        'In percent of the area; the number of points in parentheses.',
    )


def _warnings(results: Sequence[Result]) -> str:
    notes = ''.join(
        f'<li>{text(result.quantity)} {text(result.class_name)}: {text(result.warning)}.</li>'
        for result in results
        if result.warning and result.quantity != LABELS_ONLY
    )
    return section(
        'Warnings',
        f'<ul>{notes}</ul>' if notes else '',
        'Where an interval has a "!", the points cannot support the textbook interval '
        '(± 1.96 SE). The interval printed there is a wider, cautious one.'
        if notes
        else '',
    )


def _design(assessment: Assessment, record: PlanRecord, unit: AreaUnit, caution: str) -> str:
    rows = [
        [
            text(name),
            unit.format(area / record.total_area),
            f'{100 * area / record.total_area:.2f}',
            str(count),
            str(planned),
        ]
        for name, area, count, planned in zip(
            record.strata, record.area, assessment.points, record.points
        )
    ]
    note = (
        'Stratified random sample without replacement, points weighted by the area of their '
        f'pixel. {caution}'
    )
    if record.threshold:
        note += (
            f' Stratum "doubtful": pixels of common classes with a confidence below '
            f'{record.threshold} %.'
        )
    return section(
        'Strata',
        table(
            rows,
            ['stratum', f'area, {text(unit.name)}', '% of the map', 'labeled points', 'planned'],
            'figures',
        ),
        note,
    )


def _number(value: float) -> str:
    return '' if math.isnan(value) else f'{value:.10g}'


def _as_csv(rows: Sequence[Sequence[str]]) -> str:
    stream = io.StringIO()
    csv.writer(stream, lineterminator='\n').writerows(rows)
    return stream.getvalue()


def _write(stem: Path, html: str, table_text: str, picture: bytes = b'') -> List[Path]:
    contents: List[Tuple[str, bytes]] = [
        ('.html', html.encode('utf-8', 'backslashreplace')),
        ('.csv', table_text.encode('utf-8')),
    ]
    if picture:
        contents.append(('_areas.png', picture))
    paths = []
    for suffix, data in contents:
        path = stem.with_name(stem.name + suffix)
        try:
            atomic_write(path, data)
        except OSError as error:
            raise AssessError(
                f'cannot write {path}: {error}. Make its folder, or name another file with --out.'
            ) from error
        paths.append(path)
    return paths
