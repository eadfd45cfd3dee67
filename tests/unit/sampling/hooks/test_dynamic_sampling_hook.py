"""Dynamic sampling inside a real run of one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict, List, Sequence, Tuple

import cv2
import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.optim import OptimWrapperDict
from mmengine.registry import MODELS, TASK_UTILS
from support import write_tiny_config
from torch.nn import functional
from toy_runs import ToyRegression, log_of, toy_runner, toy_train

from mapsage.engine import MapSageRunner
from mapsage.evaluation import reward_variance
from mapsage.sampling import ShortfallError
from mapsage.sampling.hooks import DynamicSamplingHook, LoaderError, ModelScore
from mapsage.sampling.hooks.sample_weights import PixelWeights, check_asked, weigh_heads
from mapsage.sampling.hooks.sampling_report import TileGallery

pytestmark = pytest.mark.usefixtures('own_environment')
LOAD: dict = {'weights_only': False} if torch.__version__ >= '2' else {}

# Of the 16 tiny tiles these show one class.
DULL = {'0.png', '7.png', '14.png'}
LABELS = dict(type='DynamicSamplingHook', score=dict(type='LabelScore'), validity=dict(low=0.01))


class Recorder(Hook):
    """Keeps the file names of every training batch."""

    def __init__(self) -> None:
        self.batches: List[List[str]] = []
        self.rates: List[float] = []

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        self.batches.append([Path(s.img_path).name for s in data_batch['data_samples']])
        self.rates.append(runner.optim_wrapper.get_lr()['lr'][0])


@pytest.fixture
def train(tiny_data: Path, tmp_path: Path) -> Any:
    """Return a function that trains the tiny config with changes and returns runner and record."""
    count = iter(range(100))

    def run(hook: Any = None, **changes: Any) -> Any:
        number = next(count)
        cfg = Config.fromfile(str(write_tiny_config(tmp_path / f'{number}.py', tiny_data)))
        changes.setdefault('train_cfg', dict(type='IterBasedTrainLoop', max_iters=6))
        cfg.merge_from_dict(
            {
                'env_cfg.accelerator': 'cpu',
                'val_dataloader': None,
                'val_cfg': None,
                'val_evaluator': None,
                'default_hooks.checkpoint.interval': 3,
                'work_dir': str(tmp_path / f'work{number}'),
                'launcher': 'none',
                'experiment_name': f'{tmp_path.name}{number}',
            }
        )
        train_cfg = changes.pop('train_cfg')
        cfg.train_cfg = train_cfg
        cfg.merge_from_dict(changes)
        recorder = Recorder()
        runner = MapSageRunner.from_cfg(cfg)
        runner.register_hook(recorder, 'VERY_LOW')
        if hook is not None:
            runner.register_hook(
                hook
                if isinstance(hook, Hook)
                else DynamicSamplingHook(**{k: v for k, v in hook.items() if k != 'type'})
            )
        runner.train()
        return runner, recorder

    return run


def weights(runner: Any) -> Dict[str, torch.Tensor]:
    return runner.model.state_dict()


def same(one: Dict[str, torch.Tensor], other: Dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())


def rows(runner: Any) -> List[dict]:
    path = Path(runner.work_dir) / 'dynamic_sampling' / 'steps.jsonl'
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_no_dull_tile_is_trained_on_and_one_step_is_one_iteration(train: Any) -> None:
    without, plain = train()
    runner, record = train(LABELS)
    assert DULL & {name for batch in plain.batches for name in batch}
    assert [len(batch) for batch in record.batches] == [2] * 6
    assert not DULL & {name for batch in record.batches for name in batch}
    assert runner.iter == 6 and record.rates == plain.rates
    told = rows(runner)
    assert [row['iter'] for row in told] == list(range(1, 7))
    assert sum(row['used'] for row in told) == 12
    assert sum(row['fetched'] for row in told) == (
        12 + sum(sum(row['dropped'].values()) for row in told) + told[-1]['surplus']
    )
    assert sum(row['dropped'].get('too_low', 0) for row in told) > 0


def test_where_all_tiles_are_valid_the_run_is_the_one_without(train: Any) -> None:
    without, _ = train()
    runner, _ = train(dict(LABELS, validity=dict(low=-1.0)))
    assert same(weights(without), weights(runner))


def test_what_it_leaves_for_the_plot(train: Any) -> None:
    runner, record = train(LABELS)
    with np.load(str(Path(runner.work_dir) / 'dynamic_sampling' / 'tiles.npz')) as tiles:
        assert len(tiles['kept_images']) == 6
        assert set(tiles['dropped_reasons'].tolist()) == {'too_low'}
        assert len(tiles['classes']) == len(tiles['palette']) == 7
        # small tiles are shown as they are, in RGB
        root = Path(runner.train_dataloader.dataset.data_prefix['img_path'])
        labels = tiles['dropped_labels'][0][16:80, 16:80]
        assert len(np.unique(labels)) == 1
        assert tiles['dropped_scores'][0] == 0
        masks = [
            cv2.imread(str(root.parents[1] / 'ann_dir' / 'train' / name), 0) - 1 for name in DULL
        ]
        assert any((labels == mask).all() for mask in masks)
    scalars = runner.message_hub.log_scalars
    assert 'dynamic_sampling/pass_rate' in scalars and 'dynamic_sampling/dropped/too_low' in scalars
    written = list(Path(runner.work_dir).glob('*/vis_data/scalars.json'))[0].read_text()
    assert 'dynamic_sampling/pass_rate' in written


EPOCHS = dict(type='EpochBasedTrainLoop', max_epochs=3)
DEFAULT = {
    'train_dataloader.sampler': dict(type='DefaultSampler', shuffle=True),
    'default_hooks.sampler_seed': dict(type='DistSamplerSeedHook'),
}


def test_an_epoch_has_as_many_steps_as_the_loader_has_batches(train: Any) -> None:
    runner, record = train(LABELS, train_cfg=EPOCHS, **DEFAULT)
    assert (runner.epoch, runner.iter, len(record.batches)) == (3, 24, 24)
    used = [name for batch in record.batches for name in batch]
    assert not DULL & set(used)
    # refills read on where they are: one pass over the 13 other tiles follows another
    assert len(set(used[:13])) == 13
    drawn = runner.hooks[[type(h) for h in runner.hooks].index(DynamicSamplingHook)]._step.drawn
    assert drawn[0] > 24 * len(record.batches[0])


@pytest.mark.parametrize('score', [dict(type='LabelScore'), dict(type='ModelScore')])
def test_an_epoch_based_run_resumes_exactly(score: dict, train: Any, tmp_path: Path) -> None:
    hook = dict(score=score, validity=dict(low=0.01 if score['type'] == 'LabelScore' else 1.8))
    whole, _ = train(
        hook,
        train_cfg=EPOCHS,
        **DEFAULT,
        **{'default_hooks.checkpoint.by_epoch': True, 'default_hooks.checkpoint.interval': 1},
    )
    cut = Path(whole.work_dir) / 'epoch_2.pth'
    rest, record = train(hook, train_cfg=EPOCHS, **DEFAULT, load_from=str(cut), resume=True)
    assert len(record.batches) == 8
    assert same(weights(whole), weights(rest))


def test_an_epoch_based_run_resumes_inside_an_epoch(train: Any) -> None:
    inside = {'default_hooks.checkpoint.by_epoch': False, 'default_hooks.checkpoint.interval': 13}
    whole, seen = train(LABELS, train_cfg=EPOCHS, **DEFAULT, **inside)
    cut = Path(whole.work_dir) / 'iter_13.pth'
    rest, left = train(LABELS, train_cfg=EPOCHS, **DEFAULT, load_from=str(cut), resume=True)
    assert left.batches == seen.batches[13:] and (rest.epoch, rest.iter) == (3, 24)
    assert same(weights(whole), weights(rest))


def test_a_checkpoint_without_dynamic_sampling_can_be_resumed_with_it(train: Any) -> None:
    plain, before = train()
    cut = Path(plain.work_dir) / 'iter_3.pth'
    runner, record = train(LABELS, load_from=str(cut), resume=True)
    assert len(record.batches) == 3
    # after the three batches that were seen
    fresh = [name for batch in before.batches[3:] for name in batch if name not in DULL]
    used = [name for batch in record.batches for name in batch]
    assert used[: len(fresh)] == fresh[: len(used)]


def test_sampling_ahead_changes_nothing(train: Any) -> None:
    workers = {'train_dataloader.num_workers': 2, 'train_dataloader.persistent_workers': True}
    one, _ = train(LABELS, **workers)
    ahead, _ = train(dict(LABELS, prefetch=True), **workers)
    assert same(weights(one), weights(ahead))


def test_sampling_ahead_goes_on_when_the_loader_starts_anew(train: Any) -> None:
    # Workers that are started in the background at each of three passes over the tiles.
    runner, record = train(
        dict(LABELS, prefetch=True),
        train_cfg=EPOCHS,
        **DEFAULT,
        **{'train_dataloader.num_workers': 1},
    )
    assert runner.iter == 24 and all(len(batch) == 2 for batch in record.batches)


class Failing:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, samples: Sequence[Any]) -> List[float]:
        self.calls += 1
        if self.calls == 3:
            raise ZeroDivisionError('no pixels')
        return [1.0] * len(samples)


def test_an_error_in_the_background_is_raised_in_the_loop(train: Any) -> None:
    with pytest.raises(ZeroDivisionError, match='no pixels'):
        train(
            dict(score=Failing(), validity=dict(low=0.5), prefetch=True),
            **{'train_dataloader.num_workers': 1},
        )


@TASK_UTILS.register_module()
class EvenTiles:
    """1 for tiles of an even number."""

    def __call__(self, samples: Sequence[dict]) -> torch.Tensor:
        return torch.tensor([1.0 - int(Path(s['data_samples'].img_path).stem) % 2 for s in samples])


def test_scorers_register_by_name_and_rewards_add_up(train: Any) -> None:
    score = dict(type='RewardScore', rewards=[dict(type='EvenTiles')], weights=[5])
    runner, record = train(dict(score=score, validity=dict(low=4.0)))
    assert all(int(Path(name).stem) % 2 == 0 for batch in record.batches for name in batch)


def test_rewards_are_made_of_other_scores_too(train: Any) -> None:
    score = dict(type='RewardScore', rewards=[dict(type='LabelScore'), dict(type='ModelScore')])
    runner, record = train(
        dict(score=score, validity=dict(low=0)),
        train_cfg=dict(type='IterBasedTrainLoop', max_iters=2),
    )
    assert len(record.batches) == 2
    with pytest.raises(ValueError, match='would read weights'):
        DynamicSamplingHook(score, dict(low=0), prefetch=True)


def test_a_resumed_run_with_another_batch_size_goes_on_after_the_same_tiles(train: Any) -> None:
    order = {'train_dataloader.sampler': dict(type='InfiniteSampler', shuffle=False)}
    every = dict(LABELS, validity=dict(low=-1.0))
    first, before = train(every, **order)
    cut = Path(first.work_dir) / 'iter_3.pth'
    rest, record = train(
        every, load_from=str(cut), resume=True, **dict(order, **{'train_dataloader.batch_size': 3})
    )
    assert [name for batch in before.batches for name in batch][6:12] == [
        name for batch in record.batches for name in batch
    ][:6]


def test_shrink_needs_one_optimizer() -> None:
    hook = DynamicSamplingHook(
        **dict({k: v for k, v in LABELS.items() if k != 'type'}, shortfall='shrink')
    )
    with pytest.raises(ValueError, match='OptimWrapperDict has several'):
        hook._weigh(OptimWrapperDict())
    with pytest.raises(ValueError, match='JaccardLoss counts over the global batch already'):
        hook._weigh(None, ['JaccardLoss'])


class FrozenNorms(ToyRegression):
    """A model whose BatchNorm layers do not train."""

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self.layers[1].eval()
        return self


MODELS.register_module(module=FrozenNorms, force=True)


def one_valid_of_two(**changes: Any) -> DynamicSamplingHook:
    return DynamicSamplingHook(
        score=lambda samples: [float(number == 0) for number in range(len(samples))],
        **dict(dict(validity=dict(low=0.5), max_resample_times=0, shortfall='shrink'), **changes),
    )


def test_shrink_says_that_batch_norm_may_get_one_sample(tmp_path: Path) -> None:
    runner, _ = toy_runner(tmp_path, hooks=[one_valid_of_two()])
    with pytest.raises(ValueError, match='more than 1 value per channel'):
        runner.train()
    assert "shortfall='shrink' may leave a rank one sample, and BatchNorm" in log_of(runner)
    assert '(1 layers, layers.1 the first)' in log_of(runner)


@pytest.mark.parametrize(
    'model, hook', [('FrozenNorms', {}), ('ToyRegression', dict(shortfall='pad'))]
)
def test_nothing_is_said_where_one_sample_is_enough_or_does_not_come(
    model: str, hook: Dict[str, Any], tmp_path: Path
) -> None:
    runner, record = toy_train(tmp_path, hooks=[one_valid_of_two(**hook)], **{'model.type': model})
    assert len(record.losses) == 8
    assert 'may leave a rank one sample' not in log_of(runner)


@pytest.mark.parametrize(
    'palette, expected',
    [('random', (0, 3)), ([[1, 2, 3, 4]], (0, 3)), ([], (0, 3)), ([[1, 2, 3]], (1, 3))],
)
def test_a_gallery_is_written_whatever_the_palette(
    palette: Any, expected: Any, tmp_path: Path
) -> None:
    TileGallery().save(tmp_path / 'tiles.npz', ['a'], palette)
    with np.load(str(tmp_path / 'tiles.npz')) as tiles:
        assert tiles['palette'].shape == expected


def test_groups_of_views_by_their_spread(train: Any) -> None:
    def brightness(samples: Sequence[dict]) -> List[float]:
        return [float(sample['inputs'].float().mean()) for sample in samples]

    runner, record = train(
        dict(score=brightness, validity=dict(eps=1.0), group_size=2),
        **{
            'train_dataloader.sampler': dict(
                _delete_=True,
                type='GroupedViewsSampler',
                views=2,
                sampler=dict(type='InfiniteSampler'),
            )
        },
    )
    assert all(one == other for one, other in record.batches)
    assert sum(row['passed'] for row in rows(runner)) >= 12


def test_keep_fraction_lets_dull_tiles_in(train: Any) -> None:
    runner, record = train(dict(LABELS, keep_fraction=1.0))
    assert DULL & {name for batch in record.batches for name in batch}
    assert sum(row['unfiltered'] for row in rows(runner)) > 0


LOSS = dict(type='ModelScore', metric='loss')
EVERY_STEP = {'default_hooks.checkpoint.interval': 1}


@pytest.mark.parametrize(
    'changes',
    [
        {},
        {'train_dataloader.num_workers': 2, 'train_dataloader.persistent_workers': True},
        {'optim_wrapper.accumulative_counts': 3},
    ],
)
def test_a_run_with_a_quantile_resumes_exactly(changes: dict, train: Any) -> None:
    hook = dict(score=LOSS, validity=dict(quantile=0.4), keep_fraction=0.3, unbiased=True)
    whole, _ = train(hook, **EVERY_STEP, **changes)
    cut = Path(whole.work_dir) / 'iter_3.pth'
    held = torch.load(str(cut), **LOAD)['dynamic_sampling']
    assert sum(map(len, held['scores'])) >= 6
    rest, _ = train(hook, load_from=str(cut), resume=True, **EVERY_STEP, **changes)
    assert same(weights(whole), weights(rest))
    states = [
        torch.load(str(Path(runner.work_dir) / 'iter_6.pth'), **LOAD)['dynamic_sampling']
        for runner in (whole, rest)
    ]
    assert str(states[0]) == str(states[1])


def test_a_pool_that_cannot_be_restored_is_counted(train: Any) -> None:
    hook = dict(LABELS, local_target=2, max_age=9)
    first, _ = train(hook, **EVERY_STEP, **{'train_dataloader.batch_size': 3})
    cut = Path(first.work_dir) / 'iter_5.pth'
    pool = json.loads(torch.load(str(cut), **LOAD)['dynamic_sampling']['ranks'][0])['pool']
    rest, _ = train(
        dict(hook, group_size=2),
        load_from=str(cut),
        resume=True,
        **EVERY_STEP,
        **{'train_dataloader.batch_size': 4},
    )
    told = rows(rest)
    assert pool and told[0]['carried'] == told[0]['dropped']['not_restored'] == len(pool)


def test_weights_reach_the_loss_of_each_tile(train: Any) -> None:
    """The gradient of a step is that of the mean of weight times loss, tile by tile."""
    hook = DynamicSamplingHook(
        score=dict(type='EvenTiles'), validity=dict(low=0.5), keep_fraction=0.4, unbiased=True
    )
    runner, _ = train(
        hook,
        train_cfg=dict(type='IterBasedTrainLoop', max_iters=1),
        **{'train_dataloader.batch_size': 8, 'model.decode_head.dropout_ratio': 0.0},
    )
    step = hook._step.batches[0]
    assert len(set(step.weights)) == 2  # even tiles, and odd ones that were kept at random
    low, high = sorted(set(step.weights))
    assert high / low == pytest.approx(1 / 0.4)
    for candidate, weight in zip(step.samples, step.weights):
        assert weight == (low if candidate.score else high)
    joint_loss, tile_losses = losses_of_step(runner.model, step.samples)
    torch.testing.assert_close(
        joint_loss,
        sum(loss * weight for loss, weight in zip(tile_losses, step.weights)) / len(tile_losses),
    )


def losses_of_step(model: Any, samples: Sequence[Any]) -> Tuple[torch.Tensor, List[torch.Tensor]]:
    """Return the loss of a batch as the hook weighs it, and every tile's own without weights."""
    model.train()
    for module in model.modules():  # so that a tile's loss does not depend on the others
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            module.eval()

    def loss_of(candidates: Sequence[Any]) -> torch.Tensor:
        batch = collate([candidate.sample for candidate in candidates])
        data = model.data_preprocessor(batch, True)
        losses = model.loss(data['inputs'], data['data_samples'])
        return sum(value for name, value in losses.items() if 'loss' in name)

    joint_loss = loss_of(samples)
    weighed = [
        head for head in model.modules() if isinstance(getattr(head, 'sampler', None), PixelWeights)
    ]
    assert weighed
    for head in weighed:
        head.sampler = None
    return joint_loss, [loss_of([candidate]) for candidate in samples]


