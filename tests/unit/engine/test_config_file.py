"""Reading a config says nothing that every rank would say again."""

from __future__ import annotations

from pathlib import Path

import pytest

from mapsage.engine.config.file import read_config_file


def test_variables_of_a_config_are_not_printed_by_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv('SOME_SIZE', '8')
    path = tmp_path / 'a.py'
    path.write_text(
        "size = int('{{$SOME_SIZE:1}}')\n"
        "__import__('mmengine').logging.print_log('what the config says', logger='current')\n"
    )
    assert read_config_file(path).size == 8
    said = capfd.readouterr()
    assert 'what the config says' in said.out + said.err
    assert 'Using env variable' not in said.out + said.err
