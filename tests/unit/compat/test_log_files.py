"""Log files on a full disk: the run continues, and a warning names the file."""

from __future__ import annotations

import json
import logging
import resource
from pathlib import Path
from typing import Any

import pytest
from mmengine.logging import MMLogger
from mmengine.visualization import LocalVisBackend

from mapsage.host.log_lines import append_line


def test_scalars_on_a_full_disk_are_lost_with_a_warning(tmp_path: Path, capsys: Any) -> None:
    """Also of LoggerHook's second file, each named once."""
    MMLogger.get_instance(tmp_path.name, logger_name='mmengine')
    backend = LocalVisBackend(str(tmp_path))
    backend.add_scalars(dict(loss=1.5), step=1, file_path='second.json')
    whole = {name: (tmp_path / name).read_bytes() for name in ('scalars.json', 'second.json')}
    for name in whole:
        (tmp_path / name).rename(tmp_path / f'kept_{name}')
        (tmp_path / name).symlink_to('/dev/full')
    for step in range(3):
        backend.add_scalars(dict(loss=1.5), step=step, file_path='second.json')
    output = capsys.readouterr().out
    for name in whole:
        assert output.count(f'{tmp_path / name} cannot be written: No space left on device') == 1
    (tmp_path / 'scalars.json').unlink()
    (tmp_path / 'kept_scalars.json').rename(tmp_path / 'scalars.json')
    backend.add_scalars(dict(loss=2.5), step=4)
    lines = (tmp_path / 'scalars.json').read_text().splitlines()
    assert [json.loads(line) for line in lines] == [dict(loss=1.5, step=1), dict(loss=2.5, step=4)]


def test_no_half_line_stays(tmp_path: Path) -> None:
    path, limits = tmp_path / 'steps.jsonl', resource.getrlimit(resource.RLIMIT_FSIZE)
    append_line(str(path), 'first')
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, limits[1]))
    try:
        append_line(str(path), 'a line that fits in part only')
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    append_line(str(path), 'last')
    assert path.read_text() == 'first\nlast\n'


def test_a_log_that_cannot_be_written_is_named_once(tmp_path: Path, capfd: Any) -> None:
    logger = MMLogger(tmp_path.name, log_file='/dev/full')
    for number in range(3):
        logger.warning(f'line {number}')
    captured = capfd.readouterr()
    assert captured.err.count('/dev/full cannot be written: No space left on device') == 1
    assert 'Traceback' not in captured.err and 'line 2' in captured.out
    handler = next(
        handler for handler in logger.handlers if isinstance(handler, logging.FileHandler)
    )
    logger.handlers.remove(handler)
    with pytest.raises(OSError):
        handler.close()