def test_the_gradient_of_a_masked_step_is_the_mean_over_its_valid_tiles(train: Any) -> None:
    hook = DynamicSamplingHook(
        score=dict(type='EvenTiles'), validity=dict(low=0.5), shortfall='mask', max_resample_times=0
    )
    runner, record = train(
        hook,
        train_cfg=dict(type='IterBasedTrainLoop', max_iters=1),
        **{'train_dataloader.batch_size': 7, 'model.decode_head.dropout_ratio': 0.0},
    )
    step = hook._step.batches[0]
    live = [position for position, weight in enumerate(step.weights) if weight]
    assert step.statistics.outcome == 'mask' and len(step.samples) == len(record.batches[0]) == 7
    # Repeats are uneven, so a mean over all seven would differ.
    assert 1 < len(live) < 7 and all(step.samples[position].score == 1 for position in live)
    joint_loss, tile_losses = losses_of_step(runner.model, step.samples)
    mean = sum(tile_losses[position] for position in live) / len(live)
    parameters = [value for value in runner.model.parameters() if value.requires_grad]
    gradient, expected = (
        torch.cat([part.flatten() for part in torch.autograd.grad(loss, parameters)])
        for loss in (joint_loss, mean)
    )
    assert (gradient - expected).norm() < 1e-4 * expected.norm()


