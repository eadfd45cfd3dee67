"""tools/cache_features.py and a training on its cache: the same features, however it was made."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import time
import uuid
from pathlib import Path
from typing import Any, Dict, List, Tuple

import cv2
import frozen_config
import pytest
import torch
from forked import fork_ranks
from mmengine.config import Config
from mmengine.registry import TRANSFORMS
from support import (
    check_finished,
    launch,
    main_leg,
    on_host,
    write_tiny_config,
    write_tiny_data,
)

from mapsage.base.folder_claims import FolderClaimedError, claimed
from mapsage.engine import MapSageRunner
from mapsage.engine.env_cfg import ConfigError
from mapsage.engine.loading.data_order import SampleKey
from mapsage.extras.streaming import FeatureSourceError
from mapsage.extras.streaming import cache_features as command
from mapsage.extras.streaming import feature_caching as engine
from mapsage.extras.streaming.cache.cached import Cached
from mapsage.extras.streaming.cache.index import find_shards, read_index
from mapsage.extras.streaming.cache.keys import keys_of_run, sample_hashes
from mapsage.extras.streaming.cache.shards import CacheError, Shard, read_items
from mapsage.extras.streaming.source import Item

SHORT = """
default_hooks.update(checkpoint=dict(type='CheckpointHook', by_epoch=False, interval=100))
train_cfg.update(max_iters=8)
val_dataloader = val_cfg = val_evaluator = None
"""
FROZEN = frozen_config.FROZEN + SHORT
PLAIN = frozen_config.PLAIN + SHORT


class OwnGenerator:
    """Brightens at random, from a generator of its own."""

    def __call__(self, results: Dict[str, Any]) -> Dict[str, Any]:
        results['img'] = results['img'] + ord(os.urandom(1)) / 256
        return results


if 'OwnGenerator' not in TRANSFORMS:
    TRANSFORMS.register_module()(OwnGenerator)


@pytest.fixture
def config(tmp_path: Path, tiny_data: Path) -> Path:
    return write_tiny_config(tmp_path / 'random.py', tiny_data, FROZEN)


@pytest.fixture
def plain(tmp_path: Path, tiny_data: Path) -> Path:
    return write_tiny_config(tmp_path / 'plain.py', tiny_data, PLAIN)


def cache(path: Path, folder: Path, *options: Any, accelerator: str = 'cpu') -> Path:
    """Run the command in this process."""
    assert (
        command.main(
            [
                str(path),
                '--work-dir',
                str(path.parent / 'work'),
                '--folder',
                str(folder),
                '--accelerator',
                accelerator,
                *map(str, options),
            ]
        )
        == 0
    )
    return folder


def runner_of(path: Path, accelerator: str = 'cpu', **changes: Any) -> MapSageRunner:
    cfg = Config.fromfile(str(path))
    cfg.merge_from_dict(changes)
    cfg.experiment_name = uuid.uuid4().hex
    cfg.work_dir = str(path.parent / cfg.experiment_name)
    cfg.env_cfg.accelerator = accelerator
    return MapSageRunner.from_cfg(cfg)


def samples_of(runner: MapSageRunner) -> Any:
    return runner.train_loop.dataloader.samples


def stored(folder: Path) -> List[List[torch.Tensor]]:
    """Every item's levels, in the order of their numbers."""
    found = {}
    for entry in read_index(folder).shards:
        shard = Shard(folder / entry.file)
        for number in entry.items:
            shard.check(number)
            found[number] = list(read_items([(shard, number)]))
    return [found[number] for number in sorted(found)]


def assert_equal(one: List[List[torch.Tensor]], other: List[List[torch.Tensor]]) -> None:
    assert len(one) == len(other) > 0
    for levels, others in zip(one, other):
        assert len(levels) == len(others) == 2
        assert all(map(torch.equal, levels, others))


