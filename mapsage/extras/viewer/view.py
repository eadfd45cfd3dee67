"""Show maps in a browser: scene and map under a swipe, classes, confidence, errors.

python tools/view.py work_dirs/demo/maps
python tools/view.py maps/ --scenes scenes/ --truth labels/
python tools/view.py maps/ --truth labels/ --review errors.gpkg   q in the page reviews tiles
python tools/view.py maps/ --static site/      a folder for any web server
python tools/view.py embeddings/ --points points.gpkg   a map by clicks, see mapsage embed
"""

from __future__ import annotations

import argparse
import getpass
import socket
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Optional, Sequence

from mapsage.base.console import accept_any_text, examples
from mapsage.base.errors import UserError
from mapsage_launcher.extras import extensions_of

if TYPE_CHECKING:
    from mapsage.extras.viewer import Review, ViewServer, ViewSession


def main(argv: Optional[Sequence[str]] = None) -> None:
    """Run the program with a command line (default: ``sys.argv``)."""
    accept_any_text()
    parser = argparse.ArgumentParser(
        description='Show maps in a browser on this machine.', **examples(__doc__)
    )
    parser.add_argument('maps', nargs='+', help='folders of maps, and maps of tools/predict.py')
    parser.add_argument(
        '--scenes',
        metavar='DIR',
        help='folder of the scenes, with the names '
        'of the maps (default: the scenes that the maps were made from)',
    )
    parser.add_argument(
        '--truth',
        metavar='DIR',
        help='labels: a folder of rasters or polygons '
        'by the names of maps, or one file, such as the GeoPackage of a training; '
        'in rasters class indices as in the map, 255 for unlabeled',
    )
    parser.add_argument(
        '--reduce-zero-label',
        action='store_true',
        help='labels in which 0 is unlabeled and 1 the first class',
    )
    parser.add_argument(
        '--allow-remote',
        action='store_true',
        help='contact servers that files of the folders name: of a scene that a '
        'map was made from, of the sources of a mosaic (VRT)',
    )
    parser.add_argument(
        '--class-field',
        default='class_name',
        metavar='NAME',
        help='attribute of polygons in --truth that holds the class, as in '
        'GeoTiffDataset (default: class_name)',
    )
    parser.add_argument(
        '--default-class', metavar='NAME', help='class of polygons in --truth that name none'
    )
    parser.add_argument(
        '--outside',
        type=int,
        default=0,
        metavar='INDEX',
        help='class of pixels without a polygon in --truth; 255: unlabeled (default: 0)',
    )
    parser.add_argument(
        '--bands',
        type=int,
        nargs='+',
        default=(),
        metavar='N',
        help='bands of the scenes that are shown as red, green and blue, or one as gray, counted '
        'from 1 (default: those of the preview, bands.rgb of the model)',
    )
    parser.add_argument(
        '--review',
        metavar='FILE',
        help='GeoPackage for the decisions of a review (default: review.gpkg beside the first map)',
    )
    parser.add_argument(
        '--port', type=int, default=0, help='port of the page (default: a free one)'
    )
    parser.add_argument(
        '--static',
        metavar='OUT',
        help='write the page and all its files into '
        'this folder, for a web server, and serve nothing',
    )
    for extension in extensions_of('view'):
        extension.add_options(parser)
    args = parser.parse_args(argv)
    for extension in extensions_of('view'):
        extension.check_options(parser, args)
    if args.static is not None and args.review is not None:
        parser.error('--review needs the server of this program, which --static does not start')
    if len(args.bands) not in (0, 1, 3) or any(band < 1 for band in args.bands):
        parser.error(
            f'--bands {" ".join(map(str, args.bands))}: expected three bands such as 4 3 2, or one, '
            f'counted from 1'
        )
    if args.review is not None and Path(args.review).suffix.lower() != '.gpkg':
        parser.error(f'--review {args.review}: expected a name that ends in .gpkg')
    try:
        view(args)
    except UserError as error:
        sys.exit(f'{type(error).__name__}: {error}')


def view(args: argparse.Namespace) -> None:
    """Show maps until the user stops the program, or write them as a folder.

    Raises:
        ViewError: If there is no map, or the port is taken.
        GeoError: If a map or scene cannot be read.
    """
    from mapsage.extras.viewer import (
        Labeling,
        Review,
        TruthSettings,
        ViewServer,
        ViewSession,
        find_maps,
        write_static,
    )
    from mapsage.geo import forbid_servers

    if not args.allow_remote:
        forbid_servers()
    for extension in extensions_of('view'):
        if extension.is_asked(args):
            source = extension.run(args)
            labeling = Labeling(source, args.points)
            with ViewServer(ViewSession([]), args.port, None, say, labeling) as server:
                announce(server, len(source.paths))
                serve(server)
            return
    entries = find_maps(args.maps, args.scenes, args.truth, args.allow_remote, args.bands)
    session = ViewSession(
        entries,
        TruthSettings(args.reduce_zero_label, args.class_field, args.default_class, args.outside),
        say,
        args.allow_remote,
    )
    if args.static is not None:
        session.prepare()
        page = write_static(session, args.static)
        say(
            f'{page}: put this folder on a web server that serves parts of files, such as nginx or '
            'GitHub Pages.'
        )
        return
    review = Review(session, args.review, say)
    with ViewServer(session, args.port, review, say) as server:
        # The link is the first line, before what the preparation has to say.
        announce(server, len(entries))
        threading.Thread(target=_prepare, args=(session, review), daemon=True).start()
        serve(server)


def announce(server: ViewServer, count: int) -> None:
    """Tell the user where the page is."""
    say(f'{count} map(s): open {server.url} in a browser; Ctrl+C ends it.')
    say('The link works once: the next one is printed when it is used, for another browser.')
    say(
        f'From another machine: ssh -L {server.server_port}:127.0.0.1:{server.server_port} '
        f'{getpass.getuser()}@{socket.gethostname()}'
    )


def serve(server: ViewServer) -> None:
    """Answer the page until the user stops the program."""
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        say('')


def _prepare(session: ViewSession, review: Review) -> None:
    session.prepare()
    review.rank_when_asked()


def say(text: str) -> None:
    """Print a line immediately, also if stdout is a pipe."""
    print(text, flush=True)


def run() -> None:
    """Run the command line and exit."""
    main()
