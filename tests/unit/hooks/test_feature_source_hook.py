"""Feature sources inside a real run of one process."""
from __future__ import annotations

import copy
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional

import pytest
import torch
from frozen_config import FROZEN
from mmengine.config import Config
from support import ROOT, write_tiny_config, write_tiny_data
from torch import nn

from mapsage.accelerator import resolve_accelerator, set_current_accelerator
from mapsage.engine import MapSageRunner
from mapsage.features import FeatureSourceError, Item, Prefetched, StreamingError
from mapsage.features.encoder_gate import EncoderGate, check_frozen

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


@pytest.mark.parametrize('layer, refused', [
    (nn.BatchNorm2d(3), True), (nn.Dropout(0.1), True), (nn.Dropout2d(0.1), True),
    (nn.MultiheadAttention(3, 1, dropout=0.1), True), (nn.MultiheadAttention(3, 1), False),
    (nn.Dropout(0.), False), (nn.GroupNorm(1, 3), False)])
def test_an_encoder_that_is_not_the_same_in_every_step_is_refused(layer: nn.Module,
                                                                  refused: bool) -> None:
    encoder = nn.Sequential(nn.Conv2d(3, 3, 1), layer).requires_grad_(False)
    if not refused:
        check_frozen(encoder)
        return
    with pytest.raises(FeatureSourceError, match=f'1 .{type(layer).__name__}. of model.backbone'):
        check_frozen(encoder)


class Levels(nn.Module):
    """An encoder with statistics that its own ``train`` lets train for a moment, as ResNet's."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3).requires_grad_(False)

    def train(self, mode: bool = True) -> Levels:
        super().train(mode)
        time.sleep(0.001)  # long enough for another thread
        self.norm.eval()
        return self

    def forward(self, images: torch.Tensor) -> Any:
        return [self.norm(images)]


def test_a_model_that_is_put_into_training_leaves_the_encoder_alone() -> None:
    encoder = Levels().eval()
    model = nn.Sequential(encoder)
    gate = EncoderGate(encoder)
    images = torch.arange(24.).view(2, 3, 2, 2)
    expected, before = encoder(images)[0], copy.deepcopy(encoder.state_dict())
    source = Prefetched(gate.encode, depth=8)
    for number in range(200):
        source.request(Item(number, (), images))
        model.train()
        assert torch.equal(source.features(Item(number, (), images))[0], expected)
    source.close()
    assert all(torch.equal(value, before[name]) for name, value in encoder.state_dict().items())
    gate.remove()
    assert not {'forward', 'train'} & set(encoder.__dict__)


def test_features_go_with_one_call_and_its_images() -> None:
    encoder = Levels()
    gate = EncoderGate(encoder)
    images = torch.ones(2, 3, 4, 4)
    gate.open(lambda: (images * 2,), images.shape)
    assert torch.equal(encoder(images)[0], images * 2) and encoder(images)
    with pytest.raises(StreamingError, match='a second time in a step, with other images'):
        encoder(torch.ones(2, 3, 8, 8))
    gate.open(lambda: (images * 2,), images.shape)
    with pytest.raises(StreamingError, match=r'images \(2, 3, 8, 8\)'):
        encoder(torch.ones(2, 3, 8, 8))
    gate.close()
    assert len(encoder(torch.ones(1, 3, 2, 2))[0]) == 1


@pytest.mark.parametrize('answer', [
    dict(a=torch.ones(1, 1, 1, 1)), torch.ones(1, 1, 1, 1), (), None])
def test_a_backbone_that_gives_no_levels_is_refused(answer: Any) -> None:
    encoder = nn.Identity()
    encoder.forward = lambda images: answer  # type: ignore[method-assign]
    with pytest.raises(FeatureSourceError, match='returns a tuple of .N, C, H, W. tensors'):
        EncoderGate(encoder).encode(torch.ones(1, 3, 2, 2))


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
