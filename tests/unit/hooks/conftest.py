"""The tiny run, as a module, for every test of a hook."""
from __future__ import annotations

import importlib.util
import os
import sys
from types import ModuleType

import pytest

TINY_RUN = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'tiny_run.py')


@pytest.fixture(scope='session')
def tiny_run() -> ModuleType:
    """Return tiny_run.py imported by its path, whatever pytest's import mode is."""
    spec = importlib.util.spec_from_file_location('mapsage_tests_tiny_run', TINY_RUN)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope='session')
def tiny_run_script() -> str:
    """Return the path of tiny_run.py."""
    return TINY_RUN
