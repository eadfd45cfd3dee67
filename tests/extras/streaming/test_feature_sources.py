"""Heads trained on features from every source, under the launcher: the same head."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

import pytest
import torch
from frozen_config import FROZEN, PLAIN
from support import (
    ON_MAIN_LEG,
    REAL_DATA,
    ROOT,
    Launch,
    check_finished,
    launch,
    main_leg,
    on_host,
)
from support import write_tiny_config as write_config

from mapsage.extras.demo import DemoParams, write_demo_data

ON_XLA_LEG = importlib.util.find_spec('torch_xla') is not None
LOAD: Dict[str, Any] = dict(map_location='cpu')
if ON_MAIN_LEG or ON_XLA_LEG:
    LOAD['weights_only'] = False
Run = Tuple[List[float], Dict[str, torch.Tensor]]


def train(
    config: Path,
    work: Path,
    source: Optional[Dict[str, Any]],
    *options: str,
    heads: int = 2,
    accelerator: str = 'cpu',
    steps: int = 10,
) -> Run:
    """Return losses and weights of a run on ``heads`` ranks, and encoders where there are any."""
    text = config.read_text()
    variant = config.with_name(f'{work.name}.py')
    variant.write_text(text + (f'feature_source = {source!r}\n' if source else ''))
    check_finished(
        launch(
            variant,
            '--work-dir',
            work,
            *options,
            environ={'ACCELERATOR': accelerator},
            ranks=heads + (source or {}).get('encoders', 0),
        )
    )
    return read(work, steps)


def read(work: Path, steps: int = 10) -> Run:
    lines = [
        line
        for path in sorted(work.glob('*/vis_data/scalars.json'))
        for line in path.read_text().splitlines()
    ]
    losses = [line['loss'] for line in map(json.loads, lines) if 'loss' in line]
    assert len(losses) == steps
    return losses, torch.load(str(work / f'iter_{steps}.pth'), **LOAD)['state_dict']


def check_equal(run: Run, other: Run) -> None:
    assert run[0] == other[0]
    assert list(run[1]) == list(other[1])
    assert all(torch.equal(run[1][name], other[1][name]) for name in run[1])


@pytest.fixture(scope='module')
def plain(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp('sources') / 'plain.py', tiny_data, PLAIN)


@pytest.fixture(scope='module')
def local(plain: Path) -> Run:
    """Two ranks, without any source."""
    return train(plain, plain.parent / 'local', None)


@on_host
@pytest.mark.parametrize(
    'source',
    [dict(type='Local'), dict(type='Prefetched', depth=3), dict(type='Streamed', encoders=1)],
    ids=lambda source: source['type'],
)
def test_every_source_gives_the_same_head(source: Dict[str, Any], plain: Path, local: Run) -> None:
    check_equal(train(plain, plain.parent / source['type'], source), local)


@on_host
def test_a_cache_gives_the_same_head(plain: Path, local: Run) -> None:
    folder = plain.parent / 'features'
    check_finished(
        launch(
            command=[
                sys.executable,
                'tools/cache_features.py',
                str(plain),
                '--folder',
                str(folder),
                '--accelerator',
                'cpu',
            ]
        )
    )
    check_equal(
        train(plain, plain.parent / 'cached', dict(type='Cached', folder=str(folder))), local
    )


DEMO = """
_base_ = {config!r}
plain = [dict(type='LoadImageFromFile'), dict(type='LoadAnnotations'), dict(type='PackSegInputs')]
train_dataloader = dict(dataset=dict(data_root={data!r}, pipeline=plain))
"""
NWPU = """
_base_ = {config!r}
plain = [dict(type='LoadImageFromFile'), dict(type='LoadPolygonAnnotations'),
         dict(type='Resize', scale=(256, 256), keep_ratio=False), dict(type='PackSegInputs')]
train_dataloader = dict(num_workers=0, persistent_workers=False,
                        dataset=dict(data_root={data!r}, pipeline=plain))
