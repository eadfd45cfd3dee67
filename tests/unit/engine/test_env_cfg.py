"""What env_cfg may say."""

from __future__ import annotations

from typing import Any

import pytest

from mapsage.distributed import DEFAULT_TIMEOUT_SECONDS
from mapsage.engine.env_cfg import ConfigError, EnvCfg, parse_env_cfg


@pytest.mark.parametrize(
    'env_cfg, want',
    [
        ({}, EnvCfg()),
        (dict(dist_cfg=None), EnvCfg()),
        (dict(accelerator=None, use_model_parallel=None), EnvCfg()),
        (
            dict(accelerator='gcu', dist_cfg=dict(backend='eccl', timeout=60)),
            EnvCfg('gcu', 'eccl', 60),
        ),
        (dict(accelerator='cuda', dist_cfg=dict(backend='nccl')), EnvCfg('cuda', 'nccl')),
        (dict(dist_cfg=dict(init_backend='torch', port=29501)), EnvCfg(port=29501)),
        (dict(dist_cfg=dict(port='29501')), EnvCfg(port=29501)),
        (dict(use_model_parallel=True), EnvCfg(use_model_parallel=True)),
        (dict(use_model_parallel=False), EnvCfg(use_model_parallel=False)),
        (dict(virtual_ranks=None, reduction=None), EnvCfg()),
        (dict(virtual_ranks=1, reduction='native'), EnvCfg(virtual_ranks=1, reduction='native')),
        (
            dict(virtual_ranks=12, reduction='ordered'),
            EnvCfg(virtual_ranks=12, reduction='ordered'),
        ),
        (dict(float32_matmul_precision=None, cudnn_allow_tf32=None), EnvCfg()),
        (
            dict(float32_matmul_precision='high', cudnn_allow_tf32=False),
            EnvCfg(float32_matmul_precision='high', cudnn_allow_tf32=False),
        ),
        (dict(cross_check=None), EnvCfg()),
        (dict(cross_check={}), EnvCfg(cross_check_interval=200)),
        (dict(cross_check=dict(interval=7)), EnvCfg(cross_check_interval=7)),
        (
            dict(
                cudnn_benchmark=True,
                mp_cfg=dict(mp_start_method='fork'),
                resource_limit=4096,
                dist_cfg=dict(backend='gloo'),
            ),
            EnvCfg('auto', 'gloo'),
        ),
    ],
)
def test_read(env_cfg: dict, want: EnvCfg) -> None:
    assert parse_env_cfg(env_cfg) == want
    assert want.timeout in (60, DEFAULT_TIMEOUT_SECONDS)


@pytest.mark.parametrize(
    'named',
    [
        {},
        dict(accelerator=None),
        *(dict(accelerator=name) for name in ('auto', 'gcu', 'gcu_t20', 'xla', 'cpu', 'sim')),
    ],
)
def test_stock_nccl_reads_as_auto_and_says_so(named: dict) -> None:
    got = parse_env_cfg(dict(cudnn_benchmark=True, dist_cfg=dict(backend='nccl'), **named))
    assert got.backend == 'auto' and "read as 'auto'" in got.note
    assert got.accelerator == (named.get('accelerator') or 'auto')


@pytest.mark.parametrize(
    'env_cfg, words',
    [
        (dict(acelerator='cpu'), "'acelerator'.*Did you mean 'accelerator'"),
        (dict(dist_cfg=dict(backand='gloo')), "dist_cfg has an unknown key 'backand'.*'backend'"),
        (
            dict(dist_cfg=dict(init_backend='deepspeed')),
            "init_backend='deepspeed': expected 'torch'",
        ),
        (dict(dist_cfg=dict(port=0)), 'port=0: expected a TCP port'),
        (dict(dist_cfg=dict(port=True)), 'port=True: expected a TCP port'),
        (dict(dist_cfg=dict(port='x')), "port='x': expected a TCP port"),
        (dict(virtual_ranks=0), 'virtual_ranks=0: expected a whole number from 1 on'),
        (dict(virtual_ranks=True), 'virtual_ranks=True: expected a whole number'),
        (dict(virtual_ranks=8.0), 'virtual_ranks=8.0: expected a whole number'),
        (dict(virtual_ranks='8'), "virtual_ranks='8': expected a whole number"),
        (dict(reduction='tree'), "reduction='tree': expected 'ordered' .* 'native' .* or None"),
        (dict(reduction=True), "reduction=True: expected 'ordered'"),
        (
            dict(float32_matmul_precision='tf32'),
            "precision='tf32': expected 'highest' .*, 'high' .*, 'medium' .*, or None",
        ),
        (dict(float32_matmul_precision=True), 'precision=True: expected'),
        (dict(float32_matmul_precision=''), "precision='': expected"),
        (dict(cudnn_allow_tf32=1), 'cudnn_allow_tf32=1: expected True .*, False .*, or None'),
        (dict(cudnn_allow_tf32='no'), "cudnn_allow_tf32='no': expected"),
        (dict(cross_check=200), r'cross_check=200: expected dict\(interval=N\)'),
        (dict(cross_check=True), r'cross_check=True: expected dict\(interval=N\)'),
        *(
            (
                dict(cross_check=dict(interval=wrong)),
                f'cross_check.interval={wrong!r}: expected a whole number of iterations from 1 on',
            )
            for wrong in (0, -1, 'x', True, 1.5, None)
        ),
        (
            dict(cross_check=dict(intervall=3)),
            "cross_check has an unknown key 'intervall'.*Did you mean 'interval'",
        ),
        (dict(zzz=1), "unknown key 'zzz': expected cudnn_benchmark"),
        (dict(use_model_parallel='auto'), "must be True, False or None, got 'auto'"),
        (dict(use_model_parallel=2), 'must be True, False or None, got 2'),
        (dict(use_model_parallel=0), 'must be True, False or None, got 0'),
        (dict(use_model_parallel=1), 'must be True, False or None, got 1'),
    ],
)
def test_refused(env_cfg: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_env_cfg(env_cfg)


class MMModelParallel:
    """Stands for the wrapper's class, which a config in MMEngine's Python style holds."""


@pytest.mark.parametrize(
    'wrapper, want',
    [
        (None, None),
        ({}, None),
        (dict(find_unused_parameters=True), None),
        (dict(type='MMDistributedDataParallel'), None),
        (dict(type=dict), None),
        (dict(type='MMModelParallel'), True),
        (dict(type='mapsage.MMModelParallel'), True),
        (dict(type=MMModelParallel), True),
    ],
)
def test_the_wrapper_can_say_it_too(wrapper: Any, want: Any) -> None:
    assert parse_env_cfg({}, wrapper).use_model_parallel is want
    assert parse_env_cfg(dict(use_model_parallel=True), wrapper).use_model_parallel is True
    if want:
        with pytest.raises(ConfigError, match='=False contradicts model_wrapper_cfg'):
            parse_env_cfg(dict(use_model_parallel=False), wrapper)
    else:
        assert parse_env_cfg(dict(use_model_parallel=False), wrapper).use_model_parallel is False
