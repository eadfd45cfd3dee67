"""tools/launch.py says which rank failed first."""
from __future__ import annotations

import importlib.util
import signal
from pathlib import Path

import pytest
from support import ROOT
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

spec = importlib.util.spec_from_file_location('launch', ROOT / 'tools' / 'launch.py')
launch = importlib.util.module_from_spec(spec)
spec.loader.exec_module(launch)


def failed(**exit_codes: int) -> ChildFailedError:
    """Ranks by exit code, rank0=1 and so on."""
    failures = {}
    for name, code in exit_codes.items():
        rank = int(name[len('rank'):])
        failures[rank] = ProcessFailure(local_rank=rank, pid=100 + rank, exitcode=code,
                                        error_file='none')
    return ChildFailedError('train.py', failures)


def test_notes_that_are_cut_or_gone(tmp_path: Path) -> None:
    (tmp_path / '100-1').write_bytes('影像.tif'.encode()[:-5])  # within a character
    assert 'rank 1 failed first:\n影\ufffd' in launch.report(failed(rank1=1), tmp_path)
    assert 'rank 1 failed first:' in launch.report(failed(rank1=1), tmp_path / 'gone')


@pytest.mark.parametrize('exit_codes, notes, expected', [
    (dict(rank0=1, rank1=1), {'200-0': 'lost its peer', '100-1': 'cause'},
     'rank 1 failed first:\ncause'),
    (dict(rank0=1, rank1=-signal.SIGKILL), {'100-0': 'lost its peer'},
     'rank 1 failed first:\nkilled by SIGKILL'),
    # the ranks that still run are ended by SIGUSR2, and then listed among the failures
    (dict(rank0=1, rank1=-signal.SIGUSR2), {'100-0': 'cause'}, 'rank 0 failed first:\ncause'),
    (dict(rank0=1, rank1=-signal.SIGTERM), {'100-0': 'cause'}, 'rank 0 failed first:\ncause'),
    (dict(rank1=-signal.SIGTERM), {}, 'rank 1 failed first:\nkilled by SIGTERM'),
    (dict(rank1=3), {}, 'rank 1 failed first:\nit ended with status 3 and left no error'),
    (dict(rank1=-signal.SIGSEGV), {}, 'rank 1 failed first:\nkilled by SIGSEGV'),
    # the watchdog of a backend ends a rank by SIGABRT that has waited for another one
    (dict(rank0=-signal.SIGABRT, rank1=1), {'100-1': 'cause', '200-0': 'waited'},
     'rank 1 failed first:\ncause'),
    (dict(rank0=-signal.SIGABRT, rank1=1), {'100-1': 'lost its peer'},
     'rank 0 failed first:\nkilled by SIGABRT'),
    (dict(rank0=-signal.SIGABRT, rank1=1), {'100-0': 'waited for rank 1', '200-1': 'late'},
     'rank 0 failed first:\nwaited for rank 1'),
    (dict(rank0=-signal.SIGABRT, rank1=-signal.SIGKILL), {'100-0': 'waited for rank 1'},
     'rank 1 failed first:\nkilled by SIGKILL'),
    (dict(rank0=-signal.SIGABRT, rank1=-signal.SIGUSR2), {},
     'rank 0 failed first:\nkilled by SIGABRT. Native code gave up'),
])
def test_first_failure(exit_codes: dict, notes: dict, expected: str, tmp_path: Path) -> None:
    for name, message in notes.items():
        (tmp_path / name).write_text(message)
    assert expected in launch.report(failed(**exit_codes), tmp_path)


def test_a_rank_that_torchrun_had_to_kill_is_not_the_cause(tmp_path: Path) -> None:
    (tmp_path / '100-0').write_text('waited for rank 1')
    late = failed(rank0=1, rank1=-signal.SIGKILL)
    late.failures[1].timestamp += 30  # as long as torchrun waits after its first signal
    text = launch.report(late, tmp_path)
    assert 'rank 0 failed first:\nwaited for rank 1\n' in text
    assert 'rank(s) [1] did not end when asked to' in text and 'out of memory' not in text


def test_a_rank_that_hangs_is_named_where_a_watchdog_has_ended_the_others(tmp_path: Path) -> None:
    late = failed(rank0=-signal.SIGABRT, rank1=-signal.SIGKILL)
    late.failures[1].timestamp += 30
    text = launch.report(late, tmp_path)
    assert 'rank(s) [1] did not end when asked to' in text and 'out of memory' not in text
    (tmp_path / '100-0').write_text('waited for rank 1')
    assert 'rank 0 failed first:\nwaited for rank 1\nrank(s) [1] did not' in launch.report(
        late, tmp_path)
