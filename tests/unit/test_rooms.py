"""The pages that list the folders of the code list those that exist."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import List, Set

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ('mapsage', 'mapsage_launcher')


def folders(depth: int) -> Set[str]:
    """Return the folders with Python files, such as 'mapsage/engine/loading', down to a depth."""
    paths = {
        path.parent.relative_to(ROOT)
        for package in PACKAGES
        for path in (ROOT / package).rglob('*.py')
    }
    return {path.as_posix() for path in paths if len(path.parts) <= depth}


def tree_of_page() -> List[str]:
    """Return the paths of the tree in docs/explanation/how-it-works.md, from its indentation."""
    text = (ROOT / 'docs' / 'explanation' / 'how-it-works.md').read_text()
    block = text.split('```')[1]
    paths, parents = [], []
    for line in block.splitlines():
        match = re.match(r'( *)([\w./]+)/(?:  |, |$)', line)
        if match is None:
            continue
        level = len(match[1]) // 2
        parents = [*parents[:level], match[2]]
        paths.append('/'.join(parents))
    return paths


def test_the_tree_lists_the_folders_that_exist() -> None:
    listed = {path for path in tree_of_page() if path.split('/')[0] in PACKAGES}
    assert listed - folders(4) == set(), 'folders that are not there'
    missing = {
        folder
        for folder in folders(3)
        if folder.count('/') and folder not in listed and not _described(folder)
    }
    assert missing == set(), 'folders that the tree does not have'


def _described(folder: str) -> bool:
    """Return whether the line of the folder above describes this one, as in 'demo/ generates'."""
    parent, _, name = folder.rpartition('/')
    text = (ROOT / 'docs' / 'explanation' / 'how-it-works.md').read_text().split('```')[1]
    blocks = re.split(r'\n(?= *[\w./]+/  )', text)
    return any(
        re.match(rf' *{parent.rpartition("/")[2]}/ ', block) and f'{name}/' in block
        for block in blocks
    )


def test_the_table_of_contributing_has_every_room() -> None:
    text = (ROOT / 'CONTRIBUTING.md').read_text()
    table = text.split('## Where a change goes')[1].split('\n## ')[0]
    named = re.findall(r'`(mapsage\w*/[\w./]*)`', table)
    assert [path for path in named if not (ROOT / path).exists()] == []
    rooms = {folder for folder in folders(2) if folder != 'mapsage'}
    covered = {'/'.join(path.rstrip('/').split('/')[:2]) for path in named}
    assert {room for room in rooms if room.split('/')[0] == 'mapsage'} - covered == set()
    assert 'mapsage_launcher' in covered | {path.split('/')[0] for path in named}


@pytest.mark.parametrize(
    'page',
    [
        'CONTRIBUTING.md',
        *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / 'docs').rglob('*.md')),
    ],
)
def test_files_that_a_page_names_are_there(page: str) -> None:
    named = re.findall(
        r'`((?:mapsage|mapsage_launcher|tests|tools|scripts)/[\w./-]+(?:/|\.\w+))`',
        (ROOT / page).read_text(),
    )
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_files_of_tests_have_different_names() -> None:
    """pytest imports them by their names, as modules that other tests import from."""
    names = Counter(path.name for path in (ROOT / 'tests').rglob('test_*.py'))
    assert [name for name, count in names.items() if count > 1] == []
