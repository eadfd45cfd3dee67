"""What ranks exchange after each round of a step: eight numbers each, in one collective."""
from __future__ import annotations

from dataclasses import dataclass
from typing import List, Mapping, Optional, Sequence, Tuple

from mapsage.distributed import Channel, Consensus, raise_together
from mapsage.distributed.virtual_ranks import VirtualRanks
from mapsage.errors import UserError

# Status of a rank after a round: all went well, an exception was raised, its loader has ended.
OK, FAILED, ENDED = 0, 1, 2

# The facts of a round, of each process:
#   step        number of the step; equal on all
#   attempt     number of the resample, 0 for the initial batch; equal on all
#   status      OK, FAILED or ENDED
# and of each virtual rank that it carries out:
#   valid       valid samples the rank has now, with the surplus of earlier steps
#   judged      samples judged in this round
#   passed      how many of these are valid
#   not_finite  how many of these belong to a group with a score that is not finite
#   original    samples in the batch the rank began the step with
COUNTS = ('valid', 'judged', 'passed', 'not_finite', 'original')


class LockstepError(UserError, RuntimeError):
    """Ranks sample with different settings, or are in different steps."""

    on_every_rank = True


@dataclass(frozen=True)
class Round:
    """What all ranks found in a round; equal on every process.

    Attributes:
        ended: Whether the loaders of all of them have ended.
        valid: Number of valid samples of each virtual rank, in order; the other counts likewise,
            see :data:`COUNTS`.
    """

    ended: bool
    valid: List[int]
    judged: List[int]
    passed: List[int]
    not_finite: List[int]
    original: List[int]


def round_fields(ranks: VirtualRanks) -> Tuple[str, ...]:
    """Return the fields of the consensus for :func:`compare_round`: those of the longest block."""
    return ('step', 'attempt', 'status', *(
        f'{name} {turn}' for turn in range(len(ranks.block(0))) for name in COUNTS))


def compare_round(consensus: Consensus, ranks: VirtualRanks, error: Optional[Exception],
                  counts: Sequence[Mapping[str, int]], **facts: int) -> Round:
    """Return what all ranks found in a round. Collective: one gather when all is well.

    Args:
        consensus: Consensus over :func:`round_fields`.
        ranks: Virtual ranks and the processes that carry them out.
        error: Exception of this process, if its status is FAILED.
        counts: A value for each of :data:`COUNTS`, of each virtual rank of this process.
        **facts: ``step``, ``attempt`` and ``status``.

    Raises:
        RankError: If another rank failed; the one that failed raises its own exception.
        LockstepError: On every rank, if they are in different steps or attempts.
        RankLostError: Naming the ranks that did not come.
    """
    facts.update({f'{name} {turn}': each[name] for turn, each in enumerate(counts)
                  for name in COUNTS})
    found = consensus.tick(**facts)
    if FAILED in found.by_rank('status').values():
        raise_together(consensus.channel, error, 'fetching or scoring samples')
    if not (found.agree('step') and found.agree('attempt')):
        attempts = found.by_rank('attempt')
        where = ', '.join(f'rank {rank}: step {step}, resample {attempts[rank]}'
                          for rank, step in found.by_rank('step').items())
        raise LockstepError(f'ranks sample in different steps ({where}). Each must call sample() '
                            f'equally often and resume from the same checkpoint.')
    blocks = list(zip(consensus.channel.ranks, ranks.blocks))
    turns = range(len(ranks.block(0)))
    counts_by_name = []
    for name in COUNTS:
        # Once a turn, and not once a virtual rank: it goes over all processes.
        by_turn = [found.by_rank(f'{name} {turn}') for turn in turns]
        counts_by_name.append([by_turn[turn][process] for process, block in blocks
                               for turn in range(len(block))])
    return Round(found.min('status') == ENDED, *counts_by_name)


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