@pytest.mark.parametrize(
    'precision',
    [
        {},
        pytest.param(
            {'optim_wrapper.type': 'AmpOptimWrapper', 'optim_wrapper.dtype': 'bfloat16'},
            marks=main_leg,
        ),
    ],
)  # torch 1.10 has no LayerNorm of bfloat16 on the CPU
def test_what_training_reads_is_what_the_encoder_computes(
    config: Path, tmp_path: Path, precision: Dict[str, str]
) -> None:
    """On this leg's own device, for two views of an augmented dataset."""
    options = ['--cfg-options', *(f'{key}={value}' for key, value in precision.items())]
    folder = cache(
        config,
        tmp_path / 'cache',
        '--views',
        2,
        *(options if precision else ()),
        accelerator='auto',
    )
    runner = runner_of(config, 'auto', **precision)
    samples = samples_of(runner)
    runner.optim_wrapper = runner.build_optim_wrapper(runner.optim_wrapper)
    dtype = getattr(runner.optim_wrapper, 'cast_dtype', None)
    model = runner.model.train()
    device = runner.accelerator.device(0)
    source = Cached(
        str(folder),
        2,
        device,
        keys_of_run(runner.cfg, sample_hashes(samples.dataset), model.backbone, dtype),
    )
    samples.reseed = source.seed_of
    keys = []
    samples.finish = lambda index, seed, sample: keys.append((index, seed)) or sample
    views = set()
    for number, index in enumerate([3, 0, 3, 15, 3]):
        sample = samples[SampleKey(index, (7, number, 5))]
        images = model.data_preprocessor(
            dict(inputs=[sample['inputs']], data_samples=[sample['data_samples']]), True
        )['inputs']
        with torch.no_grad(), runner.accelerator.autocast(
            dtype or torch.bfloat16
        ) if dtype else torch.no_grad():
            expected = model.backbone(images)
        item = Item(number, (keys[-1],), torch.empty(1, 0, 0, 0))
        source.request(item)
        found = source.features(item)
        assert [level.device.type for level in found] == [device.type] * 2
        for level, other in zip(found, expected):
            assert level.dtype == other.dtype
            assert torch.equal(level.cpu(), other.cpu())
        views.add(keys[-1][1][-1])
    assert views == {0, 1}


def _losses(path: Path, source: Dict[str, Any]) -> Tuple[List[float], torch.Tensor]:
    runner = runner_of(path, feature_source=source)
    runner.train()
    file = Path(runner.work_dir, runner.timestamp, 'vis_data', 'scalars.json')
    lines = map(json.loads, file.read_text().splitlines())
    return [line['loss'] for line in lines], runner.model.decode_head.conv_seg.weight


@on_host
def test_a_head_trained_on_a_cache_is_the_one_trained_in_place(plain: Path, tmp_path: Path) -> None:
    folder = cache(plain, tmp_path / 'cache')
    losses, weights = _losses(plain, dict(type='Local'))
    cached, found = _losses(plain, dict(type='Cached', folder=str(folder)))
    assert len(losses) == 8
    assert losses == cached
    assert torch.equal(weights, found)


def test_a_random_pipeline_needs_views(config: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match='the image of sample 0 differs.*--views K'):
        cache(config, tmp_path / 'cache')
    assert not list((tmp_path / 'cache').glob('*.*s*'))  # no shard, no index
    assert read_index(cache(config, tmp_path / 'one', '--views', 1)).views == 1


@on_host
def test_what_the_config_says_is_the_default(config: Path, tmp_path: Path) -> None:
    folder = tmp_path / 'cache'
    config.write_text(
        config.read_text()
        + f"feature_source = dict(type='Cached', folder={str(folder)!r}, views=3)\n"
    )
    assert command.main([str(config), '--work-dir', str(tmp_path), '--accelerator', 'cpu']) == 0
    assert read_index(folder).items == 48


@on_host
@pytest.mark.parametrize(
    ('extra', 'error', 'words'),
    [
        (
            "train_pipeline.insert(1, dict(type='OwnGenerator'))\n",
            ConfigError,
            'between two loads with the same seed: a transform',
        ),
        (
            "model['backbone']['frozen'] = False\n",
            FeatureSourceError,
            r'parameter\(s\) of model.backbone .* are trained.*backbone.frozen=True',
        ),
        (
            "model['data_preprocessor']['batch_augments'] = [dict(type='BatchFixedSizePad', "
            'size=(64, 64))]\n',
            ConfigError,
            'batch_augments',
        ),
        (
            'train_dataloader = train_cfg = optim_wrapper = None\nparam_scheduler = None\n',
            ConfigError,
            'no train_dataloader',
        ),
    ],
)
def test_what_cannot_be_cached_is_refused(
    config: Path, tmp_path: Path, extra: str, error: Any, words: str
) -> None:
    config.write_text(config.read_text() + extra)
    with pytest.raises(error, match=words):
        cache(config, tmp_path / 'cache', '--views', 2)


@on_host
def test_a_config_that_changed_is_told_what_changed(plain: Path, tmp_path: Path) -> None:
    folder = cache(plain, tmp_path / 'cache')
    before = sorted((path, path.stat().st_mtime_ns) for path in folder.iterdir())
    plain.write_text(
        plain.read_text() + "train_pipeline.insert(2, dict(type='RandomFlip', prob=1.0))\n"
    )
    with pytest.raises(CacheError, match=r'transforms .* there, .* here \(config.dataset.pipeline'):
        cache(plain, folder, '--views', 1)
    changed = ['--cfg-options', 'randomness.seed=8']  # other random weights
    plain.write_text(plain.read_text().rpartition('train_pipeline.insert')[0])
    with pytest.raises(CacheError, match='weights .* there, .* here') as caught:
        cache(plain, folder, *changed)
    assert 'transforms' not in str(caught.value)
    assert before == sorted((path, path.stat().st_mtime_ns) for path in folder.iterdir())


