"""Sources built from a config, and settings that cannot work."""
from __future__ import annotations

from pathlib import Path
from typing import Any, Dict

import pytest
import torch
from torch import nn

from mapsage.accelerator import resolve_accelerator
from mapsage.features import FeatureSourceError, Item
from mapsage.features.build import Surroundings, build_source, view_seeds
from mapsage.features.remote.roles import ENCODERS_VARIABLE


def surroundings() -> Surroundings:
    encoder = nn.Conv2d(3, 2, 1)
    accelerator = resolve_accelerator('cpu')
    return Surroundings(encoder=encoder, encode=lambda images: (encoder(images),),
                        accelerator=accelerator, local_rank=0, device=accelerator.device(0),
                        runner=None, timeout=1.)


@pytest.mark.parametrize('config, words', [
    (dict(), 'type=None, expected one of Local, Prefetched, Cached, Streamed'),
    (dict(type='Steamed'), "type='Steamed', expected .*Did you mean 'Streamed'"),
    (dict(type='Local', depth=2), "'Local' has no setting 'depth': expected none"),
    (dict(type='Prefetched', dept=2),
     "'Prefetched' has no setting 'dept': expected depth, timeout.*Did you mean 'depth'"),
    (dict(type='Streamed', ahead=2), "'Streamed' needs encoders"),
    (dict(type='Cached', views=2), "'Cached' needs folder"),
    (dict(type='Prefetched', depth=0), "'Prefetched': depth=0, expected"),
    (dict(type='Streamed', encoders=2), r"needs 2 rank\(s\) that encode.*start_8card_training"),
])
def test_settings_that_cannot_work(config: Dict[str, Any], words: str,
                                   monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENCODERS_VARIABLE, raising=False)
    with pytest.raises(FeatureSourceError, match=words):
        build_source(config, surroundings())


@pytest.mark.parametrize('config, ahead', [
    (dict(type='Local'), 0), (dict(type='Prefetched'), 2), (dict(type='Prefetched', depth=3), 3)])
def test_sources_of_one_process_give_the_encoders_features(config: Dict[str, Any],
                                                           ahead: int) -> None:
    around = surroundings()
    before = dict(config)
    source = build_source(config, around)
    assert config == before and source.ahead == ahead
    item = Item(0, (), torch.randn(1, 3, 4, 4))
    source.request(item)
    with torch.no_grad():
        assert torch.equal(source.features(item)[0], around.encoder(item.images))
    source.close()


def test_only_a_readable_cache_has_seeds_of_views(tmp_path: Path) -> None:
    (tmp_path / 'index.json').write_text('no index')
    for config in (dict(type='Local'), dict(type='Cached'),
                   dict(type='Cached', folder=str(tmp_path / 'none')),
                   dict(type='Cached', folder=str(tmp_path))):
        assert view_seeds(config) is None
