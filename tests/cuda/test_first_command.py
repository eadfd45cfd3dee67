"""README's first command, on machines with any number of cards."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import ROOT, check_finished, launch, write_tiny_config

TWO_STEPS = """
train_cfg.update(max_iters=2, val_interval=2)
default_hooks['preview'] = None
"""


@pytest.fixture
def config(tmp_path: Path, tiny_data: Path) -> Path:
    return write_tiny_config(tmp_path / 'tiny.py', tiny_data, TWO_STEPS)


@pytest.mark.parametrize(
    'cards, accelerator, ranks, line',
    [
        (3, 'auto', 3, '3 ranks, one for each cuda device that is visible'),
        pytest.param(
            *(1, 'auto', 1, '1 rank, for the only cuda device that is visible'),
            marks=pytest.mark.long,
        ),
        (0, 'auto', 8, '8 ranks, since no card is used'),
        (1, 'cpu', 8, '8 ranks, since no card is used'),
    ],
)
def test_a_rank_for_each_card(
    cards: int, accelerator: str, ranks: int, line: str, config: Path, tmp_path: Path
) -> None:
    config.write_text(
        config.read_text().replace("accelerator='auto'", f'accelerator={accelerator!r}')
    )
    finished = launch(
        config,
        '--work-dir',
        tmp_path / 'work',
        ranks=None,
        environ={'ACCELERATOR': '', 'CUDA_DOUBLE_DEVICES': str(cards)},
    )
    check_finished(finished)
    assert line in finished.output
    device = 'cuda' if accelerator == 'auto' and cards else 'cpu'
    assert f'accelerator {device} (' in finished.output
    assert f'world size {ranks}' in finished.output
    assert 'mIoU: ' in finished.output


def test_a_mask_hides_cards_from_the_count(config: Path, tmp_path: Path) -> None:
    finished = launch(
        config,
        '--work-dir',
        tmp_path / 'work',
        ranks=None,
        environ={'ACCELERATOR': '', 'CUDA_DOUBLE_DEVICES': '4', 'CUDA_VISIBLE_DEVICES': '3,1'},
    )
    check_finished(finished)
    assert '2 ranks, one for each cuda device that is visible' in finished.output


def test_an_accelerator_that_is_not_there_is_one_sentence(config: Path) -> None:
    finished = launch(
        config, ranks=None, environ={'ACCELERATOR': 'gcu', 'CUDA_DOUBLE_DEVICES': '2'}
    )
    assert finished.status == 1 and finished.left_running == []
    assert finished.output.count("accelerator 'gcu' cannot be used here") == 1
    assert 'Traceback' not in finished.output


def test_more_ranks_than_cards_are_refused_by_the_training_and_by_the_doctor(config: Path) -> None:
    environ = {'ACCELERATOR': 'cuda', 'CUDA_DOUBLE_DEVICES': '1'}
    refusal = "2 ranks were started on this node and accelerator 'cuda' shows 1 device(s)"
    finished = launch(config, ranks=2, environ=environ)
    assert finished.status == 1 and refusal in finished.final_error
    finished = launch(
        config, ranks=2, environ=environ, command=['bash', str(ROOT / 'scripts' / 'doctor.sh')]
    )
    assert finished.status == 1 and refusal in finished.output
    assert 'training would not start' in finished.output


def test_the_doctor_counts_as_the_training_does(config: Path) -> None:
    finished = launch(
        config,
        ranks=None,
        environ={'ACCELERATOR': '', 'CUDA_DOUBLE_DEVICES': '2'},
        command=['bash', str(ROOT / 'scripts' / 'doctor.sh')],
    )
    check_finished(finished)
    assert '2 ranks, one for each cuda device that is visible' in finished.output
    assert 'ok       2 ranks got the right answers over ' in finished.output
    assert '\nrun\n  ok       it can be built' in finished.output
