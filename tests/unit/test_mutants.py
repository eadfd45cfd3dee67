"""The list of planted defects fits the source: otherwise it is found out minutes later."""

from __future__ import annotations

import importlib.util

import pytest
from support import ROOT

spec = importlib.util.spec_from_file_location('mutants', ROOT / 'tests' / 'mutants' / 'mutants.py')
mutants = importlib.util.module_from_spec(spec)
spec.loader.exec_module(mutants)


@pytest.mark.parametrize('mutant', mutants.MUTANTS, ids=lambda mutant: mutant.name)
def test_a_defect_fits_the_source_and_its_tests_are_there(mutant: mutants.Mutant) -> None:
    source = (ROOT / mutant.file).read_text()
    assert source.count(mutant.old) == 1 and mutant.new != mutant.old
    for test in mutant.tests:
        path, *names = test.split('::')
        text = (ROOT / path).read_text()
        assert all(f'def {name}(' in text for name in names), test


def test_names_are_different() -> None:
    names = [mutant.name for mutant in mutants.MUTANTS]
    assert len(set(names)) == len(names)