@pytest.mark.parametrize(
    'target, validity, changes',
    [
        (20, dict(quantile=0.3), {}),  # more than the 16 tiles of the dataset
        (20, dict(low=99.0), {}),  # each step falls back
        (3, dict(quantile=0.9), {'train_dataloader.drop_last': True}),
        (
            5,
            dict(low=99.0),
            {'train_dataloader.batch_size': 7},
        ),  # 2 tiles are left for the last batch
        (2, dict(quantile=0.3), {'model.decode_head.sampler': dict(type='OHEMPixelSampler')}),
    ],
)
def test_every_step_of_an_epoch_has_the_target(
    target: int, validity: dict, changes: dict, train: Any
) -> None:
    _, record = train(
        dict(score=LOSS, validity=validity, local_target=target, keep_fraction=0.2, unbiased=True),
        train_cfg=dict(EPOCHS, max_epochs=1),
        **DEFAULT,
        **{'train_dataloader.batch_size': 5, **changes},
    )
    assert record.batches and {len(batch) for batch in record.batches} == {target}


@pytest.mark.parametrize(
    'changes, words',
    [
        ({'model.decode_head.loss_decode': dict(_delete_=True, type='DiceLoss')}, 'has DiceLoss'),
        ({}, 'keep_fraction=0'),
    ],
)
def test_what_cannot_be_weighed_is_refused(changes: dict, words: str, train: Any) -> None:
    with pytest.raises(ValueError, match=words):
        train(dict(LABELS, unbiased=True, keep_fraction=0.3 if changes else 0.0), **changes)


