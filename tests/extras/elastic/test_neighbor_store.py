"""What a machine keeps of another one's checkpoints, and what it does not take for one."""

from __future__ import annotations

import os
import stat
import zlib
from pathlib import Path
from typing import List

import pytest

from mapsage.extras.elastic.neighbor.store import (
    FOLDER,
    CopyStore,
    DamagedCopyError,
    NoRoomError,
    checksum_of,
)


class Place:
    """A machine's disk and memory."""

    def __init__(self, folder: Path) -> None:
        self.disk, self.memory = folder / 'disk', folder / 'memory'
        self.disk.mkdir()
        self.memory.mkdir()

    def store(self) -> CopyStore:
        return CopyStore(str(self.disk), self.memory)

    def keep(self, data: bytes, name: str = 'iter_5.pth') -> Path:
        arrival = self.store().arrive(name, len(data))
        arrival.write(data[:3])
        arrival.write(data[3:])
        return arrival.keep(zlib.crc32(data))

    def files(self) -> List[Path]:
        return sorted(path for path in self.memory.rglob('*') if path.is_file())


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_the_last_whole_copy_is_kept_in_memory(place: Place) -> None:
    first = place.keep(b'the first one')
    assert first.read_bytes() == b'the first one' and first.name.endswith('-iter_5.pth')
    assert stat.S_IMODE(os.stat(first.parent).st_mode) == 0o700
    half = place.store().arrive('iter_10.pth', 8)
    half.write(b'half')
    assert place.store().is_in_memory(first)
    second = place.keep(b'the second one', 'iter_10.pth')
    assert place.store().copies() == [second]
    assert place.files() == [second]  # what a killed process left is gone as well


@pytest.mark.parametrize(
    'data, checksum',
    [
        (b'short', zlib.crc32(b'short')),
        (b'seven!!', zlib.crc32(b'other!!')),
        (b'seven!!!', zlib.crc32(b'seven!!!')),
    ],
)
def test_what_did_not_arrive_whole_does_not_replace_a_copy(
    data: bytes, checksum: int, place: Place
) -> None:
    whole = place.keep(b'whole')
    arrival = place.store().arrive('iter_10.pth', 7)
    arrival.write(data)
    with pytest.raises(DamagedCopyError, match='iter_10.pth that arrived on .* of 7 bytes'):
        arrival.keep(checksum)
    assert place.store().copies() == [whole] == place.files()


@pytest.mark.parametrize(
    'damage', [lambda data: data[:-1], lambda data: data[:-1] + b'?', lambda data: b'']
)
def test_a_copy_that_changed_is_none(damage, place: Place) -> None:
    path = place.keep(b'whole')
    path.write_bytes(damage(b'whole'))
    assert place.store().copies() == []
    assert place.files() == []


def test_a_copy_belongs_to_its_work_dir(place: Place, tmp_path: Path) -> None:
    kept = place.keep(b'whole')
    other = tmp_path / 'other'
    other.mkdir()
    CopyStore(str(other), place.memory).clear()
    assert place.store().copies() == [kept]
    # Who empties the work dir does not want to continue from what was in it.
    (place.disk / FOLDER / 'memory').unlink()
    assert place.store().copies() == []
    place.store().remove_stale()
    assert list(place.memory.iterdir()) == []


def test_files_of_others_stay(place: Place, tmp_path: Path) -> None:
    kept = place.keep(b'whole')
    for folder in (place.disk / FOLDER, kept.parent):
        (folder / 'thesis.txt').write_text('years of work')
    place.store().drop()
    assert place.store().copies() == []
    assert [(folder / 'thesis.txt').exists() for folder in (place.disk / FOLDER, kept.parent)] == [
        True,
        True,
    ]


def test_a_link_in_place_of_the_folder_is_not_followed(place: Place, tmp_path: Path) -> None:
    user = tmp_path / 'user'
    user.mkdir()
    (user / '5-00000000-iter_5.pth').write_bytes(b'whole')
    (place.disk / FOLDER).symlink_to(user)
    store = place.store()
    assert store.copies() == []
    store.drop()
    store.clear()
    assert len(list(user.iterdir())) == 1


@pytest.mark.parametrize('name', ['', '..', 'elsewhere', '../elsewhere', 'mapsage-0-no-such'])
def test_the_folder_in_memory_is_one_of_ours(name: str, place: Place, tmp_path: Path) -> None:
    for folder in (tmp_path / 'elsewhere', place.memory / 'elsewhere'):
        folder.mkdir()
        (folder / f'5-{zlib.crc32(b"whole"):08x}-iter_5.pth').write_bytes(b'whole')
    place.keep(b'right')
    (place.disk / FOLDER / 'memory').write_text(name)
    assert place.store().copies() == []
    assert (tmp_path / 'elsewhere').is_dir() and len(list((place.memory).iterdir())) == 2


def test_without_memory_a_copy_is_kept_on_the_disk(tmp_path: Path) -> None:
    store = CopyStore(str(tmp_path), tmp_path / 'no memory')
    arrival = store.arrive('iter_5.pth', 5)
    assert 'has no room in the memory of' in arrival.remark and '0.0 MB are free' in arrival.remark
    arrival.write(b'whole')
    kept = arrival.keep(zlib.crc32(b'whole'))
    assert store.copies() == [kept] and kept.parent == tmp_path / FOLDER
    assert not store.is_in_memory(kept)
    store.clear()
    assert list(tmp_path.iterdir()) == []


def test_the_newer_copy_replaces_one_in_the_other_place(place: Place) -> None:
    on_disk = CopyStore(str(place.disk), place.disk / 'no memory').arrive('iter_5.pth', 5)
    on_disk.write(b'older')
    on_disk.keep(zlib.crc32(b'older'))
    newer = place.keep(b'newer')
    assert place.store().copies() == [newer]
    assert [path.name for path in (place.disk / FOLDER).iterdir()] == ['memory']


def test_a_machine_without_room_says_what_it_needs(place: Place) -> None:
    with pytest.raises(
        NoRoomError,
        match=r'1,125,899,906.8 MB has no room in the memory of .* MB '
        r'are free for it in .*, and .* MB on the disk of',
    ):
        place.store().arrive('iter_5.pth', 2**50)
    assert place.files() == []


def test_checksum_of_a_file(tmp_path: Path) -> None:
    data = os.urandom(5 * 2**20)  # more than a chunk
    (tmp_path / 'file').write_bytes(data)
    assert checksum_of(tmp_path / 'file') == zlib.crc32(data)
