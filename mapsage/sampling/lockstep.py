"""What ranks tell each other in one round: eight numbers each, in one collective."""
from __future__ import annotations

from typing import List, NamedTuple, Optional, Sequence

import torch

from mapsage.distributed import Channel, RankError

OK, FAILED, ENDED = 0, 1, 2


class Report(NamedTuple):
    """One rank's state after a round: 64 bytes as int64, whatever it fetched.

    Attributes:
        step: Which step; equal on all ranks.
        attempt: Which resample of the step, 0 for the initial batch; equal on all ranks.
        status: ``OK``, ``FAILED`` (an exception) or ``ENDED`` (its loader has no more).
        valid: Valid samples it has now, surplus of former steps included.
        judged: Samples judged in this round.
        passed: Of these, valid ones.
        not_finite: Of these, ones whose group has a score that is not finite.
        original: Samples in the batch it began the step with.
    """

    step: int
    attempt: int
    status: int
    valid: int
    judged: int
    passed: int
    not_finite: int
    original: int


class LockstepError(RuntimeError):
    """Ranks sample with different settings, or are in different steps."""


def tell_all(channel: Optional[Channel], report: Report,
             failure: Optional[Exception] = None) -> List[Report]:
    """Return every rank's report, in group order. Collective: one gather when all is well.

    Raises:
        RankError: If another rank failed; the one that failed raises its own exception.
        LockstepError: On every rank, if they are in different steps or attempts.
        RankLostError: Naming the ranks that did not come.
    """
    if channel is None:
        if failure is not None:
            raise failure
        return [report]
    rows = [Report(*row.tolist())
            for row in channel.gather(torch.tensor(report, dtype=torch.int64))]
    raise_together(channel, [row.status == FAILED for row in rows], failure,
                   'fetching or scoring samples')
    if len({(row.step, row.attempt) for row in rows}) > 1:
        where = ', '.join(f'rank {rank}: step {row.step}, resample {row.attempt}'
                          for rank, row in zip(channel.ranks, rows))
        raise LockstepError(f'ranks sample in different steps ({where}). Each must call sample() '
                            f'equally often and resume from the same checkpoint.')
    return rows


def raise_together(channel: Channel, failed: Sequence[bool], failure: Optional[Exception],
                   what: str) -> None:
    """Raise on every rank if one failed. Collective if so.

    Args:
        channel: To the ranks of ``failed``.
        failed: Which ranks did, in group order; equal on all ranks.
        failure: This rank's exception, if it did.
        what: Words for the error: what they were doing.
    """
    if not any(failed):
        return
    text = '' if failure is None else f'{type(failure).__name__}: {failure}'[:4000]
    texts = channel.gather_texts(text)
    if failure is not None:
        raise failure
    first = list(failed).index(True)
    raise RankError(channel.ranks[first], texts[first], what)


def check_equal_settings(channel: Optional[Channel], settings: str) -> None:
    """Raise LockstepError on every rank if a rank has other settings. Collective.

    Raises:
        RankLostError: Naming the ranks that did not come.
    """
    texts = [settings] if channel is None else channel.gather_texts(settings)
    if len(set(texts)) > 1:
        assert channel is not None
        raise LockstepError('dynamic sampling has different settings on different ranks: '
                            + '; '.join(f'rank {rank}: {text}'
                                        for rank, text in zip(channel.ranks, texts)))