def test_a_model_that_was_trained_before_is_weighed_once() -> None:
    head: Any = torch.nn.Module()
    head.loss_decode, head.sampler = torch.nn.ModuleList(), None
    for factor in (2.0, 3.0):
        weigh_heads(head, lambda: [factor])  # noqa: B023
    assert head.sampler.sample(torch.zeros(1, 2, 1, 1), torch.zeros(1, 1, 1, 1)).item() == 3


def test_models_without_decode_heads_are_not_weighed() -> None:
    with pytest.raises(ValueError, match='Linear has none'):
        weigh_heads(torch.nn.Linear(1, 1), lambda: ())
    with pytest.raises(ValueError, match='decode_head did not ask'):
        check_asked({'decode_head': PixelWeights(lambda: (), None)})
    with pytest.raises(ValueError, match='2 samples reach the loss and .* gave 3'):
        PixelWeights(lambda: (1, 1, 1), None).sample(
            torch.zeros(2, 1, 4, 4), torch.zeros(2, 1, 4, 4)
        )


def test_raise_says_what_to_do(train: Any) -> None:
    with pytest.raises(ShortfallError, match=r'0/2 valid samples after all attempts'):
        train(dict(LABELS, validity=dict(low=9.0), shortfall='raise', max_resample_times=1))


