"""The words of the command line, the files of tools/ and the programs are the same ones."""
from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import ROOT

from mapsage_launcher import command

TOOLS = {path.stem: path for path in (ROOT / 'tools').glob('[!_]*.py')}


def test_every_program_has_a_file_in_tools_and_every_file_a_program() -> None:
    modules = {**command.program_modules(), 'launch': 'mapsage_launcher.launch'}
    assert set(modules) == set(TOOLS)
    for name, path in TOOLS.items():
        assert re.findall(r"run\('(.*)'\)", path.read_text()) == [modules[name]]


def test_every_word_has_a_program_and_every_launched_word_a_script() -> None:
    assert {word.program for word in command.COMMANDS.values()} <= set(command.program_modules())
    for script in command.LAUNCHED.values():
        assert (ROOT / 'scripts' / script).is_file()


@pytest.mark.parametrize('name', ['__init__', '_program', 'programs', '../programs/train', ''])
def test_what_is_no_program(name: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        command.run_program(name, [])
    assert ended.value.code == 2 and 'there is no such command' in capsys.readouterr().err


def test_a_file_of_tools_runs_from_any_folder(tmp_path: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if name != 'PYTHONPATH'}
    done = subprocess.run([sys.executable, str(TOOLS['list_configs']), 'geotiff'],
                          cwd=str(tmp_path), env=environ, stdout=subprocess.PIPE,
                          universal_newlines=True)
    assert done.returncode == 0
    assert done.stdout.startswith('geotiff/efficientnet_lite0_fpn_geotiff.py')
