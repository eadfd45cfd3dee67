"""An index says which features a cache holds; others are refused, and so are damaged indexes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Dict

import pytest
from small_cache import CPU, INDEX, KEYS, VIEWS, source

from mapsage.extras.streaming.cache.cached import Cached
from mapsage.extras.streaming.cache.index import find_shards
from mapsage.extras.streaming.cache.shards import CacheError


@pytest.mark.parametrize(
    ('change', 'words'),
    [
        (dict(weights='weights2'), 'weights weights1 there, weights2 here'),
        (
            dict(
                transforms='transforms2',
                settings=dict(
                    dataset=dict(pipeline=[dict(type='Load'), dict(type='Flip', prob=0.25)])
                ),
            ),
            r'transforms1 there, transforms2 here \(config.dataset.pipeline\[1\].prob: 0.5 there, 0.25',
        ),
    ],
)
def test_a_cache_of_other_features_is_refused(
    folder: Path, change: Dict[str, Any], words: str
) -> None:
    with pytest.raises(CacheError, match=words) as caught:
        Cached(str(folder), VIEWS, CPU, replace(KEYS, **change))
    others = {'weights', 'transforms'} - set(change)
    assert not any(f'{name} {name}1 there' in str(caught.value) for name in others)
    assert '--views 2 --folder ANOTHER' in str(caught.value)


@pytest.mark.parametrize(
    ('text', 'words'),
    [
        ('{"version": 2', 'is damaged'),
        ('{}', 'is damaged'),
        ('[]', 'is damaged'),
        ('{"version": 99}', 'version 99, this MapSage reads version 2'),
        ('{"version": 2, "keys": {"weights": ""}}', 'is damaged'),
    ],
)
def test_an_index_that_cannot_be_used_is_named(folder: Path, text: str, words: str) -> None:
    (folder / 'index.json').write_text(text)
    with pytest.raises(CacheError, match=f'index.json is .*{words[3:]}'):
        source(folder)


def test_a_shard_of_another_cache_is_refused(folder: Path) -> None:
    with pytest.raises(CacheError, match='is of another cache'):
        find_shards(folder, replace(INDEX, seed=8))
