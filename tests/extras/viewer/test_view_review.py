"""A review on the server: what is answered, to whom, and what the next viewer finds."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Dict, Iterator, NamedTuple, Optional, Tuple
from urllib.parse import urlsplit

import pytest
from support import ROOT
from view_maps import NOWHERE, UTM, Folders, add_map, folders, name_scene, open_link, serving

from mapsage.extras.viewer import (
    Review,
    ViewError,
    ViewServer,
    ViewSession,
    find_maps,
    write_static,
)
from mapsage.extras.viewer import view as command
from mapsage.extras.viewer.decisions import read_windows


def make_review(where: Folders, path: Any = None) -> Review:
    session = ViewSession(find_maps([where.maps], where.scenes, where.truth))
    session.prepare()
    review = Review(session, path)
    review.rank()
    return review


@contextmanager
def served(review: Review) -> Iterator[ViewServer]:
    with serving(ViewServer(review._session, review=review)) as server:
        yield server


class Opened(NamedTuple):
    """A viewer whose link a browser has opened: its port, and the cookie of the browser."""

    port: int
    cookie: str


def opened(server: ViewServer) -> Opened:
    port = server.server_port
    return Opened(port, server.admission.cookie(str(port)).partition(';')[0])


def ask(
    viewer: Opened, content: Any = None, path: str = '/review', **headers: Optional[str]
) -> Tuple[int, Any]:
    """Send content to a viewer, or read without any; return the status and what it answers."""
    port = viewer.port
    connection = http.client.HTTPConnection('127.0.0.1', port)
    body = json.dumps(content).encode() if isinstance(content, dict) else content
    sent = dict(
        Origin=f'http://127.0.0.1:{port}',
        Cookie=viewer.cookie,
        **{'Content-Type': 'application/json'},
    )
    sent.update({name.replace('_', '-'): value for name, value in headers.items() if value})
    for name in [name for name, value in headers.items() if value is None]:
        sent.pop(name.replace('_', '-'))
    connection.request('POST' if content is not None else 'GET', path, body, sent)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, json.loads(text) if text.startswith('{') else text


def decision(tile: Dict[str, Any], what: Optional[str] = 'wrong map') -> Dict[str, Any]:
    return dict(tile=tile['id'], decision=what, before=tile['before'])


@pytest.fixture(scope='module')
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tuple[ViewServer, Folders]]:
    """Provide a server of a map with labels, one without CRS and one with neither."""
    where = folders(tmp_path_factory.mktemp('review'))
    add_map(where, 'a', polygons=False)
    add_map(where, 'b', size=(700, 400), polygons=False, **NOWHERE)
    add_map(where, 'c', polygons=False, confidence=False)
    for name in 'bc':
        (where.truth / f'{name}.tif').unlink()
    with served(make_review(where)) as server:
        yield server, where


def test_tiles_come_worst_first_and_decisions_come_back(three: Any) -> None:
    server, where = three
    viewer = opened(server)
    assert ask(viewer, path='/catalog.json')[1]['review'] is True
    status, answer = ask(viewer, path='/review.json')
    assert status == 200 and answer['doing'] is None and answer['file'] == 'review.gpkg'
    first = answer['tiles'][0]
    kinds = [(each['map'], each['measure']) for each in answer['tiles']]
    assert kinds == [(0, 'error')] * 2 + [(1, 'uncertainty')] * 2 + [(2, '')] * 2
    assert first['score'] == pytest.approx(5000 / 512 / 400, abs=1e-4)  # in both, the first counts
    assert first['corners'] == [
        [300000, 3400000],
        [300256, 3400000],
        [300256, 3399800],
        [300000, 3399800],
    ]
    in_pixels = answer['tiles'][2]
    assert in_pixels['corners'] == [[0, 400], [512, 400], [512, 0], [0, 0]]
    assert not (where.maps / 'review.gpkg').exists()  # looking alone writes nothing
    status, answer = ask(viewer, decision(first))
    tile = answer['tile']
    assert (status, tile['decision']) == (200, 'wrong map')
    assert ask(viewer, decision(in_pixels, 'unsure'))[0] == 200
    again = ask(viewer, path='/review.json')[1]['tiles']
    assert again[0] == tile and again[2]['decision'] == 'unsure' and again[1]['decision'] is None
    status, answer = ask(viewer, decision(first, 'right'))  # from a page that has not seen it
    assert status == 409 and answer['tile'] == tile and 'decided: wrong map' in answer['sentence']
    assert ask(viewer, decision(tile, None))[1]['tile']['decision'] is None
    assert [(each.path, each.has_place) for each in read_windows(where.maps / 'review.gpkg')] == [
        (os.path.realpath(where.scenes / 'b.tif'), False)
    ]


@pytest.mark.parametrize(
    'headers, status',
    [
        (dict(Origin='http://evil.example'), 403),
        (dict(Origin=None), 403),
        (dict(Origin='null'), 403),
        (dict(Cookie=None), 403),
        (dict(Cookie='mapsage_view_{port}=guessed'), 403),
        (dict(Origin='https://127.0.0.1:{port}'), 403),
        (dict(Origin='http://localhost:{port}'), 403),  # its Host says 127.0.0.1
        (dict(Host='evil.example:{port}', Origin='http://evil.example:{port}'), 403),
        (dict(Content_Type='text/plain'), 415),
        (dict(Content_Type=None), 415),
        (dict(Content_Length='-1'), 411),
        (dict(Content_Length='5000'), 413),
        (dict(Content_Length='9' * 5000), 413),
        (dict(Content_Length='0' * 5000), 400),
        (dict(Host='localhost:{port}', Origin='http://localhost:{port}'), 400),
    ],
)
def test_no_other_page_decides(headers: Dict[str, Optional[str]], status: int, three: Any) -> None:
    viewer = opened(three[0])
    filled = {name: value and value.format(port=viewer.port) for name, value in headers.items()}
    assert ask(viewer, {}, **filled)[0] == status


@pytest.mark.parametrize(
    'content, status',
    [
        (b'', 400),
        (b'[1]', 400),
        (b'{', 400),
        (b'\xff', 400),
        (b'[' * 4000, 400),
        (b'7', 400),
        (dict(tile='x', decision='good', before=''), 400),
        (dict(tile=7, decision=None, before=''), 400),
        (dict(tile='x', decision=['right'], before=''), 400),
        (dict(tile='x', decision='right'), 400),
        (dict(tile='x', decision='right', before=''), 410),
    ],
)
def test_what_is_no_decision_is_refused(content: Any, status: int, three: Any) -> None:
    assert ask(opened(three[0]), content)[0] == status


def test_other_places_take_nothing(three: Any) -> None:
    viewer = opened(three[0])
    assert ask(viewer, {}, path='/catalog.json')[0] == 404
    with serving(ViewServer(three[0].session)) as bare:  # a viewer without a review
        assert ask(opened(bare), {})[0] == 404
        assert ask(opened(bare), path='/review.json')[0] == 404
        assert ask(opened(bare), path='/catalog.json')[1]['review'] is False


def test_a_folder_for_other_servers_offers_no_review(three: Any, tmp_path: Path) -> None:
    write_static(three[0].session, tmp_path)
    assert not json.loads((tmp_path / 'catalog.json').read_text()).get('review')


def test_a_new_map_of_the_same_name_is_reviewed_again(tmp_path: Path) -> None:
    where = folders(tmp_path)
    add_map(where, 'a', polygons=False, confidence=False)
    review = make_review(where)
    tile = review.as_json()['tiles'][0]
    review.decide(tile['id'], 'wrong map', '')
    os.rename(str(where.maps), str(tmp_path / 'moved'))  # the maps move with their review
    moved = where._replace(maps=tmp_path / 'moved')
    assert make_review(moved).as_json()['tiles'][0]['decision'] == 'wrong map'
    add_map(moved, 'a', classes=5, polygons=False, confidence=False)
    review = make_review(moved)
    (tile,) = [each for each in review.as_json()['tiles'] if each['earlier']]
    assert tile['earlier'] == 'wrong map' and tile['decision'] is None
    assert review.decide(tile['id'], 'right', tile['before'])[0]
    assert [each.decision for each in read_windows(review.path)] == ['right']


def test_tiles_are_the_windows_that_the_map_was_made_with(tmp_path: Path) -> None:
    where = folders(tmp_path)
    add_map(where, 'a', polygons=False, confidence=False)
    report = where.maps / 'a.json'
    name_scene(where, 'a', where.scenes / 'a.tif', (600, 400), {})
    content = json.loads(report.read_text())
    content['settings'].update(window=[100, 150], size=[200, 300])
    report.write_text(json.dumps(content))
    corners = [each['corners'] for each in make_review(where).as_json()['tiles']]
    assert len(corners) == 4 and all(
        (each[1][0] - each[0][0], each[0][1] - each[2][1]) == (150, 100) for each in corners
    )
    for bad in (dict(window=[0, 9]), dict(window='512'), dict(size=[1]), dict(size=None)):
        report.write_text(json.dumps(dict(content, settings=dict(content['settings'], **bad))))
        assert find_maps([where.maps])[0].windows == ()


def test_a_damaged_map_and_a_file_of_somebody_else_are_said(tmp_path: Path) -> None:
    where = folders(tmp_path)
    add_map(where, 'a', polygons=False)
    add_map(where, 'b', polygons=False)
    session = ViewSession(find_maps([where.maps], where.scenes, where.truth))
    session.prepare()
    (where.maps / 'review.gpkg').write_bytes(b'mine' * 999)
    review = Review(session)
    (where.maps / 'b.tif').unlink()
    review.rank()
    with served(review) as server:
        status, answer = ask(opened(server), path='/review.json')
        assert status == 500 and 'is not a review' in answer and '--review' in answer
        os.unlink(str(review.path))
        answer = ask(opened(server), path='/review.json')[1]
        assert {each['map'] for each in answer['tiles']} == {0}
        assert 'b is not reviewed' in answer['notes'][0]
        (where.maps / 'a.tif').unlink()  # while it is shown: its place is known
        assert ask(opened(server), decision(answer['tiles'][0]))[0] == 200


@pytest.mark.parametrize(
    'options, words',
    [
        (['--static', 'site', '--review', 'r.gpkg'], 'needs the server'),
        (['--review', 'r.csv'], r'--review r.csv: expected a name that ends in .gpkg'),
    ],
)
def test_options_that_do_not_fit(options: Any, words: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        command.main(['maps', *options])
    assert words in capsys.readouterr().err


def start_viewer(where: Folders, *arguments: Any) -> Tuple[Any, Opened]:
    """Start the command and open its link; return both, once the tiles are ranked."""
    process = subprocess.Popen(
        [sys.executable, str(ROOT / 'tools/view.py'), str(where.maps), *map(str, arguments)],
        stdout=subprocess.PIPE,
        universal_newlines=True,
    )
    assert process.stdout is not None
    (link,) = re.findall(r'http://127.0.0.1:\d+/\S+', process.stdout.readline())
    viewer = Opened(urlsplit(link).port or 0, open_link(link))
    while ask(viewer, path='/review.json')[1]['doing']:
        time.sleep(0.05)
    return process, viewer


@pytest.mark.long
def test_a_killed_viewer_and_two_at_once(tmp_path: Path) -> None:
    where = folders(tmp_path)
    add_map(where, 'a', polygons=False, **UTM)
    first, viewer = start_viewer(where)
    try:
        tile, other = ask(viewer, path='/review.json')[1]['tiles'][:2]
        assert ask(viewer, decision(tile, 'wrong label'))[0] == 200
        first.send_signal(signal.SIGKILL)
        first.communicate()
        first, viewer = start_viewer(where)
        assert ask(viewer, path='/review.json')[1]['tiles'][0]['decision'] == 'wrong label'
        with served(make_review(where)) as second:  # in this process, on the same file
            assert ask(viewer, decision(other, 'right'))[0] == 200
            status, answer = ask(opened(second), decision(other, 'unsure'))
            assert (status, answer['tile']['decision']) == (409, 'right')
    finally:
        first.kill()
        first.communicate()


def test_the_folder_of_a_review_is_made_at_the_start(tmp_path: Path) -> None:
    """At the first decision it would be too late."""
    where = folders(tmp_path)
    add_map(where, 'a')
    session = ViewSession(find_maps([where.maps]))
    Review(session, tmp_path / 'new' / 'deep' / 'errors.gpkg')
    assert (tmp_path / 'new' / 'deep').is_dir()
    (tmp_path / 'file').touch()
    with pytest.raises(ViewError, match='--review .*file.*: its folder cannot be made'):
        Review(session, tmp_path / 'file' / 'errors.gpkg')
