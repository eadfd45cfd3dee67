"""Measure the shift between two dates: two scenes, or two folders of images with equal names.

python tools/measure_shift.py before.tif after.tif
python tools/measure_shift.py data/train/A data/train/B --bound 1
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import List, Optional, Sequence, Tuple

from mapsage.base.console import accept_any_text, examples
from mapsage.base.errors import UserError

# Exit status if the shift is larger than the bound, or cannot be measured.
BEYOND_BOUND = 3


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the program with a command line (default: ``sys.argv``); return the exit status."""
    parser = argparse.ArgumentParser(
        description='Measure the shift between two dates in pixels, by phase correlation of blocks '
        'with texture. Exit status 3 if the median, or the shift of a quarter of the blocks, is '
        'larger than the bound, or if it cannot be measured.',
        **examples(__doc__),
    )
    parser.add_argument('before', help='scene of the first date, or a folder of images')
    parser.add_argument('after', help='scene of the second date, or a folder with equal names')
    parser.add_argument(
        '--bands',
        type=int,
        nargs='+',
        metavar='N',
        help='bands that are averaged, counted from 1 (default: all but alpha)',
    )
    parser.add_argument(
        '--bound',
        type=float,
        default=1.0,
        metavar='PIXELS',
        help='largest shift that is good (default: 1)',
    )
    args = parser.parse_args(argv)
    if not args.bound > 0:
        parser.error(f'--bound {args.bound:g}: expected pixels, above 0')
    # Imported here, because --help needs no rasters.
    from mapsage.geo.registration import MOST_BLOCKS, pair_shifts, summarize_shifts

    pairs = _pairs(args.before, args.after)
    most = max(1, MOST_BLOCKS // len(pairs))
    report = summarize_shifts(
        [shift for pair in pairs for shift in pair_shifts(*pair, args.bands, most)]
    )
    print(f'shift of {args.after} against {args.before}: {report.describe()}')  # noqa: T201
    if math.isnan(report.length) or report.largest > args.bound:
        if report.largest > args.bound:
            advice = (
                'align the images, for example with AROSICS or with ground control points '
                'and gdalwarp' + ', or train with ShiftDate' * (report.length > args.bound)
            )
            print(f'more than {args.bound:g}: {advice}')  # noqa: T201
        return BEYOND_BOUND
    return 0


def _pairs(before: str, after: str) -> List[Tuple[str, str]]:
    """Return the files of both dates.

    Raises:
        GeoError: If a path is missing, or a folder lacks a name of the other.
    """
    from mapsage.geo import SCENE_SUFFIXES, GeoError, files_of

    paths = Path(before), Path(after)
    if not (paths[0].is_dir() and paths[1].is_dir()):
        return [(before, after)]
    first, second = (
        {Path(file).name: file for file in files_of(str(path), SCENE_SUFFIXES)} for path in paths
    )
    different = sorted(set(first) ^ set(second))
    if different or not first:
        raise GeoError(
            f'{before} and {after} have {len(first)} and {len(second)} images, expected '
            f'equal names' + (f'; only one has {different[0]}.' if different else '.')
        )
    return [(first[name], second[name]) for name in sorted(first)]


def run() -> None:
    """Run the command line and exit with its status, or 1 after an error."""
    accept_any_text()
    try:
        status = main()
    except UserError as error:
        print(error, file=sys.stderr, flush=True)  # noqa: T201
        status = 1
    sys.exit(status)
