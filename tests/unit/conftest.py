"""The tiny run, as a module and as a script, for tests of hooks."""

from __future__ import annotations

from types import ModuleType

import pytest
import tiny_run as tiny_run_module


@pytest.fixture(scope='session')
def tiny_run() -> ModuleType:
    """Return the module tests/tiny_run.py."""
    return tiny_run_module


@pytest.fixture(scope='session')
def tiny_run_script() -> str:
    """Return the path of tests/tiny_run.py."""
    return str(tiny_run_module.__file__)
