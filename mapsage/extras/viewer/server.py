"""The viewer's server for one user on this machine: the page, byte ranges of files, polygons.

Everything in a request may come from a stranger or from another page in the user's browser.
`admission.py` decides who gets answers, `connections.py` limits connections and times, and only
files of the :class:`ViewSession` are sent. A page can write nothing but decisions of a review and
labels.
"""

from __future__ import annotations

import json
import math
import re
import socketserver
from http import HTTPStatus
from pathlib import Path
from typing import Callable, Dict, List, Optional
from urllib.parse import parse_qs

from pyogrio.errors import DataLayerError, DataSourceError

from mapsage.base.errors import UserError
from mapsage.base.files import parse_json

from .admission import Admission
from .connections import BoundedHandler, BoundedServer, as_bytes, requested_part
from .errors import ViewError
from .labeling import Labeling
from .polygons import polygons_in
from .review import DECISIONS, Review
from .session import ViewSession, stamp_of

WEB = Path(__file__).with_name('web')
PAGE = {
    '': 'index.html',
    'index.html': 'index.html',
    'viewer.js': 'viewer.js',
    'viewer.css': 'viewer.css',
    'LICENSES.txt': 'LICENSES.txt',
}
"""Path in the URL -> file of the page."""

_TYPES = {
    '.html': 'text/html; charset=utf-8',
    '.js': 'text/javascript; charset=utf-8',
    '.css': 'text/css; charset=utf-8',
    '.txt': 'text/plain; charset=utf-8',
    '.tif': 'image/tiff',
}
# Bytes of a file that are sent at a time.
_CHUNK = 1 << 20
# Largest body of a request, in bytes.
_LONGEST = 4096
_ELSEWHERE = 'This server answers on this machine only.'
_NOT_ADMITTED = (
    'This viewer answers to a browser that has opened its link. Open the last link that it printed '
    'in the terminal where it runs, http://127.0.0.1:PORT/?token=...; every link works once, and '
    'the next one is printed when it is used.\n'
)