def engine_args(path: Path, folder: Path, batch_size: int = 1, launcher: str = 'none') -> Any:
    return argparse.Namespace(
        config=str(path),
        work_dir=str(path.parent / 'work'),
        accelerator='cpu',
        cfg_options=None,
        launcher=launcher,
        local_rank=None,
        views=None,
        batch_size=batch_size,
        folder=str(folder),
    )


def _caching_until_killed(path: Path, folder: Path) -> None:
    wanted, written = engine.write_shard, []

    def two(*args: Any) -> Any:
        while len(written) == 2:  # time to be killed in
            time.sleep(1)
        written.append(wanted(*args))
        return written[-1]

    engine.write_shard = two
    engine.FeatureCaching(engine_args(path, folder), print, shard_bytes=3 * 12288).run()


def test_a_killed_run_goes_on_where_it_was(plain: Path, tmp_path: Path) -> None:
    folder = tmp_path / 'cache'
    pid = os.fork()
    if not pid:
        try:
            _caching_until_killed(plain, folder)
        finally:
            os._exit(1)
    deadline = time.monotonic() + 240
    while len(list(folder.glob('features-*.safetensors'))) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    assert os.WIFSIGNALED(os.waitpid(pid, 0)[1]), 'it ended before it was killed'
    left = {path: path.stat().st_mtime_ns for path in folder.glob('features-*.safetensors')}
    assert len(left) == 2
    (folder / 'features-000000000015.safetensors.partial-x').write_bytes(b'half')

    runner = runner_of(plain)
    keys = keys_of_run(
        runner.cfg, sample_hashes(samples_of(runner).dataset), runner.model.backbone, None
    )
    with pytest.raises(CacheError, match=f'not complete: {16 - 3 * len(left)} of 16 items'):
        Cached(str(folder), 1, torch.device('cpu'), keys)
    cache(plain, folder)
    assert left.items() <= {path: path.stat().st_mtime_ns for path in folder.iterdir()}.items()
    assert not list(folder.glob('*partial*'))
    Cached(str(folder), 1, torch.device('cpu'), keys)
    assert_equal(stored(folder), stored(cache(plain, tmp_path / 'whole')))


