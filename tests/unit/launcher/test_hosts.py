"""What to install is told from the files, programs and packages of a machine."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import List

import pytest

from mapsage_launcher import hosts

ALL = ['torch', 'mmengine', 'mmcv', 'mmseg']
FAMILY = 'onedl' if sys.version_info >= (3, 10) else 'upstream'


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of /dev, and no programs or variables."""
    for name in ('_GCU_FILES', '_CUDA_FILES', '_ROCM_FILES'):
        monkeypatch.setattr(
            hosts,
            name,
            tuple(str(tmp_path / Path(pattern).name) for pattern in getattr(hosts, name)),
        )
    monkeypatch.setenv('PATH', str(tmp_path / 'bin'))
    monkeypatch.delenv('PJRT_DEVICE', raising=False)
    monkeypatch.setattr(hosts, '_is_importable', lambda name: False)
    monkeypatch.setattr(hosts, '_is_installed', lambda name: False)
    return tmp_path


def line(absent: List[str]) -> str:
    """The line to type, without the Python before it."""
    typed = [each for each in hosts.how_to_install(absent).split('\n') if each.startswith('    ')]
    assert len(typed) == 1
    before, _, after = typed[0].partition(' -m pip install ')
    assert before.strip() == sys.executable
    return after


@pytest.mark.parametrize(
    'files, expected',
    [
        ([], 'torch --extra-index-url https://download.pytorch.org/whl/cpu'),
        (['nvidia0', 'nvidiactl'], 'torch'),
        (['dxg'], 'torch'),
        (['gcu0'], ''),
        (['gcu0', 'nvidia0'], ''),
        (['kfd'], ''),
    ],
)
def test_pytorch_of_the_machine(machine: Path, files: List[str], expected: str) -> None:
    for name in files:
        (machine / name).write_text('')
    wanted = f"'mapsage[{FAMILY},demo]' {expected}".strip()
    assert line(ALL) == wanted
    assert ('Enflame' in hosts.how_to_install(ALL)) == ('gcu0' in files)
    assert ('pytorch.org/get-started' in hosts.how_to_install(ALL)) == ('kfd' in files)


def test_a_gcu_is_known_by_its_program(machine: Path) -> None:
    (machine / 'bin').mkdir()
    program = machine / 'bin' / 'efsmi'
    program.write_text('#!/bin/sh\n')
    os.chmod(str(program), 0o755)
    assert line(ALL) == f"'mapsage[{FAMILY},demo]'"


def test_the_torch_that_is_there_is_left_alone(machine: Path) -> None:
    (machine / 'nvidia0').write_text('')
    assert line(ALL[1:]) == f"'mapsage[{FAMILY},demo]'"


def test_an_xla_device_takes_the_versions_of_its_leg(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv('PJRT_DEVICE', 'TPU')
    assert line(ALL) == "'mapsage[upstream,demo]' torch==2.9.0 torch_xla==2.9.0"


@pytest.mark.parametrize(
    'there, absent, expected',
    [
        ('mmengine', ['mmcv', 'mmseg'], 'mmcv-lite==2.1.0 mmsegmentation==1.2.2 ftfy regex'),
        ('mmcv', ['mmseg'], 'mmsegmentation==1.2.2 ftfy regex'),  # with compiled ops, which stay
        ('onedl-mmengine', ['mmcv', 'mmseg'], "'onedl-mmcv>=2.3.6' 'onedl-mmsegmentation>=1.4.2'"),
    ],
)
def test_a_family_that_is_there_in_part_is_completed(
    machine: Path, monkeypatch: pytest.MonkeyPatch, there: str, absent: List[str], expected: str
) -> None:
    monkeypatch.setattr(hosts, '_is_installed', lambda name: name == there)
    monkeypatch.setattr(
        hosts.metadata,
        'requires',
        lambda name: [
            'numpy',
            'onedl-mmengine>=0.10.12; extra == "onedl"',
            'onedl-mmcv>=2.3.6; extra == "onedl"',
            "onedl-mmsegmentation>=1.4.2; extra == 'onedl'",
            'mmengine==0.10.7; extra == "upstream"',
            'mmcv-lite==2.1.0; extra == "upstream"',
            'mmsegmentation==1.2.2; extra == "upstream"',
            'ftfy; extra == "upstream"',
            'regex; extra == "upstream"',
            'onnx>=1.15; extra == "deploy"',
            'setuptools; python_version >= "9.0" and extra == "upstream"',
        ],
    )
    assert line(absent) == expected


def test_where_python_has_no_distutils_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts.check_distutils()
    find_spec = hosts.importlib.util.find_spec
    monkeypatch.setattr(
        hosts.importlib.util,
        'find_spec',
        lambda name: None if name == 'distutils' else find_spec(name),
    )
    with pytest.raises(hosts.DistutilsError, match='lacks and setuptools provides: .* -m pip inst'):
        hosts.check_distutils()
