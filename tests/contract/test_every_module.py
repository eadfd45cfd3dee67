"""Every module of the product imports on this leg, with its Python, PyTorch and MM packages."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from support import ROOT, no_simulated_cards

MODULES = [
    '.'.join(path.relative_to(ROOT).with_suffix('').parts)
    for package in ('mapsage', 'mapsage_launcher')
    for path in sorted((ROOT / package).rglob('*.py'))
    if path.name != '__init__.py'
]


@pytest.mark.parametrize('name', MODULES)
def test_a_module_imports(name: str) -> None:
    if name.startswith('mapsage.extras.simulator.') and no_simulated_cards():
        pytest.skip(str(no_simulated_cards()))
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        # A package that only one capability needs; it is named where it is missing.
        if str(error.name).split('.')[0] in ('mapsage', 'mapsage_launcher'):
            raise
        pytest.skip(f'{error.name} is not installed')


def test_the_folders_were_found() -> None:
    assert len(MODULES) > 400 and Path(ROOT / 'mapsage').is_dir()
