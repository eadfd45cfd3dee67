"""How right is a map: areas and accuracies with intervals, from a labeled random sample.

python tools/assess.py plan maps/scene.tif --points 600 --out points.gpkg
python tools/assess.py plan maps/scene.tif --half-width 3 --out points.gpkg
python tools/assess.py report points.gpkg maps/scene.tif
python tools/assess.py compare points.gpkg maps/scene.tif other_maps/scene.tif
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, List, Optional, Sequence

from mapsage.base.console import accept_any_text, examples
from mapsage.base.errors import UserError

if TYPE_CHECKING:
    from mapsage.base.progress import ProgressLine
    from mapsage.extras.assess.map_reader import MapReader

# As in mapsage.extras.assess.allocation, which imports NumPy.
_ALLOCATIONS = ('balanced', 'proportional', 'neyman')


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the program with a command line (default: ``sys.argv``); return the exit status."""
    accept_any_text()
    args = build_parser().parse_args(argv)
    try:
        if args.word == 'plan':
            if args.half_width is not None:
                args.half_width /= 100
            plan(args)
        elif args.word == 'report':
            report(args)
        else:
            compare_maps(args)
    except (OSError, UserError) as error:
        print(f'{type(error).__name__}: {error}', file=sys.stderr)
        return 1
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Return the parser."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or '').splitlines()[0], **examples(__doc__)
    )
    words = parser.add_subparsers(dest='word', metavar='plan|report|compare', required=True)
    plan = words.add_parser('plan', help='draw random points to label')
    plan.add_argument('map', help='class map, such as NAME.tif of mapsage predict')
    plan.add_argument(
        '--out',
        required=True,
        type=_geopackage,
        metavar='FILE.gpkg',
        help='GeoPackage of the points, for QGIS',
    )
    size = plan.add_mutually_exclusive_group(required=True)
    size.add_argument('--points', type=_positive, metavar='N', help='number of points')
    size.add_argument(
        '--half-width',
        type=_percent,
        metavar='PERCENT',
        help='wanted half-width of the 95 %% interval, in percent of the map',
    )
    plan.add_argument(
        '--target',
        metavar='CLASS',
        help='class for whose area --half-width and --allocation neyman are '
        '(default: the overall accuracy)',
    )
    plan.add_argument(
        '--allocation',
        choices=_ALLOCATIONS,
        default=_ALLOCATIONS[0],
        help='balanced: --minimum points in small strata, the rest proportional to '
        'area; neyman: most points where errors are expected (default: balanced)',
    )
    plan.add_argument(
        '--minimum',
        type=_positive,
        default=50,
        metavar='N',
        help='fewest points in a stratum, for balanced (default: 50)',
    )
    plan.add_argument(
        '--doubtful-share',
        type=_share,
        default=5,
        metavar='PERCENT',
        help='largest share of the map in the stratum of doubtful pixels; 0 for no '
        'such stratum (default: 5)',
    )
    plan.add_argument(
        '--confidence',
        metavar='FILE',
        help='confidence of the map (default: NAME_confidence.tif if it exists)',
    )
    plan.add_argument(
        '--probabilities',
        metavar='FILE',
        help='probabilities of the map (default: NAME_probabilities.tif if it exists)',
    )
    plan.add_argument(
        '--seed', type=_seed, default=0, metavar='N', help='seed of the draw (default: 0)'
    )
    report = words.add_parser('report', help='estimate areas and accuracies from labeled points')
    report.add_argument('points', help='GeoPackage of `plan`, labeled')
    report.add_argument('map', help='the map of the plan')
    report.add_argument(
        '--other-map',
        action='store_true',
        help='MAP is another map of the same area than the one that the points were planned for',
    )
    compare = words.add_parser('compare', help='say which of two maps is better')
    compare.add_argument('points', help='GeoPackage of `plan`, labeled')
    compare.add_argument('first', help='a map of the area')
    compare.add_argument('second', help='another map of the area')
    for word, name in ((report, 'assessment'), (compare, 'comparison')):
        word.add_argument(
            '--out',
            metavar='FILE.html',
            help=f'page to write; a table is written next to it (default: POINTS_{name}.html)',
        )
        word.add_argument(
            '--skip-unlabeled', action='store_true', help='leave out points without a label'
        )
        word.add_argument(
            '--extra-class',
            nargs='+',
            default=[],
            metavar='NAME',
            help='reference classes that the map lacks',
        )
    for word in (plan, report, compare):
        word.add_argument(
            '--nodata',
            type=int,
            nargs='+',
            default=[],
            metavar='VALUE',
            help='values of the map that count as no data',
        )
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f'{text}: expected 1 or more')
    return number


