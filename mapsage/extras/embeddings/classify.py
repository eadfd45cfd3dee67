"""Make a class map from embeddings and a few labels, with scores from spatial cross-validation.

python tools/classify.py embeddings/ --labels points.gpkg --out maps
python tools/classify.py scene.tif --labels classes.tif --method forest --out maps
"""

from __future__ import annotations

import argparse
import sys
from typing import Optional, Sequence

from mapsage.base.console import accept_any_text, examples
from mapsage.base.errors import UserError

# As in mapsage.extras.embeddings.classifiers, which imports NumPy.
_METHODS = ('probe', 'knn', 'forest')


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the program with a command line (default: ``sys.argv``); return the exit status."""
    accept_any_text()
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.most < 1:
        parser.error(f'--most {args.most}: expected 1 or more')
    if args.block is not None and not 0 < args.block < float('inf'):
        parser.error(f'--block {args.block:g}: expected a number above 0')
    from mapsage.extras.embeddings.classification import classify

    try:
        return classify(args)
    except (OSError, UserError) as error:
        print(f'{type(error).__name__}: {error}', file=sys.stderr)  # noqa: T201
        return 1


def build_parser() -> argparse.ArgumentParser:
    """Return the parser."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or '').splitlines()[0], **examples(__doc__)
    )
    parser.add_argument(
        'embeddings',
        nargs='+',
        metavar='EMBEDDING',
        help='files or folders of mapsage embed, GeoTIFFs of AlphaEarth or of GeoTessera; all of '
        'one encoder',
    )
    parser.add_argument(
        '--labels',
        required=True,
        metavar='FILE',
        help='points or polygons with a field of the class (GeoPackage, GeoJSON), or a raster of '
        'class indices',
    )
    parser.add_argument('--out', required=True, help='folder of the maps')
    parser.add_argument(
        '--field', default='class', help='field of the points or polygons (default: class)'
    )
    parser.add_argument('--layer', help='layer of the points or polygons, if there are several')
    parser.add_argument(
        '--method',
        choices=_METHODS,
        default=_METHODS[0],
        help='classifier of the map: linear probe, 5 nearest neighbors, or random forest; the '
        'scores of all three are shown (default: probe)',
    )
    parser.add_argument(
        '--block',
        type=float,
        metavar='SIDE',
        help="side of the blocks of the cross-validation, in the unit of the embedding's CRS "
        '(default: a tenth of the labeled area)',
    )
    parser.add_argument(
        '--most',
        type=int,
        default=1000,
        metavar='N',
        help='largest number of cells of a class that are taken from polygons or a raster '
        '(default: 1000)',
    )
    parser.add_argument('--overwrite', action='store_true', help='make existing maps again')
    return parser


def run() -> None:
    """Run the command line and exit with its status."""
    sys.exit(main())