@on_host
def test_damaged_and_missing_shards_are_computed_again(
    plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = tmp_path / 'cache'
    engine.FeatureCaching(engine_args(plain, folder), print, shard_bytes=3 * 12288).run()
    shards = sorted(folder.glob('features-*'))
    assert len(shards) == 6
    whole = stored(folder)
    kept = shards[0].stat().st_mtime_ns
    shards[1].write_bytes(shards[1].read_bytes()[:-1])
    shards[3].unlink()
    capsys.readouterr()
    cache(plain, folder)
    said = capsys.readouterr().out
    assert f'{shards[1]} is damaged: its items are computed again' in said
    assert '10 of 16 items are there' in said and '\n6 items in' in said
    assert shards[0].stat().st_mtime_ns == kept
    assert_equal(stored(folder), whole)


@on_host
def test_two_runs_do_not_write_one_folder(plain: Path, tmp_path: Path) -> None:
    folder = tmp_path / 'cache'
    folder.mkdir()
    with claimed(folder, ['the feature cache'], ''):
        with pytest.raises(
            FolderClaimedError,
            match=(
                rf'cache is in use: process {os.getpid()} on .*, since .*, writes the feature '
                r'cache\. .* choose another --folder'
            ),
        ):
            cache(plain, folder)
    cache(plain, folder)


@on_host
def test_a_disk_too_small_is_known_before_the_work(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, 'free_bytes', lambda folder: 196607)
    with pytest.raises(CacheError, match='has 196,607 bytes free.*need about 196,608'):
        cache(plain, tmp_path / 'cache')
    assert not list((tmp_path / 'cache').glob('features*'))


def _first_batch(path: Path, folder: Path) -> Tuple[int, List[int], bool]:
    """Return how many sizes of files a rank asked for, its samples, and if their features fit."""
    cfg = Config.fromfile(str(path))
    cfg.launcher, cfg.feature_source = 'pytorch', dict(type='Cached', folder=str(folder))
    cfg.train_dataloader.num_workers, cfg.train_dataloader.persistent_workers = 0, False
    cfg.work_dir, cfg.env_cfg.accelerator = str(path.parent / 'three'), 'cpu'
    runner = MapSageRunner.from_cfg(cfg)
    loop = runner.train_loop
    runner.optim_wrapper = runner.build_optim_wrapper(runner.optim_wrapper)
    (hook,) = (hook for hook in runner.hooks if type(hook).__name__ == 'FeatureSourceHook')
    asked: List[str] = []
    size = os.path.getsize
    os.path.getsize = lambda name: asked.append(str(name)) or size(name)
    hook.before_run(runner)
    runner._init_model_weights()
    hook.before_train(runner)
    os.path.getsize = size
    next(loop.dataloader_iterator)
    hook._close_images()
    samples = loop.dataloader.samples
    (item,) = hook._items
    found = hook._source.features(item)
    for row, (index, seed) in enumerate(item.keys):
        sample = samples.load(index, seed)
        images = runner.model.module.data_preprocessor(
            dict(inputs=[sample['inputs']], data_samples=[sample['data_samples']]), True
        )['inputs']
        hook._gate.close()
        expected = hook._gate.encode(images)
        if not all(torch.equal(level[row], other[0]) for level, other in zip(found, expected)):
            return 0, [], False
    hook.after_train(runner)
    return (sum(name.endswith('.png') for name in asked), [index for index, _ in item.keys], True)


@on_host
def test_images_that_come_go_and_change_cost_their_own_features_only(
    plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    data = write_tiny_data(tmp_path / 'data')
    write_tiny_config(plain, data, PLAIN)
    folder = cache(plain, tmp_path / 'cache')
    shards = {path: path.stat().st_mtime_ns for path in folder.glob('features-*')}
    images, masks = data / 'img_dir/train', data / 'ann_dir/train'
    for kind in (images, masks):
        shutil.copy(str(kind / '3.png'), str(kind / '0new.png'))
        (kind / '5.png').unlink()
    changed = cv2.imread(str(images / '7.png'))
    cv2.imwrite(str(images / '7.png'), 255 - changed // 2)
    runner = runner_of(plain, feature_source=dict(type='Cached', folder=str(folder)))
    with pytest.raises(CacheError, match='2 of 16 items are missing'):
        runner.train()
    capsys.readouterr()
    cache(plain, folder)
    said = capsys.readouterr().out
    assert '14 of 16 items are there' in said and '2 more items are of samples that' in said
    assert '\n2 items in' in said and 'complete: 16 items' in said
    assert shards.items() <= {path: path.stat().st_mtime_ns for path in folder.iterdir()}.items()
    cache(plain, folder)  # again, with nothing to do
    assert '16 of 16 items are there' in capsys.readouterr().out
    losses, weights = _losses(plain, dict(type='Local'))
    cached, found = _losses(plain, dict(type='Cached', folder=str(folder)))
    assert len(losses) == 8 and losses == cached and torch.equal(weights, found)
    ranks = fork_ranks(_first_batch, 3, tmp_path / 'ranks', plain, folder)
    assert [sizes for sizes, _, _ in ranks] == [32, 0, 0]  # 16 images and masks, once
    assert all(fits for _, _, fits in ranks)
    assert len({index for _, indexes, _ in ranks for index in indexes}) == 6


def _rank(path: Path, folder: Path) -> List[str]:
    said: List[str] = []
    engine.FeatureCaching(
        engine_args(path, folder, launcher='pytorch'), said.append, shard_bytes=3 * 12288
    ).run()
    return said


@on_host
def test_ranks_share_what_is_missing(plain: Path, tmp_path: Path) -> None:
    folder = tmp_path / 'cache'
    engine.FeatureCaching(engine_args(plain, folder), print, shard_bytes=3 * 12288).run()
    whole = stored(folder)
    sorted(folder.glob('features-*'))[1].unlink()
    sorted(folder.glob('features-*'))[3].unlink()
    said = fork_ranks(_rank, 3, tmp_path / 'ranks', plain, folder)
    assert '10 of 16 items are there' in said[0][1] and 'on 3 rank(s)' in said[0][2]
    assert said[1:] == [[], []]
    new = {entry.file: entry.items for entry in read_index(folder).shards}
    assert [3, 4] in new.values() and [5, 12] in new.values() and [13, 14] in new.values()
    assert_equal(stored(folder), whole)
    assert find_shards(folder, read_index(folder))[1] == []


@main_leg
def test_the_script_runs_it_on_all_cards(config: Path, tmp_path: Path) -> None:
    folder = tmp_path / 'cache'
    finished = launch(
        config,
        '--folder',
        folder,
        '--views',
        2,
        '--cfg-options',
        'train_dataloader.num_workers=1',
        ranks=2,
        command=['bash', 'scripts/cache_features.sh'],
        environ={'ACCELERATOR': 'cpu', 'WORK_DIR': str(tmp_path / 'work')},
    )
    check_finished(finished)
    assert f"folder='{folder}', views=2" in finished.output
    assert_equal(stored(folder), stored(cache(config, tmp_path / 'alone', '--views', 2)))
