"""Which checkpoint a run resumes from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from mmengine.config import Config

from mapsage.engine.checkpoints.resume import (
    ResumeError,
    batches_done,
    candidates_in,
    choose_checkpoint,
    folders_of,
)


def write(path: Path, seed: Any = 1, **more: Any) -> str:
    torch.save(
        dict(meta=dict(seed=seed), state_dict={}, message_hub={}, optimizer={}, **more), str(path)
    )
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


def aged(folder: Path, **seconds: float) -> None:
    """Set the times of last modification, in seconds since some start."""
    for name, when in seconds.items():
        path = folder / (name if name == 'last_checkpoint' else f'{name}.pth')
        os.utime(path, (1e9 + when, 1e9 + when))


def at(folder: Path, **iterations: int) -> None:
    for name, iteration in iterations.items():
        torch.save(
            dict(meta=dict(seed=1, iter=iteration), state_dict={}, message_hub={}),
            str(folder / f'{name}.pth'),
        )


@pytest.mark.parametrize(
    'iterations, last, times, first',
    [
        # killed after the file had its name and before last_checkpoint named it
        (dict(iter_4=4, iter_8=8), 'iter_4', dict(iter_4=1, last_checkpoint=2, iter_8=3), 'iter_8'),
        (
            dict(stopped=5, iter_8=8),
            'stopped',
            dict(stopped=1, last_checkpoint=2, iter_8=3),
            'iter_8',
        ),
        (
            dict(iter_4=4, stopped=5),
            'iter_4',
            dict(iter_4=1, last_checkpoint=2, stopped=3),
            'stopped',
        ),
        (
            dict(epoch_1=4, iter_6=6),
            'epoch_1',
            dict(epoch_1=1, last_checkpoint=2, iter_6=3),
            'iter_6',
        ),
        (
            dict(iter_6=6, epoch_2=8),
            'iter_6',
            dict(iter_6=1, last_checkpoint=2, epoch_2=3),
            'epoch_2',
        ),
        (
            dict(model_4=4, iter_8=8),
            'model_4',
            dict(model_4=1, last_checkpoint=2, iter_8=3),
            'iter_8',
        ),
        # begun again from an earlier checkpoint: those of the first attempt are older
        (
            dict(iter_4=4, iter_8=8, iter_12=12),
            'iter_8',
            dict(iter_4=1, iter_12=2, iter_8=3, last_checkpoint=4),
            'iter_8',
        ),
        # a copy of a work dir, in the order of the names
        (
            dict(iter_12=12, iter_4=4, stopped=5, epoch_1=6),
            'iter_12',
            dict(epoch_1=1, last_checkpoint=2, iter_12=3, iter_4=4, stopped=5),
            'iter_12',
        ),
        # killed in the first save
        (dict(stopped=5), None, dict(stopped=1), 'stopped'),
        (dict(iter_4=4, stopped=5), None, dict(stopped=1, iter_4=2), 'stopped'),
        (dict(iter_500=500, epoch_3=600), None, dict(iter_500=1, epoch_3=2), 'epoch_3'),
    ],
)
def test_the_newest_whole_file_comes_first(
    iterations: Any, last: Any, times: Any, first: str, tmp_path: Path
) -> None:
    at(tmp_path, **iterations)
    if last:
        (tmp_path / 'last_checkpoint').write_text(str(tmp_path / f'{last}.pth'))
    aged(tmp_path, **times)
    candidates = candidates_in(str(tmp_path))
    assert Path(candidates[0]).stem == first
    assert sorted(candidates) == sorted(str(tmp_path / f'{name}.pth') for name in iterations)


def test_a_newer_file_that_cannot_be_read_is_skipped_and_named(tmp_path: Path) -> None:
    at(tmp_path, iter_4=4, stopped=5)
    damage(str(tmp_path / 'stopped.pth'))
    (tmp_path / 'last_checkpoint').write_text(str(tmp_path / 'iter_4.pth'))
    aged(tmp_path, iter_4=1, last_checkpoint=2, stopped=3)
    choice = choose_checkpoint(str(tmp_path))
    assert Path(str(choice.path)).name == 'iter_4.pth' and 'stopped.pth' in choice.skipped[0]


def test_a_copied_work_dir_does_not_follow_the_original(tmp_path: Path) -> None:
    (tmp_path / 'copy').mkdir()
    at(tmp_path, iter_8=8, iter_12=12)
    at(tmp_path / 'copy', iter_8=8)
    (tmp_path / 'copy' / 'last_checkpoint').write_text(str(tmp_path / 'iter_8.pth'))
    aged(tmp_path / 'copy', last_checkpoint=2)
    assert Path(candidates_in(str(tmp_path / 'copy'))[0]).name == 'iter_8.pth'


@pytest.mark.parametrize('pointer', ['{}/iter_8.pth', '{}/stopped.pth', 'elsewhere/iter_8.pth'])
def test_a_copied_work_dir_continues_with_its_own_files(pointer: str, tmp_path: Path) -> None:
    for folder in (tmp_path / 'original', tmp_path / 'copy'):
        folder.mkdir()
        at(folder, iter_4=4, stopped=6, iter_8=8)
        (folder / 'last_checkpoint').write_text(pointer.format(tmp_path / 'original'))
        aged(folder, iter_4=1, stopped=2, iter_8=3, last_checkpoint=4)
    candidates = candidates_in(str(tmp_path / 'copy'))
    assert candidates[0] == str(tmp_path / 'copy' / Path(pointer).name)
    assert {Path(path).parent.name for path in candidates} == {'copy'}
    # A folder into which the run writes is not the original of a copy.
    folders = [str(tmp_path / 'original')] if pointer[0] == '{' else []
    assert candidates_in(str(tmp_path / 'copy'), folders)[0] == str(
        tmp_path / ('original' if folders else 'copy') / Path(pointer).name
    )


def test_out_dir_of_the_hook_counts_as_well(tmp_path: Path) -> None:
    (tmp_path / 'work').mkdir()
    at(tmp_path, iter_4=4, iter_8=8)
    (tmp_path / 'work' / 'last_checkpoint').write_text(str(tmp_path / 'iter_4.pth'))
    aged(tmp_path / 'work', last_checkpoint=2)
    aged(tmp_path, iter_4=1, iter_8=3)
    assert Path(candidates_in(str(tmp_path / 'work'))[0]).name == 'iter_8.pth'


def test_a_first_save_elsewhere_that_nothing_names_yet(tmp_path: Path) -> None:
    """The process was killed between the two: the run must not start from scratch."""
    work, out = tmp_path / 'work', tmp_path / 'disk' / 'work'
    work.mkdir()
    out.mkdir(parents=True)
    at(out, iter_4=4)
    for hook in (
        dict(type='CheckpointHook', out_dir=str(tmp_path / 'disk')),
        dict(type='CheckpointHook', out_dir=tmp_path / 'disk'),
    ):
        for cfg in (
            dict(default_hooks=dict(checkpoint=hook, timer=None)),
            dict(custom_hooks=[dict(type='EMAHook'), hook]),
        ):
            folders = folders_of(Config(cfg), f'{work}/')
            assert choose_checkpoint(str(work), folders=folders).path == str(out / 'iter_4.pth')
    assert folders_of(Config(dict(default_hooks=dict(a=dict(out_dir='s3://b')))), 'work') == []
    assert folders_of(Config(), 'work') == []


@pytest.mark.parametrize('content', [b'', b'gone.pth', b'\n', b'\xff\0', b'..', b'/'])
def test_last_checkpoint_that_names_nothing(tmp_path: Path, content: bytes) -> None:
    write(tmp_path / 'iter_3.pth')
    (tmp_path / 'last_checkpoint').write_bytes(content)
    assert Path(choose_checkpoint(str(tmp_path)).path).name == 'iter_3.pth'


def test_falls_back_past_what_cannot_be_read(tmp_path: Path) -> None:
    write(tmp_path / 'iter_1.pth', seed=4)
    damage(write(tmp_path / 'iter_2.pth'))
    (tmp_path / 'iter_3.pth').write_bytes(b'')
    (tmp_path / 'iter_4.pth').write_bytes(b'hello world')
    torch.save(dict(state_dict={}), str(tmp_path / 'iter_5.pth'))
    choice = choose_checkpoint(str(tmp_path))
    assert (Path(choice.path).name, choice.seed, len(choice.skipped)) == ('iter_1.pth', 4, 4)


def test_falls_back_past_one_flipped_bit(tmp_path: Path) -> None:
    for number in (1, 2):
        path = write(tmp_path / f'iter_{number}.pth', weight=torch.full((100,), 3.0))
    damaged = bytearray(Path(path).read_bytes())
    damaged[damaged.find(torch.full((100,), 3.0).numpy().tobytes()) + 202] ^= 0x10
    Path(path).write_bytes(bytes(damaged))
    (tmp_path / 'last_checkpoint').write_text(path)
    choice = choose_checkpoint(str(tmp_path))
    assert Path(str(choice.path)).name == 'iter_1.pth' and 'Bad CRC-32' in choice.skipped[0]


def test_best_checkpoint_is_not_resumed_from(tmp_path: Path) -> None:
    """CheckpointHook's save_best leaves out the optimizer and the schedulers."""
    write(tmp_path / 'iter_4.pth')
    damage(write(tmp_path / 'iter_8.pth'))
    torch.save(
        dict(meta=dict(seed=1), state_dict={}, message_hub={}),
        str(tmp_path / 'best_mIoU_iter_8.pth'),
    )
    assert Path(choose_checkpoint(str(tmp_path)).path).name == 'iter_4.pth'


