"""Mask queries on 3, 4 and 5 real ranks compute what one process does with the whole batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List

import pytest
import torch
from forked import fork_scenarios
from mask_models import build, eomt_config, images_of, labels_of, pmt_config, samples_of
from mmengine.optim import build_optim_wrapper
from sampling_ranks import Answers, answers_of
from support import ON_MAIN_LEG, on_host

from mapsage.accelerator import resolve_accelerator, set_current_accelerator
from mapsage.distributed import init_process_group
from mapsage.distributed.wrappers import MMDistributedDataParallel

pytestmark = on_host
IMAGES, STEPS = 2, 2  # of a rank, and batches of an accumulation
KINDS = dict(
    eomt=eomt_config,
    # batch statistics of a rank are its own on a CPU, which has no SyncBN
    pmt=lambda: pmt_config(norm_cfg=dict(type='GN', num_groups=4)),
)


def batches(world: int) -> List[Dict[str, List[Any]]]:
    """Batches for all ranks; rank r has 1 + 2 r mod 5 classes, and one image is without labels."""
    made = []
    for step in range(STEPS):
        labels = torch.cat(
            [
                labels_of(IMAGES, seed=10 * step + rank, classes=1 + 2 * rank % 5, void=0.2)
                for rank in range(world)
            ]
        )
        labels[-1 - step] = 255
        made.append(dict(inputs=images_of(len(labels), seed=step), data_samples=samples_of(labels)))
    return made


def part(batch: Dict[str, List[Any]], images: slice) -> Dict[str, List[Any]]:
    return {key: value[images] for key, value in batch.items()}


def train(model: Any, given: List[Dict[str, List[Any]]], amp: bool) -> Dict[str, Any]:
    """One accumulated optimizer step; the losses, the gradients and the norm before clipping."""
    core = getattr(model, 'module', model)
    kind = dict(type='AmpOptimWrapper', dtype='bfloat16') if amp else dict(type='OptimWrapper')
    wrapper = build_optim_wrapper(
        core, dict(kind, optimizer=dict(type='SGD', lr=0.1), accumulative_counts=STEPS)
    )
    wrapper.initialize_count_status(model, 0, STEPS)
    gradients: Dict[str, torch.Tensor] = {}
    wrapper.step = lambda: gradients.update(
        {name: value.grad.clone() for name, value in core.named_parameters() if value.requires_grad}
    )
    losses = [float(model.train_step(batch, wrapper)['loss']) for batch in given]
    return dict(losses=losses, gradients=gradients)


def one_rank(kind: str, amp: bool) -> Any:
    set_current_accelerator(resolve_accelerator('cpu'))
    init_process_group(resolve_accelerator('cpu'), timeout=120)
    torch.set_num_threads(1)
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    model = build(KINDS[kind]())
    model.decode_head.attn_mask_probs.fill_(1.0)  # a lower one is drawn by each rank for itself
    wrapped = MMDistributedDataParallel(model.train())
    mine = [part(batch, slice(IMAGES * rank, IMAGES * rank + IMAGES)) for batch in batches(world)]
    found = train(wrapped, mine, amp)
    held = [
        len(set(torch.unique(sample.gt_sem_seg.data).tolist()) - {255})
        for sample in mine[0]['data_samples']
    ]
    return dict(
        losses=found['losses'],
        held=sum(held),
        gradients={name: value.numpy() for name, value in found['gradients'].items()},
    )


def run_scenarios(folder: Path) -> Dict[str, Any]:
    scenarios = {
        f'{kind} {world}': (one_rank, world, kind, False)
        for kind, world in (('eomt', 3), ('eomt', 4), ('eomt', 5), ('pmt', 4))
    }
    if ON_MAIN_LEG:  # torch 1.10 has no layer norm of bfloat16 on the CPU
        scenarios['eomt 3 amp'] = (one_rank, 3, 'eomt', True)
    return fork_scenarios(scenarios, folder)


@pytest.fixture(scope='module')
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    return answers_of(run_scenarios, tmp_path_factory.mktemp('masks'))


@pytest.mark.parametrize('kind, world', [('eomt', 3), ('eomt', 4), ('eomt', 5), ('pmt', 4)])
def test_losses_and_gradients_are_those_of_one_process(
    kind: str, world: int, answers: Answers
) -> None:
    """Over an accumulation of two batches."""
    told = answers.of(f'{kind} {world}')
    assert len({each['held'] for each in told}) > 1  # uneven masks
    alone = whole(kind, world)
    for step in range(STEPS):
        mean = sum(each['losses'][step] for each in told) / world
        assert mean == pytest.approx(alone['losses'][step], rel=1e-5)
    for each in told:
        assert each['gradients'].keys() == alone['gradients'].keys()
        for name, value in alone['gradients'].items():
            torch.testing.assert_allclose(
                torch.from_numpy(each['gradients'][name]),
                value,
                rtol=1e-3,
                atol=1e-5 * float(value.abs().max()),
            )


@pytest.mark.skipif(not ON_MAIN_LEG, reason='the layer norm of torch 1.10 takes no bfloat16')
def test_so_they_are_in_mixed_precision(answers: Answers) -> None:
    told, alone = answers.of('eomt 3 amp'), whole('eomt', 3, amp=True)
    for step in range(STEPS):
        mean = sum(each['losses'][step] for each in told) / 3
        assert mean == pytest.approx(alone['losses'][step], rel=0.01)
    flat, expected = (
        torch.cat([torch.as_tensor(each[name]).flatten() for name in sorted(each)])
        for each in (told[1]['gradients'], alone['gradients'])
    )
    assert float((flat - expected).norm() / expected.norm()) < 0.05
    exact = whole('eomt', 3)['gradients']
    rounded = torch.cat([exact[name].flatten() for name in sorted(exact)])
    assert not torch.equal(rounded, expected)


def whole(kind: str, world: int, amp: bool = False) -> Any:
    """What one process computes with the batches of all ranks."""
    model = build(KINDS[kind]())
    model.decode_head.attn_mask_probs.fill_(1.0)
    return train(model.train(), batches(world), amp)
