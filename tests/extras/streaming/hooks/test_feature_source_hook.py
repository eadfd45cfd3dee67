"""Feature sources inside a real run of one process."""

from __future__ import annotations

import io
import json
import logging
import sys
import time
from pathlib import Path
from typing import Any, Dict, List, Optional

import mmcv
import pytest
import torch
from frozen_config import FROZEN
from mmengine.config import Config
from mmengine.registry import TRANSFORMS
from support import write_tiny_config, write_tiny_data

from mapsage.engine import MapSageRunner
from mapsage.extras.streaming import FeatureSourceError
from mapsage.extras.streaming.cache.keys import ViewSeeds
from mapsage.extras.streaming.hooks import feature_source_hook
from mapsage.extras.streaming.hooks.image_stand_in import leave_images_out

pytestmark = pytest.mark.usefixtures('own_environment')
PREFETCHED = dict(type='Prefetched', depth=3)


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
        cfg.merge_from_dict(
            {'env_cfg.accelerator': 'cpu', 'default_hooks.checkpoint.interval': 3, **changes}
        )
        cfg.work_dir = changes.get('work_dir', str(tmp_path / f'work{number}'))
        # MMEngine shares the logged figures of runs whose name and second are the same.
        cfg.launcher, cfg.experiment_name = 'none', f'sources{time.time_ns()}'
        if source is not None:
            cfg.feature_source = source
        if Path(cfg.work_dir).exists():
            time.sleep(1.1)  # MMEngine names the folder of a run's log after the second
        runner = MapSageRunner.from_cfg(cfg)
        runner.train()
        return runner, losses_of(Path(cfg.work_dir))

    return run


def losses_of(work: Path) -> List[float]:
    lines = [
        json.loads(line)
        for path in sorted(work.glob('*/vis_data/scalars.json'))
        for line in path.read_text().splitlines()
    ]
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
    changes = {
        'train_cfg': dict(type='EpochBasedTrainLoop', max_epochs=2),
        'train_dataloader.sampler.type': 'DefaultSampler',
        'log_processor.by_epoch': True,
        'default_hooks.checkpoint.by_epoch': True,
    }
    run = train(PREFETCHED, **changes)
    check_equal(run, train(None, **changes))
    assert len(run[1]) == 16


def test_resumed_inside_an_epoch(train: Any, tmp_path: Path) -> None:
    changes = {
        'train_cfg': dict(type='EpochBasedTrainLoop', max_epochs=2),
        'train_dataloader.sampler.type': 'DefaultSampler',
        'val_dataloader': None,
        'val_cfg': None,
        'val_evaluator': None,
        'default_hooks.checkpoint.interval': 11,
    }
    whole, losses = train(PREFETCHED, work_dir=str(tmp_path / 'whole'), **changes)
    rest = train(
        PREFETCHED, resume=True, load_from=str(tmp_path / 'whole' / 'iter_11.pth'), **changes
    )
    check_equal(rest, (whole, losses[11:]))


def test_resumed(train: Any, tmp_path: Path) -> None:
    work = str(tmp_path / 'resumed')
    train(PREFETCHED, work_dir=work, **{'train_cfg.max_iters': 3})
    check_equal(train(PREFETCHED, work_dir=work, resume=True), train(None))


@pytest.mark.skipif(
    torch.__version__.startswith('1.'),
    reason="torch 1.10's autocast on CPU leaves the two sides of a layer unequal",
)
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


@pytest.mark.parametrize(
    'source, changes, words',
    [
        (
            PREFETCHED,
            {'model.backbone.frozen': False},
            r'parameter\(s\) of model.backbone .DINOv3ViT.',
        ),
        (
            PREFETCHED,
            {'model.backbone.frozen': False, 'model.backbone.frozen_stages': 1},
            'parameter.*trained',
        ),
        (dict(type='Prefetch'), {}, "type='Prefetch'.*Did you mean 'Prefetched'"),
        (dict(depth=2), {}, 'type=None, expected one of'),
        (dict(type='Prefetched', dept=2), {}, "no setting 'dept'.*Did you mean 'depth'"),
        (dict(type='Prefetched', depth=0), {}, 'depth=0, expected'),
        (dict(type='Cached'), {}, 'needs folder'),
    ],
)
def test_what_cannot_work_is_said_before_the_first_step(
    source: Any, changes: Dict[str, Any], words: str, train: Any
) -> None:
    with pytest.raises(FeatureSourceError, match=words):
        train(source, **changes)


