"""The site of docs/ in Chromium: what a search finds, and pages on a wide and a narrow screen.

``MAPSAGE_SITE`` names a site that is already built, as in .ci/run; without it, the test builds one.
"""

from __future__ import annotations

import os
import subprocess
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Iterator, List

import pytest
from support import ROOT
from viewer_page import Page, serving

FRONT = 'index.html'
PAGES = (FRONT, 'tutorials/own-folders.html', 'reference/registered/hooks.html', 'benchmarks.html')


class _Handler(SimpleHTTPRequestHandler):
    """Serves files and prints nothing."""

    def log_message(self, *args: Any) -> None:
        """Print no line for a request."""


@pytest.fixture(scope='module')
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Provide the address of the site, which a local server sends."""
    site = Path(os.environ.get('MAPSAGE_SITE') or tmp_path_factory.mktemp('site'))
    if not (site / FRONT).exists():
        done = subprocess.run(
            ['bash', str(ROOT / 'scripts' / 'build_docs.sh'), str(site)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            universal_newlines=True,
        )
        assert done.returncode == 0, done.stdout
    handler = partial(_Handler, directory=str(site))
    with serving(ThreadingHTTPServer(('127.0.0.1', 0), handler)) as url:
        yield url


@pytest.fixture(scope='module')
def page(browser: Any, address: str) -> Iterator[Any]:
    """Provide a page of the site; it asks no other host and has no error in the console."""
    page = Page(browser, address, name=None)
    yield page.page
    page.close()


def search(page: Any, word: str) -> List[str]:
    """Type a word into the search; return the addresses that it lists, best first."""
    page.click('input.md-search__input')
    page.keyboard.type(word)
    # The addresses of sections have the word, by which the page then marks it.
    page.wait_for_function(
        "word => [...document.querySelectorAll('.md-search-result__link')].some("
        "link => new URL(link.href).searchParams.get('h') === word)",
        arg=word.lower(),
    )
    return page.eval_on_selector_all(
        '.md-search-result__link', 'links => links.map(link => link.href)'
    )


@pytest.mark.parametrize(
    'word, wanted',
    [
        ('device_ids', 'tutorials/eight-cards.html?h=device_ids#5-when-something-is-wrong'),
        ('resume', 'tutorials/eight-cards.html?h=resume#4-stop-and-resume-also-on-fewer-cards'),
        ('GeoPackage', 'tutorials/scenes.html?h=geopackage#a-file-of-buildings'),
        (
            'class weights',
            'reference/config.html?h=class+weights#class-weights-and-losses-for-unequal-classes',
        ),
        ('conda', 'tutorials/first-hour.html?h=conda#with-conda'),
        ('no data', 'how-to/troubleshooting.html?h=no+data#no-data-nodata'),
        ('python api', 'how-to/maps.html?h=python+api#python-api'),
        ('wandb', 'how-to/run-report.html?h=wandb#tensorboard-mlflow-and-wandb'),
    ],
)
def test_typing_a_word_lists_its_section_first(
    page: Any, address: str, word: str, wanted: str
) -> None:
    page.set_viewport_size(dict(width=1280, height=900))
    page.goto(address + FRONT)
    listed = search(page, word)
    # The page comes before its sections; its address has those words that it holds above them.
    assert listed[0].partition('?')[0] == address + wanted.partition('?')[0]
    assert listed[1] == address + wanted
    page.click('.md-search-result__link >> nth=1')
    page.wait_for_url('**' + wanted.partition('?')[0] + '*')
    page.wait_for_function(
        "words => [...document.querySelectorAll('article mark')].some("
        'mark => words.includes(mark.textContent.toLowerCase()))',
        arg=word.lower().split(),
    )


# What of the text leaves the screen to the right, and is in no box that scrolls.
OVERFLOW = """() => [...document.querySelectorAll('article *')].filter(element => {
    if (element.getBoundingClientRect().right <= innerWidth + 1) return false;
    for (let box = element.parentElement; box; box = box.parentElement)
        if (getComputedStyle(box).overflowX !== 'visible') return false;
    return true;
}).map(element => element.outerHTML.slice(0, 200))"""


@pytest.mark.parametrize('width', [1280, 390])
@pytest.mark.parametrize('name', PAGES)
def test_a_page_fits_its_screen(page: Any, address: str, name: str, width: int) -> None:
    page.set_viewport_size(dict(width=width, height=900))
    page.goto(address + name)
    assert page.evaluate(OVERFLOW) == []
    assert page.evaluate('document.documentElement.scrollWidth') == width
    shown = page.eval_on_selector_all(
        'article img',
        """images => images.map(
        image => [image.src, image.complete && image.naturalWidth > 0])""",
    )
    assert [source for source, complete in shown if not complete] == []
    # The first lines are read without scrolling.
    assert page.eval_on_selector('article p', 'line => line.getBoundingClientRect().bottom') < 500


@pytest.mark.parametrize('width, rows', [(1280, 2), (390, 5)])
def test_the_gallery_has_rows(page: Any, address: str, width: int, rows: int) -> None:
    page.set_viewport_size(dict(width=width, height=900))
    page.goto(address + FRONT)
    boxes = page.eval_on_selector_all(
        '.gallery img',
        """images => images.map(
        image => { const box = image.getBoundingClientRect();
                   return [Math.round(box.top), Math.round(box.width)]; })""",
    )
    assert len(boxes) == 5 and len({top for top, _ in boxes}) == rows
    assert all(width / 4 < image <= width for _, image in boxes)
