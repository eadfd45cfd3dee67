"""Debian's Chromium, driven by playwright: ``bash scripts/run_tests.sh --leg browser``."""

from __future__ import annotations

import shutil
from typing import Any, Iterator, List

import pytest

CHROMIUM = shutil.which('chromium')
WEBGL = ['--use-angle=swiftshader', '--enable-unsafe-swiftshader', '--ignore-gpu-blocklist']
ALONE = [
    '--no-sandbox',
    '--disable-background-networking',
    # no name is looked up: what asks for another host gets an error, which a test sees
    '--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1',
]


@pytest.fixture(scope='module')
def chromium() -> Iterator[Any]:
    """Provide a function that starts a browser with more arguments."""
    sync_api = pytest.importorskip(
        'playwright.sync_api', reason='needs playwright: bash scripts/run_tests.sh --leg browser'
    )
    if CHROMIUM is None:
        pytest.skip('needs Chromium: apt-get install chromium')
    started: List[Any] = []
    with sync_api.sync_playwright() as play:

        def start(*arguments: str) -> Any:
            started.append(
                play.chromium.launch(executable_path=CHROMIUM, args=[*ALONE, *arguments])
            )
            return started[-1]

        yield start
        for each in started:
            each.close()


@pytest.fixture(scope='module')
def browser(chromium: Any) -> Any:
    """Provide a browser that draws by WebGL in software."""
    return chromium(*WEBGL)
