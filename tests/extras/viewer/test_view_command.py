"""What tools/view.py says before there is a page. tests/browser has the page."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path
from typing import Any, Tuple

import pytest
from support import PATIENT, ROOT, main_leg
from view_maps import add_map, folders
from warm_python import warm_python

pytestmark = main_leg


def view(*arguments: Any) -> Tuple[int, str]:
    done = subprocess.run(
        [warm_python(), 'tools/view.py', *map(str, arguments)],
        cwd=str(ROOT),
        timeout=PATIENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        universal_newlines=True,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    'inside, arguments, told',
    [
        ([], [], 'no map in {maps}: found no .tif file'),
        (['notes.tif.txt', 'NAME.gpkg'], [], 'no map in {maps}: found no .tif file'),
        ([], ['--scenes', 'none'], '--scenes none does not exist'),
        ([], ['--truth', 'none'], '--truth none does not exist'),
    ],
)
def test_a_folder_without_maps(tmp_path: Path, inside: Any, arguments: Any, told: str) -> None:
    maps = tmp_path / 'my maps'
    maps.mkdir()
    for name in inside:
        (maps / name).write_text('')
    status, output = view(maps, *arguments)
    assert status == 1 and output.startswith('ViewError: ' + told.format(maps=maps)), output
    assert 'Traceback' not in output and len(output.splitlines()) == 1


def test_a_port_in_use(tmp_path: Path) -> None:
    where = folders(tmp_path)
    add_map(where, 'a', polygons=False)
    with socket.socket() as taken:
        taken.bind(('127.0.0.1', 0))
        taken.listen()
        port = taken.getsockname()[1]
        status, output = view(where.maps, '--port', port)
    assert status == 1 and f'--port {port}: ' in output and 'for a free one' in output, output
    assert 'Traceback' not in output and 'open http' not in output


def test_a_file_that_is_no_map(tmp_path: Path) -> None:
    (tmp_path / 'a.tif').write_bytes(b'II*\0 and no more')
    status, output = view(tmp_path)
    assert status == 1 and 'a.tif cannot be read' in output and 'Traceback' not in output, output