model = dict(backbone=dict(frozen=True))
optim_wrapper = dict(_delete_=True, type='OptimWrapper', optimizer=dict(type='SGD', lr=0.01))
"""
SHORT = """
val_dataloader = val_cfg = val_evaluator = None
train_cfg = dict(max_iters=4, val_interval=4)
default_hooks = dict(logger=dict(interval=1), checkpoint=dict(interval=4, save_best=None))
visualizer = dict(vis_backends=[dict(type='LocalVisBackend')])
"""


@main_leg
@pytest.mark.parametrize(
    'text, config, data',
    [
        (DEMO, 'demo/vit_tiny_frozen_demo.py', None),
        pytest.param(
            NWPU,
            'dinov3/vit_tiny_nwpu.py',
            REAL_DATA / 'nwpu_polygons',
            marks=pytest.mark.long,
        ),
    ],
    ids=['demo', 'nwpu'],
)
def test_demo_and_nwpu_train_alike_from_every_source(
    text: str, config: str, data: Optional[Path], tmp_path: Path
) -> None:
    if data is None:
        data = tmp_path / 'demo'
        write_demo_data(data, DemoParams(train_scenes=1, val_scenes=1, scene_size=512))
    elif not data.is_dir():
        pytest.skip(f'{data} is not here')
    path = tmp_path / 'short.py'
    path.write_text(text.format(config=str(ROOT / 'configs' / config), data=str(data)) + SHORT)
    expected = train(path, tmp_path / 'local', None, heads=1, steps=4)
    folder = str(tmp_path / 'features')
    check_finished(
        launch(
            command=[
                sys.executable,
                'tools/cache_features.py',
                str(path),
                '--folder',
                folder,
                '--accelerator',
                'cpu',
            ]
        )
    )
    for source in (
        dict(type='Cached', folder=folder),
        dict(type='Prefetched'),
        dict(type='Streamed', encoders=1),
    ):
        check_equal(train(path, tmp_path / str(source['type']), source, heads=1, steps=4), expected)


@main_leg
def test_two_encoders_serve_a_random_pipeline_and_a_resumed_head(
    tiny_data: Path, tmp_path: Path
) -> None:
    config = write_config(tmp_path / 'random.py', tiny_data, FROZEN)
    workers = ['--cfg-options', 'train_dataloader.num_workers=1']
    expected = train(config, tmp_path / 'alone', None, *workers, heads=1)
    source = dict(type='Streamed', encoders=2, ahead=3)
    work = tmp_path / 'streamed'
    variant = config.with_name('first.py')
    variant.write_text(config.read_text() + f'feature_source = {source!r}\n')
    check_finished(launch(variant, '--work-dir', work, *workers, 'train_cfg.max_iters=5', ranks=3))
    check_equal(train(config, work, source, '--resume', *workers, heads=1), expected)


# What a simulated card computes is what the CPU does.
@main_leg
@pytest.mark.parametrize('heads, encoders', [('cpu', 'sim'), ('sim', 'cpu')])
def test_encoders_and_heads_on_other_devices(
    heads: str, encoders: str, plain: Path, local: Run
) -> None:
    losses, weights = train(
        plain,
        plain.parent / f'{encoders}_to_{heads}',
        dict(type='Streamed', encoders=1, accelerator=encoders),
        accelerator=heads,
    )
    assert losses == pytest.approx(local[0], rel=1e-5)
    for name, weight in weights.items():
        assert torch.allclose(weight, local[1][name], rtol=1e-4, atol=1e-5), name


@pytest.mark.skipif(not ON_XLA_LEG, reason='torch_xla is not installed: the xla leg runs this')
@pytest.mark.timeout(900)  # three launches, which compile their steps
def test_heads_on_xla_devices(plain: Path) -> None:
    def on_xla(source: Optional[Dict[str, Any]]) -> Run:
        name = 'xla' if source is None else f'xla_{source["type"]}'
        return train(plain, plain.parent / name, source, accelerator='xla')

    expected = on_xla(None)
    check_equal(on_xla(dict(type='Prefetched')), expected)
    losses, _ = on_xla(dict(type='Streamed', encoders=1, accelerator='cpu'))
    assert losses == pytest.approx(expected[0], rel=1e-5)


@on_host
@pytest.mark.parametrize(
    'ranks, source, words',
    [
        (2, dict(type='Streamed', encoders=2), ['RoleError', 'encoders=2 of 2 rank(s)', '3']),
        (
            2,
            dict(type='Streamed', encoders=1, pool_bytes=1000, block_bytes=1000),
            ['StreamingError', '24576 bytes', 'raise pool_bytes'],
        ),
        (2, dict(type='Streamed', encoders=1, ahead=-1), ['ahead=-1, expected']),
        (2, dict(type='Prefetched', deep=3), ["no setting 'deep'", "'depth'"]),
    ],
)
def test_a_source_that_cannot_work(
    ranks: int, source: Dict[str, Any], words: List[str], plain: Path, tmp_path: Path
) -> None:
    config = tmp_path / 'wrong.py'
    config.write_text(plain.read_text() + f'feature_source = {source!r}\n')
    finished = launch(config, '--work-dir', tmp_path / 'work', ranks=ranks)
    assert finished.status != 0 and finished.left_running == []
    for word in words:
        assert word in finished.final_error, finished.output[-4000:]


@main_leg
def test_a_killed_encoder_ends_the_job_by_name(plain: Path, tmp_path: Path) -> None:
    config = tmp_path / 'long.py'
    config.write_text(plain.read_text() + 'train_cfg.update(max_iters=100000)\n')
    run = Launch(config, '--work-dir', tmp_path / 'work', ranks=3, environ={'ENCODERS': '1'})
    run.wait_for(tmp_path / 'work' / 'iter_5.pth')
    os.kill(run.ranks()[-1], signal.SIGKILL)  # started last: rank 2
    finished = run.finish()
    assert finished.status != 0 and finished.left_running == []
    assert 'rank 2 failed first' in finished.final_error
    assert 'killed by SIGKILL' in finished.final_error
