"""What the launcher prints at its end names the cause, and no innocent rank."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from mapsage_launcher.ranks.failure_report import describe_failure, read_notes


def failed(**exit_codes: int) -> ChildFailedError:
    """Ranks by exit code, rank0=1 and so on."""
    failures = {}
    for name, code in exit_codes.items():
        rank = int(name[len('rank') :])
        failures[rank] = ProcessFailure(
            local_rank=rank, pid=100 + rank, exitcode=code, error_file='none'
        )
    return ChildFailedError('train.py', failures)


def test_notes_that_are_cut_or_gone(tmp_path: Path) -> None:
    (tmp_path / '100-1').write_bytes('影像.tif'.encode()[:-5])  # within a character
    assert 'rank 1 failed first:\n影\ufffd' in describe_failure(failed(rank1=1), tmp_path)
    assert 'rank 1 failed first:' in describe_failure(failed(rank1=1), tmp_path / 'gone')


@pytest.mark.parametrize(
    'exit_codes, notes, expected',
    [
        (
            dict(rank0=1, rank1=1),
            {'200-0': 'lost its peer', '100-1': 'cause'},
            'rank 1 failed first:\ncause',
        ),
        (
            dict(rank0=1, rank1=-signal.SIGKILL),
            {'100-0': 'lost its peer'},
            'rank 1 failed first:\nkilled by SIGKILL',
        ),
        # the ranks that still run are ended by SIGUSR2, and then listed among the failures
        (dict(rank0=1, rank1=-signal.SIGUSR2), {'100-0': 'cause'}, 'rank 0 failed first:\ncause'),
        (dict(rank0=1, rank1=-signal.SIGTERM), {'100-0': 'cause'}, 'rank 0 failed first:\ncause'),
        (dict(rank1=-signal.SIGTERM), {}, 'rank 1 failed first:\nkilled by SIGTERM'),
        (dict(rank1=3), {}, 'rank 1 failed first:\nit ended with status 3 and left no error'),
        (dict(rank1=-signal.SIGSEGV), {}, 'rank 1 failed first:\nkilled by SIGSEGV'),
        # the watchdog of a backend ends a rank by SIGABRT that has waited for another one
        (
            dict(rank0=-signal.SIGABRT, rank1=1),
            {'100-1': 'cause', '200-0': 'waited'},
            'rank 1 failed first:\ncause',
        ),
        (
            dict(rank0=-signal.SIGABRT, rank1=1),
            {'100-1': 'lost its peer'},
            'rank 0 failed first:\nkilled by SIGABRT',
        ),
        (
            dict(rank0=-signal.SIGABRT, rank1=1),
            {'100-0': 'waited for rank 1', '200-1': 'late'},
            'rank 0 failed first:\nwaited for rank 1',
        ),
        (
            dict(rank0=-signal.SIGABRT, rank1=-signal.SIGKILL),
            {'100-0': 'waited for rank 1'},
            'rank 1 failed first:\nkilled by SIGKILL',
        ),
        (
            dict(rank0=-signal.SIGABRT, rank1=-signal.SIGUSR2),
            {},
            'rank(s) [0] aborted while rank(s) [1] still ran:\nkilled by SIGABRT. Native code gave up',
        ),
    ],
)
def test_first_failure(exit_codes: dict, notes: dict, expected: str, tmp_path: Path) -> None:
    for name, message in notes.items():
        (tmp_path / name).write_text(message)
    assert expected in describe_failure(failed(**exit_codes), tmp_path)


@pytest.mark.parametrize(
    'notes, expected',
    [
        # who waited does not head the report, whoever it was
        (
            {'100-1-0': 'RankLostError: rank 1 waited'},
            'error: rank(s) [0] was waited for in vain, rank 1 reports:\nRankLostError: rank 1 waited',
        ),
        (
            {'100-0-1,3': 'lost', '200-2-1,3': 'lost too'},
            'error: rank(s) [1, 3] were waited for in vain, rank 0 reports:\nlost',
        ),
        # nor does one that a stopped rank blames once it continues
        (
            {'100-1-0': 'waited for 0', '200-0-1': 'waited for 1'},
            'rank(s) [0] was waited for in vain',
        ),
        # a rank that says itself that it was late
        (
            {'100-0-0': 'the others have waited'},
            'error: rank 0 failed first:\nthe others have waited',
        ),
        # what a rank says of itself says more than what others say of it
        (
            {
                '100-0-2': 'rank 2 failed: ValueError',
                '200-1-2': 'the same',
                '300-2-': 'ValueError: tile',
            },
            'error: rank 2 failed first:\nValueError: tile',
        ),
        (
            {'100-2-': 'ValueError: tile', '200-0-2': 'lost 2'},
            'error: rank 2 failed first:\nValueErr',
        ),
        (
            {'100-1-0': 'rank 0 failed: no encoder', '200-0-3': 'StreamingError: encoder rank 3'},
            'error: rank(s) [3] was waited for in vain, rank 0 reports:\nStreamingError',
        ),
        (
            {'100-1-2,3': 'lost', '200-2-3': 'lost 3', '300-3-': 'ValueError: tile'},
            'error: rank 3 failed first:\nValueError: tile',
        ),
        # nobody is to blame for what every rank says
        (
            {
                '100-1-nobody': 'ConfigError: a',
                '200-0-nobody': 'ConfigError: a',
                '300-2-nobody': 'ConfigError: a',
            },
            'error: rank(s) [0, 1, 2] report:\nConfigError: a',
        ),
        ({'100-1-nobody': 'ConfigError: a'}, 'error: rank(s) [1] report:\nConfigError: a'),
        (
            {'100-1-': 'ImportError: b', '200-2-': 'ImportError: b'},
            'error: rank(s) [1, 2] report:\nImportError: b',
        ),
        # where one refuses for all, the others say so
        (
            {
                '100-1-0': 'rank 0 failed in claiming',
                '200-2-0': 'rank 0 failed in claiming',
                '300-0-nobody': 'FolderClaimedError',
            },
            'error: rank(s) [0] report:\nFolderClaimedError',
        ),
    ],
)
@pytest.mark.parametrize('reported', [(0, 1, 2, 3), (3, 2, 1, 0)])
def test_the_heading_blames_whom_the_notes_blame(
    notes: dict, expected: str, reported: tuple, tmp_path: Path
) -> None:
    for name, message in notes.items():
        (tmp_path / name).write_text(message)
    # the ranks that left no note were ended by the launcher
    wrote = {note.rank for note in read_notes(tmp_path)}
    codes = {f'rank{rank}': 1 if rank in wrote else -signal.SIGUSR2 for rank in reported}
    assert expected in describe_failure(failed(**codes), tmp_path)


@pytest.mark.parametrize('hangs, ranks', [(0, 3), (1, 3), (2, 3), (4, 5)])
def test_ranks_that_abort_without_a_word_are_not_said_to_be_the_cause(
    hangs: int, ranks: int, tmp_path: Path
) -> None:
    codes = {
        f'rank{rank}': -signal.SIGUSR2 if rank == hangs else -signal.SIGABRT
        for rank in range(ranks)
    }
    text = describe_failure(failed(**codes), tmp_path)
    innocents = sorted(set(range(ranks)) - {hangs})
    assert text.startswith(
        f'\nerror: rank(s) {innocents} aborted while rank(s) [{hangs}] still '
        f'ran:\nkilled by SIGABRT'
    )


def test_innocents_that_abort_say_before_whom_they_waited_for(tmp_path: Path) -> None:
    (tmp_path / '100-2-1').write_text('rank 2 waited in collective 3 of its device backend')
    text = describe_failure(
        failed(rank0=-signal.SIGABRT, rank1=-signal.SIGUSR2, rank2=-signal.SIGABRT), tmp_path
    )
    assert 'rank(s) [1] was waited for in vain, rank' in text, text


def test_a_rank_that_torchrun_had_to_kill_is_not_the_cause(tmp_path: Path) -> None:
    (tmp_path / '100-0').write_text('waited for rank 1')
    late = failed(rank0=1, rank1=-signal.SIGKILL)
    late.failures[1].timestamp += 30  # as long as torchrun waits after its first signal
    text = describe_failure(late, tmp_path)
    assert 'rank 0 failed first:\nwaited for rank 1\n' in text
    assert 'rank(s) [1] did not end when asked to' in text and 'out of memory' not in text


def test_a_rank_that_hangs_is_named_where_a_watchdog_has_ended_the_others(tmp_path: Path) -> None:
    late = failed(rank0=-signal.SIGABRT, rank1=-signal.SIGKILL)
    late.failures[1].timestamp += 30
    text = describe_failure(late, tmp_path)
    assert 'rank(s) [1] did not end when asked to' in text and 'out of memory' not in text
    (tmp_path / '100-0').write_text('waited for rank 1')
    assert 'rank 0 failed first:\nwaited for rank 1\nrank(s) [1] did not' in describe_failure(
        late, tmp_path
    )