@pytest.mark.parametrize(
    'hook, changes, error, words',
    [
        (dict(LABELS, prefetch=True), {}, LoaderError, 'num_workers of 1 or more'),
        (
            dict(LABELS, local_target=3, group_size=2),
            {},
            ValueError,
            'local_target=3, group_size=2',
        ),
        (dict(LABELS, group_size=4), {}, ValueError, 'for example local_target=4'),
        (
            dict(score=dict(type='ModelScore'), validity=dict(low=0), prefetch=True),
            {},
            ValueError,
            'would read weights while the step changes them',
        ),
        (
            dict(score=dict(type='ModelScore'), validity=dict(eps=0), group_size=2),
            {},
            ValueError,
            'one score per tile',
        ),
        (dict(score=3, validity=dict(low=0)), {}, ValueError, 'score=3, expected a config'),
        (LABELS, dict(custom_hooks=[LABELS]), LoaderError, 'lists DynamicSamplingHook twice'),
        (dict(LABELS, validity={}), {}, ValueError, 'no criterion'),
        (dict(LABELS, validity=dict(eps=0.1)), {}, ValueError, 'group_size=1 has none'),
    ],
)
def test_bad_settings(hook: dict, changes: dict, error: Any, words: str, train: Any) -> None:
    with pytest.raises(error, match=words):
        train(hook, **changes)


