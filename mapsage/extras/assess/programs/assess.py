"""How right is a map: areas and accuracies with intervals, from a labeled random sample.

python tools/assess.py plan maps/scene.tif --points 600 --out points.gpkg
python tools/assess.py plan maps/scene.tif --half-width 3 --out points.gpkg
python tools/assess.py report points.gpkg maps/scene.tif
python tools/assess.py compare points.gpkg maps/scene.tif other_maps/scene.tif
"""

from __future__ import annotations

import argparse
import sys
from typing import Optional, Sequence

from mapsage.base.console import accept_any_text, examples
from mapsage.base.errors import UserError

# As in mapsage.extras.assess.allocation, which imports NumPy.
_ALLOCATIONS = ('balanced', 'proportional', 'neyman')


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the program with a command line (default: ``sys.argv``); return the exit status."""
    accept_any_text()
    args = build_parser().parse_args(argv)
    from mapsage.extras.assess import command as assess

    try:
        if args.word == 'plan':
            if args.half_width is not None:
                args.half_width /= 100
            assess.plan(args)
        elif args.word == 'report':
            assess.report(args)
        else:
            assess.compare_maps(args)
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


def run() -> None:
    """Run the command line and exit."""
    sys.exit(main())
