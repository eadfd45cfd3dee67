"""tools/view.py: serve maps to a browser on this machine, or write them as a static folder.

The server and the page are in `mapsage/extras/viewer/`.
"""

from __future__ import annotations

import argparse
import getpass
import socket
import threading

from mapsage.extras.viewer import (
    Review,
    TruthSettings,
    ViewServer,
    ViewSession,
    find_maps,
    write_static,
)
from mapsage.geo import forbid_servers


def view(args: argparse.Namespace) -> None:
    """Show maps until the user stops the program, or write them as a folder.

    Raises:
        ViewError: If there is no map, or the port is taken.
        GeoError: If a map or scene cannot be read.
    """
    if not args.allow_remote:
        forbid_servers()
    entries = find_maps(args.maps, args.scenes, args.truth, args.allow_remote)
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
        say(f'{len(entries)} map(s): open {server.url} in a browser; Ctrl+C ends it.')
        say('The link works once: the next one is printed when it is used, for another browser.')
        say(
            f'From another machine: ssh -L {server.server_port}:127.0.0.1:{server.server_port} '
            f'{getpass.getuser()}@{socket.gethostname()}'
        )
        threading.Thread(target=_prepare, args=(session, review), daemon=True).start()
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            say('')


def _prepare(session: ViewSession, review: Review) -> None:
    session.prepare()
    review.rank_when_asked()


def say(text: str) -> None:
    """Print a line immediately, also if stdout is a pipe."""
    print(text, flush=True)  # noqa: T201
