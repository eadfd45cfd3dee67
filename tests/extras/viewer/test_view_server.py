"""What the server answers, to whom, and the folder for other servers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Iterator, Tuple

import pytest
from view_maps import Folders, add_map, folders, request, serving

from mapsage.extras.viewer import ViewError, ViewServer, ViewSession, find_maps, write_static


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Tuple[ViewServer, Folders]]:
    """Provide a server of one map, and its folders."""
    where = folders(tmp_path)
    add_map(where, 'a')
    session = ViewSession(find_maps([where.maps], where.scenes, where.truth))
    session.prepare()
    with serving(ViewServer(session)) as server:
        yield server, where


def ask(server: ViewServer, path: str, method: str = 'GET', **headers: str) -> Any:
    """Ask as a browser that has opened the link; with ``Cookie=''``, as one that has not."""
    host = headers.get('Host', f'127.0.0.1:{server.server_port}')
    headers.setdefault(
        'Cookie', server.admission.cookie(host.partition(':')[2] or '80').partition(';')[0]
    )
    return request(server, method, path, headers)


def test_the_page_and_what_it_shows(served: Any) -> None:
    server, where = served
    answer, body = ask(server, '/')
    assert answer.status == 200 and b'viewer.js' in body
    for name in ('viewer.js', 'viewer.css', 'LICENSES.txt'):
        assert ask(server, f'/{name}')[0].status == 200
    catalog = json.loads(ask(server, '/catalog.json')[1])
    (shown,) = catalog['maps']
    assert shown['ready'] and set(shown['files']) == {'map', 'confidence', 'scene', 'truth'}
    assert shown['accuracy'] == [239200 - 5000, 239200]
    everything = (where.maps / 'a.tif').read_bytes()
    url = '/' + shown['files']['map']
    answer, body = ask(server, url)
    assert answer.status == 200 and body == everything
    answer, body = ask(server, url, Range='bytes=100-299')
    assert answer.status == 206 and body == everything[100:300]
    assert answer.headers['Content-Range'] == f'bytes 100-299/{len(everything)}'
    answer, body = ask(server, url, 'HEAD', Range='bytes=-5')
    assert answer.status == 206 and answer.headers['Content-Length'] == '5' and not body
    assert ask(server, url, Range=f'bytes={len(everything)}-')[0].status == 416
    answer, body = ask(server, '/maps/0/polygons?box=300001,3399978,300002,3399979')
    assert len(json.loads(body)['features']) == 1


@pytest.mark.parametrize(
    'path',
    [
        '/maps/0/map/../../../catalog.py',
        '/%2e%2e/etc/passwd',
        '/../server.py',
        '/maps/0/nothing/1.tif',
        '/maps/7/map/1-1.tif',
        '/maps/7/polygons?box=1,2,3,4',
        '/package.json',
        '/src/main.js',
    ],
)
def test_nothing_else_is_answered(path: str, served: Any) -> None:
    answer, body = ask(served[0], path)
    assert answer.status in (404, 410) and b'root:' not in body and body


def test_a_name_that_points_here_is_refused(served: Any) -> None:
    for host in (
        'evil.example',
        f'evil.example:{served[0].server_port}',
        '',
        '127.0.0.1.evil.example',
        'evil.example:80:127.0.0.1',
    ):
        answer, body = ask(served[0], '/catalog.json', Host=host)
        assert answer.status == 403 and b'maps' not in body
    # the port may be another: `ssh -L 9000:127.0.0.1:PORT`, where PORT is taken on the other side
    for host in (f'localhost:{served[0].server_port}', '127.0.0.1:9000', 'localhost'):
        assert ask(served[0], '/', Host=host)[0].status == 200


def test_bad_boxes_and_lost_files_are_said(served: Any) -> None:
    server, where = served
    for box in ('1,2,3', 'a,b,c,d', ''):
        answer, body = ask(server, f'/maps/0/polygons?box={box}')
        assert answer.status == 400 and b'left,' in body
    url = '/' + json.loads(ask(server, '/catalog.json')[1])['maps'][0]['files']['map']
    path = where.maps / 'a.tif'
    path.write_bytes(path.read_bytes() + b'x')
    answer, body = ask(server, url, Range='bytes=0-9')
    assert answer.status == 410 and b'a.tif has changed' in body
    path.unlink()
    assert b'a.tif was removed' in ask(server, url)[1]
    (shown,) = json.loads(ask(server, '/catalog.json')[1])['maps']  # of other maps the page goes on
    assert (shown['width'], shown['height'], shown['crs']) == (600, 400, 'EPSG:32631')
    (where.maps / 'a.gpkg').write_bytes(b'SQLite format 3\0 that ends here')
    answer, body = ask(server, '/maps/0/polygons?box=1,2,3,4')
    assert answer.status == 500 and b'a.gpkg cannot be read' in body
    (where.maps / 'a.gpkg').unlink()
    assert b'--polygons' in ask(server, '/maps/0/polygons?box=1,2,3,4')[1]


def test_a_port_in_use_is_said(served: Any) -> None:
    with pytest.raises(ViewError, match=f'--port {served[0].server_port}: .*use.*free one'):
        ViewServer(served[0].session, served[0].server_port)
    with pytest.raises(ViewError, match='--port 70000'):
        ViewServer(served[0].session, 70000)


def test_a_folder_for_any_server(
    served: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = write_static(served[0].session, tmp_path / 'site')
    assert page.exists() and (page.parent / 'viewer.js').exists()
    (shown,) = json.loads((page.parent / 'catalog.json').read_text())['maps']
    files = {kind: page.parent / path for kind, path in shown['files'].items()}
    assert files['map'].read_bytes() == (served[1].maps / 'a.tif').read_bytes()
    assert set(files) == {'map', 'confidence', 'scene', 'truth'}
    assert len(json.loads((page.parent / shown['polygons']).read_text())['features']) == 96
    assert str(tmp_path) not in (page.parent / 'catalog.json').read_text()  # it may be published
    monkeypatch.setattr('mapsage.extras.viewer.polygons.MOST', 9)
    write_static(served[0].session, tmp_path / 'site')
    (shown,) = json.loads((page.parent / 'catalog.json').read_text())['maps']
    assert shown['polygons'] is None and 'QGIS' in shown['notes'][-1]
    (tmp_path / 'file').write_text('')
    with pytest.raises(ViewError, match='cannot write into'):
        write_static(served[0].session, tmp_path / 'file')


def test_one_bad_scene_does_not_hide_the_others(tmp_path: Path) -> None:
    where = folders(tmp_path)
    add_map(where, 'a')
    add_map(where, 'b')
    (where.scenes / 'a.tif').write_bytes(b'II*\0' + bytes(50))
    session = ViewSession(find_maps([where.maps], where.scenes))
    session.prepare()
    first, second = session.as_json(lambda number, kind: kind)['maps']
    assert 'scene' not in first['files'] and 'The scene is not shown' in first['notes'][0]
    assert 'scene' in second['files'] and first['ready'] and second['ready']


def test_numbers_of_5000_digits_get_an_answer(served: Any) -> None:
    server, _ = served
    digits = '9' * 5000
    for header, status in (
        (f'bytes={digits}-', 416),
        (f'bytes=0-{digits}', 206),
        (f'bytes=-{digits}', 206),
        (f'bytes={digits}-1', 200),
    ):
        assert ask(server, '/viewer.css', Range=header)[0].status == status
    origin = f'http://127.0.0.1:{server.server_port}'
    for path in (f'/maps/{digits}/map/1-1.tif', f'/maps/0/polygons?box={digits},1,2,3'):
        assert ask(server, path)[0].status in (400, 404)
    assert ask(server, '/review', 'POST', Origin=origin, Content_Length=digits)[0].status == 404