# ---- the model's score ----


@pytest.fixture
def segmentor(train: Any) -> Any:
    runner, _ = train(train_cfg=dict(type='IterBasedTrainLoop', max_iters=1))
    batch = next(iter(runner.train_dataloader))
    samples = [
        dict(inputs=x, data_samples=y) for x, y in zip(batch['inputs'], batch['data_samples'])
    ]
    return runner, samples


def collate(samples: List[dict]) -> Dict[str, list]:
    return {key: [sample[key] for sample in samples] for key in samples[0]}


def test_model_scores_are_the_loss_of_each_tile(segmentor: Any) -> None:
    runner, samples = segmentor
    before = {name: value.clone() for name, value in weights(runner).items()}
    runner.model.train()
    runner.model.backbone.eval()  # as a frozen part is
    scorer = ModelScore(scale=1.0)
    scorer.bind(runner.model, collate)
    scores = scorer(samples)
    assert runner.model.training and runner.model.decode_head.training
    assert not runner.model.backbone.training
    assert same(before, weights(runner))
    model = runner.model.eval()
    for sample, score in zip(samples, scores):
        data = model.data_preprocessor(collate([sample]), True)
        logits = model.encode_decode(data['inputs'], [dict(img_shape=(64, 64), pad_shape=(64, 64))])
        truth = data['data_samples'][0].gt_sem_seg.data
        expected = functional.cross_entropy(logits, truth, ignore_index=255)
        torch.testing.assert_close(score, expected.detach())


