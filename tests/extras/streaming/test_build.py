"""Sources built from a config, and settings that cannot work."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List

import pytest
import torch
from torch import nn

from mapsage.accelerator import resolve_accelerator
from mapsage.distributed.launcher import ENCODERS_VARIABLE
from mapsage.extras.streaming import FeatureSourceError, Item
from mapsage.extras.streaming.build import Surroundings, _runs, build_source, view_seeds


def surroundings() -> Surroundings:
    encoder = nn.Conv2d(3, 2, 1)
    accelerator = resolve_accelerator('cpu')
    return Surroundings(
        encoder=encoder,
        encode=lambda images: (encoder(images),),
        accelerator=accelerator,
        local_rank=0,
        device=accelerator.device(0),
        runner=None,
        timeout=1.0,
    )


@pytest.mark.parametrize(
    'config, words',
    [
        (dict(), 'type=None, expected one of Local, Prefetched, Cached, Streamed'),
        (dict(type='Steamed'), "type='Steamed', expected .*Did you mean 'Streamed'"),
        (dict(type='Local', depth=2), "'Local' has no setting 'depth': expected none"),
        (
            dict(type='Prefetched', dept=2),
            "'Prefetched' has no setting 'dept': expected depth, timeout.*Did you mean 'depth'",
        ),
        (dict(type='Streamed', ahead=2), "'Streamed' needs encoders"),
        (dict(type='Cached', views=2), "'Cached' needs folder"),
        (dict(type='Prefetched', depth=0), "'Prefetched': depth=0, expected"),
        (dict(type='Streamed', encoders=2), r'needs 2 rank\(s\) that encode.*start_8card_training'),
    ],
)
def test_settings_that_cannot_work(
    config: Dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ENCODERS_VARIABLE, raising=False)
    with pytest.raises(FeatureSourceError, match=words):
        build_source(config, surroundings())


@pytest.mark.parametrize(
    'settings, words',
    [
        (dict(wire_dtype='int8'), "wire_dtype='int8', expected None"),
        (dict(pool_bytes=9), 'pool_bytes=9, block_bytes=4194304'),
        (dict(timeout=0), 'timeout=0'),
        (dict(ahead=-1), 'ahead=-1'),
        (dict(peer_timeout=0), 'peer_timeout=0, expected'),
    ],
)
def test_settings_of_a_stream_are_checked_before_its_links_are_opened(
    settings: Dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENCODERS_VARIABLE, '2')
    monkeypatch.delenv('WORLD_SIZE', raising=False)  # without it no link can be opened
    with pytest.raises(FeatureSourceError, match=words):
        build_source(dict(type='Streamed', encoders=2, **settings), surroundings())


@pytest.mark.parametrize(
    'config, ahead',
    [(dict(type='Local'), 0), (dict(type='Prefetched'), 2), (dict(type='Prefetched', depth=3), 3)],
)
def test_sources_of_one_process_give_the_encoders_features(
    config: Dict[str, Any], ahead: int
) -> None:
    around = surroundings()
    before = dict(config)
    source = build_source(config, around)
    assert config == before and source.ahead == ahead
    item = Item(0, (), torch.randn(1, 3, 4, 4))
    source.request(item)
    with torch.no_grad():
        assert torch.equal(source.features(item)[0], around.encoder(item.images))
    source.close()


class Listed:
    """A dataset that lists one sample."""

    def __len__(self) -> int:
        return 1

    def get_data_info(self, index: int) -> Dict[str, Any]:
        return dict(img_path=f'{index}.png', sample_idx=index)


@pytest.mark.parametrize('slots', [[], [0, 1, 2, 3], [-1, -1, 5, 6, 0, 0, 1, -1, 7]])
def test_slots_travel_as_few_numbers(slots: List[int]) -> None:
    runs = _runs(slots)
    assert [first + at * step for first, step, count in runs for at in range(count)] == slots
    assert len(_runs(list(range(10**5)))) == 1


def test_only_a_readable_cache_has_seeds_of_views(tmp_path: Path) -> None:
    (tmp_path / 'index.json').write_text('no index')
    for config in (
        dict(type='Local'),
        dict(type='Cached'),
        dict(type='Cached', folder=str(tmp_path / 'none')),
        dict(type='Cached', folder=str(tmp_path)),
    ):
        assert view_seeds(config, Listed()) is None
