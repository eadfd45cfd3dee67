"""Requests, and files of a map folder, with anything in them."""

from __future__ import annotations

import json
import re
import socket
import sys
from typing import Any, Iterator, List, NamedTuple
from urllib.parse import quote

import numpy as np
import pytest
import rasterio
from fuzzing import JSON, changed, damaged, documents
from hypothesis import example, given
from hypothesis import strategies as st
from view_maps import Folders, add_map, folders, serving

from mapsage.extras.viewer import Review, ViewError, ViewServer, ViewSession, find_maps
from mapsage.extras.viewer.catalog import _report, _scenes_of, _windows_of
from mapsage.extras.viewer.decisions import ReviewFile, is_review, read_windows
from mapsage.extras.viewer.display import _read_matrix
from mapsage.extras.viewer.session import scores_of
from mapsage.geo import GeoError, read_classes


class Fuzzed(ViewServer):
    """A viewer that keeps the errors of its handlers."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, (ConnectionError, socket.timeout)):
            self.errors.append(repr(error))

    errors: List[str] = []


class Site(NamedTuple):
    """A running viewer and its folders."""

    server: Fuzzed
    where: Folders

    def cookie(self) -> str:
        return self.server.admission.cookie(str(self.server.server_port)).partition(';')[0]

    def send(self, content: bytes) -> bytes:
        """Return the answer to bytes, after which nothing more comes."""
        self.server.errors.clear()
        with socket.create_connection(('127.0.0.1', self.server.server_port), 60) as connection:
            answer = b''
            try:
                connection.sendall(content)
                connection.shutdown(socket.SHUT_WR)
                while True:
                    part = connection.recv(1 << 16)
                    if not part:
                        break
                    answer += part
            except ConnectionError:  # it was refused before all of it was read
                pass
        assert self.server.errors == []
        return answer

    def ask(self, path: str, method: str = 'GET', body: bytes = b'', **headers: str) -> int:
        """Return the status of the answer to an admitted browser."""
        host = f'127.0.0.1:{self.server.server_port}'
        headers = dict(Host=host, Cookie=self.cookie(), Origin=f'http://{host}', **headers)
        lines = [f'{method} {path} HTTP/1.1', *map('{0[0]}: {0[1]}'.format, headers.items())]
        answer = self.send('\r\n'.join(lines).encode() + b'\r\n\r\n' + body)
        return int(answer.split(b' ', 2)[1])


@pytest.fixture(scope='module')
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    where = folders(tmp_path_factory.mktemp('fuzz'))
    add_map(where, 'a', size=(100, 60))
    session = ViewSession(find_maps([where.maps], where.scenes, where.truth))
    session.prepare()
    review = Review(session)
    review.rank()
    with serving(Fuzzed(session, review=review)) as server:
        yield Site(server, where)


@given(st.data())
def test_any_request_gets_an_answer_or_an_end(site: Site, data: st.DataObject) -> None:
    host = f'127.0.0.1:{site.server.server_port}'
    valid = (
        f'GET /catalog.json HTTP/1.1\r\nHost: {host}\r\nCookie: {site.cookie()}\r\n'
        f'Range: bytes=0-9\r\nOrigin: http://{host}\r\nContent-Length: 2\r\n\r\n{{}}'
    ).encode()
    answer = site.send(
        data.draw(
            st.one_of(
                st.binary(max_size=200),
                damaged(valid),
                damaged(valid.replace(b'GET', b'POST')),
                damaged(valid.replace(b'/catalog.json', b'/maps/0/polygons?box=1,2,3,4')),
            )
        )
    )
    # HTTP/0.9 has no headers
    assert re.match(rb'(HTTP/1\.[01] [2-5]\d\d |$)', answer) or b'HTTP/' not in answer[:20], answer


@given(st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), max_size=60))
@example('//[')
@example('http://[')
@example('/?' + '&' * 5000)
@example('/maps/0/polygons?box=' + ',' * 5000)
@example('/maps/999999/polygons?box=1,2,3,4')
@example('*')
def test_any_path(site: Site, path: str) -> None:
    assert 200 <= site.ask(path or '/') < 500


@given(
    st.one_of(
        st.lists(
            st.one_of(
                st.floats().map(str),
                st.integers().map(str),
                st.text(max_size=6),
                st.sampled_from(['1e999', '-inf', 'nan', '1_0', '٣', '9' * 5000]),
            ),
            min_size=3,
            max_size=5,
        ).map(','.join),
        st.text(),
    )
)
@example('5,5,1,1')
@example('-1e308,-1e308,1e308,1e308')
def test_any_box(site: Site, box: str) -> None:
    path = '/maps/0/polygons?box=' + quote(box.encode('utf-8', 'replace'))
    assert site.ask(path) in (200, 400, 414)


@given(documents(dict(tile='x', decision='right', before='')))
def test_any_decision(site: Site, body: bytes) -> None:
    status = site.ask(
        '/review',
        'POST',
        body[:5000],
        **{'Content-Type': 'application/json', 'Content-Length': str(len(body[:5000]))},
    )
    assert status in (400, 410, 413)


@given(st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=40))
@example('9' * 5000)
@example('²')
@example('1' + '0' * 8)
def test_any_content_length(site: Site, length: str) -> None:
    status = site.ask(
        '/review', 'POST', b'{}', **{'Content-Type': 'application/json', 'Content-Length': length}
    )
    assert status in (400, 411, 413)


REPORT = dict(
    settings=dict(
        input=[['/none/a.tif', 1, 1], ['s3://b/a.tif', 1, 1]],
        mosaic='m',
        window=[64, 64],
        size=[600, 400],
    ),
    width=600,
    height=400,
    pixels={f'class {number}': 7 for number in range(6)},
    files=['a.tif'],
)


@given(documents(REPORT))
@example(json.dumps(dict(settings=dict(input=[['/' + 'x' * 300 + '.tif']]))).encode())
def test_any_report_of_a_map(site: Site, content: bytes) -> None:
    path = site.where.maps / 'a.json'
    path.write_bytes(content)
    (entry,) = find_maps([site.where.maps])
    json.dumps(entry.as_json(), allow_nan=False)
    report = _report(site.where.maps / 'a.tif')
    assert all(isinstance(name, str) for name in _scenes_of(report))
    assert all(side > 0 for pair in _windows_of(report) for side in pair)
    path.unlink()


CLASSES = [dict(value=number, name=f'class {number}', color=[number, 0, 255]) for number in (0, 1)]


@given(documents(CLASSES))
def test_any_classes_in_a_tag(tmp_path_factory: Any, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / 'classes.tif'
    with rasterio.open(
        path,
        'w',
        driver='GTiff',
        width=2,
        height=2,
        count=1,
        dtype='uint8',
        transform=rasterio.Affine(1, 0, 5, 0, -1, 5),
    ) as file:
        file.write(np.zeros((1, 2, 2), np.uint8))
        file.update_tags(MAPSAGE_CLASSES=content.decode('latin-1').replace('\0', ''))
    try:
        classes = read_classes(path)
        entries = find_maps([path]) if classes else []
        assert all(json.dumps(entry.as_json(), allow_nan=False) for entry in entries)
    except (GeoError, ViewError) as error:
        assert 'classes.tif' in str(error)


@given(documents([[5, 7], [0, 2**40]]))
@example(b'[[1, 2], [3, 1e999]]')
@example(b'[[1, 2], [3, 1180591620717411303424]]')
def test_any_confusion_matrix_of_a_copy(tmp_path_factory: Any, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / 'matrix.json'
    path.write_bytes(content)
    matrix = _read_matrix(path, 2)
    assert matrix is None or [len(row) for row in matrix] == [2, 2]
    assert json.dumps(scores_of(matrix), allow_nan=False)


@given(st.data())
def test_any_review_file(site: Site, data: st.DataObject) -> None:
    path = site.where.maps.parent / 'review.gpkg'
    if not path.exists():
        review = Review(site.server.session, path)
        review.rank()
        tile = review.as_json()['tiles'][0]
        review.decide(tile['id'], 'right', '')
        path.with_suffix('.valid').write_bytes(path.read_bytes())
    valid = path.with_suffix('.valid').read_bytes()
    path.write_bytes(data.draw(st.one_of(st.binary(max_size=100), damaged(valid))))
    for read in (ReviewFile(path, '').read, lambda: is_review(path), lambda: read_windows(path)):
        try:
            read()
        except ViewError as error:
            assert 'review.gpkg' in str(error)


@given(JSON)
def test_any_report_is_no_error(report: Any) -> None:
    for settings in (report, dict(input=report), dict(input=[report]), dict(window=report)):
        _scenes_of(dict(settings=settings))
        _windows_of(dict(settings=settings))


def test_the_changes_reach_the_values() -> None:
    """The generator itself: otherwise the tests here would pass with nothing tried."""
    seen: List[Any] = []

    @given(changed(REPORT))
    def draw(value: Any) -> None:
        seen.append(value)

    draw()
    assert sum(isinstance(value, dict) and value != REPORT for value in seen) > len(seen) / 2
    assert any(
        isinstance(value, dict)
        and isinstance(value.get('settings'), dict)
        and value['settings'] != REPORT['settings']
        for value in seen
    )
