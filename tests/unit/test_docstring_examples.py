"""The examples in docstrings run, and print what stands there."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest
from support import ROOT, on_host

pytestmark = on_host
FILES = [
    path
    for package in ('mapsage', 'mapsage_launcher')
    for path in sorted((ROOT / package).rglob('*.py'))
    if '>>> ' in path.read_text()
]


@pytest.mark.parametrize('path', FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_examples_of_a_module(path: Path) -> None:
    module = importlib.import_module('.'.join(path.relative_to(ROOT).with_suffix('').parts))
    result = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL)
    assert result.attempted > 0 and result.failed == 0


def test_public_functions_have_examples() -> None:
    assert len(FILES) >= 7
