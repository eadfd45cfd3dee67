"""Forked ranks that talk over channels, and what they tell the test about it."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any, Callable, Dict, List, Sequence, Tuple

import torch.distributed as dist

from mapsage.distributed import DisagreementError, RankError, RankLostError
from mapsage.extras.streaming import StreamingError

PATIENT = 60.0  # seconds: a test that waits for this deadline is a test that fails


class Answers:
    """What the ranks of each scenario returned, by scenario and world size."""

    def __init__(self, told: Dict[Tuple[str, int], Any]) -> None:
        self._told = told

    def of(self, scenario: str, world: int = 2) -> List[Any]:
        answer = self._told[scenario, world]
        assert isinstance(answer, list), answer
        return answer


def start() -> int:
    dist.init_process_group('gloo', timeout=timedelta(seconds=PATIENT))
    return dist.get_rank()


def error_of(action: Callable[[], Any]) -> Dict[str, Any]:
    """Return the error that ``action`` must raise, as plain values."""
    try:
        action()
    except (
        RankLostError,
        RankError,
        DisagreementError,
        StreamingError,
        ValueError,
        KeyError,
        FileNotFoundError,
    ) as error:
        return dict(vars(error), type=type(error).__name__, message=str(error))
    raise AssertionError('no error was raised')


def wait_for_others(folder: Path, ranks: Sequence[int], mark: str = 'done') -> None:
    """Keep this process, and with it rank 0's store, until all of ``ranks`` are as far."""
    (folder / f'{mark}{dist.get_rank()}').touch()
    wait_until_done(folder, ranks, mark)


def wait_until_done(folder: Path, ranks: Sequence[int], mark: str = 'done') -> None:
    """Return once all of ``ranks`` have come to :func:`wait_for_others`."""
    deadline = time.monotonic() + PATIENT
    while any(not (folder / f'{mark}{rank}').exists() for rank in ranks):
        assert time.monotonic() < deadline
        time.sleep(0.02)
