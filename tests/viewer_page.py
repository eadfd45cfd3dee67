"""The page of the viewer in a browser, for tests: what it shows, asks for and complains of."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from typing import Any, Iterator, List, Union

import cv2
import numpy as np
from view_maps import Folders

from mapsage.extras.viewer import ViewServer, ViewSession, find_maps

PATIENCE = 120000  # milliseconds


@contextmanager
def serving(server: Any) -> Iterator[Any]:
    """Run a server; provide it, or its address if it is none of the viewer."""
    with server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield (
            server if isinstance(server, ViewServer) else f'http://127.0.0.1:{server.server_port}/'
        )
        server.shutdown()


@contextmanager
def viewing(where: Folders) -> Iterator[ViewServer]:
    session = ViewSession(find_maps([where.maps], where.scenes, where.truth))
    session.prepare()
    with serving(ViewServer(session)) as viewer:
        yield viewer


class Page:
    """A page with what it asked for and what it complained of.

    Args:
        browser: Browser of playwright.
        address: The viewer, whose link is opened, or the address of the page.
        name: Map whose picture must be there; None where nothing can be drawn.
    """

    def __init__(self, browser: Any, address: Union[str, ViewServer], name: Any = 'a') -> None:
        url = address.url if isinstance(address, ViewServer) else address
        root = url.partition('?')[0]
        self.page = browser.new_page(viewport=dict(width=1000, height=600))
        self.page.set_default_timeout(PATIENCE)
        self.requests: List[str] = []
        self.foreign: List[str] = []
        self.complaints: List[str] = []
        self.page.on('request', lambda request: self._note(request.url, root))
        self.page.on(
            'console',
            lambda message: (
                self.complaints.append(message.text) if message.type == 'error' else None
            ),
        )
        self.page.on('pageerror', lambda error: self.complaints.append(str(error)))
        self.page.goto(url)
        if name is not None:
            self.wait_for(name)

    def _note(self, asked: str, url: str) -> None:
        if not asked.startswith(('blob:', 'data:')):
            self.requests.append(asked)
            if not asked.startswith(url):
                self.foreign.append(asked)

    def wait_for(self, name: str) -> None:
        """Wait for the picture of a map."""
        self.page.wait_for_function(f'document.body.dataset.ready === {json.dumps(name)}')

    def close(self, complaints: bool = False) -> None:
        """Close the page, which asked no other host for anything.

        Args:
            complaints: Whether the console has errors, as it has of each answer that is one.
        """
        self.page.close()
        assert self.foreign == [] and bool(self.complaints) == complaints, self.complaints

    def press(self, keys: str) -> None:
        """Press keys of a letter each, one after the other."""
        for key in keys:
            self.page.keyboard.press(key)
        self.drawn()

    def drawn(self) -> None:
        """Wait until everything is drawn that has been asked for."""
        # From the next frame on: the event of the frame before may still be waiting.
        self.page.evaluate("""() => new Promise((done) => {
            const map = viewer.map();
            map.once('precompose', () => map.once('rendercomplete', done));
            map.render(); })""")

    def place(self, share: float, height: float) -> List[float]:
        """Return x and y on the page of a place of the map, in shares of its width and height."""
        return self.page.evaluate(
            """([share, height]) => {
            const [left, bottom, right, top] = viewer.state.extent;
            return viewer.map().getPixelFromCoordinate(
                [left + share * (right - left), top - height * (top - bottom)]); }""",
            [share, height],
        )

    def color(self, share: float, height: float) -> List[int]:
        """Return red, green and blue at a place of the map."""
        x, y = self.place(share, height)
        picture = cv2.imdecode(np.frombuffer(self.page.screenshot(), np.uint8), cv2.IMREAD_COLOR)
        return picture[int(y), int(x), ::-1].tolist()

    def click(self, share: float, height: float) -> str:
        """Click on a place of the map; return what the page says of it."""
        x, y = self.place(share, height)
        self.page.mouse.click(x, y)
        return self.page.inner_text('#status')

    def sentence(self, words: str) -> str:
        """Wait for the sentence over the map that has these words, and return it."""
        try:
            self.page.wait_for_function(
                """(words) => {
                const box = document.getElementById('sentence');
                return !box.hidden && box.textContent.includes(words); }""",
                arg=words,
            )
        except Exception as error:
            raise AssertionError(
                f'no sentence with {words!r} but {self.page.text_content("#sentence")!r}'
            ) from error
        return self.page.inner_text('#sentence')

    def panel(self) -> str:
        """Return the text of the panel."""
        return self.page.inner_text('#panel')
