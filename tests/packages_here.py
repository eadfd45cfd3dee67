"""Packages that only some tests need, downloaded once per machine by scripts/test_packages.sh."""

from __future__ import annotations

import functools
import subprocess

import pytest
from support import ROOT


def package_folder(name: str) -> str:
    """Return the folder of packages, or skip the test if they cannot be had."""
    folder = _find(name)
    if not folder:
        pytest.skip(f'packages cannot be downloaded (scripts/test_packages.sh {name})')
    return folder


@functools.lru_cache(maxsize=None)
def _find(name: str) -> str:
    """Return the folder of packages; empty if they cannot be had."""
    result = subprocess.run(
        ['bash', str(ROOT / 'scripts' / 'test_packages.sh'), name],
        universal_newlines=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        timeout=400,
    )
    if result.returncode == 5:
        return ''
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()
