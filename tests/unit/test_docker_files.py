"""docker/install.sh leaves a base's packages alone, tried in the environment of the tests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from support import ROOT, main_leg

pytestmark = main_leg  # the pip of Python 3.8 may be too old for a dry run


def install(requirements: Path, tmp_path: Path) -> subprocess.CompletedProcess:
    """Run docker/install.sh with this Python as the base's; nothing is fetched or installed."""
    return subprocess.run(
        ['bash', str(ROOT / 'docker' / 'install.sh'), str(requirements)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=str(tmp_path),
        env=dict(os.environ, MAPSAGE_PYTHON=sys.executable, PIP_NO_INDEX='1', PIP_DRY_RUN='1'),
    )


def test_another_version_than_the_bases_is_an_error_that_names_both(tmp_path: Path) -> None:
    import numpy

    wanted = tmp_path / 'wanted.txt'
    wanted.write_text('torch==0.0.1  # left out, since the base has one\nnumpy<1\n')
    tried = install(wanted, tmp_path)
    assert tried.returncode != 0 and 'which stays' in tried.stdout
    assert f'numpy=={numpy.__version__}' in tried.stdout + tried.stderr
    assert 'torch==0.0.1' not in tried.stdout + tried.stderr


def test_dockerfile_names_files_that_are_there() -> None:
    text = (ROOT / 'docker' / 'Dockerfile').read_text()
    for name in re.findall(r'(?:docker|requirements|scripts)/\w+\.\w+', text):
        assert (ROOT / name).is_file(), name
    assert text.index('ARG BASE=') < text.index('FROM ${BASE}')
