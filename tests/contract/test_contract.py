"""One suite, every accelerator: the checks of checks.py in separate processes."""

from __future__ import annotations

import functools
import sys
import tempfile
from pathlib import Path
from typing import Dict, List, Union

import pytest
from doubles import MAKES, T20, make  # vendors' packages; only their own ranks may see them
from ranks import run_ranks
from support import why_no_make

from mapsage.accelerator import ACCELERATORS

sys.path.insert(0, str(Path(__file__).parent))
from checks import ONE_PROCESS, SEVERAL_PROCESSES, run_checks  # noqa: E402

# Real cards draw from a generator each; by default simulated ones draw what the CPU does.
ENVIRON = {
    'gcu_t20': T20,
    'sim': {'MAPSAGE_SIM_RANDOM': 'device'},
    **{name: make(name) for name in MAKES},
}
# The makes stand for `plugin`, which is whichever of them is installed.
NAMES = [*(kind.name for kind in ACCELERATORS if kind.name != 'plugin'), *MAKES]


def on_rank(name: str, kind: str) -> Dict[str, str]:
    return run_checks(name, kind)


def why_not(name: str) -> str:
    if name == 'gcu_t20':
        try:
            import torch_xla  # noqa: F401
        except ImportError:
            return 'its double stands on torch_xla, which is in the xla leg'
        return ''
    if name in MAKES:
        return why_no_make()
    return next(kind for kind in ACCELERATORS if kind.name == name).why_unavailable() or ''


@functools.lru_cache(maxsize=None)
def outcomes(name: str, ranks: int) -> Union[List[Dict[str, str]], str]:
    """What each rank found, or how the ranks ended; they run once for all checks."""
    kind = 'one' if ranks == 1 else 'several'
    with tempfile.TemporaryDirectory() as folder:
        try:
            return run_ranks(
                on_rank, ranks, Path(folder), name, kind, timeout=180, environ=ENVIRON.get(name, {})
            )
        except AssertionError as error:
            return str(error)


def judge(name: str, check: str, ranks: int) -> None:
    reason = why_not(name)
    if reason:
        pytest.skip(f'{name}: {reason}')
    ran = outcomes(name, ranks)
    assert not isinstance(ran, str), ran
    found = [outcome[check] for outcome in ran]
    skipped = [each for each in found if each.startswith('skip: ')]
    if skipped:
        assert len(skipped) == len(found), found
        pytest.skip(skipped[0][len('skip: ') :])
    assert found == [''] * ranks, '\n'.join(f'rank {r}: {e}' for r, e in enumerate(found))


@pytest.mark.parametrize('check', ONE_PROCESS)
@pytest.mark.parametrize('name', NAMES)
def test_one_process(name: str, check: str) -> None:
    judge(name, check, 1)


@pytest.mark.parametrize('check', SEVERAL_PROCESSES)
# Makes differ in names and in how they register, which 2 ranks show.
@pytest.mark.parametrize(
    'name, ranks',
    [(name, ranks) for name in NAMES for ranks in ((2,) if name in MAKES else (2, 4))],
)
def test_several_processes(name: str, ranks: int, check: str) -> None:
    if name == 'cuda':
        import torch

        if 0 < torch.cuda.device_count() < ranks:
            pytest.skip(f'{ranks} ranks need as many cards, there are {torch.cuda.device_count()}')
    judge(name, check, ranks)
