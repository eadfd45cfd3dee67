"""Which devices ranks get: masks, one card a task, and runs elsewhere on a machine with cards."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Dict, List

import pytest
from cards import card_variables, launch_on_cards, logged, write_start
from ranks import free_port
from support import Finished, Launch, check_finished, write_tiny_config

SHORT = """
custom_imports = dict(imports=['mapsage', 'fault_hooks'])
custom_hooks = [dict(type='ReportPlacement')]
train_cfg = dict(type='IterBasedTrainLoop', max_iters=2, val_interval=2)
default_hooks['preview'] = None
default_hooks['checkpoint']['interval'] = 2
"""


@pytest.fixture
def config(tiny_data: Path, tmp_path: Path) -> Path:
    return write_tiny_config(tmp_path / 'tiny.py', tiny_data, SHORT)


def devices(folder: Path, ranks: int) -> List[List[str]]:
    """Return the devices on which each rank's weights were at the end, which must be equal."""
    placement = [json.loads((folder / f'{rank}.json').read_text()) for rank in range(ranks)]
    assert len({rank['digest'] for rank in placement}) == 1
    return [rank['devices'] for rank in placement]


def train(config: Path, folder: Path, **options: Any) -> Finished:
    environ: Dict[str, str] = options.pop('environ', {})
    return launch_on_cards(
        config,
        '--work-dir',
        folder / 'work',
        '--cfg-options',
        f'load_from={write_start(config)}',
        **options,
        environ={'MAPSAGE_TEST_PLACEMENT': str(folder), **environ},
    )


def test_each_task_sees_a_card_of_its_own(config: Path, tmp_path: Path) -> None:
    """As Slurm's --gpus-per-task=1 starts them."""
    rendezvous = {
        'MASTER_ADDR': '127.0.0.1',
        'MASTER_PORT': str(free_port()),
        'SLURM_NTASKS': '2',
        'SLURM_NODELIST': 'node0',
        'SLURM_JOB_ID': '77',
        'MAPSAGE_TEST_PLACEMENT': str(tmp_path),
    }
    tasks = [
        Launch(
            config,
            '--launcher',
            'slurm',
            '--accelerator',
            'cuda',
            '--work-dir',
            tmp_path / 'work',
            command=[sys.executable, 'tools/train.py'],
            environ={
                **card_variables(8),
                **rendezvous,
                'CUDA_VISIBLE_DEVICES': card,
                'SLURM_PROCID': str(rank),
                'SLURM_LOCALID': str(rank),
            },
        )
        for rank, card in enumerate(('5', '2'))
    ]
    for task in [task.finish(120.0) for task in tasks]:
        check_finished(task)
    assert devices(tmp_path, 2) == [['cuda:0'], ['cuda:0']]


@pytest.mark.parametrize(
    'mask, ranks, messages',
    [
        ('5', 2, ['rank 0 is on the card of rank(s) [1]']),
        ('3,5', 3, ['3 ranks were started on this node', 'shows 2 device(s)']),
    ],
)
def test_ranks_that_outnumber_their_cards_are_refused(
    mask: str, ranks: int, messages: List[str], config: Path, tmp_path: Path
) -> None:
    finished = train(config, tmp_path, cards=8, ranks=ranks, environ={'CUDA_VISIBLE_DEVICES': mask})
    assert finished.status != 0 and finished.left_running == []
    for message in [*messages, 'CUDA_VISIBLE_DEVICES']:
        assert message in finished.final_error, finished.output[-4000:]


def test_a_mask_chooses_the_cards(config: Path, tmp_path: Path) -> None:
    finished = train(config, tmp_path, cards=8, ranks=2, environ={'CUDA_VISIBLE_DEVICES': '3,5'})
    check_finished(finished)
    assert 'accelerator cuda (2 device(s)' in finished.output
    assert devices(tmp_path, 2) == [['cuda:0'], ['cuda:1']]


@pytest.mark.parametrize('mask', ['', '-1'])
def test_a_mask_without_cards_leaves_the_cpu(mask: str, config: Path, tmp_path: Path) -> None:
    hidden = {'CUDA_VISIBLE_DEVICES': mask}
    check_finished(train(config, tmp_path, environ={'ACCELERATOR': 'auto', **hidden}))
    assert devices(tmp_path, 2) == [['cpu'], ['cpu']]
    refused = train(config, tmp_path, environ=hidden)
    assert refused.status != 0 and refused.left_running == []
    assert "accelerator 'cuda' cannot be used here" in refused.final_error, refused.output[-4000:]


@pytest.mark.parametrize('accelerator, kind', [('cpu', 'cpu'), ('sim', 'gcu:{}')])
def test_ranks_elsewhere_may_outnumber_the_cards(
    accelerator: str, kind: str, config: Path, tmp_path: Path
) -> None:
    losses = []
    for cards in (0, 2):
        folder = tmp_path / str(cards)
        folder.mkdir()
        check_finished(
            train(config, folder, cards=cards, ranks=3, environ={'ACCELERATOR': accelerator})
        )
        assert devices(folder, 3) == [[kind.format(rank)] for rank in range(3)]
        losses.append(logged(folder / 'work'))
    assert len(losses[0]) == 2 and losses[0] == losses[1]
