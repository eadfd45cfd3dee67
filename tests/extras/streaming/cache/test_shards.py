"""A shard is a whole safetensors file, or nothing is written."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import fork_ranks
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from small_cache import INDEX, read_all, source

from mapsage.extras.streaming.cache.shards import (
    CacheError,
    DamagedShardError,
    Shard,
    ShardEntry,
    ranges_of,
    write_shard,
)


def test_shards_are_safetensors_that_others_may_read(folder: Path) -> None:
    mask = os.umask(0)
    os.umask(mask)
    for path in folder.glob('features-*'):
        tensors = load_file(str(path))
        assert {name.split('.')[1] for name in tensors} == {'00', '01'}
        assert path.stat().st_mode & 0o777 == 0o666 & ~mask


def _write_with_little_room(folder: Path) -> str:
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
    try:
        write_shard(folder, INDEX.cache, {0: [torch.zeros(100, 10, 10)]}, {0: 'sample0'})
    except CacheError as error:
        return str(error)
    return 'written'


def test_a_disk_without_room_keeps_what_is_there(folder: Path, tmp_path: Path) -> None:
    before = sorted(folder.iterdir())
    said = fork_ranks(_write_with_little_room, 1, tmp_path / 'rank', folder)[0]
    assert 'cannot write' in said and 'features-000000000000' in said
    assert 'It needs 40,' in said and 'MB are free in' in said and 'same command' in said
    assert sorted(folder.iterdir()) == before
    read_all(source(folder))


@given(st.sets(st.integers(0, 60)))
def test_ranges_hold_what_they_were_made_of(numbers: Any) -> None:
    entry = ShardEntry('x', 1, 2, sorted(numbers))
    assert ShardEntry.of_json(json.loads(json.dumps(entry.to_json())), 1000) == entry
    ranges = ranges_of(sorted(numbers))
    assert all(start < stop for start, stop in ranges)
    assert all(one[1] < other[0] for one, other in zip(ranges, ranges[1:]))


def test_a_shard_that_another_program_wrote_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    path = tmp_path / 'features-0.safetensors'
    save_file({'weight': torch.zeros(2)}, str(path), dict(format='pt'))
    with pytest.raises(DamagedShardError, match='features-0.safetensors is damaged'):
        Shard(path)
