"""What ranks exchange after each round of a step: eight numbers each, in one collective."""
from __future__ import annotations

from typing import Optional

from mapsage.distributed import Channel, Consensus, Facts, raise_together

# Status of a rank after a round: all went well, an exception was raised, its loader has ended.
OK, FAILED, ENDED = 0, 1, 2

# The facts of a round:
#   step        number of the step; equal on all ranks
#   attempt     number of the resample, 0 for the initial batch; equal on all ranks
#   status      OK, FAILED or ENDED
#   valid       valid samples the rank has now, with the surplus of earlier steps
#   judged      samples judged in this round
#   passed      how many of these are valid
#   not_finite  how many of these belong to a group with a score that is not finite
#   original    samples in the batch the rank began the step with
FIELDS = ('step', 'attempt', 'status', 'valid', 'judged', 'passed', 'not_finite', 'original')


class LockstepError(RuntimeError):
    """Ranks sample with different settings, or are in different steps."""


def compare_round(consensus: Consensus, error: Optional[Exception], **facts: int) -> Facts:
    """Return what all ranks found in a round. Collective: one gather when all is well.

    Args:
        consensus: Consensus over :data:`FIELDS`.
        error: Exception of this rank, if its status is FAILED.
        **facts: A value for each of :data:`FIELDS`.

    Raises:
        RankError: If another rank failed; the one that failed raises its own exception.
        LockstepError: On every rank, if they are in different steps or attempts.
        RankLostError: Naming the ranks that did not come.
    """
    found = consensus.tick(**facts)
    if FAILED in found.by_rank('status').values():
        raise_together(consensus.channel, error, 'fetching or scoring samples')
    if not (found.agree('step') and found.agree('attempt')):
        attempts = found.by_rank('attempt')
        where = ', '.join(f'rank {rank}: step {step}, resample {attempts[rank]}'
                          for rank, step in found.by_rank('step').items())
        raise LockstepError(f'ranks sample in different steps ({where}). Each must call sample() '
                            f'equally often and resume from the same checkpoint.')
    return found


def check_equal_settings(channel: Channel, settings: str) -> None:
    """Raise LockstepError on every rank if a rank has different settings. Collective.

    Raises:
        RankLostError: Naming the ranks that did not come.
    """
    texts = channel.gather_texts(settings)
    if len(set(texts)) > 1:
        raise LockstepError('dynamic sampling has different settings on different ranks: '
                            + '; '.join(f'rank {rank}: {text}'
                                        for rank, text in zip(channel.ranks, texts)))
