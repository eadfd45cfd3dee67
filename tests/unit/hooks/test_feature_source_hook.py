"""Feature sources inside a real run of one process."""
from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional

import pytest
import torch
from frozen_config import FROZEN
from mmengine.config import Config
from support import ROOT, write_tiny_config, write_tiny_data

from mapsage.accelerator import resolve_accelerator, set_current_accelerator
from mapsage.engine import MapSageRunner
from mapsage.features import FeatureSourceError

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


@pytest.mark.parametrize('source', [dict(type='Local'), PREFETCHED])
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


@pytest.mark.skipif(torch.__version__.startswith('1.'),
                    reason="torch 1.10's autocast on CPU leaves the two sides of a layer unequal")
def test_bfloat16(train: Any) -> None:
    changes = {'optim_wrapper.type': 'AmpOptimWrapper', 'optim_wrapper.dtype': 'bfloat16'}
    check_equal(train(PREFETCHED, **changes), train(None, **changes))


def test_accumulated_gradients(train: Any) -> None:
    changes = {'optim_wrapper.accumulative_counts': 2}
    check_equal(train(PREFETCHED, **changes), train(None, **changes))


SAMPLING = dict(type='DynamicSamplingHook', score=dict(type='LabelScore'), validity=dict(low=0.01))


def test_dynamic_sampling_goes_with_sources_that_do_not_work_ahead(train: Any) -> None:
    changes = dict(custom_hooks=[SAMPLING])
    check_equal(train(dict(type='Local'), **changes), train(None, **changes))
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


def test_a_cache_goes_on_with_the_pool_of_dynamic_sampling(train: Any, tmp_path: Path) -> None:
    changes = {'custom_hooks': [dict(SAMPLING, local_target=3, max_age=3)]}
    sys.path.insert(0, str(ROOT / 'tools'))
    import cache_features
    config = write_tiny_config(tmp_path / 'cache.py', tmp_path / 'data', FROZEN)
    write_tiny_data(tmp_path / 'data')
    folder = str(tmp_path / 'features')
    assert cache_features.main([str(config), '--folder', folder, '--views', '2', '--accelerator',
                                'cpu', '--work-dir', str(tmp_path / 'w')]) == 0
    changes.update({f'{split}_dataloader.dataset.data_root': str(tmp_path / 'data')
                    for split in ('train', 'val')})
    source = dict(type='Cached', folder=folder, views=2)
    whole = train(source, **changes)
    work = str(tmp_path / 'resumed')
    train(source, work_dir=work, **{'train_cfg.max_iters': 3}, **changes)
    check_equal(train(source, work_dir=work, resume=True, **changes), whole)


def test_streaming_needs_a_launcher(train: Any) -> None:
    with pytest.raises(ValueError, match='needs 1 rank.s. that encode, beside'):
        train(dict(type='Streamed', encoders=1))
