"""Which checkpoint a run resumes from."""
from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from mapsage.engine.resume import ResumeError, candidates_in, choose_checkpoint


def write(path: Path, seed: Any = 1, **more: Any) -> str:
    torch.save(dict(meta=dict(seed=seed), state_dict={}, message_hub={}, optimizer={}, **more),
               str(path))
    return str(path)


def damage(path: str) -> None:
    Path(path).write_bytes(Path(path).read_bytes()[:100])


def test_the_highest_number_wins_and_not_the_last_name(tmp_path: Path) -> None:
    for number in (2, 10, 9):
        write(tmp_path / f'iter_{number}.pth', seed=number)
    choice = choose_checkpoint(str(tmp_path))
    assert (Path(choice.path).name, choice.seed, choice.skipped) == ('iter_10.pth', 10, [])


def test_the_file_of_the_last_run_comes_first(tmp_path: Path) -> None:
    """A work dir may still hold the checkpoints of a longer run before."""
    for number in (5, 100):
        write(tmp_path / f'iter_{number}.pth')
    (tmp_path / 'last_checkpoint').write_text(str(tmp_path / 'iter_5.pth'))
    names = [Path(path).name for path in candidates_in(str(tmp_path))]
    assert names == ['iter_5.pth', 'iter_100.pth']


@pytest.mark.parametrize('content', ['', 'gone.pth', '\n'])
def test_last_checkpoint_that_names_nothing(tmp_path: Path, content: str) -> None:
    write(tmp_path / 'iter_3.pth')
    (tmp_path / 'last_checkpoint').write_text(content)
    assert Path(choose_checkpoint(str(tmp_path)).path).name == 'iter_3.pth'


def test_falls_back_past_what_cannot_be_read(tmp_path: Path) -> None:
    write(tmp_path / 'iter_1.pth', seed=4)
    damage(write(tmp_path / 'iter_2.pth'))
    (tmp_path / 'iter_3.pth').write_bytes(b'')
    (tmp_path / 'iter_4.pth').write_bytes(b'hello world')
    torch.save(dict(state_dict={}), str(tmp_path / 'iter_5.pth'))
    choice = choose_checkpoint(str(tmp_path))
    assert (Path(choice.path).name, choice.seed, len(choice.skipped)) == ('iter_1.pth', 4, 4)


def test_best_checkpoint_is_not_resumed_from(tmp_path: Path) -> None:
    """CheckpointHook's save_best leaves out the optimizer and the schedulers."""
    write(tmp_path / 'iter_4.pth')
    damage(write(tmp_path / 'iter_8.pth'))
    torch.save(dict(meta=dict(seed=1), state_dict={}, message_hub={}),
               str(tmp_path / 'best_mIoU_iter_8.pth'))
    assert Path(choose_checkpoint(str(tmp_path)).path).name == 'iter_4.pth'


def test_unfinished_and_foreign_files_are_no_candidates(tmp_path: Path) -> None:
    for name in ('iter_9.pth.partial', 'latest.pth', 'iter_x.pth', 'iter_3.pth.bak'):
        write(tmp_path / name)
    with pytest.raises(ResumeError, match='holds no checkpoint'):
        choose_checkpoint(str(tmp_path))


def test_missing_work_dir(tmp_path: Path) -> None:
    with pytest.raises(ResumeError, match='holds no checkpoint'):
        choose_checkpoint(str(tmp_path / 'none'))


def test_every_reason_is_given(tmp_path: Path) -> None:
    for number in (1, 2):
        damage(write(tmp_path / f'iter_{number}.pth'))
    with pytest.raises(ResumeError, match='none of the 2') as caught:
        choose_checkpoint(str(tmp_path))
    assert 'iter_1.pth' in str(caught.value) and 'iter_2.pth' in str(caught.value)


def test_a_named_checkpoint_comes_first(tmp_path: Path) -> None:
    write(tmp_path / 'iter_3.pth')
    named = write(tmp_path / 'other.pth')
    assert choose_checkpoint(str(tmp_path), str(named)).path == str(named)
    choice = choose_checkpoint(str(tmp_path), str(tmp_path / 'gone.pth'))
    assert Path(choice.path).name == 'iter_3.pth' and 'gone.pth' in choice.skipped[0]


def test_a_url_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ResumeError, match='not a local file'):
        choose_checkpoint(str(tmp_path), 'https://example.org/a.pth')


def test_weights_alone_are_no_run(tmp_path: Path) -> None:
    torch.save(dict(weight=torch.ones(1)), str(tmp_path / 'w.pth'))
    with pytest.raises(ResumeError, match='use load_from without --resume for weights alone'):
        choose_checkpoint(str(tmp_path), str(tmp_path / 'w.pth'))


def test_relative_last_checkpoint_is_not_listed_twice(tmp_path: Path, monkeypatch: Any) -> None:
    write(tmp_path / 'iter_3.pth')
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'last_checkpoint').write_text(os.path.join('.', 'iter_3.pth'))
    assert len(candidates_in(str(tmp_path))) == 1
