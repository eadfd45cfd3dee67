"""The files of a delivery, plain and in archives."""

from __future__ import annotations

import os
import re
import resource
import zipfile
from pathlib import Path

import pytest

from mapsage.extras.demo.prepare.source_files import (
    EXTRACTED,
    PrepareError,
    list_files,
    nothing_found,
    select,
    some,
)


def _delivery(root: Path) -> Path:
    (root / 'plain').mkdir(parents=True)
    (root / 'plain' / 'a_1.png').write_bytes(b'unpacked')
    with zipfile.ZipFile(str(root / 'pack.zip'), 'w') as archive:
        archive.writestr('images/a_1.png', b'packed')
        archive.writestr('images/a_2.png', b'two')
        archive.writestr('images/inner.zip', b'')
    return root


def test_files_are_listed_and_read_alike_plain_or_packed(tmp_path: Path) -> None:
    files = {file.location: file for file in list_files(_delivery(tmp_path / 'in'))}
    assert sorted(files) == [
        'pack.zip/images/a_1.png',
        'pack.zip/images/a_2.png',
        'pack.zip/images/inner.zip',
        'plain/a_1.png',
    ]
    plain, packed = files['plain/a_1.png'], files['pack.zip/images/a_1.png']
    assert (plain.read(), packed.read()) == (b'unpacked', b'packed')
    with plain.on_disk(tmp_path) as path:
        assert path == plain.path
    with packed.on_disk(tmp_path) as path:
        assert path.read_bytes() == b'packed' and path.parent.name.startswith(EXTRACTED)
    assert not path.exists() and not list(tmp_path.glob(EXTRACTED + '*'))


def test_an_unpacked_file_wins_over_its_archive_and_copies_are_refused(tmp_path: Path) -> None:
    files = list_files(_delivery(tmp_path))
    found = select(files, re.compile(r'a_(\d)\.png'))
    assert {key: file.member for key, file in found.items()} == {
        ('1',): None,
        ('2',): 'images/a_2.png',
    }
    (tmp_path / 'a_1.png').write_bytes(b'copy')
    with pytest.raises(PrepareError, match='are both 1; keep one of them'):
        select(list_files(tmp_path), re.compile(r'a_(\d)\.png'))


def test_a_cut_off_archive_and_a_missing_folder_are_named(tmp_path: Path) -> None:
    archive = _delivery(tmp_path) / 'pack.zip'
    archive.write_bytes(archive.read_bytes()[:-30])
    with pytest.raises(PrepareError, match=r'pack\.zip \(\d+ bytes\) is not a complete zip'):
        list_files(tmp_path)
    with pytest.raises(PrepareError, match='absent does not exist'):
        list_files(tmp_path / 'absent')


def test_a_file_larger_than_any_of_a_delivery_is_not_unpacked(tmp_path: Path) -> None:
    archive = _delivery(tmp_path) / 'pack.zip'
    content = bytearray(archive.read_bytes())
    # Bytes 24 to 27 of an entry of the directory are the size after unpacking.
    start = content.find(b'PK\x01\x02')
    content[start + 24 : start + 28] = (2**32 - 2).to_bytes(4, 'little')
    archive.write_bytes(bytes(content))
    with open(tmp_path / 'plain' / 'a_3.png', 'wb') as file:
        file.truncate(2 << 30)
    files = {file.location: file for file in list_files(tmp_path)}
    for name, size in (('pack.zip/images/a_1.png', '4.3 GB'), ('plain/a_3.png', '2.1 GB')):
        with pytest.raises(PrepareError, match=f'{Path(name).name} has {size}, expected'):
            files[name].read()
    with pytest.raises(PrepareError, match='a_1.png has 4.3 GB'), files[
        'pack.zip/images/a_1.png'
    ].on_disk(tmp_path):
        pass
    assert not list(tmp_path.glob(EXTRACTED + '*'))


def test_a_size_that_is_not_true_is_damage(tmp_path: Path) -> None:
    archive = _delivery(tmp_path) / 'pack.zip'
    content = bytearray(archive.read_bytes())
    start = content.find(b'PK\x01\x02')
    content[start + 24 : start + 28] = (3).to_bytes(4, 'little')
    archive.write_bytes(bytes(content))
    (file,) = [file for file in list_files(archive) if file.location.endswith('a_1.png')]
    with pytest.raises(PrepareError, match='a_1.png cannot be unpacked .*damaged'):
        file.read()


def test_a_file_that_does_not_fit_into_the_memory_is_named(tmp_path: Path) -> None:
    (tmp_path / 'a_1.png').touch()
    os.truncate(str(tmp_path / 'a_1.png'), 1 << 30)
    (file,) = list_files(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path('/proc/self/statm').read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), before[1]))
    try:
        with pytest.raises(PrepareError, match='a_1.png does not fit into the free memory'):
            file.read()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_messages_list_what_is_there(tmp_path: Path) -> None:
    assert some(list('abcdef')) == 'a, b, c, d, e and 1 more' and some(['a', 'b']) == 'a, b'
    message = str(nothing_found(tmp_path, list_files(_delivery(tmp_path)), 'maps'))
    assert 'holds no maps. It holds 4 files, archives: pack.zip' in message
    assert 'Unpack the archives in the archive first: pack.zip: images/inner.zip.' in message
