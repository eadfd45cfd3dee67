"""Whole runs of one process with several virtual ranks, and what they refuse."""

from __future__ import annotations

import collections
import copy
import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any, Dict, List

import pytest
import torch
from mmengine.dist import get_dist_info, sync_random_seed
from mmengine.hooks import Hook
from mmengine.optim import OptimWrapper, OptimWrapperDict
from mmengine.registry import DATA_SAMPLERS, MODELS, OPTIM_WRAPPERS
from torch.utils.data import BatchSampler, DataLoader, Sampler
from toy_runs import ToyNumbers, ToyRegression, log_of, toy_runner, toy_train

from mapsage.accelerator.cpu import CpuAccelerator
from mapsage.distributed.virtual_ranks import VirtualRanks, VirtualRanksError
from mapsage.distributed.wrappers import MMModelParallel
from mapsage.distributed.wrappers.gradient_mean import GradientMean
from mapsage.distributed.wrappers.rank_batches import pack_rank_batches, unpack_rank_batches
from mapsage.distributed.wrappers.rank_buffers import RankBuffers
from mapsage.engine.checkpoints.resume import ResumeError
from mapsage.engine.guards.accelerator_hook import AcceleratorHook
from mapsage.engine.guards.non_finite_loss_hook import NonFiniteLossError, NonFiniteLossHook
from mapsage.engine.loading.block_loader import as_rank
from mapsage.extras.forensics.step_recorder import StepRecorder
from mapsage.sampling.hooks import DynamicSamplingHook

FOUR: Dict[str, Any] = {'env_cfg.virtual_ranks': 4}
Pair = collections.namedtuple('Pair', 'inputs data_samples')


@pytest.mark.parametrize(
    'batch',
    [dict(a=1), [1, 2], (1, 2), Pair(1, 2), torch.ones(2), collections.OrderedDict(a=1)],
    ids=lambda batch: type(batch).__name__,
)
def test_a_batch_looks_as_before_and_carries_the_others(batch: Any) -> None:
    carrier = pack_rank_batches([batch, 'second', 'third'])
    plain_type = tuple if isinstance(batch, tuple) else type(batch)
    assert isinstance(carrier, plain_type) and list(carrier) == list(batch)
    first, *later = unpack_rank_batches(carrier, range(3, 6))
    assert isinstance(first, type(batch)) and later == ['second', 'third']
    assert not isinstance(batch, Pair) or carrier.data_samples == 2


def test_a_batch_that_cannot_carry_others_is_an_error() -> None:
    with pytest.raises(VirtualRanksError, match='batches of type int, which cannot carry'):
        pack_rank_batches([1, 2])


@pytest.mark.parametrize(
    'batch',
    [dict(a=1), [1, 2], (1, 2), Pair(1, 2), collections.OrderedDict(a=1)],
    ids=lambda batch: type(batch).__name__,
)
def test_a_carrier_is_pickled_and_copied(batch: Any) -> None:
    carrier = pack_rank_batches([batch, 'second'])
    for copied in (pickle.loads(pickle.dumps(carrier)), copy.deepcopy(carrier)):
        assert type(copied) is type(carrier) and list(copied) == list(carrier)
        first, second = unpack_rank_batches(copied, range(2))
        assert isinstance(first, type(batch)) and second == 'second'


def test_a_batch_that_lost_the_others_is_an_error() -> None:
    with pytest.raises(VirtualRanksError, match=r'ranks 2 to 3 was given 1 batch\(es\) \(dict\)'):
        unpack_rank_batches(dict(pack_rank_batches([dict(a=1), dict(a=2)])), range(2, 4))


class Samples(Hook):
    """Keeps the samples of all virtual ranks of a step."""

    def __init__(self) -> None:
        self.seen: List[List[int]] = []

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        self.seen.append(
            [
                sample.number
                for batch in unpack_rank_batches(data_batch, range(4))
                for sample in batch['data_samples']
            ]
        )


@DATA_SAMPLERS.register_module(force=True)
class Backwards(Sampler):
    """A user's sampler, which asks MMEngine for its rank."""

    def __init__(self, dataset: Any, seed: Any = None) -> None:
        self.length = len(dataset)
        self.rank, self.world_size = get_dist_info()

    def __iter__(self) -> Any:
        return iter(range(self.length - 1 - self.rank, -1, -self.world_size))

    def __len__(self) -> int:
        return self.length // self.world_size


