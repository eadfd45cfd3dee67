"""Links that work once, and the cookie that a browser gets for one."""

from __future__ import annotations

from threading import Barrier, Thread
from typing import Any, Iterator, List, Optional

import pytest
from view_maps import add_map, folders, request, serving

from mapsage.extras.viewer import Review, ViewServer, ViewSession, find_maps

SENTENCE = b'Open the last link that it printed'


@pytest.fixture(scope='module')
def viewer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ViewServer]:
    """Provide a viewer of one map with a review."""
    where = folders(tmp_path_factory.mktemp('admission'))
    add_map(where, 'a', polygons=True)
    session = ViewSession(find_maps([where.maps], where.scenes, where.truth))
    session.prepare()
    review = Review(session)
    review.rank()
    with serving(ViewServer(session, review=review)) as server:
        yield server


def ask(
    server: ViewServer, path: str, method: str = 'GET', cookie: Optional[str] = None, **headers: str
) -> Any:
    if cookie is not None:
        headers['Cookie'] = cookie
    return request(server, method, path, headers)


def path_of(link: str) -> str:
    return '/' + link.split('/', 3)[3]


def cookie_of(answer: Any) -> str:
    return answer.headers['Set-Cookie'].partition(';')[0]


@pytest.mark.parametrize('method', ['GET', 'HEAD', 'POST'])
def test_nothing_is_answered_without_the_cookie(viewer: ViewServer, method: str) -> None:
    session = viewer.session
    paths = [
        '/',
        '/index.html',
        '/viewer.js',
        '/catalog.json',
        '/review.json',
        '/review',
        '/none',
        '/maps/0/polygons?box=1,2,3,4',
        '/?token=',
        '/?token=guessed',
        '/?token=%FF%00',
        *(f'/maps/0/{kind}/{session.stamp(0, kind)}.tif' for kind in ('map', 'scene', 'truth')),
    ]
    names = [f'mapsage_view_{viewer.server_port}', 'mapsage_view_', 'other']
    cookies = [None, '', *(f'{name}={value}' for name in names for value in ('', 'x', '\xe9', '='))]
    for path in paths:
        for cookie in cookies:
            answer, body = ask(
                viewer,
                path,
                method,
                cookie,
                Range='bytes=0-9',
                Origin=f'http://127.0.0.1:{viewer.server_port}',
            )
            assert answer.status == 403 and 'Set-Cookie' not in answer.headers, (path, cookie)
            assert body == b'' if method == 'HEAD' else SENTENCE in body


def test_a_link_works_once_and_the_next_is_printed(viewer: ViewServer) -> None:
    printed: List[str] = []
    viewer.say = printed.append
    link = viewer.url
    for method in ('HEAD', 'POST'):  # neither uses it up: a program that looks at links, say
        assert ask(viewer, path_of(link), method)[0].status == 403
    assert printed == [] and viewer.url == link
    answer, body = ask(viewer, path_of(link))
    assert (answer.status, answer.headers['Location'], body) == (303, '/', b'')
    attributes = answer.headers['Set-Cookie'].split('; ')[1:]
    assert sorted(attributes) == ['HttpOnly', 'Path=/', 'SameSite=Strict']
    assert answer.headers['Referrer-Policy'] == 'no-referrer'
    cookie = cookie_of(answer)
    assert ask(viewer, '/', cookie=cookie)[0].status == 200
    # again without the cookie: another user has read the link in this user's terminal
    answer, body = ask(viewer, path_of(link))
    assert answer.status == 403 and SENTENCE in body
    # again with it: the user goes back in the browser's history
    answer, _ = ask(viewer, path_of(link), cookie=cookie)
    assert (answer.status, answer.headers['Location']) == (303, '/')
    # a second browser opens the link that was printed, and the first stays admitted
    assert len(printed) == 1 and viewer.url in printed[0] and link not in printed[0]
    second = cookie_of(ask(viewer, path_of(printed[0].rpartition(' ')[2]))[0])
    for each in (cookie, second):
        assert ask(viewer, '/catalog.json', cookie=f'theme=dark; {each};a=b=c')[0].status == 200


def test_the_cookie_belongs_to_the_port_that_the_browser_knows(viewer: ViewServer) -> None:
    host = 'localhost:9000'  # ssh -L 9000:127.0.0.1:PORT
    answer, _ = ask(viewer, path_of(viewer.url), Host=host)
    cookie = cookie_of(answer)
    assert cookie.startswith('mapsage_view_9000=')
    assert ask(viewer, '/catalog.json', cookie=cookie, Host=host)[0].status == 200
    assert ask(viewer, '/catalog.json', cookie=cookie)[0].status == 403
    for bad in ('evil.example', '127.0.0.1:9\tx', 'localhost:123456', '127.0.0.1:', '127.0.0.1:٣'):
        answer, body = ask(viewer, path_of(viewer.url), Host=bad.encode().decode('latin-1'))
        assert answer.status == 403 and 'Set-Cookie' not in answer.headers, bad


def test_a_link_on_a_page_of_another_site_leads_to_the_page(viewer: ViewServer) -> None:
    # a redirect would be followed without the cookie
    answer, _ = ask(viewer, path_of(viewer.url), **{'Sec-Fetch-Site': 'cross-site'})
    assert (answer.status, answer.headers['Refresh']) == (200, '0;url=/')
    assert ask(viewer, '/', cookie=cookie_of(answer))[0].status == 200


def test_one_of_many_that_open_a_link_at_once_is_admitted(viewer: ViewServer) -> None:
    path, statuses, together = path_of(viewer.url), [], Barrier(8)

    def open_it() -> None:
        together.wait()
        statuses.append(ask(viewer, path)[0].status)

    threads = [Thread(target=open_it) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(statuses) == [303] + [403] * 7


def test_another_viewer_on_the_port_does_not_know_the_cookie(viewer: ViewServer) -> None:
    cookie = cookie_of(ask(viewer, path_of(viewer.url))[0])
    with serving(ViewServer(viewer.session)) as other:
        mine = f'mapsage_view_{other.server_port}={cookie.partition("=")[2]}'
        assert ask(other, '/', cookie=mine)[0].status == 403
