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


@pytest.mark.parametrize('exit_codes, notes, expected', [
    (dict(rank0=1, rank1=1), {'200-0': 'lost its peer', '100-1': 'cause'},
     'rank 1 failed first:\ncause'),
    (dict(rank0=1, rank1=-signal.SIGKILL), {'100-0': 'lost its peer'},
     'rank 1 failed first:\nkilled by SIGKILL'),
    # torchrun ends the ranks that still run by SIGTERM, and then lists them among the failures
    (dict(rank0=1, rank1=-signal.SIGTERM), {'100-0': 'cause'}, 'rank 0 failed first:\ncause'),
    (dict(rank1=-signal.SIGTERM), {}, 'rank 1 failed first:\nkilled by SIGTERM'),
    (dict(rank1=-signal.SIGSEGV), {}, 'rank 1 failed first:\nkilled by SIGSEGV'),
])
def test_first_failure(exit_codes: dict, notes: dict, expected: str, tmp_path: Path) -> None:
    for name, message in notes.items():
        (tmp_path / name).write_text(message)
    assert expected in launch.report(failed(**exit_codes), tmp_path)