@DATA_SAMPLERS.register_module(force=True)
class Deaf(Backwards):
    """One that was told another rank."""

    def __init__(self, dataset: Any, seed: Any = None) -> None:
        super().__init__(dataset, seed)
        self.rank = 0


@DATA_SAMPLERS.register_module(force=True)
class AsksForASeed(Backwards):
    """One whose constructor is collective."""

    def __init__(self, dataset: Any, seed: Any = None) -> None:
        super().__init__(dataset, seed)
        self.own = sync_random_seed()


def test_a_users_sampler_and_batch_sampler_are_built_for_each_virtual_rank(tmp_path: Path) -> None:
    samples = Samples()
    DATA_SAMPLERS.register_module(name='TorchBatches', module=BatchSampler, force=True)
    toy_train(
        tmp_path,
        hooks=[samples],
        **{
            **FOUR,
            'train_dataloader.dataset.length': 24,
            'train_dataloader.sampler': dict(type='Backwards', _delete_=True),
            'train_dataloader.batch_sampler': dict(type='TorchBatches', drop_last=False),
            'train_cfg.max_iters': 3,
        },
    )
    # virtual rank 0 has 23, 19, 15, ..., virtual rank 1 has 22, 18, ...
    assert samples.seen == [
        [23 - 8 * step - rank - 4 * k for rank in range(4) for k in (0, 1)] for step in range(3)
    ]


