"""A file appears whole or not at all."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
from pathlib import Path

import pytest

from mapsage.base.files import atomic_write


@pytest.mark.parametrize('durable', [False, True])
def test_a_file_takes_the_place_of_another(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / 'report.json'
    path.write_bytes(b'old')
    with open(path, 'rb') as reader:
        atomic_write(str(path), b'new', durable)
        assert reader.read() == b'old'  # the old file was replaced, not written over
    assert path.read_bytes() == b'new' and list(tmp_path.iterdir()) == [path]


def _write_with_little_room(path: Path) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write beyond the limit is then an OSError
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    try:
        atomic_write(path, bytes(5000))
    except OSError:
        os._exit(7)


def test_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / 'tile.png'
    path.write_bytes(b'earlier')
    process = multiprocessing.get_context('fork').Process(
        target=_write_with_little_room, args=(path,)
    )
    process.start()
    process.join(60)
    assert process.exitcode == 7
    assert path.read_bytes() == b'earlier' and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize('mask', [0o022, 0o027])
def test_permissions_are_those_of_the_umask(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        atomic_write(tmp_path / 'map.png', b'')
    finally:
        os.umask(before)
    assert (tmp_path / 'map.png').stat().st_mode & 0o777 == 0o666 & ~mask


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        atomic_write(tmp_path / 'none' / 'map.png', b'')
