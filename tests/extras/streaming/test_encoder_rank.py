"""How a rank finds out that it encodes, without any other rank."""

from __future__ import annotations

import os
import signal
from argparse import Namespace
from typing import Any, Iterator, List, Tuple

import pytest
import torch
from mmengine.config import Config
from mmengine.registry import MODELS

from mapsage.accelerator.cpu import CpuAccelerator
from mapsage.extras.streaming import encoder_rank, train_options
from mapsage.extras.streaming.encoder_rank import EncoderRank, take_role
from mapsage_launcher import stop_request


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = dict(os.environ)
    monkeypatch.setattr(encoder_rank, '_roles', [])
    yield
    os.environ.clear()
    os.environ.update(before)


def be(rank: int, world_size: int) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR='localhost',
        MASTER_PORT='1',
    )


def config(encoders: int = 1, **changes: Any) -> Config:
    return Config(
        dict(
            dict(
                launcher='pytorch',
                env_cfg=dict(accelerator='cpu'),
                feature_source=dict(type='Streamed', encoders=encoders),
            ),
            **changes,
        )
    )


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


@pytest.mark.parametrize(
    'kind, amp',
    [
        ('AmpOptimWrapper', True),
        ('mmengine.AmpOptimWrapper', True),
        ('OptimWrapper', False),
        (None, False),
    ],
)
def test_the_encoder_computes_in_the_precision_of_the_run(kind: Any, amp: bool) -> None:
    wrapper = dict(optimizer=dict(type='SGD'), **({} if kind is None else dict(type=kind)))
    assert encoder_rank._is_amp(Config(dict(optim_wrapper=wrapper))) == amp


def test_the_number_of_encoders_on_the_command_line() -> None:
    cfg = config(encoders=3)
    cfg.feature_source.wire_dtype = 'bfloat16'
    train_options.run(Namespace(encoders=2), cfg)
    assert cfg.feature_source == dict(type='Streamed', encoders=2, wire_dtype='bfloat16')
    train_options.run(Namespace(encoders=0), cfg)
    assert cfg.get('feature_source') is None
    cfg.feature_source = dict(type='Cached', folder='x')
    train_options.run(Namespace(encoders=0), cfg)
    assert cfg.feature_source.type == 'Cached'
    train_options.run(Namespace(encoders=1), cfg)
    assert cfg.feature_source == dict(type='Streamed', encoders=1)


@pytest.mark.usefixtures('signals_as_before')
@pytest.mark.parametrize(
    'rank, heads, launched, status',
    [
        (3, 3, True, None),
        (3, 3, False, None),  # next to heads, which say themselves how they ended
        (5, 2, True, 0),
        (5, 2, False, None),
    ],
)
def test_an_encoder_leaves_the_status_to_its_heads(
    rank: int,
    heads: int,
    launched: bool,
    status: Any,
    tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last step of a run is completed, whoever asks to stop in it."""
    os.environ.pop('MAPSAGE_ERROR_NOTES', None)
    be(rank, rank + 1)
    os.environ.update(LOCAL_RANK=str(rank % 4), LOCAL_WORLD_SIZE=str(rank % 4 + 1))
    if launched:
        os.environ['MAPSAGE_ERROR_NOTES'] = str(tmp_path)
        (tmp_path / 'stop').write_text('SIGTERM')
    encoder = take_role(config(encoders=rank + 1 - heads))
    assert encoder is not None
    monkeypatch.setattr(encoder, '_serve', lambda: None)
    monkeypatch.setitem(stop_request._received, signal.SIGTERM, 0.0)
    if status is None:
        encoder.train()
    else:
        with pytest.raises(stop_request.StoppedEarly) as stopped:
            encoder.train()
        assert stopped.value.code == status
    assert (tmp_path / 'left').exists() == (status is not None)


class Reached(Exception):
    """The encoder was built."""


class KernelReport(torch.nn.Module):
    """Says which kernels are chosen when an encoder is built."""

    def __init__(self) -> None:
        super().__init__()
        raise Reached(
            torch.backends.cudnn.benchmark,
            torch.backends.cudnn.deterministic,
            torch.are_deterministic_algorithms_enabled(),
        )


def test_an_encoder_computes_in_the_precision_of_the_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    if 'KernelReport' not in MODELS:
        MODELS.register_module()(KernelReport)
    received: List[Tuple[Any, ...]] = []
    monkeypatch.setattr(
        CpuAccelerator, 'set_float32_precision', lambda self, *settings: received.append(settings)
    )
    be(1, 2)
    encoder = take_role(
        config(
            model=dict(backbone=dict(type='KernelReport')),
            env_cfg=dict(
                accelerator='cpu', float32_matmul_precision='high', cudnn_allow_tf32=False
            ),
        )
    )
    assert encoder is not None
    with pytest.raises(Reached):
        encoder.train()
    assert received == [('high', False)]


@pytest.mark.parametrize(
    'changes, expected',
    [
        (dict(), (False, False, False)),
        (dict(env_cfg=dict(accelerator='cpu', cudnn_benchmark=True)), (True, False, False)),
        (
            dict(
                env_cfg=dict(accelerator='cpu', cudnn_benchmark=True),
                randomness=dict(seed=3, deterministic=True),
            ),
            (False, True, True),
        ),
    ],
)
def test_an_encoder_chooses_kernels_as_heads_do(changes: Any, expected: Any) -> None:
    if 'KernelReport' not in MODELS:
        MODELS.register_module()(KernelReport)
    before = (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic)
    torch.backends.cudnn.benchmark = False  # a run in this process may have set it
    be(1, 2)
    encoder = take_role(config(model=dict(backbone=dict(type='KernelReport')), **changes))
    assert encoder is not None
    try:
        with pytest.raises(Reached) as reached:
            encoder.train()
    finally:
        torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = before
        torch.use_deterministic_algorithms(False)
    assert reached.value.args == expected