def test_unfinished_and_foreign_files_are_no_candidates(tmp_path: Path) -> None:
    for name in ('iter_9.pth.partial', 'latest.pth', 'iter_x.pth', 'iter_3.pth.bak'):
        write(tmp_path / name)
    with pytest.raises(ResumeError, match='--resume must: .* holds no checkpoint'):
        choose_checkpoint(str(tmp_path), mode='must')


@pytest.mark.parametrize('mode', [True, 'auto'])
def test_an_empty_or_missing_work_dir_starts_the_run(tmp_path: Path, mode: Any) -> None:
    choice = choose_checkpoint(str(tmp_path / 'none'), mode=mode)
    assert choice.path is None and choice.seed is None
    assert 'none holds no checkpoint' in choice.notes[0] and 'from scratch' in choice.notes[0]
    with pytest.raises(ResumeError, match='holds no checkpoint'):
        choose_checkpoint(str(tmp_path / 'none'), mode='must')


def test_another_mode_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ResumeError, match="resume='iter_3.pth': expected True, False, 'auto' or"):
        choose_checkpoint(str(tmp_path), mode='iter_3.pth')


def test_every_reason_is_given(tmp_path: Path) -> None:
    for number in (1, 2):
        damage(write(tmp_path / f'iter_{number}.pth'))
    with pytest.raises(ResumeError, match='none of the 2') as caught:
        choose_checkpoint(str(tmp_path))
    assert 'iter_1.pth' in str(caught.value) and 'iter_2.pth' in str(caught.value)


