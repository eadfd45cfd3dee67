"""The limit of open files, checked before the connections are made."""

from __future__ import annotations

import errno
import resource
from pathlib import Path
from typing import Iterator, Tuple

import pytest

from mapsage.distributed import descriptors
from mapsage.distributed.descriptors import DescriptorLimitError, check_descriptors, check_limit


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Tuple[int, int]]:
    # Others of the same process may have left many open.
    monkeypatch.setattr(descriptors, '_OPEN', tmp_path)
    for number in range(20):
        (tmp_path / str(number)).touch()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, before[1]))
    try:
        yield 1024, before[1]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_thousand_files_are_enough_for_eight_hundred_ranks(limit: Tuple[int, int]) -> None:
    check_descriptors(800, 1)
    for ranks, groups in ((1024, 1), (600, 2)):
        with pytest.raises(DescriptorLimitError) as error:
            check_descriptors(ranks, groups)
        assert 'may open 1024 files' in str(error.value)
        assert f'{ranks} ranks need 1' in str(error.value)
        assert 'ulimit -n 2048' in str(error.value)


def test_one_process_needs_nothing() -> None:
    check_descriptors(1, 9)


def test_an_exhausted_limit_says_so(limit: Tuple[int, int]) -> None:
    check_limit(OSError(errno.ECONNREFUSED, 'no'))
    with pytest.raises(DescriptorLimitError, match='1024 .* all are in use.* ulimit -n 2048'):
        check_limit(OSError(errno.EMFILE, 'Too many open files'))
