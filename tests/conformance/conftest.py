"""The images of the conformance runs."""

import gc
from pathlib import Path

import pytest
from both_runners import run
from tiny_host import write_tiny_images


@pytest.fixture(scope='session')
def images(tmp_path_factory) -> Path:
    """Return the folder of the tiny images; do not change it.

    One run before the tests imports what MMEngine and matplotlib import late. MMEngine collects
    garbage for each dataset, over all objects that are not frozen: 0.2 s for those of the modules.
    """
    folder = tmp_path_factory.mktemp('conformance')
    data = write_tiny_images(folder / 'data')
    for side in ('stock', 'ours'):
        assert run(side, {}, [({}, 'train')], data, folder / side, preview=True).error == ''
    gc.collect()
    gc.freeze()
    return data