def test_the_loss_of_scores(segmentor: Any) -> None:
    """A head that gives scores is scored by them, normalized, and not by their softmax."""
    runner, samples = segmentor
    head = runner.model.decode_head
    given = head.predict
    head.predict = lambda *arguments: given(*arguments).softmax(1) * 3
    plain, scored = ModelScore(scale=1.0), ModelScore(scale=1.0)
    scored.bind(runner.model, collate)
    head.gives_scores = True
    scores = scored(samples)
    del head.gives_scores, head.predict
    plain.bind(runner.model, collate)
    torch.testing.assert_close(scores, plain(samples), atol=1e-4, rtol=1e-4)


def test_one_minus_iou_and_a_tile_without_labels(segmentor: Any) -> None:
    runner, samples = segmentor
    scorer = ModelScore('one_minus_iou', scale=0.5)
    scorer.bind(runner.model, collate)
    samples[1]['data_samples'].gt_sem_seg.data[:] = 255
    scores = scorer(samples)
    assert 0 < scores[0] <= 1 and scores[1] == 0
    assert samples[0]['inputs'].shape == (3, 64, 64)  # a copy was padded and scaled


def test_the_variance_of_a_reward_from_one_pass(segmentor: Any) -> None:
    runner, samples = segmentor
    scorer = ModelScore('reward_variance', scale=1.0)
    scorer.bind(runner.model, collate)
    samples[1]['data_samples'].gt_sem_seg.data[:] = 255
    scores = scorer(samples)
    model = runner.model.eval()
    data = model.data_preprocessor(collate([samples[0]]), True)
    logits = model.encode_decode(data['inputs'], [dict(img_shape=(64, 64), pad_shape=(64, 64))])
    truth = data['data_samples'][0].gt_sem_seg.data[0]
    assert float(scores[0]) == pytest.approx(
        float(reward_variance(logits[0].softmax(0), truth)), rel=1e-4
    )
    assert scores[0] > 0 and scores[1] == 0


@pytest.mark.parametrize(
    'arguments, words',
    [
        (dict(metric='iou'), 'expected one of loss'),
        (dict(scale=0), 'scale=0, expected more than 0'),
    ],
)
def test_bad_model_scores(arguments: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ModelScore(**arguments)


def test_a_model_that_cannot_be_scored_with() -> None:
    with pytest.raises(ValueError, match='Linear has no encode_decode'):
        ModelScore().bind(torch.nn.Linear(1, 1), collate)
