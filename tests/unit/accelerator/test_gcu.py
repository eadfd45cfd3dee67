"""What the S60 line needs of the environment."""

from __future__ import annotations

from typing import Dict

import pytest

from mapsage.accelerator.gcu import INT64_VARIABLE, GcuAccelerator


@pytest.mark.parametrize(
    'value, version, refused',
    [
        ('1', '2.10.0', True),
        ('true', '2.10.0+3.7.20260408', True),
        ('1', 'unknown', True),
        ('1', '2.7.0', True),
        ('0', '2.10.0', False),
        ('false', '2.10.0', False),
        ('', '2.10', False),
        ('1', '2.11.0+3.8.20260713', False),
    ],
)
def test_whole_int64_is_refused(
    value: str, version: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    software: Dict[str, str] = {'torch_gcu': version}
    monkeypatch.setattr(GcuAccelerator, 'software', lambda self: software)
    problem = GcuAccelerator().environment_problem({INT64_VARIABLE: value})
    assert (problem is not None) == refused
    if problem is not None:
        assert f'{INT64_VARIABLE}={value}: with it torch_gcu {version} keeps' in problem
        assert f'unset {INT64_VARIABLE}' in problem
    assert GcuAccelerator().environment_problem({}) is None