@pytest.fixture
def cached(tmp_path: Path) -> Dict[str, Any]:
    """Return the changes of a config whose training samples have a cache of two views."""
    from mapsage.extras.streaming import cache_features

    config = write_tiny_config(tmp_path / 'cache.py', tmp_path / 'data', FROZEN)
    write_tiny_data(tmp_path / 'data')
    assert (
        cache_features.main(
            [
                str(config),
                '--folder',
                str(tmp_path / 'features'),
                '--views',
                '2',
                '--accelerator',
                'cpu',
                '--work-dir',
                str(tmp_path / 'w'),
            ]
        )
        == 0
    )
    return {
        f'{split}_dataloader.dataset.data_root': str(tmp_path / 'data')
        for split in ('train', 'val')
    }


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> List[str]:
    """Return a list that gets the flag of each image or mask that is decoded."""
    flags: List[str] = []
    decode = mmcv.imfrombytes

    def counted(content: bytes, flag: str = 'color', **settings: Any) -> Any:
        flags.append(flag)
        return decode(content, flag=flag, **settings)

    monkeypatch.setattr(mmcv, 'imfrombytes', counted)
    return flags


EPOCHS = {
    'train_cfg': dict(type='EpochBasedTrainLoop', max_epochs=2, val_interval=5),
    'train_dataloader.sampler.type': 'DefaultSampler',
    'log_processor.by_epoch': True,
    'default_hooks.checkpoint.by_epoch': True,
}


@pytest.mark.parametrize('loop', [{'train_cfg.val_interval': 100}, EPOCHS], ids=['iters', 'epochs'])
def test_a_training_on_a_cache_decodes_masks_only(
    loop: Any, train: Any, tmp_path: Path, cached: Any, decoded: List[str]
) -> None:
    source = dict(type='Cached', folder=str(tmp_path / 'features'), views=2)
    changes = {
        **cached,
        **loop,
        'train_dataloader.num_workers': 0,
        'train_dataloader.persistent_workers': False,
    }
    whole = train(dict(source, load_images=True), **changes)
    count = len(decoded)
    assert decoded.count('color') >= len(whole[1]) + 4
    del decoded[:]
    check_equal(train(source, **changes), whole)
    # Four are decoded to see that their masks do not depend on the image, and four are validated.
    assert decoded.count('color') == 4 + 4 and len(decoded) > count // 2


def test_a_transform_that_looks_at_the_image_gets_it(
    train: Any, tmp_path: Path, cached: Any, decoded: List[str]
) -> None:
    looks = [
        dict(type='LoadImageFromFile'),
        dict(type='LoadAnnotations'),
        dict(type='MaskDark'),
        dict(type='PackSegInputs'),
    ]
    if 'MaskDark' not in TRANSFORMS:
        TRANSFORMS.register_module()(MaskDark)
    samples = MapSageRunner.build_dataloader(
        dict(
            batch_size=1,
            num_workers=0,
            sampler=dict(type='DefaultSampler', shuffle=False),
            dataset=dict(
                type='LoveDADataset',
                data_root=str(tmp_path / 'data'),
                pipeline=looks,
                data_prefix=dict(img_path='img_dir/train', seg_map_path='ann_dir/train'),
            ),
        )
    ).samples
    before = list(samples.dataset.pipeline.transforms)
    assert leave_images_out(samples, ViewSeeds(0, 1)) is None
    assert samples.dataset.pipeline.transforms == before
    del samples.dataset.pipeline.transforms[2]
    restore = leave_images_out(samples, ViewSeeds(0, 1))
    assert restore is not None and not samples[0]['inputs'].any()
    restore()
    assert samples[0]['inputs'].any() and samples.dataset.pipeline.transforms[0] is before[0]


class MaskDark:
    """Ignores what is dark in the image."""

    def __call__(self, results: Dict[str, Any]) -> Dict[str, Any]:
        results['gt_seg_map'][results['img'].sum(-1) < 200] = 255
        return results


def test_a_cache_goes_on_with_the_pool_of_dynamic_sampling(
    train: Any, tmp_path: Path, cached: Any
) -> None:
    changes = {'custom_hooks': [dict(SAMPLING, local_target=3, max_age=3)], **cached}
    folder = str(tmp_path / 'features')
    source = dict(type='Cached', folder=folder, views=2)
    whole = train(source, **changes)
    work = str(tmp_path / 'resumed')
    train(source, work_dir=work, **{'train_cfg.max_iters': 3}, **changes)
    check_equal(train(source, work_dir=work, resume=True, **changes), whole)


def test_streaming_needs_a_launcher(train: Any) -> None:
    with pytest.raises(ValueError, match='needs 1 rank.s. that encode, in addition'):
        train(dict(type='Streamed', encoders=1))


class FullDisk(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(28, 'No space left on device')


@pytest.mark.parametrize('stream', [FullDisk(), io.StringIO()], ids=['full', 'closed'])
def test_a_warning_that_cannot_be_written_is_no_error(
    stream: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    if type(stream) is io.StringIO:
        stream.close()
    monkeypatch.setattr(feature_source_hook, 'get_rank', lambda: 1)
    monkeypatch.setattr(sys, 'stderr', stream)
    feature_source_hook.log_on_any_rank(logging.WARNING, 'an encoder is lost')
