"""A tutorial of docs/, block by block; tests/long/test_pages.py runs all pages."""
from __future__ import annotations

from pathlib import Path

from page_blocks import Workspace
from support import main_leg

pytestmark = main_leg


def test_the_blocks_of_a_tutorial_run(tmp_path: Path) -> None:
    """From 40 tiles that a script draws to scores, masks and maps, as the page writes it."""
    workspace = Workspace(tmp_path)
    failed = workspace.run_page('tutorials/own-folders.md')
    assert failed == [], '\n'.join(failed)
    work_dir = tmp_path / 'work_dirs' / 'tiles'
    assert len(list((work_dir / 'masks').rglob('*.png'))) == 10
    assert len(list((tmp_path / 'maps' / 'tiles').glob('tile_*.tif'))) == 10
    assert (work_dir / 'report.html').exists() and (work_dir / 'preview.png').exists()


def test_a_block_that_fails_is_named(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    assert 'status 3' in workspace.run_shell('exit 3')
    assert 'does not exist' in workspace.run_shell('python tools/doctor.py configs/no_such.py')
