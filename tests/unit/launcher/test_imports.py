"""The launcher imports only the standard library until a function needs PyTorch."""

from __future__ import annotations

import subprocess
import sys
from typing import List

import pytest
from support import ROOT

MODULES: List[str] = sorted(
    '.'.join(path.relative_to(ROOT).with_suffix('').parts)
    for path in (ROOT / 'mapsage_launcher').rglob('*.py')
    if path.name != '__init__.py'
)
PROGRAM = """
import importlib, sys
sys.path.append(sys.argv[1])
for name in sys.argv[2:]:
    importlib.import_module(name)
foreign = {name.split('.')[0] for name in sys.modules} & {
    'mapsage', 'torch', 'numpy', 'mmengine', 'mmcv', 'mmseg'}
assert not foreign, foreign
"""


def test_the_walk_sees_the_modules_of_all_folders() -> None:
    assert {
        'mapsage_launcher.launch',
        'mapsage_launcher.nodes.elastic',
        'mapsage_launcher.ranks.fork_server',
        'mapsage_launcher.trust.guard',
    } <= set(MODULES)


@pytest.mark.parametrize('options', [[], ['-I', '-S']], ids=['python', 'without site-packages'])
def test_all_modules_import_the_standard_library_alone(options: List[str]) -> None:
    done = subprocess.run(
        [sys.executable, *options, '-c', PROGRAM, str(ROOT), *MODULES],
        stderr=subprocess.PIPE,
        universal_newlines=True,
    )
    assert done.returncode == 0, done.stderr
