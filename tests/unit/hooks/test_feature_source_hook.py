"""Feature sources inside a real run of one process."""
from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional

import pytest
import torch
from frozen_config import FROZEN
from mmengine.config import Config
from support import write_tiny_config
from torch import nn

from mapsage.accelerator import resolve_accelerator, set_current_accelerator
from mapsage.engine import MapSageRunner
from mapsage.hooks import FeatureSourceError
from mapsage.hooks.encoder_gate import check_frozen

PREFETCHED = dict(type='Prefetched', depth=3)


@pytest.fixture(autouse=True)
def _own_environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
    set_current_accelerator(resolve_accelerator('cpu'))


@pytest.fixture
def train(tiny_data: Path, tmp_path: Path) -> Any:
    """Return a function that trains six steps with a source and returns runner and losses."""
    count = iter(range(100))

    def run(source: Optional[Dict[str, Any]], **changes: Any) -> Any:
        number = next(count)
        cfg = Config.fromfile(str(write_tiny_config(tmp_path / f'{number}.py', tiny_data, FROZEN)))
        if 'train_cfg' in changes:
            cfg.train_cfg = changes.pop('train_cfg')
        else:
            changes = {'train_cfg.max_iters': 6, 'train_cfg.val_interval': 3, **changes}
        cfg.merge_from_dict({'env_cfg.accelerator': 'cpu', 'default_hooks.checkpoint.interval': 3,
                             **changes})
        cfg.work_dir = changes.get('work_dir', str(tmp_path / f'work{number}'))
        cfg.launcher, cfg.experiment_name = 'none', f'sources{number}'
        if source is not None:
            cfg.feature_source = source
        runner = MapSageRunner.from_cfg(cfg)
        runner.train()
        return runner, losses_of(Path(cfg.work_dir))

    return run


def losses_of(work: Path) -> List[float]:
    lines = [json.loads(line) for path in sorted(work.glob('*/vis_data/scalars.json'))
             for line in path.read_text().splitlines()]
    return [line['loss'] for line in lines if 'loss' in line]


def check_equal(run: Any, other: Any) -> None:
    assert run[1] == other[1]
    weights, others = run[0].model.state_dict(), other[0].model.state_dict()
    assert list(weights) == list(others)
    assert all(torch.equal(weights[name], others[name]) for name in weights)


@pytest.mark.parametrize('source', [dict(type='InPlace'), PREFETCHED])
def test_the_head_is_the_one_of_a_run_without_a_source(source: Any, train: Any) -> None:
    run = train(source)
    check_equal(run, train(None))
    assert len(run[1]) == 6
    assert 'forward' not in run[0].model.backbone.__dict__  # the encoder is itself again


def test_epochs(train: Any) -> None:
    changes = {'train_cfg': dict(type='EpochBasedTrainLoop', max_epochs=2),
               'train_dataloader.sampler.type': 'DefaultSampler', 'log_processor.by_epoch': True,
               'default_hooks.checkpoint.by_epoch': True}
    run = train(PREFETCHED, **changes)
    check_equal(run, train(None, **changes))
    assert len(run[1]) == 16


def test_resumed(train: Any, tmp_path: Path) -> None:
    work = str(tmp_path / 'resumed')
    train(PREFETCHED, work_dir=work, **{'train_cfg.max_iters': 3})
    check_equal(train(PREFETCHED, work_dir=work, resume=True), train(None))


def test_bfloat16(train: Any) -> None:
    changes = {'optim_wrapper.type': 'AmpOptimWrapper', 'optim_wrapper.dtype': 'bfloat16'}
    check_equal(train(PREFETCHED, **changes), train(None, **changes))


def test_accumulated_gradients(train: Any) -> None:
    changes = {'optim_wrapper.accumulative_counts': 2}
    check_equal(train(PREFETCHED, **changes), train(None, **changes))


SAMPLING = dict(type='DynamicSamplingHook', score=dict(type='LabelScore'), validity=dict(low=0.01))


def test_dynamic_sampling_goes_with_sources_that_do_not_work_ahead(train: Any) -> None:
    changes = dict(custom_hooks=[SAMPLING])
    check_equal(train(dict(type='InPlace'), **changes), train(None, **changes))
    with pytest.raises(FeatureSourceError, match="'Prefetched' works ahead of the step"):
        train(PREFETCHED, **changes)


@pytest.mark.parametrize('source, changes, words', [
    (PREFETCHED, {'model.backbone.frozen': False}, r'parameter\(s\) of model.backbone .DINOv3ViT.'),
    (PREFETCHED, {'model.backbone.frozen': False, 'model.backbone.frozen_stages': 1},
     'parameter.*trained'),
    (dict(type='Prefetch'), {}, "type='Prefetch'.*Did you mean 'Prefetched'"),
    (dict(depth=2), {}, 'type=None, expected one of'),
    (dict(type='Prefetched', dept=2), {}, "no setting 'dept'.*Did you mean 'depth'"),
    (dict(type='Prefetched', depth=0), {}, 'depth=0, expected'),
    (dict(type='Cached'), {}, 'needs folder'),
])
def test_what_cannot_work_is_said_before_the_first_step(
        source: Any, changes: Dict[str, Any], words: str, train: Any) -> None:
    with pytest.raises(FeatureSourceError, match=words):
        train(source, **changes)


@pytest.mark.parametrize('layer, refused', [
    (nn.BatchNorm2d(3), True), (nn.Dropout(0.1), True), (nn.Dropout2d(0.1), True),
    (nn.Dropout(0.), False), (nn.GroupNorm(1, 3), False)])
def test_an_encoder_that_is_not_the_same_in_every_step_is_refused(layer: nn.Module,
                                                                  refused: bool) -> None:
    encoder = nn.Sequential(nn.Conv2d(3, 3, 1), layer).requires_grad_(False)
    if not refused:
        check_frozen(encoder)
        return
    with pytest.raises(FeatureSourceError, match=f'1 .{type(layer).__name__}. of model.backbone'):
        check_frozen(encoder)


def test_streaming_needs_a_launcher(train: Any) -> None:
    with pytest.raises(ValueError, match='needs 1 rank.s. that encode beside'):
        train(dict(type='Streamed', encoders=1))
