"""Checkpoints hold what the bits of a run depend on, and a resume says what differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable, Dict, Iterator

import pytest
import torch
from toy_runs import log_of, toy_train

from mapsage.engine.guards.reproducibility import (
    META_KEY,
    differences,
    group_ranks,
    promises_bits,
    resume_warning,
)
from mapsage.extras.forensics.compare_checkpoints import compare_checkpoints

LOAD = {'weights_only': False} if torch.__version__ >= '2' else {}
FACTS = {'device': 'cpu AVX2', 'threads': '1', 'torch': '2.13.0', 'cv2': '4.1', 'mapsage': '0.1'}


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def resumed(
    folder: Path, edit: Callable[[Dict[str, Any]], Any] = lambda meta: None, threads: int = 1
) -> str:
    """Train, change the meta of the checkpoint, resume it and return the log."""
    toy_train(folder, **{'train_cfg.max_iters': 4})
    path = folder / 'iter_4.pth'
    checkpoint = torch.load(str(path), **LOAD)
    edit(checkpoint['meta'])
    torch.save(checkpoint, str(path))
    torch.set_num_threads(threads)
    runner, seen = toy_train(folder, resume='must')
    assert len(seen.losses) == 4
    return log_of(runner)


@pytest.mark.parametrize(
    'edit, threads, told',
    [
        (lambda meta: None, 1, []),
        (lambda meta: meta.pop(META_KEY), 1, []),  # written before there was this hook
        (lambda meta: None, 2, ['threads: 1, now 2', 'losses and weights', 'OMP_NUM_THREADS=1']),
        (
            lambda meta: meta[META_KEY][0]['facts'].update(torch='1.9.1'),
            1,
            [f'torch: 1.9.1, now {torch.__version__}', 'losses and weights'],
        ),
        (lambda meta: meta[META_KEY][0]['facts'].pop('numpy'), 1, ['numpy: none, now', 'images']),
        (
            lambda meta: meta[META_KEY][0]['facts'].update(cuDNN='8907'),
            1,
            ['cuDNN: 8907, now none'],
        ),
    ],
    ids=['same', 'old', 'threads', 'torch', 'new fact', 'lost fact'],
)
def test_a_resume_says_what_differs(
    edit: Any, threads: int, told: Any, tmp_path: Path, one_thread: None
) -> None:
    log = resumed(tmp_path, edit, threads)
    assert ('computes otherwise' in log) == bool(told)
    for text in told:
        assert text in log


def test_weights_that_a_run_begins_with_are_no_resume(tmp_path: Path, one_thread: None) -> None:
    toy_train(tmp_path / 'one', **{'train_cfg.max_iters': 4})
    torch.set_num_threads(2)
    other, _ = toy_train(tmp_path / 'other', load_from=str(tmp_path / 'one' / 'iter_4.pth'))
    assert 'computes otherwise' not in log_of(other)


def test_two_checkpoints_are_compared(tmp_path: Path, one_thread: None) -> None:
    changes = {'train_cfg.max_iters': 4}
    toy_train(tmp_path / 'one', **changes)
    same = compare_checkpoints(*[str(tmp_path / 'one' / 'iter_4.pth')] * 2)
    assert same.conditions == () and '\n' not in str(same)
    torch.set_num_threads(2)
    toy_train(tmp_path / 'other', **changes)
    found = compare_checkpoints(*[str(tmp_path / each / 'iter_4.pth') for each in ('one', 'other')])
    assert [each.name for each in found.conditions] == ['threads']
    assert 'threads: 1 and 2' in str(found)


def test_ranks_are_grouped_by_what_they_agree_in() -> None:
    odd = dict(FACTS, threads='2')
    groups = group_ranks([FACTS, odd, FACTS, FACTS], ['a', 'b', 'a', 'c'])
    assert groups == [
        dict(ranks=[0, 2, 3], hosts=['a', 'c'], facts=FACTS),
        dict(ranks=[1], hosts=['b'], facts=odd),
    ]
    # The same values in another place are no difference: ranks move between processes.
    assert not differences(groups, group_ranks([odd, FACTS], ['d', 'd']))
    assert [tuple(each) for each in differences(groups, groups[:1])] == [('threads', '1, 2', '1')]


@pytest.mark.parametrize(
    'device, fact, no_longer_exact',
    [
        ('cpu AVX2', 'threads', 'losses and weights'),
        ('cuda NVIDIA A', 'threads', 'augmented images'),
        ('cuda NVIDIA A', 'torch', 'losses and weights'),
        ('cuda NVIDIA A', 'cv2', 'augmented images'),
        ('cpu AVX2', 'mapsage', 'order of the samples'),
    ],
)
def test_what_is_no_longer_exact(device: str, fact: str, no_longer_exact: str) -> None:
    before = dict(FACTS, device=device)
    warning = resume_warning(
        *(group_ranks([facts], ['a']) for facts in (before, {**before, fact: '7'}))
    )
    ends = ('losses and weights', 'augmented images', 'order of the samples')
    assert [end for end in ends if end in warning] == [no_longer_exact]


@pytest.mark.parametrize(
    'facts, promised',
    [
        (dict(device='cpu AVX2'), True),
        (dict(device='sim GCU'), True),
        (dict(device='cuda H100'), False),
        (dict(device='cuda H100', deterministic='True', cudnn_benchmark='False'), True),
        (dict(device='cuda H100', deterministic='True', cudnn_benchmark='True'), False),
        (dict(device='gcu S60', deterministic='True'), True),
    ],
)
def test_which_ranks_promise_the_same_bits(facts: Dict[str, str], promised: bool) -> None:
    facts = dict(dict(deterministic='False'), **facts)
    assert promises_bits([facts, dict(facts)]) is promised
    assert promises_bits([facts]) is promised
    assert promises_bits([facts, dict(facts, threads='2')]) is False