class ViewServer(BoundedServer):
    """Server on 127.0.0.1 for the files of a :class:`ViewSession` and no others.

    Only browsers that have opened one of its links get answers (:class:`Admission`). A request with
    a ``Host`` other than this machine is refused: otherwise a page elsewhere could read the files
    through a host name that it points to 127.0.0.1 (DNS rebinding).

    Args:
        session: Maps to show.
        port: Port to listen at; 0 takes a free one.
        review: Review of the maps; None for a viewer without one.
        labeling: What is shown and labeled in place of maps, or None.
        say: Function that is called with a sentence and the next link when a link was used.

    Raises:
        ViewError: If the port is taken.
    """

    def __init__(
        self,
        session: ViewSession,
        port: int = 0,
        review: Optional[Review] = None,
        say: Callable[[str], None] = lambda text: None,
        labeling: Optional[Labeling] = None,
    ) -> None:
        self.session, self.review, self.say = session, review, say
        self.labeling = labeling
        self.admission = Admission()
        try:
            super().__init__(('127.0.0.1', port), _Handler)
        except (OSError, OverflowError) as error:
            raise ViewError(
                f'--port {port}: {error}. Choose another, or leave --port out for a free one.'
            ) from error

    def server_bind(self) -> None:
        """Bind without looking up the host name, which takes long without a name server."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]

    @property
    def url(self) -> str:
        """Link to the page. It works once, and this property then returns the next link."""
        return f'http://127.0.0.1:{self.server_port}/?token={self.admission.token}'

    def handle_error(self, request: object, client_address: object) -> None:
        """Print nothing when a browser hangs up, which it does at every zoom."""


class _Handler(BoundedHandler):
    server: ViewServer

    def do_GET(self) -> None:  # noqa: N802  (name of the base class)
        port = self._port()
        url_path, _, query = self.path.partition('?')
        if port is None:
            self._refuse(HTTPStatus.FORBIDDEN, _ELSEWHERE)
            return
        if not self.server.admission.admits(self.headers.get_all('Cookie', []), port):
            self._admit_by_link(url_path, query, port)
            return
        self.server.note_admission(self.connection, True)
        path = url_path.lstrip('/')
        match = re.fullmatch(r'maps/([0-9]{1,6})/(\w+)(?:/([\w-]+)\.tif)?', path)
        # A link, opened in a browser that is already admitted.
        if path == '' and query.startswith('token='):
            self._start(HTTPStatus.SEE_OTHER, _TYPES['.txt'], 0, Location='/')
        elif path in PAGE:
            self._send_file(WEB / PAGE[path])
        elif path == 'catalog.json':
            self._send_catalog()
        elif path == 'review.json' and self.server.review is not None:
            self._send_review(self.server.review)
        elif path.startswith('labels/') and self.server.labeling is not None:
            tile = self.server.labeling.tile_at(path)
            if tile is None:
                self._refuse(HTTPStatus.NOT_FOUND, f'There is no tile {path[:200]}.')
            else:
                self._send(HTTPStatus.OK, 'application/octet-stream', tile)
        elif match and match.group(2) == 'polygons':
            self._send_polygons(int(match.group(1)), parse_qs(query))
        elif match and match.group(3):
            self._send_raster(int(match.group(1)), match.group(2), match.group(3))
        else:
            self._refuse(HTTPStatus.NOT_FOUND, f'There is no {url_path[:200]} here.')

    do_HEAD = do_GET  # noqa: N815

    def do_POST(self) -> None:  # noqa: N802
        """Accept a decision or a label, from the viewer's own page only (checked by Origin)."""
        length = self.headers.get('Content-Length', '')
        receivers = {'/review': self.server.review, '/labels': self.server.labeling}
        receiver = receivers.get(self.path)
        port = self._port()
        if port is None:
            self._refuse(HTTPStatus.FORBIDDEN, _ELSEWHERE)
        elif not self.server.admission.admits(self.headers.get_all('Cookie', []), port):
            self._refuse(HTTPStatus.FORBIDDEN, _NOT_ADMITTED)
        elif self.headers.get('Origin') != f'http://{self.headers.get("Host")}':
            self._refuse(HTTPStatus.FORBIDDEN, 'Expected a decision from the page of this viewer.')
        elif receiver is None:
            self._refuse(HTTPStatus.NOT_FOUND, f'{self.path[:200]} accepts no decisions.')
        elif self.headers.get('Content-Type', '').partition(';')[0].strip() != 'application/json':
            self._refuse(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, 'Expected application/json.')
        elif not re.fullmatch('[0-9]+', length):
            self._refuse(
                HTTPStatus.LENGTH_REQUIRED, f'Content-Length {length[:20]!r}: expected bytes.'
            )
        elif as_bytes(length) > _LONGEST:
            self._refuse(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f'Content-Length {length[:20]}: expected at most {_LONGEST} bytes.',
            )
        elif isinstance(receiver, Review):
            self._decide(receiver, self.rfile.read(as_bytes(length)))
        else:
            self._change_labels(receiver, self.rfile.read(as_bytes(length)))

    def log_message(self, *arguments: object) -> None:
        """Print nothing: a map takes many requests."""

    def _port(self) -> Optional[str]:
        """Return the port by which the browser knows this machine; None if it asks another host.

        Any port is accepted, because ``ssh -L`` may use another port than the server.
        """
        match = re.fullmatch(
            r'(?:127\.0\.0\.1|localhost)(?::([0-9]{1,5}))?', self.headers.get('Host', '')
        )
        return match and (match.group(1) or '80')

    def _admit_by_link(self, url_path: str, query: str, port: str) -> None:
        """Admit a browser that opens the valid link; refuse all other requests."""
        token = parse_qs(query).get('token', [''])[0]
        if (self.command, url_path) != ('GET', '/') or not self.server.admission.redeem(token):
            self.close_connection = True
            self._refuse(HTTPStatus.FORBIDDEN, _NOT_ADMITTED)
            return
        headers = dict(Set_Cookie=self.server.admission.cookie(port), Referrer_Policy='no-referrer')
        # A browser that comes from a link on another site, such as a terminal in a web page, would
        # follow a redirect without the cookie (SameSite=Strict). A page that refreshes itself comes
        # from this site, so the browser sends the cookie.
        if self.headers.get('Sec-Fetch-Site') == 'cross-site':
            self._start(HTTPStatus.OK, _TYPES['.html'], 0, Refresh='0;url=/', **headers)
        else:
            self._start(HTTPStatus.SEE_OTHER, _TYPES['.txt'], 0, Location='/', **headers)
        self.server.say(f'A browser has opened the link. The next one: {self.server.url}')

    def _url_of(self, number: int, kind: str) -> str:
        if kind == 'polygons':
            return f'maps/{number}/polygons'
        # With the stamp, the browser's cache cannot mix byte ranges of an old and a new file.
        return f'maps/{number}/{kind}/{self.server.session.stamp(number, kind)}.tif'

    def _send_catalog(self) -> None:
        catalog = self.server.session.as_json(self._url_of)
        labeling = self.server.labeling
        if labeling is not None:
            catalog.update(maps=labeling.catalog(), labels=labeling.describe())
        self._send_json(dict(catalog, review=self.server.review is not None))

    def _send_raster(self, number: int, kind: str, stamp: str) -> None:
        path = self.server.session.file(number, kind)
        if path is None:
            self._refuse(HTTPStatus.NOT_FOUND, f'Map {number} has no {kind}.')
            return
        try:
            current_stamp = stamp_of(path)
        except OSError:
            self._refuse(HTTPStatus.GONE, f'{path.name} was removed while it was shown.')
            return
        if current_stamp != stamp:
            self._refuse(
                HTTPStatus.GONE,
                f'{path.name} has changed while it was shown; start the viewer again.',
            )
            return
        self._send_file(path)

    def _send_polygons(self, number: int, query: Dict[str, List[str]]) -> None:
        entries = self.server.session.entries
        path = entries[number].polygons if number < len(entries) else None
        try:
            box = [float(value) for value in query['box'][0].split(',')]
            if len(box) != 4 or not all(map(math.isfinite, box)):
                raise ValueError(f'{len(box)} numbers')
        except (KeyError, ValueError) as error:
            box_text = str(query.get('box'))[:100]
            self._refuse(
                HTTPStatus.BAD_REQUEST,
                f'box={box_text} ({str(error)[:100]}); expected left,bottom,right,top.',
            )
            return
        if path is None or not path.exists():
            self._refuse(
                HTTPStatus.NOT_FOUND,
                'This map has no polygons, or they were removed; predict with --polygons.',
            )
            return
        try:
            polygons = polygons_in(path, box)
        # KeyError: the file lacks one of the fields.
        except (DataSourceError, DataLayerError, KeyError) as error:
            self._refuse(
                HTTPStatus.INTERNAL_SERVER_ERROR,
                f'{path.name} cannot be read: {error}. '
                'Predict with --polygons --overwrite to make it again.',
            )
            return
        self._send_json(polygons)

    def _send_json(self, content: Dict[str, object], status: HTTPStatus = HTTPStatus.OK) -> None:
        self._send(status, 'application/json', json.dumps(content).encode())

    def _refuse(self, status: HTTPStatus, sentence: str) -> None:
        self._send(status, 'text/plain; charset=utf-8', sentence.encode())

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self._start(status, kind, len(body))
        if self.command != 'HEAD':
            self.wfile.write(body)

    def _start(self, status: HTTPStatus, kind: str, length: int, **headers: str) -> None:
        self.send_response(status)
        self.send_header('Content-Type', kind)
        self.send_header('Content-Length', str(length))
        self.send_header('Cache-Control', 'no-cache')
        self.send_header('X-Content-Type-Options', 'nosniff')
        # The unread rest of a refused body would be read as the next request.
        if self.command == 'POST' or self.close_connection:
            self.send_header('Connection', 'close')
        for name, value in headers.items():
            self.send_header(name.replace('_', '-'), value)
        self.end_headers()

    def _send_file(self, path: Path) -> None:
        """Send a file, or the bytes of it that ``Range`` asks for."""
        kind = _TYPES.get(path.suffix, 'application/octet-stream')
        try:
            file = open(path, 'rb')  # noqa: SIM115  (closed below, after the errors of opening)
        except OSError as error:
            self._refuse(HTTPStatus.GONE, f'{path.name} cannot be read any more: {error.strerror}.')
            return
        with file:
            size = path.stat().st_size
            requested = requested_part(self.headers.get('Range'), size)
            start, end = (0, size) if requested is None else requested
            if requested is None:
                self._start(HTTPStatus.OK, kind, size, Accept_Ranges='bytes')
            elif start >= end:
                self._start(
                    HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE,
                    kind,
                    0,
                    Content_Range=f'bytes */{size}',
                )
                return
            else:
                self._start(
                    HTTPStatus.PARTIAL_CONTENT,
                    kind,
                    end - start,
                    Accept_Ranges='bytes',
                    Content_Range=f'bytes {start}-{end - 1}/{size}',
                )
            if self.command == 'HEAD':
                return
            file.seek(start)
            left = end - start
            while left:
                chunk = file.read(min(_CHUNK, left))
                if not chunk:
                    # The file has shrunk. The browser notices by the missing bytes.
                    self.close_connection = True
                    return
                self.wfile.write(chunk)
                left -= len(chunk)

    def _send_review(self, review: Review) -> None:
        try:
            self._send_json(review.as_json())
        except ViewError as error:
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, str(error))

    def _change_labels(self, labeling: Labeling, body: bytes) -> None:
        try:
            self._send_json(labeling.change(dict(parse_json(body.decode()))))
        except (UserError, ValueError, TypeError) as error:
            self._refuse(HTTPStatus.BAD_REQUEST, str(error))

    def _decide(self, review: Review, body: bytes) -> None:
        try:
            tile, decision, expected_state = (
                parse_json(body.decode())[name] for name in ('tile', 'decision', 'before')
            )
            if not (
                isinstance(tile, str)
                and isinstance(expected_state, str)
                and (decision is None or decision in list(DECISIONS))
            ):
                raise ValueError(f'{decision!r}')
        except (ValueError, TypeError, LookupError) as error:
            self._refuse(
                HTTPStatus.BAD_REQUEST,
                f'This is not a decision ({error!r}); expected '
                f'tile, before, and decision: null or one of {", ".join(DECISIONS)}.',
            )
            return
        try:
            written, answer = review.decide(tile, decision, expected_state)
            self._send_json(answer, HTTPStatus.OK if written else HTTPStatus.CONFLICT)
        except LookupError:
            self._refuse(
                HTTPStatus.GONE,
                'The maps have changed since this page was loaded, or '
                'are being ranked again: reload it.',
            )
        except ViewError as error:
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, str(error))
