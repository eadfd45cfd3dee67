"""Several ranks resume inside an accumulation cycle, and inside an epoch, with the same bits."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Dict

import pytest
from forked import fork_scenarios
from sampling_ranks import Answers, answers_of
from support import on_host
from toy_runs import log_of, same_weights, toy_train

pytestmark = on_host
EPOCHS: Dict[str, Any] = {
    'train_cfg': dict(by_epoch=True, max_epochs=3, val_interval=1),
    'train_dataloader.sampler.type': 'DefaultSampler',
}
EMA = [dict(type='EMAHook', update_buffers=True, momentum=0.3)]
# By world: 5 and 3 batches in an epoch. The checkpoint is the second in its cycle of three.
LENGTH, CUT = {2: 20, 3: 18}, 5


def whole_and_resumed(folder: Path, world: int) -> Any:
    changes = {
        **EPOCHS,
        'train_dataloader.dataset.length': LENGTH[world],
        'optim_wrapper.accumulative_counts': 3,
        'custom_hooks': EMA,
        'default_hooks.checkpoint': dict(interval=CUT, by_epoch=False),
    }
    whole, seen = toy_train(folder / 'whole', **changes)
    if whole.rank == 0:
        (folder / 'rest').mkdir(exist_ok=True)
        shutil.copy(str(folder / 'whole' / f'iter_{CUT}.pth'), str(folder / 'rest'))
    rest, left = toy_train(folder / 'rest', resume='must', **changes)
    return dict(
        iters=(whole.iter, rest.iter),
        losses=(seen.losses[CUT:], left.losses),
        samples=(seen.samples[CUT:], left.samples),
        # rank 0 continues with its own buffers, the others with those of the checkpoint
        same=same_weights(
            dict(whole.model.module.named_parameters()), dict(rest.model.module.named_parameters())
        ),
        figures=(seen.figures[-1], left.figures[-1]),
        lost='is lost' in log_of(rest) if rest.rank == 0 else False,
    )


def plain_gradients(folder: Path) -> Any:
    """Return the weights of a run with a checkpoint inside its cycles, and of one with none."""
    return [
        toy_train(
            folder / str(interval),
            **{
                'optim_wrapper.accumulative_counts': 4,
                'default_hooks.checkpoint.interval': interval,
                'model.dropout': 0.0,
            },
        )[0]
        .model.module.layers[4]
        .weight.detach()
        .numpy()
        for interval in (1, 8)
    ]


def run_scenarios(folder: Path) -> Dict[str, Any]:
    return fork_scenarios(
        {
            '2': (whole_and_resumed, 2, folder / '2', 2),
            '3': (whole_and_resumed, 3, folder / '3', 3),
            'plain': (plain_gradients, 3, folder / 'plain'),
        },
        folder,
    )


@pytest.fixture(scope='module')
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    return answers_of(run_scenarios, tmp_path_factory.mktemp('resumed'))


@pytest.mark.parametrize('world', [2, 3])
def test_ranks_go_on_inside_an_accumulation_cycle(world: int, answers: Answers) -> None:
    for told in answers.of(str(world)):
        for name in ('iters', 'losses', 'samples', 'figures'):
            assert told[name][0] == told[name][1], name
        assert told['same'] and not told['lost'] and len(told['losses'][1]) >= 4


def test_a_checkpoint_inside_a_cycle_does_not_change_the_training(answers: Answers) -> None:
    """The mean of the gradients so far, and their mean at the step, add up to the same."""
    for often, seldom in answers.of('plain'):
        assert often == pytest.approx(seldom, rel=1e-5)
