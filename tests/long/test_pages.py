"""Every block of the tutorials and how-tos, on the demo's data at reduced size."""
from __future__ import annotations

import pytest
from page_blocks import Workspace, pages
from support import main_leg

pytestmark = [main_leg, pytest.mark.timeout(900)]


@pytest.fixture(scope='module')
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """Provide a folder like a checkout with the demo trained in it."""
    workspace = Workspace(tmp_path_factory.mktemp('pages'), all_tiles=True)
    assert workspace.train_demo() == ''
    return workspace


@pytest.mark.parametrize('page', pages())
def test_the_blocks_of_a_page_run(workspace: Workspace, page: str) -> None:
    failed = workspace.run_page(page)
    assert failed == [], '\n'.join(failed)
