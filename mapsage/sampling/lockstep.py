"""What processes exchange after each round of a step, in one collective of small numbers.

A round fetches and scores samples; a step has as many rounds as it needs for a full batch. After
each round every process sends three facts of its own, and five counts for each virtual rank that it
carries out. So all processes make the same decision about the next round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import List, Mapping, Optional, Sequence, Tuple

from mapsage.base.errors import UserError
from mapsage.distributed import Channel, Consensus, raise_together
from mapsage.distributed.virtual_ranks import VirtualRanks

# Status of a rank after a round: all went well, an exception was raised, its loader has ended.
OK, FAILED, ENDED = 0, 1, 2

# The facts of a round, for each process:
#   step        number of the step; equal on all
#   attempt     number of the resample, 0 for the initial batch; equal on all
#   status      OK, FAILED or ENDED
# and for each virtual rank that it carries out:
#   valid       valid samples the virtual rank has now, with the surplus of earlier steps
#   judged      samples judged in this round
#   passed      how many of these are valid
#   not_finite  how many of these belong to a group with a score that is not finite
#   original    samples in the batch the virtual rank began the step with
COUNTS = ('valid', 'judged', 'passed', 'not_finite', 'original')


class LockstepError(UserError, RuntimeError):
    """Ranks sample with different settings, or are in different steps."""

    on_every_rank = True


@dataclass(frozen=True)
class Round:
    """What all ranks found in a round; equal on every process.

    Attributes:
        ended: Whether the loaders of all ranks have ended.
        valid, judged, passed, not_finite, original: A count for each virtual rank, in order; see
            :data:`COUNTS`.
    """

    ended: bool
    valid: List[int]
    judged: List[int]
    passed: List[int]
    not_finite: List[int]
    original: List[int]


def round_fields(ranks: VirtualRanks) -> Tuple[str, ...]:
    """Return the fields of the consensus for :func:`compare_round`.

    A process carries out a block of virtual ranks. Process 0 has the longest block, which decides
    the number of fields; a process with a shorter block leaves the last fields at 0.
    """
    return (
        'step',
        'attempt',
        'status',
        *(f'{name} {position}' for position in range(len(ranks.block(0))) for name in COUNTS),
    )


def compare_round(
    consensus: Consensus,
    ranks: VirtualRanks,
    error: Optional[Exception],
    counts: Sequence[Mapping[str, int]],
    **facts: int,
) -> Round:
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
    facts.update(
        {
            f'{name} {position}': rank_counts[name]
            for position, rank_counts in enumerate(counts)
            for name in COUNTS
        }
    )
    answers = consensus.tick(**facts)
    if FAILED in answers.by_rank('status').values():
        raise_together(consensus.channel, error, 'fetching or scoring samples')
    if not (answers.agree('step') and answers.agree('attempt')):
        attempts = answers.by_rank('attempt')
        where = ', '.join(
            f'rank {rank}: step {step}, resample {attempts[rank]}'
            for rank, step in answers.by_rank('step').items()
        )
        raise LockstepError(
            f'ranks sample in different steps ({where}). Each must call sample() '
            f'equally often and resume from the same checkpoint.'
        )
    blocks = list(zip(consensus.channel.ranks, ranks.blocks))
    positions = range(len(ranks.block(0)))
    counts_by_name = []
    for name in COUNTS:
        # `by_rank` walks over all processes. Calling it for every virtual rank would make this
        # quadratic in the number of ranks.
        by_position = [answers.by_rank(f'{name} {position}') for position in positions]
        counts_by_name.append(
            [
                by_position[position][process]
                for process, block in blocks
                for position in range(len(block))
            ]
        )
    # ENDED is the largest status, so the smallest one is ENDED if all loaders have ended.
    return Round(answers.min('status') == ENDED, *counts_by_name)


def check_equal_settings(channel: Channel, settings: str) -> None:
    """Raise LockstepError on every rank if a rank has different settings. Collective.

    Raises:
        RankLostError: Naming the ranks that did not come.
    """
    texts = channel.gather_texts(settings)
    if len(set(texts)) > 1:
        raise LockstepError(
            'dynamic sampling has different settings on different ranks: '
            + '; '.join(f'rank {rank}: {text}' for rank, text in zip(channel.ranks, texts))
        )
