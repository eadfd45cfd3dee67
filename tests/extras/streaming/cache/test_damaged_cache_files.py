"""Files of a cache with anything in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fuzzing import changed, damaged, documents
from hypothesis import given
from hypothesis import strategies as st
from small_cache import INDEX, write_cache

from mapsage.extras.streaming.cache.index import find_shards, read_index
from mapsage.extras.streaming.cache.shards import CacheError, Shard, read_items


@pytest.fixture(scope='module')
def valid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_cache(tmp_path_factory.mktemp('valid'))


def read_all(path: Path) -> None:
    """Read a shard as training does."""
    shard = Shard(path)
    for item in shard.entry.items:
        shard.check(item)
        read_items([(shard, item)])


@given(st.data())
def test_any_shard(valid: Path, tmp_path_factory: Any, data: st.DataObject) -> None:
    content = sorted(valid.glob('*.safetensors'))[0].read_bytes()
    length = int.from_bytes(content[:8], 'little')
    header = json.loads(content[8 : 8 + length])
    metadata = {name: json.loads(header['__metadata__'][name]) for name in ('checksums', 'samples')}
    kind = data.draw(st.sampled_from(['bytes', 'header', *metadata]))
    if kind == 'bytes':
        content = data.draw(st.one_of(damaged(content), st.binary(max_size=60)))
    else:
        if kind == 'header':
            text = data.draw(documents(header))
        else:
            header['__metadata__'][kind] = data.draw(documents(metadata[kind])).decode('latin-1')
            text = json.dumps(header).encode()
        content = len(text).to_bytes(8, 'little') + text + content[8 + length :]
    path = tmp_path_factory.getbasetemp() / 'features-000000000000.safetensors'
    path.unlink(missing_ok=True)  # the file before is still mapped
    path.write_bytes(content)
    try:
        read_all(path)
    except CacheError as error:
        assert path.name in str(error)


@given(st.data())
def test_any_index(valid: Path, tmp_path_factory: Any, data: st.DataObject) -> None:
    content = json.loads((valid / 'index.json').read_text())
    folder = tmp_path_factory.getbasetemp()
    (folder / 'index.json').write_bytes(data.draw(documents(content)))
    try:
        index = read_index(folder)
        assert index is not None
        assert index.items >= 0 and isinstance(index.cache, str) and index.finished() is not None
    except CacheError as error:
        assert 'index.json' in str(error)


@given(changed(json.loads(json.dumps(vars(INDEX.keys)))))
def test_any_keys(tmp_path_factory: Any, keys: Any) -> None:
    folder = tmp_path_factory.getbasetemp()
    (folder / 'index.json').write_text(
        json.dumps(dict(version=2, keys=keys, views=2, seed=7, made_with={}, shards=[]))
    )
    try:
        index = read_index(folder)
        assert index is not None and find_shards(folder / 'none', index)[1] == []
    except CacheError as error:
        assert 'index.json' in str(error)
