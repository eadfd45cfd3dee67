"""The words of the command line, the files of tools/ and the programs are the same ones."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Optional

import pytest
from support import ROOT

from mapsage_launcher import command
from mapsage_launcher.drivers import AUTOLOAD

TOOLS = {path.stem: path for path in (ROOT / 'tools').glob('[!_]*.py')}


def test_every_program_has_a_file_in_tools_and_every_file_a_program() -> None:
    modules = {row.program: row.module for row in command.COMMANDS.values()}
    modules['launch'] = 'mapsage_launcher.launch'
    assert set(modules) == set(TOOLS)
    for name, path in TOOLS.items():
        assert re.findall(r"run\('(.*)'\)", path.read_text()) == [modules[name]]


def test_every_launched_word_has_a_script() -> None:
    for script in command.LAUNCHED.values():
        assert (ROOT / 'scripts' / script).is_file()


@pytest.mark.parametrize('name', ['__init__', '_program', 'commands', '../commands/train', ''])
def test_what_is_no_program(name: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        command.run_program(name, [])
    assert ended.value.code == 2 and 'there is no such command' in capsys.readouterr().err


@pytest.mark.long
def test_a_file_of_tools_runs_from_any_folder(tmp_path: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if name != 'PYTHONPATH'}
    done = subprocess.run(
        [sys.executable, str(TOOLS['list_configs']), 'geotiff'],
        cwd=str(tmp_path),
        env=environ,
        stdout=subprocess.PIPE,
        universal_newlines=True,
    )
    assert done.returncode == 0
    assert done.stdout.startswith('geotiff/efficientnet_lite0_fpn_geotiff.py')


@pytest.mark.parametrize('before', [None, '1'])
def test_a_program_is_imported_without_plugins(
    before: Optional[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch imports plugins while it is imported; the program's children get the user's value."""
    (tmp_path / 'look_at_plugins.py').write_text(
        f'import os\nseen = [os.environ[{AUTOLOAD!r}]]\n'
        f'def run():\n    seen.append(os.environ.get({AUTOLOAD!r}))\n'
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(command.COMMANDS, 'train', command.Command('look_at_plugins'))
    monkeypatch.setattr(sys, 'argv', sys.argv)
    if before is None:
        monkeypatch.delenv(AUTOLOAD, raising=False)
    else:
        monkeypatch.setenv(AUTOLOAD, before)
    command.run_program('train', [])
    assert sys.modules.pop('look_at_plugins').seen == ['0', before]


@pytest.mark.parametrize('name', ['suggest', 'suggest_labels', 'suggest-labels'])
def test_a_program_is_found_by_its_word_and_by_its_file(name: str) -> None:
    row = command.find_command(name)
    assert row is not None and row.module == 'mapsage.extras.labels.suggest_labels'
