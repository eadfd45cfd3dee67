"""Reading a config says nothing that every rank would say again."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import List

import pytest
from mmengine.logging import MMLogger

from mapsage.engine.config.file import read_config_file


def test_variables_of_a_config_are_not_printed_by_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv('SOME_SIZE', '8')
    path = tmp_path / 'a.py'
    path.write_text(
        "size = int('{{$SOME_SIZE:1}}')\n"
        "__import__('mmengine').logging.print_log('what the config says', logger='current')\n"
    )
    said: List[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = MMLogger.get_current_instance()
    logger.addHandler(handler)
    try:
        assert read_config_file(path).size == 8
    finally:
        logger.removeHandler(handler)
    assert said == ['what the config says']
