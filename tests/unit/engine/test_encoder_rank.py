"""How a rank finds out that it encodes, without any other rank."""
from __future__ import annotations

import os
from typing import Any, Iterator

import pytest
from mmengine.config import Config

from mapsage.commands import cli
from mapsage.engine import encoder_rank
from mapsage.engine.encoder_rank import EncoderRank, take_role


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = dict(os.environ)
    monkeypatch.setattr(encoder_rank, '_roles', [])
    yield
    os.environ.clear()
    os.environ.update(before)


def be(rank: int, world_size: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank),
                      LOCAL_WORLD_SIZE=str(world_size), MASTER_ADDR='localhost', MASTER_PORT='1')


def config(encoders: int = 1, **changes: Any) -> Config:
    return Config(dict(dict(
        launcher='pytorch', env_cfg=dict(accelerator='cpu'),
        feature_source=dict(type='Streamed', encoders=encoders)), **changes))


def test_a_second_runner_finds_the_job_as_it_was_split() -> None:
    be(1, 3)
    assert take_role(config()) is None and os.environ['WORLD_SIZE'] == '2'
    assert take_role(config()) is None and os.environ['WORLD_SIZE'] == '2'


def test_the_last_rank_encodes_each_time() -> None:
    be(2, 3)
    assert isinstance(take_role(config()), EncoderRank)
    assert isinstance(take_role(config()), EncoderRank)
    assert os.environ['RANK'] == '2'


def test_alone_it_is_no_encoder() -> None:
    assert take_role(config(launcher='none')) is None


@pytest.mark.parametrize('rank', [0, 1])
@pytest.mark.parametrize('heads, encoders', [('cpu', 'gcu'), ('gcu', 'cpu')])
def test_a_rank_needs_its_own_kind_of_device_only(rank: int, heads: str, encoders: str) -> None:
    be(rank, 2)
    cfg = config(env_cfg=dict(accelerator=heads))
    cfg.feature_source.accelerator = encoders
    assert (take_role(cfg) is not None) == (rank == 1)
    if rank:  # the first of the encoders' own devices
        assert os.environ['LOCAL_RANK'] == '0'


@pytest.mark.parametrize('kind, amp', [
    ('AmpOptimWrapper', True), ('mmengine.AmpOptimWrapper', True), ('OptimWrapper', False),
    (None, False)])
def test_the_encoder_computes_in_the_precision_of_the_run(kind: Any, amp: bool) -> None:
    wrapper = dict(optimizer=dict(type='SGD'), **({} if kind is None else dict(type=kind)))
    assert encoder_rank._is_amp(Config(dict(optim_wrapper=wrapper))) == amp


def test_the_number_of_encoders_on_the_command_line() -> None:
    cfg = config(encoders=3)
    cfg.feature_source.wire_dtype = 'bfloat16'
    cli.stream_features(cfg, 2)
    assert cfg.feature_source == dict(type='Streamed', encoders=2, wire_dtype='bfloat16')
    cli.stream_features(cfg, 0)
    assert cfg.get('feature_source') is None
    cfg.feature_source = dict(type='Cached', folder='x')
    cli.stream_features(cfg, 0)
    assert cfg.feature_source.type == 'Cached'
    cli.stream_features(cfg, 1)
    assert cfg.feature_source == dict(type='Streamed', encoders=1)
