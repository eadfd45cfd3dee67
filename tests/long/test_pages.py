"""Every block of the tutorials and how-tos, on the demo's data at reduced size."""

from __future__ import annotations

import pytest
from page_blocks import Workspace, pages
from support import main_leg

pytestmark = [main_leg, pytest.mark.timeout(900)]


@pytest.fixture(scope='module')
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """Provide a folder like a checkout with the demo trained in it."""
    workspace = Workspace(tmp_path_factory.mktemp('pages'))
    assert workspace.train_demo() == ''
    return workspace


@pytest.mark.parametrize('page', pages())
def test_the_blocks_of_a_page_run(workspace: Workspace, page: str) -> None:
    failed = workspace.run_page(page)
    assert failed == [], '\n'.join(failed)
    if page == 'tutorials/own-folders.md':
        tiles = workspace.folder / 'work_dirs/tiles'
        assert len(list((tiles / 'masks').rglob('*.png'))) == 10
        assert len(list((workspace.folder / 'maps/tiles').glob('tile_*.tif'))) == 10
        assert (tiles / 'report.html').exists() and (tiles / 'preview.png').exists()


def test_a_block_that_fails_is_named(workspace: Workspace) -> None:
    assert 'status 3' in workspace.run_shell('exit 3')
    assert 'does not exist' in workspace.run_shell('python tools/doctor.py configs/no_such.py')