@pytest.mark.parametrize('mode', [True, 'auto', 'must'])
@pytest.mark.parametrize('load_from', ['stage_1/iter_8.pth', 'gone.pth', 'https://x.org/a.pth'])
def test_the_work_dir_comes_before_load_from(load_from: str, mode: Any, tmp_path: Path) -> None:
    (tmp_path / 'stage_1').mkdir()
    write(tmp_path / 'stage_1' / 'iter_8.pth')
    (tmp_path / 'work').mkdir()
    write(tmp_path / 'work' / 'iter_3.pth', seed=7)
    named = load_from if '://' in load_from else str(tmp_path / load_from)
    choice = choose_checkpoint(str(tmp_path / 'work'), named, mode)
    assert (Path(str(choice.path)).name, choice.seed) == ('iter_3.pth', 7)
    assert named in choice.notes[0] and 'not read again' in choice.notes[0]
    damage(str(tmp_path / 'work' / 'iter_3.pth'))
    with pytest.raises(ResumeError, match='none of the 1'):  # and does not begin again
        choose_checkpoint(str(tmp_path / 'work'), named, mode)


def test_a_config_may_name_an_earlier_checkpoint_of_the_work_dir(tmp_path: Path) -> None:
    named = write(tmp_path / 'iter_3.pth')
    write(tmp_path / 'iter_5.pth')
    assert choose_checkpoint(str(tmp_path), named).path == named
    choice = choose_checkpoint(str(tmp_path), named, 'auto')
    assert Path(str(choice.path)).name == 'iter_5.pth'


def test_load_from_is_resumed_as_under_mmengine_where_there_is_nothing(tmp_path: Path) -> None:
    named = write(tmp_path / 'iter_3.pth', seed=4)
    choice = choose_checkpoint(str(tmp_path / 'work'), named)
    assert (choice.path, choice.seed) == (named, 4) and 'is resumed' in choice.notes[0]
    with pytest.raises(FileNotFoundError):
        choose_checkpoint(str(tmp_path / 'work'), str(tmp_path / 'gone.pth'))


@pytest.mark.parametrize('mode', [True, 'auto'])
@pytest.mark.parametrize('name', ['w.pth', 'https://x.org/w.pth'])
def test_weights_alone_start_a_run(name: str, mode: Any, tmp_path: Path) -> None:
    torch.save(dict(weight=torch.ones(1)), str(tmp_path / 'w.pth'))
    named = name if '://' in name else str(tmp_path / name)
    choice = choose_checkpoint(str(tmp_path / 'work'), named, mode)
    assert choice.path is None and f'weights of load_from={named!r}' in choice.notes[0]
    with pytest.raises(ResumeError, match='holds no checkpoint'):
        choose_checkpoint(str(tmp_path / 'work'), named, 'must')


@pytest.mark.parametrize(
    'epoch, iteration, info, done',
    [
        (1, 13, dict(max_iters=16, max_epochs=2), (5, 8)),
        (0, 8, dict(max_iters=16, max_epochs=2), (8, 8)),
        (1, 8, dict(max_iters=16, max_epochs=2), (0, 8)),
        (3, 24, dict(max_iters=80, max_epochs=10), (0, 8)),
        (0, 5, dict(max_iters=8, max_epochs=1), (5, 8)),
        (0, 5, {}, (0, 0)),  # without RuntimeInfoHook
        (2, 30, dict(max_iters=16, max_epochs=2), (0, 8)),
    ],
)
def test_batches_done(epoch: int, iteration: int, info: dict, done: tuple) -> None:
    assert batches_done(epoch, iteration, info) == done


def test_relative_last_checkpoint_is_not_listed_twice(tmp_path: Path, monkeypatch: Any) -> None:
    write(tmp_path / 'iter_3.pth')
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'last_checkpoint').write_text(os.path.join('.', 'iter_3.pth'))
    assert len(candidates_in(str(tmp_path))) == 1
