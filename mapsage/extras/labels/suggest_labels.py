"""Choose the windows to label next, or windows whose labels a confident model contradicts.

python tools/suggest_labels.py CONFIG CHECKPOINT scenes/ --count 50 --out next_tiles.gpkg
python tools/suggest_labels.py CONFIG CHECKPOINT scenes/ --suspicious --out check.gpkg
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path
from typing import Optional, Sequence

from mapsage.commands import options


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the program with a command line (default: ``sys.argv``); return the exit status."""
    parser = build_parser()
    args = parser.parse_args(argv)
    check_arguments(parser, args)
    from mapsage.extras.labels.label_suggestions import LabelSuggestions

    return LabelSuggestions(args, functools.partial(print, flush=True)).run()


def build_parser() -> argparse.ArgumentParser:
    """Return the parser."""
    parser = options.build_parser(
        'Choose the windows to label next: uncertain, of rare classes, far apart and unlike each '
        'other.',
        doc=__doc__,
    )
    parser.add_argument('checkpoint', help='path of the checkpoint')
    parser.add_argument(
        'inputs',
        nargs='+',
        metavar='INPUT',
        help='images, folders of images and scenes, as in tools/predict.py',
    )
    parser.add_argument(
        '--allow-remote',
        action='store_true',
        help='contact servers that a file of an input folder names, such as a '
        'mosaic (VRT); servers on the command line are contacted in any case',
    )
    parser.add_argument(
        '--out',
        required=True,
        metavar='FILE',
        help='GeoPackage (.gpkg) for QGIS, or a table (.csv), which images without '
        'georeference need; a picture of the windows is written next to it',
    )
    parser.add_argument(
        '--count', type=int, default=50, metavar='N', help='number of windows (default: 50)'
    )
    parser.add_argument(
        '--suspicious',
        action='store_true',
        help="windows of the config's labeled data where the model is sure of "
        'another class than the label, those with most such pixels first',
    )
    parser.add_argument(
        '--min-confidence',
        type=float,
        default=0.9,
        metavar='P',
        help='least probability at which the model is sure, for --suspicious (default: 0.9)',
    )
    parser.add_argument(
        '--exclude',
        nargs='+',
        default=[],
        metavar='FILE',
        help='polygons (earlier suggestions, labels), in any CRS, or tables of '
        'earlier suggestions: windows that they cover by half are left out. In a '
        'review of tools/view.py, windows with a wrong map (--suspicious: a wrong '
        'label) come first instead',
    )
    parser.add_argument(
        '--min-distance',
        type=float,
        default=1.5,
        metavar='WINDOWS',
        help="distance of two windows' middles, in sides of a window (default: 1.5: no neighbors)",
    )
    parser.add_argument(
        '--tta',
        action='store_true',
        help='also prefer windows whose mirror images are predicted differently',
    )
    parser.add_argument(
        '--window',
        type=int,
        metavar='PIXELS',
        help="side of a window (default: the config's training size, else 512)",
    )
    parser.add_argument(
        '--scale',
        type=float,
        metavar='FACTOR',
        help='factor by which scenes are resized for the model, as in tools/predict.py',
    )
    parser.add_argument(
        '--gsd',
        type=options.pixel_size,
        metavar='METERS',
        help='size of the pixels that the model was trained on, instead of --scale',
    )
    options.add_scene_options(parser)
    parser.add_argument(
        '--bands',
        type=int,
        nargs='+',
        metavar='N',
        help='bands of the scene, counted from 1 (default: all but alpha)',
    )
    parser.add_argument(
        '--batch-size', type=int, metavar='N', help='number of windows measured at a time'
    )
    parser.add_argument('--amp', action='store_true', help='16-bit floats where the model allows')
    return parser


def check_arguments(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End the program with a usage error if options are invalid or contradict each other."""
    if args.work_dir:
        parser.error('--work-dir is for training and testing; the windows go into --out')
    if args.launcher != 'none':
        parser.error(
            f'--launcher {args.launcher}: windows are chosen by one process; leave '
            '--launcher out, and start one'
        )
    if Path(args.out).suffix.lower() not in ('.gpkg', '.csv'):
        parser.error(f'--out {args.out}: expected a name that ends in .gpkg or .csv')
    for option, number in (
        ('--count', args.count),
        ('--batch-size', args.batch_size),
        ('--window', args.window),
    ):
        if number is not None and number < 1:
            parser.error(f'{option} {number}: expected 1 or more')
    if not 0 <= args.min_distance < float('inf'):
        parser.error(f'--min-distance {args.min_distance:g}: expected 0 or more windows')
    if not 0 <= args.min_confidence <= 1:
        parser.error(f'--min-confidence {args.min_confidence:g}: expected 0 to 1')
    if args.scale is not None and args.gsd is not None:
        parser.error('--scale and --gsd say the same in two ways: give one of them')
    for option, factor in (('--scale', args.scale), ('--gsd', args.gsd)):
        if factor not in (None, 'auto') and not 0 < factor < float('inf'):
            parser.error(f'{option} {factor:g}: expected a number above 0')


def run() -> None:
    """Run the command line and exit."""
    from mapsage.commands import cli

    cli.run(main)