def _percent(text: str) -> float:
    number = float(text)
    if not 0 < number < 100:
        raise argparse.ArgumentTypeError(f'{text}: expected a number above 0 and below 100')
    return number


def _share(text: str) -> float:
    number = float(text)
    if not 0 <= number <= 50:
        raise argparse.ArgumentTypeError(f'{text}: expected 0 to 50 percent')
    return number


def _seed(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f'{text}: expected 0 or more')
    return number


def _geopackage(text: str) -> str:
    if not text.lower().endswith('.gpkg'):
        raise argparse.ArgumentTypeError(f'{text}: expected a name that ends in .gpkg')
    return text


def plan(args: argparse.Namespace) -> None:
    """Draw the points of a survey and print what it can be expected to show.

    Raises:
        AssessError: If the map or the options do not allow a plan.
        GeoError: If a file cannot be read.
    """
    from mapsage.base.progress import ProgressLine
    from mapsage.extras.assess.errors import AssessError
    from mapsage.extras.assess.map_reader import MapReader, default_companion
    from mapsage.extras.assess.plan import PlanOptions, make_plan
    from mapsage.extras.assess.points_file import write_plan
    from mapsage.extras.assess.tables import print_plan, say
    from mapsage.geo import confidence_path, probabilities_path

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
    with ProgressLine(2 * len(reader.boxes()), 'map', say) as progress:
        survey = make_plan(reader, options, progress.advance)
    write_plan(args.out, survey.record, survey.points, survey.crs)
    print_plan(survey, reader, args.out)


def report(args: argparse.Namespace) -> None:
    """Write and print the areas and accuracies of a map.

    Raises:
        AssessError: If points and map do not allow an estimate.
        GeoError: If the map cannot be read.
    """
    from mapsage.base.progress import ProgressLine
    from mapsage.extras.assess.assessment import assess
    from mapsage.extras.assess.labeled_sample import (
        LabelOptions,
        check_digest,
        explain_weights,
        sample_of_map,
        sample_of_plan,
    )
    from mapsage.extras.assess.map_reader import MapReader
    from mapsage.extras.assess.page import AreaUnit, write_assessment
    from mapsage.extras.assess.points_file import read_labeled_plan
    from mapsage.extras.assess.tables import print_report, say

    labeled = read_labeled_plan(args.points)
    options = LabelOptions(args.skip_unlabeled, args.extra_class)
    reader = MapReader(args.map, nodata=args.nodata)
    if args.other_map:
        sample = sample_of_map(labeled, reader, options)
        with ProgressLine(len(reader.boxes()), 'map', say) as progress:
            mapped = _mapped_shares(reader, progress)
    else:
        with ProgressLine(len(reader.boxes()), 'map', say) as progress:
            check_digest(labeled, reader, progress.advance)
        sample = sample_of_plan(labeled, options, reader)
        mapped = labeled.record.mapped_shares.tolist()
    assessment = assess(sample)
    mapped = [*mapped, *[0.0] * (len(assessment.class_names) - len(mapped))]
    caution = explain_weights(labeled)
    paths = write_assessment(
        _stem(args), Path(args.map).name, assessment, labeled.record, mapped, caution
    )
    print_report(assessment, AreaUnit(labeled.record.unit, assessment.total_area), mapped)
    if caution:
        say(caution)
    say('')
    for path in paths:
        say(str(path))


def compare_maps(args: argparse.Namespace) -> None:
    """Write and print the differences of two maps.

    Raises:
        AssessError: If points and maps do not allow a comparison.
        GeoError: If a map cannot be read.
    """
    from mapsage.extras.assess.comparison import compare
    from mapsage.extras.assess.labeled_sample import LabelOptions, explain_weights, sample_of_map
    from mapsage.extras.assess.map_reader import MapReader
    from mapsage.extras.assess.page import write_comparison
    from mapsage.extras.assess.points_file import read_labeled_plan
    from mapsage.extras.assess.tables import print_comparison, say

    labeled = read_labeled_plan(args.points)
    options = LabelOptions(args.skip_unlabeled, args.extra_class)
    readers = [MapReader(path, nodata=args.nodata) for path in (args.first, args.second)]
    # A class of one map is a possible reference class for the other.
    names = [name for reader in readers for name in reader.class_names if reader.has_names]
    options = options._replace(extra_classes=[*options.extra_classes, *names])
    differences = compare(*(sample_of_map(labeled, reader, options) for reader in readers))
    print_comparison(differences, explain_weights(labeled))
    stem = _stem(args, '_comparison')
    for path in write_comparison(stem, args.first, args.second, differences):
        say(str(path))


def _mapped_shares(reader: MapReader, progress: ProgressLine) -> List[float]:
    import numpy as np

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


def run() -> None:
    """Run the command line and exit."""
    sys.exit(main())