@pytest.mark.parametrize(
    ('changes', 'words'),
    [
        (
            {'train_dataloader.sampler': dict(type='Deaf', _delete_=True)},
            'sampler of virtual rank 1 of 4 has rank=0: expected 1',
        ),
        (
            {'train_dataloader.sampler': dict(type='AsksForASeed', _delete_=True)},
            r'torch.distributed.broadcast .*virtual rank 0 of 4 is built.* the seed that it is given',
        ),
        (
            {
                'train_dataloader.sampler': dict(type='DefaultSampler', round_up=False),
                'train_dataloader.dataset.length': 17,
                'train_dataloader.batch_size': 1,
            },
            'an epoch has 4 batches on one virtual rank and 5 on another',
        ),
        (
            {'custom_hooks': [dict(type='SyncBuffersHook')]},
            r'4 virtual ranks in 1 process\(es\) with SyncBuffersHook: .*Start 4 processes',
        ),
        (
            {'model_wrapper_cfg': dict(type='MMDistributedDataParallel', process_group=1)},
            'process_group=1 cannot be obeyed',
        ),
    ],
)
def test_what_cannot_be_divided_is_refused(
    changes: Dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(VirtualRanksError, match=words):
        toy_train(tmp_path, **FOUR, **changes)


def test_a_checkpoint_of_another_number_is_refused(tmp_path: Path) -> None:
    toy_train(tmp_path, **FOUR, **{'train_cfg.max_iters': 4})
    with pytest.raises(VirtualRanksError, match='virtual_ranks=3, and the checkpoint .* with 4'):
        toy_train(tmp_path, resume='must', **{'env_cfg.virtual_ranks': 3})


def test_what_a_training_refuses_does_not_keep_from_testing(tmp_path: Path) -> None:
    toy_train(tmp_path, **FOUR, **{'train_cfg.max_iters': 4})
    runner, record = toy_runner(
        tmp_path,
        load_from=str(tmp_path / 'iter_4.pth'),
        **FOUR,
        custom_hooks=[dict(type='SyncBuffersHook')],
    )
    runner.test()
    assert len(record.figures) == 1


def test_a_test_takes_the_weights_it_names_though_resume_is_set(tmp_path: Path) -> None:
    toy_train(tmp_path)
    named = str(tmp_path / 'iter_4.pth')
    runner, record = toy_runner(tmp_path, load_from=named, resume='auto', randomness=dict(seed=5))
    assert (runner._load_from, runner._resume, runner.seed) == (named, 'auto', 5)
    runner.test()
    plain_runner, plain = toy_runner(tmp_path, load_from=named)
    plain_runner.test()
    assert record.figures == plain.figures


def test_nothing_to_resume_from_does_not_keep_from_testing(tmp_path: Path) -> None:
    toy_train(tmp_path)
    runner, record = toy_runner(
        tmp_path / 'other', load_from=str(tmp_path / 'iter_4.pth'), resume='must'
    )
    runner.test()
    assert len(record.figures) == 1
    with pytest.raises(ResumeError, match='holds no checkpoint'):
        runner.train()


def test_a_checkpoint_that_others_cannot_carry_out_goes_on_as_before(tmp_path: Path) -> None:
    def surplus() -> DynamicSamplingHook:  # one sample of three in each step
        return DynamicSamplingHook(
            score=lambda samples: [1.0] * len(samples),
            local_target=2,
            validity=dict(low=0),
            max_age=9,
        )

    three = {'train_dataloader.batch_size': 3}
    toy_train(tmp_path, hooks=[surplus()], **FOUR, **three, **{'train_cfg.max_iters': 4})
    run, record = toy_train(
        tmp_path,
        hooks=[surplus()],
        resume='must',
        **three,
        custom_hooks=[dict(type='SyncBuffersHook')],
    )
    log = log_of(run)
    assert len(record.losses) == 4 and 'It continues with 1 virtual ranks' in log
    assert 'the run had 4 rank(s) and has 1: the pool is dealt out again' in log
    told = (tmp_path / 'dynamic_sampling' / 'steps.jsonl').read_text().splitlines()
    # Four ranks had four each; they count where the run continues.
    assert [json.loads(line)['carried'] for line in told][-4:][0] == 16


def test_the_learning_rate_is_scaled_by_the_batch_of_all_virtual_ranks(tmp_path: Path) -> None:
    _, record = toy_train(tmp_path, **FOUR, auto_scale_lr=dict(enable=True, base_batch_size=4))
    assert record.rates[0] == pytest.approx(0.05 * 4 * 2 / 4)


def test_the_virtual_rank_of_a_bad_loss_is_named(tmp_path: Path) -> None:
    class Poisoned(Hook):
        def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
            if runner.iter == 2:
                unpack_rank_batches(data_batch, range(4))[2]['inputs'][0].fill_(float('nan'))

    with pytest.raises(NonFiniteLossError, match=r'at iteration 3, virtual rank 2 \(rank 0\)'):
        toy_train(tmp_path, hooks=[Poisoned()], **FOUR)


@MODELS.register_module(force=True)
class SyncToy(ToyRegression):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.SyncBatchNorm(1)


@pytest.mark.parametrize('computed', [True, False])
def test_sync_bn_layers_are_refused_where_the_device_computes_them(
    computed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    supports = replace(CpuAccelerator.supports, sync_bn=computed)
    monkeypatch.setattr(CpuAccelerator, 'supports', supports)
    runner, _ = toy_runner(tmp_path, **FOUR, **{'model.type': 'SyncToy'})
    assert ('SyncBN layers' in str(runner._obstacle_to_training)) == computed


@MODELS.register_module(force=True)
class BlockToy(ToyRegression):
    block = None


def test_a_models_own_attribute_block_is_no_block_of_virtual_ranks(tmp_path: Path) -> None:
    _, record = toy_train(tmp_path, **{'model.type': 'BlockToy'})
    assert len(record.losses) == 8


@OPTIM_WRAPPERS.register_module(force=True)
class OwnUpdate(OptimWrapper):
    def update_params(self, *args: Any, **kwargs: Any) -> None:
        super().update_params(*args, **kwargs)


def test_an_optimizer_wrapper_with_its_own_update_is_refused(tmp_path: Path) -> None:
    with pytest.raises(VirtualRanksError, match='OwnUpdate has an update_params of its own'):
        toy_train(tmp_path, **FOUR, **{'optim_wrapper.type': 'OwnUpdate'})


def test_several_optimizers_are_refused(tmp_path: Path) -> None:
    runner, _ = toy_runner(tmp_path, **FOUR)
    with pytest.raises(VirtualRanksError, match='OptimWrapperDict has an update_params'):
        runner.model.train_step(None, OptimWrapperDict())


class Freezes(Hook):
    def __init__(self, iteration: int) -> None:
        self.iteration = iteration

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        if runner.iter == self.iteration:
            next(runner.model.parameters()).requires_grad = False


def test_parameters_are_frozen_between_two_accumulation_cycles_alone(tmp_path: Path) -> None:
    cycles = {**FOUR, 'optim_wrapper.accumulative_counts': 2}
    toy_train(tmp_path, hooks=[Freezes(4)], **cycles)
    with pytest.raises(VirtualRanksError, match='beginning of the accumulation cycle'):
        toy_train(tmp_path, hooks=[Freezes(5)], **cycles)


def test_a_sparse_gradient_is_refused_by_name() -> None:
    mean = GradientMean(VirtualRanks(2, 1), 0, 'ordered', may_miss=False)
    table = torch.nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    mean.begin(table)
    with pytest.raises(VirtualRanksError, match='gradient of weight is sparse.*sparse=False'):
        mean.add([table.weight.grad])


class Lazy(torch.nn.Module):
    """Has a buffer from its first forward pass on, whose shape follows the input's."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, 'grid'):
            self.register_buffer('grid', values.clone())
        elif self.grid.shape != values.shape:
            self.grid = self.grid.sum() + torch.zeros_like(values)
        self.grid += 1
        return self.grid


def test_each_virtual_rank_has_its_own_buffers_that_come_and_grow() -> None:
    model, alone = Lazy(), [Lazy() for _ in range(3)]
    buffers = RankBuffers(model, range(3))
    for step, length in enumerate((2, 2, 5, 5)):
        buffers.begin()
        for rank, want in enumerate(alone):
            buffers.place(rank)
            values = torch.full((length + (rank == 1),), 10.0 * rank + step)
            assert torch.equal(model(values), want(values))
        buffers.place(0)
        assert torch.equal(model.grid, alone[0].grid)


def test_a_second_training_seeds_no_turn_twice(tmp_path: Path) -> None:
    runner, _ = toy_train(tmp_path, **FOUR)
    model = runner.model
    assert not any(value.requires_grad for each in model.block_outputs for value in each.values())
    before = len(model.on_virtual_rank_start)
    for kind in (AcceleratorHook, NonFiniteLossHook):
        hook = next(each for each in runner._hooks if isinstance(each, kind))
        hook.before_train(runner)
        hook.before_train(runner)  # after a training that an error has ended
    assert len(model.on_virtual_rank_start) == before + 1 and len(hook._watch._handles) == 6
    hook.after_train(runner)
    assert len(model.on_virtual_rank_start) == before and not hook._watch._handles


def test_a_recorder_that_records_again_keeps_the_last_step_alone(tmp_path: Path) -> None:
    runner, _ = toy_train(tmp_path, **FOUR)
    recorder = StepRecorder(runner.iter + 1)
    before = len(runner.model.on_virtual_rank_start)
    for _ in range(2):
        recorder.begin(runner, None)
        for virtual_rank in range(4):
            for function in runner.model.on_virtual_rank_start[before:]:
                function(virtual_rank, dict(inputs=[]))
    assert [step.virtual_rank for step in recorder.steps] == [0, 1, 2, 3]
    recorder.after_train_iter(runner, 0)
    assert len(runner.model.on_virtual_rank_start) == before


@MODELS.register_module(force=True)
def wrapped_toy() -> MMModelParallel:
    return MMModelParallel(ToyRegression(), devices=['cpu'])


def test_a_wrapper_that_adds_in_no_order_is_refused(tmp_path: Path) -> None:
    toy_train(tmp_path, **{'model.type': 'wrapped_toy'})
    with pytest.raises(
        VirtualRanksError,
        match=("reduction='ordered' with the model wrapper MMModelParallel.*Remove the setting"),
    ):
        toy_train(tmp_path, **{'model.type': 'wrapped_toy', 'env_cfg.reduction': 'ordered'})


def test_a_loader_that_is_built_already_is_refused(tmp_path: Path) -> None:
    runner, _ = toy_runner(tmp_path, **FOUR)
    runner._train_dataloader = DataLoader(ToyNumbers(8))
    with pytest.raises(VirtualRanksError, match='train_dataloader is a DataLoader'):
        runner.train()


def test_a_process_is_itself_again_behind_the_block() -> None:
    with as_rank(3, 7):
        assert get_dist_info() == (3, 7)
    assert get_dist_info() == (0, 1) and not torch.distributed.is_initialized()
