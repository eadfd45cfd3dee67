"""The build of the double: what it does a second time, and what it says where it cannot build."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Tuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / 'tests' / 'doubles' / 'cuda'
# This Python's environment is doubles/KEY in the environment with PyTorch.
BELOW = Path(sys.prefix).parents[1]


def build(folder: Path, **environ: str) -> Tuple[int, str]:
    """Return the exit status of the build and what it says."""
    done = subprocess.run(
        [str(BELOW / 'bin' / 'python'), str(folder / 'build.py')],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        universal_newlines=True,
        timeout=120,
        env={**os.environ, **environ},
    )
    return done.returncode, done.stdout


@pytest.fixture
def changed_sources(tmp_path: Path) -> Path:
    """A copy of the sources with a change, so that a build is due."""
    folder = tmp_path / 'cuda'
    shutil.copytree(SOURCES, folder, ignore=shutil.ignore_patterns('__pycache__'))
    with open(folder / 'src' / 'runtime' / 'devices.cpp', 'a') as file:
        file.write('\n#error not a real error\n')
    return folder


def test_a_second_build_does_nothing() -> None:
    assert build(SOURCES) == (0, f'{sys.prefix}/bin/python\n')


def test_sources_that_do_not_compile_give_no_environment(changed_sources: Path) -> None:
    before = {path for path in (BELOW / 'doubles').iterdir() if path.is_dir()}
    status, message = build(changed_sources)
    assert status == 4
    assert 'could not compile the double of CUDA for torch 2.14' in message
    assert 'not a real error' in message
    key = message.split(f'{BELOW}/doubles/')[1].split()[0]
    assert Path(sys.prefix) in before and not (BELOW / 'doubles' / key).exists()


def test_a_missing_compiler_is_said(changed_sources: Path) -> None:
    status, message = build(changed_sources, CXX='no-such-compiler')
    assert status == 5
    assert "no C++20 compiler with nm was found (CXX='no-such-compiler'" in message
    assert 'apt install g++' in message


def test_headers_that_cannot_be_downloaded_are_said(changed_sources: Path, tmp_path: Path) -> None:
    status, message = build(
        changed_sources,
        XDG_CACHE_HOME=str(tmp_path / 'cache'),
        PIP_NO_INDEX='1',
        PIP_FIND_LINKS=str(tmp_path),
    )
    assert status == 5
    assert "CUDA's headers could not be downloaded" in message
    assert 'nvidia-cuda-runtime==13.0.*' in message


def test_another_pytorch_is_refused(changed_sources: Path, tmp_path: Path) -> None:
    (tmp_path / 'torch').mkdir()
    (tmp_path / 'torch' / '__init__.py').touch()
    (tmp_path / 'torch' / 'version.py').write_text("__version__ = '2.13.0+cpu'\ncuda = None\n")
    status, message = build(changed_sources, PYTHONPATH=str(tmp_path))
    assert status == 5
    assert 'torch 2.13.0+cpu of ' in message and 'is built for no CUDA' in message


def test_the_script_says_that_pytorchs_cuda_build_cannot_be_had(tmp_path: Path) -> None:
    environments = BELOW.parent
    if not list(environments.glob('main-*/.complete')):
        pytest.skip(f'the environment of the main leg is not in {environments}')
    for path in environments.glob('main-*'):
        (tmp_path / path.name).symlink_to(path)
    environ = {name: value for name, value in os.environ.items() if name != 'MAPSAGE_PYTHON'}
    done = subprocess.run(
        ['bash', str(ROOT / 'scripts' / 'setup_env.sh'), 'cuda'],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        universal_newlines=True,
        timeout=120,
        env={
            **environ,
            'MAPSAGE_ENVS': str(tmp_path),
            'PIP_NO_INDEX': '1',
            'PIP_FIND_LINKS': str(tmp_path),
        },
    )
    assert done.returncode == 5
    assert "PyTorch's CUDA build cannot be had here" in done.stderr
    assert done.stdout == ''
