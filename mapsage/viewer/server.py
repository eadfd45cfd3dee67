"""A server for one user on this machine: the page, parts of the files, and polygons."""
from __future__ import annotations

import json
import math
import re
import socketserver
from http import HTTPStatus
from pathlib import Path
from typing import Any, Callable, Dict, Optional
from urllib.parse import parse_qs

from pyogrio.errors import DataLayerError, DataSourceError

from mapsage.json_text import parse_json

from .admission import Admission
from .byte_ranges import as_bytes, requested_part
from .connections import BoundedHandler, BoundedServer
from .errors import ViewError
from .polygons import polygons_in
from .review import DECISIONS, Review
from .session import ViewSession, stamp_of

WEB = Path(__file__).with_name('web')
PAGE = {'': 'index.html', 'index.html': 'index.html', 'viewer.js': 'viewer.js',
        'viewer.css': 'viewer.css', 'LICENSES.txt': 'LICENSES.txt'}
"""Files of the page by their place in the URL."""

_TYPES = {'.html': 'text/html; charset=utf-8', '.js': 'text/javascript; charset=utf-8',
          '.css': 'text/css; charset=utf-8', '.txt': 'text/plain; charset=utf-8',
          '.tif': 'image/tiff'}
_CHUNK = 1 << 20  # bytes that are sent at a time
_LONGEST = 4096  # bytes of what a page may send
_ELSEWHERE = 'This server answers on this machine only.'
_NOT_ADMITTED = (
    'This viewer answers to a browser that has opened its link. Open the last link that it printed '
    'in the terminal where it runs, http://127.0.0.1:PORT/?token=...; every link works once, and '
    'the next one is printed when it is used.\n')


class ViewServer(BoundedServer):
    """Server on 127.0.0.1 that answers for the files of a :class:`ViewSession` and no others.

    It answers to browsers that have opened one of its links (:class:`Admission`). A request whose
    ``Host`` is not this machine is refused: a page elsewhere could otherwise read the files through
    a name that it lets point here (DNS rebinding).

    Args:
        session: Maps to show.
        port: Port to listen at; 0 takes a free one.
        review: Decisions that may be made of the maps, or None for none.
        say: Function that is told when a link was used, with the next one: a sentence.

    Raises:
        ViewError: If the port is taken.
    """

    def __init__(self, session: ViewSession, port: int = 0, review: Optional[Review] = None,
                 say: Callable[[str], None] = lambda text: None) -> None:
        self.session, self.review, self.say = session, review, say
        self.admission = Admission()
        try:
            super().__init__(('127.0.0.1', port), _Handler)
        except (OSError, OverflowError) as error:
            raise ViewError(f'--port {port}: {error}. Choose another, or leave --port out for a '
                            'free one.') from error

    def server_bind(self) -> None:
        """Bind without the question for a host name, which waits where no name server answers."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]

    @property
    def url(self) -> str:
        """Link to the page, which works once; from then on it is another one."""
        return f'http://127.0.0.1:{self.server_port}/?token={self.admission.token}'

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a browser that has hung up; it does so at every zoom."""


class _Handler(BoundedHandler):
    server: ViewServer

    def do_GET(self) -> None:  # noqa: N802  (name of the base class)
        port = self._port()
        place, _, query = self.path.partition('?')
        if port is None:
            self._refuse(HTTPStatus.FORBIDDEN, _ELSEWHERE)
            return
        if not self.server.admission.admits(self.headers.get_all('Cookie', []), port):
            self._admit_by_link(place, query, port)
            return
        self.server.note_admission(self.connection, True)
        path = place.lstrip('/')
        found = re.fullmatch(r'maps/([0-9]{1,6})/(\w+)(?:/([\w-]+)\.tif)?', path)
        if path == '' and query.startswith('token='):  # a link, in a browser that was admitted
            self._start(HTTPStatus.SEE_OTHER, _TYPES['.txt'], 0, Location='/')
        elif path in PAGE:
            self._send_file(WEB / PAGE[path])
        elif path == 'catalog.json':
            self._send_json(dict(self.server.session.as_json(self._place),
                                 review=self.server.review is not None))
        elif path == 'review.json' and self.server.review is not None:
            self._send_review(self.server.review)
        elif found and found.group(2) == 'polygons':
            self._send_polygons(int(found.group(1)), parse_qs(query))
        elif found and found.group(3):
            self._send_raster(int(found.group(1)), found.group(2), found.group(3))
        else:
            self._refuse(HTTPStatus.NOT_FOUND, f'There is no {place[:200]} here.')

    do_HEAD = do_GET  # noqa: N815

    def do_POST(self) -> None:  # noqa: N802
        """Take a decision of a review; no other page may make one in the user's name."""
        review, length = self.server.review, self.headers.get('Content-Length', '')
        port = self._port()
        if port is None:
            self._refuse(HTTPStatus.FORBIDDEN, _ELSEWHERE)
        elif not self.server.admission.admits(self.headers.get_all('Cookie', []), port):
            self._refuse(HTTPStatus.FORBIDDEN, _NOT_ADMITTED)
        elif self.headers.get('Origin') != f'http://{self.headers.get("Host")}':
            self._refuse(HTTPStatus.FORBIDDEN, 'Only the page of this server decides here.')
        elif self.path != '/review' or review is None:
            self._refuse(HTTPStatus.NOT_FOUND, f'Nothing can be sent to {self.path[:200]}.')
        elif self.headers.get('Content-Type', '').partition(';')[0].strip() != 'application/json':
            self._refuse(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, 'Expected application/json.')
        elif not re.fullmatch('[0-9]+', length):
            self._refuse(HTTPStatus.LENGTH_REQUIRED,
                         f'Content-Length {length[:20]!r}: expected bytes.')
        elif as_bytes(length) > _LONGEST:
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                         f'Content-Length {length[:20]}: expected at most {_LONGEST} bytes.')
        else:
            self._decide(review, self.rfile.read(as_bytes(length)))

    def log_message(self, *arguments: Any) -> None:
        """Print nothing for each of the many requests of a map."""

    def _port(self) -> Optional[str]:
        """Return the port by which the browser knows this machine; None if it names another one.

        It may be any port: ``ssh -L`` has another one than the server.
        """
        found = re.fullmatch(r'(?:127\.0\.0\.1|localhost)(?::([0-9]{1,5}))?',
                             self.headers.get('Host', ''))
        return found and (found.group(1) or '80')

    def _admit_by_link(self, place: str, query: str, port: str) -> None:
        """Admit a browser that opens a link that works; refuse everybody else."""
        token = parse_qs(query).get('token', [''])[0]
        if (self.command, place) != ('GET', '/') or not self.server.admission.redeem(token):
            self.close_connection = True
            self._refuse(HTTPStatus.FORBIDDEN, _NOT_ADMITTED)
            return
        headers = dict(Set_Cookie=self.server.admission.cookie(port), Referrer_Policy='no-referrer')
        # A browser that comes from a link on another site, such as a terminal on a page, would
        # follow a redirect without the cookie (SameSite=Strict); a page of ours it leaves with it.
        if self.headers.get('Sec-Fetch-Site') == 'cross-site':
            self._start(HTTPStatus.OK, _TYPES['.html'], 0, Refresh='0;url=/', **headers)
        else:
            self._start(HTTPStatus.SEE_OTHER, _TYPES['.txt'], 0, Location='/', **headers)
        self.server.say(f'A browser has opened the link. The next one: {self.server.url}')

    def _place(self, number: int, kind: str) -> str:
        if kind == 'polygons':
            return f'maps/{number}/polygons'
        # the stamp keeps parts of an old and of a new file of the same name apart
        return f'maps/{number}/{kind}/{self.server.session.stamp(number, kind)}.tif'

    def _send_raster(self, number: int, kind: str, stamp: str) -> None:
        path = self.server.session.file(number, kind)
        if path is None:
            self._refuse(HTTPStatus.NOT_FOUND, f'Map {number} has no {kind}.')
            return
        try:
            now = stamp_of(path)
        except OSError:
            self._refuse(HTTPStatus.GONE, f'{path.name} was removed while it was shown.')
            return
        if now != stamp:
            self._refuse(HTTPStatus.GONE, f'{path.name} has changed while it was shown; start the '
                         'viewer again.')
            return
        self._send_file(path)

    def _send_polygons(self, number: int, query: Dict[str, Any]) -> None:
        entries = self.server.session.entries
        path = entries[number].polygons if number < len(entries) else None
        try:
            box = [float(value) for value in query['box'][0].split(',')]
            if len(box) != 4 or not all(map(math.isfinite, box)):
                raise ValueError(f'{len(box)} numbers')
        except (KeyError, ValueError) as error:
            given = str(query.get('box'))[:100]
            self._refuse(HTTPStatus.BAD_REQUEST, f'box={given} ({str(error)[:100]}); expected left,'
                         'bottom,right,top.')
            return
        if path is None or not path.exists():
            self._refuse(HTTPStatus.NOT_FOUND, 'This map has no polygons, or they were removed; '
                         'predict with --polygons.')
            return
        try:
            found = polygons_in(path, box)
        except (DataSourceError, DataLayerError, KeyError) as error:  # a name is not there
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, f'{path.name} cannot be read: {error}. '
                         'Predict with --polygons --overwrite to make it again.')
            return
        self._send_json(found)

    def _send_json(self, content: Any, status: HTTPStatus = HTTPStatus.OK) -> None:
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
        # What is left of a refused body would be the next request.
        if self.command == 'POST' or self.close_connection:
            self.send_header('Connection', 'close')
        for name, value in headers.items():
            self.send_header(name.replace('_', '-'), value)
        self.end_headers()

    def _send_file(self, path: Path) -> None:
        """Send a file, or the part of it that ``Range`` asks for."""
        kind = _TYPES.get(path.suffix, 'application/octet-stream')
        try:
            file = open(path, 'rb')  # noqa: SIM115  (closed below, after the errors of opening)
        except OSError as error:
            self._refuse(HTTPStatus.GONE, f'{path.name} cannot be read any more: {error.strerror}.')
            return
        with file:
            size = path.stat().st_size
            part = requested_part(self.headers.get('Range'), size)
            if part is None:
                self._start(HTTPStatus.OK, kind, size, Accept_Ranges='bytes')
                part = 0, size
            elif part[0] >= part[1]:
                self._start(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, kind, 0,
                            Content_Range=f'bytes */{size}')
                return
            else:
                self._start(HTTPStatus.PARTIAL_CONTENT, kind, part[1] - part[0],
                            Accept_Ranges='bytes',
                            Content_Range=f'bytes {part[0]}-{part[1] - 1}/{size}')
            if self.command == 'HEAD':
                return
            file.seek(part[0])
            left = part[1] - part[0]
            while left:
                chunk = file.read(min(_CHUNK, left))
                if not chunk:  # the file has shrunk: the reader notices by the length
                    self.close_connection = True
                    return
                self.wfile.write(chunk)
                left -= len(chunk)

    def _send_review(self, review: Review) -> None:
        try:
            self._send_json(review.as_json())
        except ViewError as error:
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, str(error))

    def _decide(self, review: Review, body: bytes) -> None:
        try:
            tile, decision, before = (parse_json(body.decode())[name]
                                      for name in ('tile', 'decision', 'before'))
            if not (isinstance(tile, str) and isinstance(before, str)
                    and (decision is None or decision in list(DECISIONS))):
                raise ValueError(f'{decision!r}')
        except (ValueError, TypeError, LookupError) as error:
            self._refuse(HTTPStatus.BAD_REQUEST, f'This is no decision ({error!r}); expected tile, '
                         f'before, and decision: null or one of {", ".join(DECISIONS)}.')
            return
        try:
            written, answer = review.decide(tile, decision, before)
            self._send_json(answer, HTTPStatus.OK if written else HTTPStatus.CONFLICT)
        except LookupError:
            self._refuse(HTTPStatus.GONE, 'The maps have changed since this page was loaded, or '
                         'are being ranked again: reload it.')
        except ViewError as error:
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, str(error))
